"""A layout with which a translated config fits the memory of its GPUs."""

import tempfile
from dataclasses import replace
from typing import Any

import yaml

from rl.config.checks import check
from rl.config.options import ConfigError, Dumper
from rl.config.schema import Config, load_config
from rl.dry_run.changes import Change, cheapest_change, with_values
from rl.dry_run.estimate import estimate
from rl.dry_run.hardware import Hardware
from rl.dry_run.shape import check_layouts, models_of
from rl.models.sizes import num_kv_heads


def fitted(
    tree: dict[str, Any], world_size: int, *, shape: str, gpu_memory_gib: float
) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of the layout that have to change by dotted key, and notes.

    The dry run estimates the memory. The settings that may change (`rl.dry_run.changes`) do not change what
    is learned. tree: the settings, nested. shape: config.json of a model that is not here; "": one of
    configs/models, if the model's name begins with a name there. Raises ValueError if the run cannot be.
    """
    if not (tree.get("model", {}).get("path") and tree.get("data", {}).get("train")):
        return {}, ["Without model.path and data.train, which the script leaves empty, nothing was checked."]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.dump(tree, file, Dumper=Dumper)
        file.flush()
        config = load_config(file.name)
    check(config)
    hardware = Hardware(gpu_memory_gib=gpu_memory_gib)
    divided: dict[str, object] = {}
    try:
        models, _ = models_of(config, shape=shape)
        divided = heads_divided(config, models["policy"].hf)
        config = with_values(config, divided)
        check_layouts(config, world_size, models)
    except ConfigError as error:
        if "has no config.json here" not in str(error):
            raise
        return {}, ["The layout was not estimated, because the model is not here; give --model-shape FILE."]
    notes = [f"{key}={value}: the model has fewer key/value heads." for key, value in divided.items()]
    found = estimate(config, world_size, hardware, shape=shape)
    if not found.problems:
        return divided, notes
    where = (
        f"verl's layout does not fit {world_size} GPUs of {gpu_memory_gib:g} GiB by the dry run's estimate"
    )
    change = cheapest_change(found)
    if change is None or change.world_size != world_size:
        moved: dict[str, object] = {"training.optimizer.host_share": 1.0}
        lighter = estimate(with_values(config, moved), world_size, hardware, shape=shape)
        second = cheapest_change(lighter) if lighter.problems else Change({}, world_size, lighter)
        if second is not None and second.world_size == world_size:
            change = replace(second, values=moved | second.values)
    if change is None:
        return divided, [*notes, f"{where}."]
    if change.world_size != world_size:
        return divided, [*notes, f"{where}; use {change.words(found)}."]
    return divided | change.values, [*notes, f"{change.words(found)}: {where}."]


def heads_divided(config: Config, hf: dict[str, Any]) -> dict[str, object]:
    """Return the settings with which training.tp is at most a model's number of key/value heads.

    {}: it is already. The ranks beyond them share the tokens of a sequence by training.cp instead, as verl's
    Ulysses does, unless the sequences have images.
    """
    training, heads = config.training, num_kv_heads(hf)
    if training.tp <= heads or training.tp % heads:
        return {}
    if config.data.image_key:
        return {"training.tp": heads}
    cp = training.cp * training.tp // heads
    tokens = -(-training.micro_batch_tokens * training.cp // cp)
    return {"training.tp": heads, "training.cp": cp, "training.micro_batch_tokens": tokens}
