"""Validation on held-out prompts: `val-core/<data_source>/acc/mean@k`."""

from collections import defaultdict

import torch

from rl.config import Config
from rl.data.prompts import Prompt
from rl.phases import Phases
from rl.rollout.engine import Sampling


def validate(phases: Phases, prompts: list[Prompt], config: Config) -> None:
    """Generate and score validation.samples_per_prompt responses to every held-out prompt; logs means per data source.

    The accuracy of a sample is the reward function's `acc`, or its score where it gives none; 0 if the function failed.
    """
    samples = config.validation.samples_per_prompt
    batch = phases.sample(prompts, validation_sampling(config), purpose="validation", timing="testing")
    phases.judge(batch, prompts, timing="testing")
    accuracy = batch.score_details.get("acc", batch.scores.masked_fill(batch.score_details["failed"] > 0, 0.0))
    accuracy = torch.where(accuracy.isnan(), batch.scores, accuracy)
    by_source: dict[str, list[float]] = defaultdict(list)
    for group, value in zip(batch.groups.tolist(), accuracy.tolist()):
        by_source[prompts[group].data_source].append(value)
    for source, values in by_source.items():
        phases.metrics[f"val-core/{source}/acc/mean@{samples}"] = sum(values) / len(values)


def validation_sampling(config: Config) -> Sampling:
    """Sampling of validation: its own temperature; greedy sees the whole vocabulary."""
    greedy = config.validation.temperature == 0
    rollout = config.rollout
    return Sampling(
        samples_per_prompt=config.validation.samples_per_prompt,
        temperature=config.validation.temperature,
        top_p=1.0 if greedy else rollout.top_p,
        top_k=0 if greedy else rollout.top_k,
        min_p=0.0 if greedy else rollout.min_p,
        max_tokens=rollout.max_response_tokens,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
    )
