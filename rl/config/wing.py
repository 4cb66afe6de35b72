"""The wing: the table of the options whose implementation is a folder of `rl/features`.

The trunk, all code outside of `rl.features`, never imports it. Where an option may take part, the trunk
calls `door`, which imports the function or class that the option's entry names. For example, a run with
`rollout.kv_offload_gib=4` needs the entry `kv_offload`: its engine gets what the function `parts` in
rl/features/kv_offload/kv_offload.py returns.

An option can be taken out: remove its folder and its entry. A config that needs it is then refused by name
(`check_wing`), and every other run works as before. Tools ask for a door of an option by the option's name
(`door_of`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from rl.config.features import OPTIONAL, is_on, setting
from rl.config.options import ConfigError, flatten
from rl.config.schema import Config


@dataclass(frozen=True)
class Entry:
    """One option. A door is a place where the option enters the program. It is written as "file:name",
    relative to the folder of the option: "engine:parts" is `parts` of engine.py, and "harbor" is the whole
    file harbor.py. An empty door means that the option does not enter there."""

    when: str
    """Features of a config that need the option, separated by commas (`rl.config.features`)."""
    engine: str = ""
    """(config, adapters) -> parts of the engine that generates with the policy (`rl.rollout.parts`)."""
    trainer: str = ""
    """(config, model, base_of) -> parts of a model in training (`rl.engines.training_parts`)."""
    sampler: str = ""
    """Subclass of `rl.run.samplers.SamplerForm`: the form in which samples are produced."""
    extends: str = ""
    """Name of the option that this option extends. Its code may import the folder of the extended option."""
    doors: dict[str, str] = field(default_factory=dict)
    """Further doors, by the name under which the trunk asks for them."""

    def door(self, name: str) -> str:
        """Return the door of this name, a field or a key of `doors`; "" if the option has none."""
        return self.doors.get(name) or str(getattr(self, name, ""))

    def needed_by(self, config: Config) -> bool:
        """Return whether the config needs the option."""
        return any(is_on(config, feature) for feature in self.when.split(", "))


CONTAINERS = {
    "programs": "image_store:runner",
    "description": "container:describe",
    "environment": "environment:ContainerEnvironment",
    "tasks": "harbor",
}
AGENTS = {
    "dialogues": "dialogue_form:TrajectoryForm",
    "logs": "stored_log",
    "puzzles": "integrations.reasoning_gym",
    "tasksets": "integrations.verifiers",
    "verl": "integrations.verl",
}

PACKAGE, FOLDER = "rl.features", Path(__file__).parents[1] / "features"

FEATURES = {
    "transformers_backend": Entry(
        "a class of transformers",
        trainer="part:parts",
        doors={"copies": "shards:ranks_per_copy", "pass_bytes": "memory:pass_bytes"},
    ),
    "bitwise": Entry("model.numerics=bitwise", engine="engine:parts", trainer="trainer:parts"),
    "sampling_masks": Entry("sampling masks", engine="engine:parts", trainer="trainer:parts"),
    "router_replay": Entry("training.router_replay", engine="engine:parts", trainer="trainer:parts"),
    "teachers": Entry(
        "a teacher",
        trainer="divergence:parts",
        doors={"inputs": "reading:TeacherInputs", "teaching": "teaching:Teaching"},
    ),
    "adapters": Entry(
        "adapters", engine="slots:parts", trainer="trainer:parts", doors={"export": "peft:export_peft"}
    ),
    "fp8_engine": Entry("rollout.quantization=fp8", engine="staged_refit:parts"),
    "kv_offload": Entry("rollout.kv_offload_gib", engine="kv_offload:parts"),
    "drafts": Entry("a prediction head, drafts", engine="drafts:parts", trainer="mtp:parts"),
    "vision": Entry("data.image_key", engine="requests:parts", trainer="tower:parts"),
    "agents": Entry("agents", doors=AGENTS),
    "containers": Entry("containers, programs in containers", extends="agents", doors=CONTAINERS),
    "roles": Entry("roles", sampler="sampler_form:RolesForm"),
    "stored_runs": Entry(
        "run.mode=train_only|score_only",
        sampler="sampler_form:StoredForm",
        doors={"score_only": "score_only:score_only"},
    ),
    "carry_over": Entry("rollout.carry_over", sampler="sampler_form:CarryOverForm"),
    "changed_only": Entry("refit.changed_only", doors={"messages": "changed_only:ChangedOnly"}),
    "sweep": Entry("a sweep", doors={"run": "points:run_points"}),
    "early_stop": Entry("sweep.stop", extends="sweep", doors={"rule": "early_stop:EarlyStop"}),
    "first_step": Entry("run.mode=check", doors={"training": "first_step:FirstStep"}),
    "evaluate": Entry("run.mode=evaluate", doors={"training": "evaluate:Evaluation"}),
    "trace": Entry("trace.steps", doors={"recorder": "recorder:Tracing"}),
}
"""Folder of `rl/features` -> entry. Parts of an engine or of a model are in this order."""


def door(config: Config, name: str) -> Any:
    """Return the function or class behind a door of the first option, in the order of the table, that the
    config needs and that has this door; None if there is none.

    name: `sampler`, or a key of `Entry.doors`.
    """
    return next(doors(config, name), None)


def doors(config: Config, name: str) -> Iterator[Any]:
    """Yield the functions or classes behind this door of all options that the config needs.

    Raises ConfigError if it needs an option that was removed.
    """
    check_wing(config)
    for folder, entry in FEATURES.items():
        if entry.door(name) and entry.needed_by(config):
            yield door_of(folder, name)


def door_of(folder: str, name: str, *, needed_by: str = "this run") -> Any:
    """Import a door of an option by the option's name. Raises ConfigError as `path_of`."""
    module, _, attribute = path_of(folder, name, needed_by=needed_by).partition(":")
    imported = import_module(module)
    return getattr(imported, attribute) if attribute else imported


def path_of(folder: str, name: str, *, needed_by: str = "this run") -> str:
    """Return a door as "package.module:name".

    needed_by: a setting, for example "reward.kwargs.container". Raises ConfigError if the option was removed.
    """
    if not _has(folder):
        raise _removed(needed_by, f"the option {folder}")
    return f"{PACKAGE}.{folder}.{FEATURES[folder].door(name)}"


def check_wing(config: Config) -> None:
    """Raise ConfigError if the config needs an option that this copy of the program does not have."""
    present = [entry for folder, entry in FEATURES.items() if _has(folder)]
    known = {feature for entry in present for feature in entry.when.split(", ")}
    for feature in OPTIONAL:
        if feature not in known and is_on(config, feature):
            raise _removed(setting(config, feature), "an option")
    for key, value in flatten(config).items():
        for name in value if isinstance(value, list | tuple) else [value]:
            if isinstance(name, str) and name.startswith(f"{PACKAGE}."):
                folder = name.split(".")[2]
                if not _has(folder):
                    raise _removed(f"{key}={name}", f"the option {folder}")


def _has(folder: str) -> bool:
    return folder in FEATURES and (FOLDER / folder).is_dir()


def _removed(setting: str, option: str) -> ConfigError:
    return ConfigError(
        f"{setting} needs {option} that was removed from this copy of the program (rl/config/wing.py lists "
        "those it has); leave the key out, or restore the option's folder in rl/features and its entry."
    )
