"""Checks before training that reward functions can grade their ground truths."""

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from rl.config.agent_plan import AgentPlan
from rl.config.functions import companion
from rl.config.needs import generates_held_out, scores_training
from rl.config.schema import Config
from rl.data.prompts import GROUND_TRUTH, Prompt, value_at
from rl.data.reading import read_row
from rl.engines.inputs import Inputs
from rl.rewards.mixture import Mixture, read_truth
from rl.rewards.pool.pool import ScoringPool

log = logging.getLogger(__name__)

TRIED = 128
"""Number of ground truths that a reward function's `try_truth` tries; they are evenly spaced in the data."""


def check_truths(config: Config, inputs: Inputs, pool: ScoringPool) -> None:
    """Raise ValueError, with file and row, for a ground truth that cannot be graded or is graded wrongly.

    Each rank checks its share of the rows. `check_truth` checks every row; it is defined beside the row's
    reward function, or beside its environment. `try_truth` checks TRIED rows in the workers, which may
    execute the ground truth. Reward functions do not check rows of environments, because an environment's
    score may replace the reward function's. Not collective.
    """
    rows = [
        *(inputs.prompts if scores_training(config) else ()),
        *inputs.held_out * generates_held_out(config),
    ]
    prompts = [row for row in rows if isinstance(row, Prompt)]
    plan, checks = config.agents.plan, dict[str, Callable[..., Any] | None]()
    rank, world = dist.get_rank(), dist.get_world_size()
    key = config.data.ground_truth_key or GROUND_TRUTH
    environments = [_environment(plan, prompt) for prompt in prompts]
    for prompt, environment in list(zip(prompts, environments))[rank::world]:
        if environment and environment not in checks:
            checks[environment] = None if config.agents.interpreter else _check_beside(environment)
        if check := checks.get(environment):
            with at(prompt.place, key):
                read_truth(check, prompt.ground_truth, environment)
    prompts = [prompt for prompt, environment in zip(prompts, environments) if not environment]
    if not prompts:
        return
    assert inputs.rewards is not None
    mixture = Mixture(inputs.rewards)
    for prompt in prompts[rank::world]:
        with at(prompt.place, key):
            try:
                mixture.check_truth(prompt.ground_truth, prompt.data_source)
            except ValueError as error:
                if prompt.ground_truth is not None:
                    raise
                raise ValueError(
                    f"{key} is missing, which {pool.name} needs; {_remedy(prompt, key)}."
                ) from error
    if rank == 0 and all(prompt.ground_truth is None for prompt in prompts):
        log.warning(
            "none of the %d rows that are scored has a %s, so %s gets None; if it reads one, %s",
            len(prompts),
            key,
            pool.name,
            _remedy(prompts[0], key),
        )
    empty = [p for p in prompts if isinstance(p.ground_truth, str | list | dict) and not p.ground_truth]
    if rank == 0 and empty:
        log.warning(
            "%d of %d rows that are scored have an empty %s, the first in %s: %s compares with nothing",
            len(empty),
            len(prompts),
            key,
            empty[0].place,
            pool.name,
        )
    tried = [prompt for prompt in prompts if mixture.tries_truths(prompt.data_source)]
    tried = tried[:: -(-len(tried) // TRIED) or 1][rank::world]
    pool.score([arguments(prompt, None) for prompt in tried], logs=False)
    for number, reason in pool.failures.items():
        raise ValueError(f"{tried[number].place}: {reason.removeprefix('ValueError: ')}")


def _remedy(prompt: Prompt, key: str) -> str:
    """Return what to do about a missing ground truth. key: column, or path into one, where it was read."""
    row = read_row(prompt.place)
    *parents, last = key.split(".")
    found = value_at(row, parents)
    own = "fill in the value, leave out the row, or " if isinstance(found, dict) and last in found else ""
    return f"{own}set data.ground_truth_key to its column, one of {', '.join(map(str, row.values))}"


def _environment(plan: AgentPlan, prompt: Prompt) -> str:
    """Return the environment class that scores a prompt; empty if reward functions score it.

    Reward functions also score prompts whose environment only provides tools.
    """
    name = plan.name_for({**prompt.extra_info, "data_source": prompt.data_source})
    return (plan.sources[name] if name else plan.default).environment


def _check_beside(environment: str) -> Callable[..., Any] | None:
    """Return `check_truth` of an environment's module; None if this process cannot import the module."""
    try:
        return companion(environment, "check_truth")
    except ImportError:  # the workers import it too, and report the error with its key
        return None


@contextlib.contextmanager
def at(place: str, key: str = GROUND_TRUTH) -> Iterator[None]:
    """Prefix a ValueError of the body with the place of its row. key: the data's name for ground truths."""
    try:
        yield
    except ValueError as error:
        text = re.sub(rf"^{re.escape(GROUND_TRUTH)}\b", lambda _: key, str(error))
        raise ValueError(f"{place}: {text}") from error


def arguments(prompt: Prompt, response: str | None) -> dict:
    """Return the reward function's arguments for a response; None: only the ground truth is tried."""
    return dict(
        prompt=prompt.text,
        response=response,
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        extra_info=prompt.extra_info,
    )
