"""Compares the sampling parameters that the engine had for each sample with the config."""

from typing import Any

import numpy as np

from rl.checks.batches import CheckFailed, refuse
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.rollout.inversion import uniforms
from rl.rollout.sampling import PARAMETERS, parameters_code

SMALLEST_TEMPERATURE = 0.01
"""vLLM raises a lower temperature, except 0, to this value."""


def expected_parameters(config: Config, purpose: str) -> dict[str, Any]:
    """Return the parameters by vLLM's names. purpose: training, greedy or validation (sampled)."""
    rollout, validation = config.rollout, config.validation
    found: dict[str, Any] = {"stop": rollout.stop, "stop_token_ids": rollout.stop_token_ids}
    if purpose == "greedy":
        found["temperature"] = 0.0
    elif purpose == "validation":
        found |= {"temperature": validation.temperature, "min_p": rollout.min_p}
        found |= {"top_p": validation.top_p or rollout.top_p, "top_k": validation.top_k or rollout.top_k}
    else:
        found |= {name: getattr(rollout, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    if not found["temperature"]:
        return {name: value for name, value in found.items() if name not in ("top_p", "top_k", "min_p")}
    return found | {"temperature": max(found["temperature"], SMALLEST_TEMPERATURE)}


def check_uniforms() -> None:
    """Raise CheckFailed if two tokens of a sample, or two samples, get the same random number."""
    seeds, positions = (index.ravel() for index in np.indices((16, 32)))
    found = uniforms(seeds.astype(np.uint64), positions)
    if len(np.unique(found)) < len(found) or abs(found.mean() - 0.5) > 0.1:
        raise CheckFailed(
            f"sampling check: {len(found)} tokens of different samples and positions get only "
            f"{len(np.unique(found))} random numbers, with the mean {found.mean():.3g}: tokens of a sample, "
            "or samples, depend on each other."
        )


def check_sampling(batch: Batch, config: Config, purpose: str) -> None:
    """Raise CheckFailed if the engine sampled with other parameters than the config has for the purpose.

    The error names the other purpose with the parameters, or the parameter that did not reach the engine.
    """
    if batch.sampled_with is None:
        return
    expected = expected_parameters(config, purpose)
    wrong = (batch.sampled_with != parameters_code(expected)) & (batch.sampled_with != -1)
    if not wrong.any():
        return
    others = {
        f"the parameters of {other}": expected_parameters(config, other)
        for other in ("training", "greedy", "validation")
    }
    for name, neutral in PARAMETERS.items():
        values = (True, False) if isinstance(neutral, bool) else (neutral,)
        others |= {f"{name}={value}": expected | {name: value} for value in values}
    code = int(batch.sampled_with[wrong][0])
    named = [what for what, parameters in others.items() if code == parameters_code(parameters)]
    given = ", ".join(f"{name}={value}" for name, value in expected.items())
    what = f"the engine sampled {{sample}} with {['other parameters', *named][-1]}"
    refuse("sampling", batch, wrong, what, f"the config gives {given} for {purpose}")
