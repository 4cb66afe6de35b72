"""The models of a run as a dry run sees them: what they are built from, and the widths that memory and time follow from."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rl.config.layout_checks import check_judge, check_layout, num_experts
from rl.config.options import ConfigError, listed
from rl.config.schema import Config, algorithm_of, needs_engine, needs_reference, needs_reward
from rl.dry_run.parameters import Part, count_parameters, group_parts
from rl.models import SUPPORTED, architecture, read_hf_config, value_model, value_weights
from rl.models.layout import VOCAB, Weight

SHAPES = Path(__file__).resolve().parents[2] / "configs" / "models"
"""Published configs, a directory each, for models whose checkpoints are elsewhere."""


@dataclass(frozen=True)
class Model:
    """One model of the run."""

    name: str
    """policy, critic, implicit_reward, reward_model or judge."""
    hf: dict
    weights: tuple[Weight, ...]
    parts: tuple[Part, ...]
    learns: bool
    trained_layout: bool
    """Whether it lies on the training grid; a judge does not."""
    path: str | None = None
    """Where the config says that it is, if not in model.path."""
    keeps_reference: bool = False
    """Whether a copy of its first weights is kept, in host memory."""

    @property
    def num_layers(self) -> int:
        return self.hf["num_hidden_layers"]

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer; 0 for a dense model."""
        return num_experts(self.hf)

    @property
    def experts_per_token(self) -> int:
        return self.hf.get("num_experts_per_tok", 0)

    @property
    def has_head(self) -> bool:
        """Whether it is a language model, not a value model."""
        return not any(weight.hf == ("score.weight",) for weight in self.weights)

    @property
    def parameters(self) -> int:
        return count_parameters(self.parts)

    @property
    def multiplied(self) -> int:
        """Parameters that a token is multiplied with: of routed experts those chosen, of a language model the head."""
        total = 0
        for part in self.parts:
            weight = part.weight
            if weight.expert is not None:
                total += part.elements * self.experts_per_token // self.num_experts
            elif weight.cut is not VOCAB or not weight.first_stage or weight.tied_to_head:
                total += part.elements
        return total

    @property
    def heads_width(self) -> tuple[int, int]:
        """Channels of all heads' queries (and keys), and of their values."""
        heads = self.hf["num_attention_heads"]
        if self.hf.get("kv_lora_rank"):
            return heads * (self.hf["qk_nope_head_dim"] + self.hf["qk_rope_head_dim"]), heads * self.hf[
                "v_head_dim"
            ]
        dim = self.hf.get("head_dim") or self.hf["hidden_size"] // heads
        return heads * dim, heads * dim

    def cache_elements(self, tp: int) -> int:
        """Of one token in a rank's KV cache. MLA caches its latent and the rotary key, whole on every rank."""
        hf = self.hf
        if hf.get("kv_lora_rank"):
            return self.num_layers * (hf["kv_lora_rank"] + hf["qk_rope_head_dim"])
        kv_heads = hf.get("num_key_value_heads") or hf["num_attention_heads"]
        dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        return self.num_layers * 2 * math.ceil(kv_heads / tp) * dim

    def derived_elements(self, tp: int) -> int:
        """What the engine computes from weights and keeps beside them: of MLA a second form of kv_b_proj."""
        hf = self.hf
        if not hf.get("kv_lora_rank"):
            return 0
        width = hf["num_attention_heads"] // tp * (hf["qk_nope_head_dim"] + hf["v_head_dim"])
        return self.num_layers * width * hf["kv_lora_rank"]


def check_layouts(config: Config, world_size: int, models: Mapping[str, Model]) -> None:
    """ConfigError if the layouts of training and generation do not fit the models and the number of ranks."""
    for model in models.values():
        if model.trained_layout:
            check_layout(config, world_size, model.hf, SUPPORTED, path=model.path)
        else:
            check_judge(config, world_size, model.hf)


def models_of(config: Config, *, shape: str = "") -> tuple[dict[str, Model], list[str]]:
    """Every model that a run of this config builds, by name, and notes for the user.

    shape: config.json, or its directory, in the place of model.path's. ConfigError as `rl.engines.inputs` raises it.
    """
    needs, notes = algorithm_of(config).needs, []
    paths = {"policy": ("model.path", config.model.path, False)}
    if "critic" in needs:
        paths["critic"] = ("critic.path", config.critic.path, True)
    if "implicit_reward" in needs:
        paths["implicit_reward"] = ("implicit_reward.path", config.implicit_reward.path, False)
    if config.reward.model.path and needs_reward(config):
        paths["reward_model"] = ("reward.model.path", config.reward.model.path, True)
    models = {}
    for name, (key, own_path, values) in paths.items():
        path = own_path or config.model.path
        hf = _read(path, key if own_path else "model.path", shape if path == config.model.path else "", notes)
        body = value_model(hf) if values else hf
        try:
            _check_known(body, path)
            architecture(body).check(body)
            weights = value_weights(body, needs_head=False) if values else architecture(body).weights(body)
        except KeyError as missing:
            raise ConfigError(f"{path}/config.json lacks the key {missing}.") from missing
        models[name] = Model(
            name,
            body,
            tuple(weights),
            tuple(group_parts(weights)),
            learns=name != "reward_model",
            trained_layout=True,
            path=own_path or None,
            keeps_reference=name == "implicit_reward" or (name == "policy" and needs_reference(config)),
        )
    judge = config.reward.judge.path
    if judge and needs_reward(config):
        hf = _read(judge, "reward.judge.path", "", notes)
        _check_known(hf, judge)
        weights = architecture(hf).weights(hf)
        models["judge"] = Model(
            "judge", hf, tuple(weights), tuple(group_parts(weights)), learns=False, trained_layout=False
        )
    return models, notes + _absent(config)


def _check_known(hf: dict, path: str) -> None:
    """ConfigError for an architecture that there is no code for."""
    names = hf.get("architectures") or []
    if not set(names) & set(SUPPORTED):
        known = listed(sorted(SUPPORTED), "and")
        raise ConfigError(
            f"The model in {path} has the architecture {', '.join(names) or '(none)'}; supported: {known}."
        )


def _read(path: str, key: str, shape: str, notes: list[str]) -> dict:
    """The config.json of a model, or the published one that the path is named after."""
    if shape:
        file = Path(shape, "config.json") if Path(shape).is_dir() else Path(shape)
        if not file.is_file():
            raise ConfigError(f"--model-shape {shape} is neither a config.json nor a directory with one.")
        return json.loads(file.read_text())
    if Path(path, "config.json").is_file():
        return read_hf_config(path, key=key)
    named = Path(path).name.lower()
    published = sorted(SHAPES.glob("*/"))  # none beside an installed copy of the program
    fitting = [directory for directory in published if named.startswith(directory.name)]
    if not fitting:
        known = listed([directory.name for directory in published] or [f"{SHAPES} is missing"], "or")
        raise ConfigError(
            f"{key}={path} has no config.json here, and its name begins with none of the published shapes ({known}); "
            "give --model-shape FILE."
        )
    directory = max(fitting, key=lambda directory: len(directory.name))
    note = f"{path} is not on this machine: the shape is that of configs/models/{directory.name}"
    if note not in notes:
        notes.append(note)
    return json.loads((directory / "config.json").read_text())


def _absent(config: Config) -> list[str]:
    """Notes on data files that are not here."""
    files = [*config.data.train, *(config.data.val if needs_engine(config) else [])]
    missing = [path for path in files if not Path(path).exists()]
    return [f"not on this machine, and not looked into: {', '.join(missing)}"] if missing else []
