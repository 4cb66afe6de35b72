"""Where do two runs part? The first step and stage at which what they have stored differs.

Reads what every run stores: digests of all stages of its steps, the samples (`logging.rollouts`), the norm
of its gradients, its config and its environment. A difference is called rounding if it is at most ROUNDING of
the largest value, or of the norm of all values.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rl.run_directory.digests import STAGES, START, WEIGHTS, gap, read_digests
from rl.run_directory.metric_log import FILE_NAME, STEP, read_records
from rl.run_directory.record import config_of_step
from rl.run_directory.rollout_files import read, stored_steps

GRADIENT = "actor/grad_norm"
ROUNDING = {"float32": 1e-4, "bfloat16": 1e-2}
"""Largest relative difference that is called rounding, by `model.dtype`."""
EQUAL = "the runs do not part"
"""Beginning of the answer if nothing differs."""
SAME_SUM = 1e-7
"""Largest difference between the sums of equal weights on different layouts, relative to their norm."""


def parting(a: Path, b: Path) -> list[str]:
    """Return lines that say where two runs part, and what differs between their configs and environments.

    Raises ValueError if one of them is not the directory of a run.
    """
    configs = [_flat(yaml.safe_load(config_of_step(run, 10**9).read_text())) for run in (a, b)]
    first = _first_difference(a, b, ROUNDING[configs[0].get("model.dtype", "float32")])
    settings = _settings(a, b, *configs)
    if first.startswith(EQUAL) and any(line.startswith("config: ") for line in settings):
        first += (
            "; the keys below have had no effect on what is stored. For example, objective.clip_high has "
            "none with one update per step"
        )
    return [first, *settings]


def _first_difference(a: Path, b: Path, rounding: float) -> str:
    files, digests = (stored_steps(a), stored_steps(b)), (read_digests(a), read_digests(b))
    norms = [
        {record[STEP]: record[GRADIENT] for record in read_records(run / FILE_NAME) if GRADIENT in record}
        for run in (a, b)
    ]
    steps = sorted(set().union(*(own.keys() & other.keys() for own, other in (files, digests, norms))))
    for step in steps:
        rows = [
            read(found[step], ["group", "sample", *STAGES.values()]).to_pylist()
            for found in files
            if step in files[0] and step in files[1]
        ]
        samples = _of_samples(*rows, rounding=rounding) if rows else ""
        own, other = (found.get(step, {}) for found in digests)
        found = _of_digests(own, other, rounding)
        if samples and (not found or samples.startswith(f"{found.partition(',')[0]},")):
            found = samples  # names the sample and the token
        if not found:
            own_norm, other_norm = (each.get(step) for each in norms)
            found = _of_gradients(own_norm, other_norm, rounding) or _of_weights(own, other, rounding)
        if found:
            return f"the runs part at step {step}: {found}"
    return f"{EQUAL} in the {len(steps)} steps that both have stored"


def _of_digests(a: dict[str, Any], b: dict[str, Any], rounding: float) -> str:
    """Return the first stage of a step with different digests; "" if there is none."""
    for stage in (START, *STAGES):
        own, other = a.get(stage), b.get(stage)
        if own is None or other is None or own == other or own[0] == other[0] and isinstance(own, list):
            continue
        if isinstance(own, str):
            return f"{stage}, the hashes differ (another value)"
        return f"{stage}, {_kind(gap(own, other), rounding if stage != 'scores' else 1e-7)}"
    return ""


def _of_gradients(own: float | None, other: float | None, rounding: float) -> str:
    if own is None or other is None or own == other:
        return ""
    return f"gradient, {_values(own, other, 'norm', scale=own, rounding=rounding)}"


def _of_weights(a: dict[str, Any], b: dict[str, Any], rounding: float) -> str:
    """Return whether the weights after a step differ; "" if they do not."""
    if WEIGHTS not in a or WEIGHTS not in b:
        return ""
    apart = max(abs(x - y) for x, y in zip(a[WEIGHTS], b[WEIGHTS])) / max(a[WEIGHTS][1], 1e-30)
    return f"{WEIGHTS} after it, {_kind(apart, rounding)}" if apart > SAME_SUM else ""


def _kind(apart: float, rounding: float) -> str:
    kind = "rounding" if apart <= rounding else "another value"
    return f"a difference of about {apart:.1e} of their norm ({kind})"


def _of_samples(a: list[dict[str, Any]], b: list[dict[str, Any]], *, rounding: float) -> str:
    """Return the first stage, sample and token that differ in the rows of a step; "" if none does."""
    if len(a) != len(b):
        return f"prompts, {len(a)} and {len(b)} samples are stored"
    for stage, column in STAGES.items():
        for own, other in zip(a, b, strict=True):
            x, y = (np.atleast_1d(np.asarray(row[column])) for row in (own, other))
            if (
                own[column] is None
                or other[column] is None
                or np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
            ):
                continue
            where = f"group {own['group']} sample {own['sample']}"
            if len(x) != len(y) and np.array_equal(x[: len(y)], y[: len(x)]):
                return f"{stage}, {where}: {len(x)} and {len(y)} tokens"
            size = min(len(x), len(y))
            token = int(np.flatnonzero(x[:size] != y[:size])[0])
            place = f"{where} token {token}" if isinstance(own[column], list) else where
            largest = float(np.abs(x).max())
            return f"{stage}, {_values(x[token], y[token], place, scale=largest, rounding=rounding)}"
    return ""


def _values(own: Any, other: Any, place: str, *, scale: float, rounding: float) -> str:
    is_rounding = np.asarray(own).dtype.kind == "f" and abs(own - other) <= rounding * scale
    kind = "rounding" if is_rounding else "another value"
    return f"{place}: {own} and {other} ({kind})"


def _settings(a: Path, b: Path, *configs: dict[str, Any]) -> list[str]:
    """Return a line for each key of the config, and of the environment, that differs."""
    lines = [
        f"config: {line}" for line in _differing(*configs) if not line.startswith(("run.dir", "run.name"))
    ]
    found = [json.loads((run / "environment.json").read_text()) for run in (a, b)]
    kept = "python", "git_revision", "git_status", "packages", "world_size", "role_sizes"
    trees = [_flat({key: each.get(key) for key in kept}) for each in found]
    return lines + [f"environment: {line}" for line in _differing(*trees)]


def _differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [f"{key}: {a.get(key)} and {b.get(key)}" for key in a | b if a.get(key) != b.get(key)]


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    return {
        key: value
        for name, each in tree.items()
        for key, value in _flat(each, f"{prefix}.{name}" if prefix else str(name)).items()
    }
