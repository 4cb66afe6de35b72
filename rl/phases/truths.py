"""Checks before training that reward functions can grade their ground truths."""

import logging

import torch.distributed as dist

from rl.config.schema import Config, generates_held_out, scores_training
from rl.data.prompts import Prompt
from rl.engines.inputs import Inputs
from rl.rewards.mixture import Mixture
from rl.rewards.pool.pool import ScoringPool

log = logging.getLogger(__name__)

TRIED = 128
"""Number of ground truths, evenly spaced in the data, that `try_truth` of a reward function tries."""


def check_truths(config: Config, inputs: Inputs, pool: ScoringPool) -> None:
    """Raise ValueError, with file and row, for a ground truth that cannot be graded or would grade wrongly.

    Each rank checks its share of the rows: every row by `check_truth` of its reward functions, which reads
    the truth, and TRIED rows by `try_truth` in the workers, which may run it. A run with environments is
    not checked, because their scores may replace the reward function's. Not collective.
    """
    rows = [
        *(inputs.prompts if scores_training(config) else ()),
        *inputs.held_out * generates_held_out(config),
    ]
    prompts = [row for row in rows if isinstance(row, Prompt)]
    agents = config.agents
    if agents.environment or agents.sources or agents.container.image or not prompts:
        return
    assert inputs.rewards is not None
    rank, world, mixture = dist.get_rank(), dist.get_world_size(), Mixture(inputs.rewards)
    if rank == 0 and all(prompt.ground_truth is None for prompt in prompts):
        log.warning(
            "none of the %d rows that are scored has a reward_model.ground_truth; the reward function gets "
            "None",
            len(prompts),
        )
    for prompt in prompts[rank::world]:
        try:
            mixture.check_truth(prompt.ground_truth, prompt.data_source)
        except ValueError as error:
            raise ValueError(f"{prompt.place}: {error}") from error
    tried = [prompt for prompt in prompts if mixture.tries_truths(prompt.data_source)]
    tried = tried[:: -(-len(tried) // TRIED) or 1][rank::world]
    pool.score([arguments(prompt, None) for prompt in tried], logs=False)
    for number, reason in pool.failures.items():
        raise ValueError(f"{tried[number].place}: {reason.removeprefix('ValueError: ')}")


def arguments(prompt: Prompt, response: str | None) -> dict:
    """Return the reward function's arguments for a response; with None only the ground truth is tried."""
    return dict(
        prompt=prompt.text,
        response=response,
        ground_truth=prompt.ground_truth,
        data_source=prompt.data_source,
        extra_info=prompt.extra_info,
    )
