"""The wing: the table of the options whose implementation is a folder of `rl/features`.

The trunk of the program imports no module of `rl.features`. Where an option may take part, the trunk asks
this table and imports what the option's entry names. For example, a run with `rollout.kv_offload_gib=4` has
the entry `kv_offload`, and its engine gets the parts that `rl/features/kv_offload/engine.py` returns.

An option can be taken out: remove its folder and its entry. A config that needs it is then refused by name
(`check_wing`), and every other run works as before.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from rl.config.features import OPTIONAL, is_on, setting
from rl.config.options import ConfigError
from rl.config.schema import Config


@dataclass(frozen=True)
class Entry:
    """One option. A door is the name of a function or a class, such as "engine:parts" for `parts` of
    engine.py in the folder; empty: the option has none."""

    when: str
    """Features of a config that need the option, separated by commas (`rl.config.features`)."""
    engine: str = ""
    """(config, adapters) -> parts of the engine that generates with the policy (`rl.rollout.parts`)."""
    trainer: str = ""
    """(config, model, base_of) -> parts of a model that trains (`rl.training.parts`)."""
    sampler: str = ""
    """Subclass of `rl.run.samplers.SamplerForm`: the form in which samples are produced."""
    doors: dict[str, str] = field(default_factory=dict)
    """Further doors, by the name under which the trunk asks for them."""

    def needed_by(self, config: Config) -> bool:
        """Return whether the config needs the option."""
        return any(is_on(config, feature) for feature in self.when.split(", "))


FEATURES = {
    "bitwise": Entry(
        "model.numerics=bitwise",
        engine="rl.rollout.bitwise_numerics:parts",
        trainer="rl.training.bitwise_numerics:parts",
    ),
    "sampling_masks": Entry(
        "sampling masks", engine="rl.rollout.sampling_masks:parts", trainer="rl.training.sampling_masks:parts"
    ),
    "router_replay": Entry(
        "training.router_replay", engine="rl.rollout.routes:parts", trainer="rl.training.router_replay:parts"
    ),
    "teachers": Entry(
        "a teacher", trainer="rl.training.divergence:parts", doors={"teaching": "rl.phases.teaching:Teaching"}
    ),
    "adapters": Entry(
        "adapters",
        engine="rl.rollout.adapters:parts",
        trainer="rl.training.adapter:parts",
        doors={"export": "rl.checkpoint.peft:export_peft"},
    ),
    "fp8_engine": Entry("rollout.quantization=fp8", engine="rl.refit.quantised:parts"),
    "kv_offload": Entry("rollout.kv_offload_gib", engine="rl.rollout.kv_offload:parts"),
    "drafts": Entry(
        "drafts, a prediction head", engine="rl.rollout.drafts:parts", trainer="rl.training.mtp:parts"
    ),
    "vision": Entry("data.image_key", engine="rl.vision.requests:parts", trainer="rl.vision.tower:parts"),
    "agents": Entry("agents", doors={"dialogues": "form:TrajectoryForm"}),
    "containers": Entry(
        "containers",
        doors={"programs": "rl.sandbox.images:runner", "description": "rl.sandbox.container:describe"},
    ),
    "roles": Entry("roles", sampler="form:RolesForm"),
    "stored_runs": Entry(
        "run.mode=train_only|score_only",
        sampler="form:StoredForm",
        doors={"score_only": "rl.run.score_only:score_only"},
    ),
    "carry_over": Entry("rollout.carry_over", sampler="form:CarryOverForm"),
    "changed_only": Entry("refit.changed_only", doors={"messages": "rl.refit.changed_only:ChangedOnly"}),
    "sweep": Entry("a sweep", doors={"run": "rl.run.points:run_points"}),
    "early_stop": Entry("sweep.stop", doors={"rule": "rl.run.early_stop:EarlyStop"}),
    "first_step": Entry("run.mode=check", doors={"training": "rl.run.first_step:FirstStep"}),
    "trace": Entry("trace.steps", doors={"recorder": "rl.runtime.trace_recorder:Tracing"}),
}
"""Folder of `rl/features` -> entry. Parts of an engine or of a model are in this order."""


def door(config: Config, name: str) -> Any:
    """Import what the first option of a config names as its door; None if no option has it.

    name: `sampler`, or a key of `Entry.doors`.
    """
    return next(doors(config, name), None)


def doors(config: Config, name: str) -> Iterator[Any]:
    """Import what the options of a config name as their door, in the order of the table."""
    for folder, entry in FEATURES.items():
        path = entry.doors.get(name) or getattr(entry, name, "")
        if path and entry.needed_by(config):
            yield load(folder, path)


def door_of(folder: str, name: str) -> Any:
    """Import a further door of an option. Raises ConfigError if this copy of the program lacks the option."""
    if folder not in FEATURES:
        raise ConfigError(f"this copy of the program has no rl/features/{folder}, which this run needs.")
    return load(folder, FEATURES[folder].doors[name])


def load(folder: str, path: str) -> Any:
    """Import a door. path: as in `Entry`."""
    file, _, attribute = path.partition(":")
    module = file if file.startswith("rl.") else f"rl.features.{folder}.{file}"
    return getattr(import_module(module), attribute)


def check_wing(config: Config) -> None:
    """Raise ConfigError if the config needs an option that this copy of the program does not have."""
    known = {feature for entry in FEATURES.values() for feature in entry.when.split(", ")}
    for feature in OPTIONAL:
        if feature not in known and is_on(config, feature):
            raise ConfigError(
                f"{setting(config, feature)} needs an option that was removed from this copy of the program "
                "(rl/config/wing.py lists those it has); leave the key out, or restore the option's folder "
                "in rl/features and its entry."
            )
