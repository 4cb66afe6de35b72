"""Where do two runs part? The first step and stage at which what they have stored differs.

Reads what every run stores: the samples of its steps (`logging.rollouts`), the norm of its gradients, its
config and its environment. A difference is called rounding if it is at most ROUNDING of the largest value.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rl.run_directory.metric_log import FILE_NAME, STEP, read_records
from rl.run_directory.record import config_of_step
from rl.run_directory.rollout_files import read, stored_steps

STAGES = {
    "prompts": "prompt_ids",
    "tokens": "response_ids",
    "engine log-probs": "rollout_logprobs",
    "scores": "score",
    "old log-probs": "old_logprobs",
    "advantages": "advantages",
}
"""Stage of a step, in their order -> column of the stored samples."""
GRADIENT = "actor/grad_norm"
ROUNDING = 1e-4


def parting(a: Path, b: Path) -> list[str]:
    """Return lines that say where two runs part, and what differs between their configs and environments.

    Raises ValueError if one of them is not the directory of a run.
    """
    return [_first_difference(a, b), *_settings(a, b)]


def _first_difference(a: Path, b: Path) -> str:
    files = stored_steps(a), stored_steps(b)
    norms = [
        {record[STEP]: record[GRADIENT] for record in read_records(run / FILE_NAME) if GRADIENT in record}
        for run in (a, b)
    ]
    steps = sorted(files[0].keys() & files[1].keys() | norms[0].keys() & norms[1].keys())
    for step in steps:
        if step in files[0] and step in files[1]:
            rows = [read(found[step], ["group", "sample", *STAGES.values()]).to_pylist() for found in files]
            if found := _of_samples(*rows):
                return f"the runs part at step {step}: {found}"
        own, other = (found.get(step) for found in norms)
        if own is not None and other is not None and own != other:
            return f"the runs part at step {step}: gradient, {_values(own, other, 'norm', scale=own)}"
    return f"the runs do not part in the {len(steps)} steps that both have stored"


def _of_samples(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> str:
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
            return f"{stage}, {_values(x[token], y[token], place, scale=float(np.abs(x).max()))}"
    return ""


def _values(own: Any, other: Any, place: str, *, scale: float) -> str:
    is_rounding = np.asarray(own).dtype.kind == "f" and abs(own - other) <= ROUNDING * scale
    kind = "rounding" if is_rounding else "another value"
    return f"{place}: {own} and {other} ({kind})"


def _settings(a: Path, b: Path) -> list[str]:
    """Return a line for each key of the config, and of the environment, that differs."""
    last = 10**9
    trees = [_flat(yaml.safe_load(config_of_step(run, last).read_text())) for run in (a, b)]
    lines = [f"config: {line}" for line in _differing(*trees) if not line.startswith(("run.dir", "run.name"))]
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
