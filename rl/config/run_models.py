"""The models of a run: one table for reading their files, building them and the dry run."""

from dataclasses import dataclass
from typing import Any, Literal

from rl.config.features import CLASS, is_on
from rl.config.needs import (
    algorithm_of,
    keeps_reference,
    learns,
    learns_from_samples,
    needs_reward,
    uses_teacher,
)
from rl.config.schema import Config, Optimizer
from rl.models import by_class, rope


@dataclass(frozen=True)
class RunModel:
    """One model that a run builds."""

    name: str
    """policy, critic, implicit_reward, reward_model, judge, or teacher and its number."""
    key: str
    """Config key of its checkpoint."""
    own_path: str
    """Value of this key; empty if the model is in model.path."""
    path: str
    """Hugging Face checkpoint directory."""
    head: Literal["", "optional", "needed"] = ""
    """Whether the checkpoint of a value model may have a value head ("optional") or must have one
    ("needed"); "" for a language model."""
    optimizer: Optimizer | None = None
    """None if it does not learn."""
    temperature: float = 1.0
    """Temperature of the distribution for its log-probs."""
    keeps_reference: bool = False
    """Whether a copy of its initial weights is kept."""
    reads_tokens: bool = False
    """Whether it reads the policy's token ids, so that it needs the same vocabulary."""
    has_adapters: bool = False
    """Whether it has the section `adapter`."""
    shares_base: bool = False
    """Whether it shares all other weights with the policy."""
    on_training_grid: bool = True

    @property
    def learns(self) -> bool:
        return self.optimizer is not None

    @property
    def is_teacher(self) -> bool:
        return self.name.startswith("teacher")


def run_models(config: Config) -> dict[str, RunModel]:
    """Return the models that the config needs, by name, the policy first."""
    trains = learns(config)
    needs = algorithm_of(config).needs if trains else ()
    reward, critic = config.reward, config.critic
    models: dict[str, RunModel] = {}

    def add(name: str, key: str, own_path: str, **properties: Any) -> None:
        models[name] = RunModel(name, key, own_path, own_path or config.model.path, **properties)

    add(
        "policy",
        "model.path",
        "",
        optimizer=config.training.optimizer if trains else None,
        temperature=config.rollout.temperature if learns_from_samples(config) else 1.0,
        keeps_reference=trains and keeps_reference(config),
        has_adapters=config.adapter.is_on,
    )
    if "critic" in needs:
        shared = dict(has_adapters=critic.share_base, shares_base=critic.share_base)
        options = dict(head="optional", optimizer=critic.optimizer, reads_tokens=True)
        add("critic", "critic.path", critic.path, **options, **shared)
    if "implicit_reward" in needs:
        own = config.implicit_reward
        options = dict(optimizer=own.optimizer, keeps_reference=True, reads_tokens=True)
        add("implicit_reward", "implicit_reward.path", own.path, **options)
    if reward.model.path and needs_reward(config):
        add("reward_model", "reward.model.path", reward.model.path, head="needed")
    if reward.judge.path and needs_reward(config):
        add("judge", "reward.judge.path", reward.judge.path, on_training_grid=False)
    if uses_teacher(config):
        teacher = config.teacher
        for number, path in enumerate(teacher.paths, 1):
            of_path = [f"teacher.sources.{source}" for source, own in teacher.sources.items() if own == path]
            key = "teacher.path" if path == teacher.path else of_path[0]
            options = dict(temperature=config.rollout.temperature, reads_tokens=True)
            add(f"teacher {number}", key, path, **options)
    return models


def hf_config_of(config: Config, model: RunModel, written: dict) -> dict:
    """Return the config.json `written` as the program reads it for a model of the run.

    The rotation of models in model.path is scaled. A model that trains as its class in transformers is
    described by it.
    """
    hf = written if model.own_path else rope.scaled(written, config.model.rope_scaling)
    return by_class.described(hf) if model.on_training_grid and is_on(config, CLASS) else hf
