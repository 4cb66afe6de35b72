"""Validation on held-out prompts, with a greedy response to each prompt, several sampled ones, or both.

`val-core/<data_source>/acc/mean@1` is the greedy accuracy. With k samples, mean@k, best@k (pass@k) and maj@k
are logged (`rl.run.validation_metrics`).
"""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import torch

from rl.config.schema import Config
from rl.data.prompts import Prompt
from rl.phases.batch_metrics import num_turns, spread
from rl.phases.phases import Phases
from rl.rollout.sampling import Sampling, greedy_sampling, train_sampling
from rl.run.validation_metrics import validation_metrics


def validate(phases: Phases, prompts: list[Prompt], config: Config) -> None:
    """Generate and score responses to every held-out prompt, and log the metrics of each data source.

    The accuracy of a sample is the reward function's `acc`; its score if the function returns no `acc`; and 0
    if the function failed.
    """
    if config.validation.greedy:
        _measure(phases, prompts, greedy_sampling(config), purpose="validation")
    if config.validation.samples_per_prompt:
        _measure(phases, prompts, validation_sampling(config), purpose="validation.sampled")


def validation_sampling(config: Config) -> Sampling:
    """Return the sampling for several responses per prompt."""
    validation = config.validation
    return replace(
        train_sampling(config),
        samples_per_prompt=validation.samples_per_prompt,
        temperature=validation.temperature,
    )


def _measure(phases: Phases, prompts: list[Prompt], sampling: Sampling, *, purpose: str) -> None:
    batch = phases.generation.sample(prompts, sampling, purpose=purpose, timing="testing")
    if batch.turns is not None:  # prompts whose environments failed are left out
        batch = batch.merge_rows()
        sizes = torch.bincount(batch.groups)
        batch = batch.keep_groups((sizes == sampling.samples_per_prompt).nonzero().squeeze(1).tolist())
        if not len(batch):
            return
        turns = spread("num_turns", num_turns(batch))
        phases.step.metrics |= {f"val-aux/{name}": value for name, value in turns.items()}
    several = sampling.samples_per_prompt > 1
    predictions = phases.scoring.fill_scores(batch, timing="testing", predictions=several)
    variables = {"acc": batch.outcomes, "score": batch.scores}
    variables |= {
        name: column for name, column in batch.score_details.items() if name not in ("acc", "failed")
    }
    prompts, shape = batch.prompts, (len(batch.prompts), sampling.samples_per_prompt)
    tables = {name: column.double().reshape(shape).numpy() for name, column in variables.items()}
    answers = np.array(predictions, dtype=object).reshape(shape) if several else None
    members: dict[str, list[int]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        members[prompt.data_source].append(number)
    values = {
        source: {name: table[rows] for name, table in tables.items()} for source, rows in members.items()
    }
    votes = None if answers is None else {source: answers[rows].tolist() for source, rows in members.items()}
    phases.step.metrics |= validation_metrics(values, votes)
