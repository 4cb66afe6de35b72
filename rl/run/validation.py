"""Validation on held-out prompts, and the loss of held-out responses.

Each held-out prompt gets a greedy response, several sampled responses, or both.

`val-core/<data_source>/acc/mean@1` is the greedy accuracy. With k samples, mean@k, best@k (pass@k) and maj@k
are logged (`rl.run.validation_metrics`). `val/loss` is the mean of -log pi over the trained tokens of all
held-out responses, `val-core/<data_source>/loss` is the same mean over the responses of one source, and
perplexity is exp(loss). For example, a loss of 0.7 is a perplexity of 2.01.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from rl.checks.batches import check_losses, check_table
from rl.config.schema import Config
from rl.data.batch import Batch, data_responses
from rl.data.prompts import Prompt
from rl.objectives.segments import segment_sum
from rl.phases.batch_metrics import num_turns, spread
from rl.phases.phases import Phases
from rl.phases.sampler import SampleCall
from rl.rollout.sampling import Sampling, greedy_sampling, train_sampling
from rl.run.validation_metrics import validation_metrics

Store = Callable[[str, Batch, list[str | None] | None], None]
"""Stores the samples of a pass: its name, the scored samples, and their answers if the pass votes."""


def passes(config: Config) -> list[str]:
    """Return the passes over the held-out prompts that `validation` asks for, in their order."""
    own = config.validation
    asked = {"loss": own.loss, "greedy": own.greedy, "sampled": own.samples_per_prompt > 0}
    return [name for name, is_asked in asked.items() if is_asked]


def validate(phases: Phases, prompts: list[Prompt], config: Config, store: Store) -> None:
    """Measure the policy on every held-out prompt, as `validation` says, and log the metrics of each source.

    Collective over the world.
    """
    is_refitted = False
    for name in passes(config):
        if name != "loss" and not is_refitted:
            phases.sampler.refit()
            is_refitted = True
        measure(phases, prompts, config, name, store)


def measure(phases: Phases, prompts: list[Prompt], config: Config, name: str, store: Store) -> None:
    """Measure one pass and log its metrics. The engines have the present weights, except for the loss.

    The accuracy of a sample is the reward function's `acc`, or the score if the function returns no `acc`. It
    is 0 if the function, or the environment of a trajectory, failed. `val-core/<data_source>/failed/mean@k`
    is the share of failed samples.
    """
    if name == "loss":
        phases.step.metrics |= loss_metrics(phases, prompts, config.data.prompts_per_step)
        return
    is_greedy = name == "greedy"
    sampling = greedy_sampling(config) if is_greedy else validation_sampling(config)
    store(name, *_measure(phases, prompts, sampling, is_greedy=is_greedy))


def loss_metrics(phases: Phases, prompts: list[Prompt], prompts_per_pass: int) -> dict[str, float]:
    """Return loss and perplexity of the held-out responses. Collective over the world.

    prompts_per_pass: number of prompts in memory at once.
    """
    sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))  # sum of the loss, and of the mask
    trained: dict[str, list[torch.Tensor]] = defaultdict(list)
    for start in range(0, len(prompts), prompts_per_pass):
        part = prompts[start : start + prompts_per_pass]
        batch = data_responses(part)
        losses = torch.where(batch.mask > 0, -phases.inference.present_logprobs(batch), 0.0)
        columns = [segment_sum(column.double(), batch.lengths).numpy() for column in (losses, batch.mask)]
        for sample, (prompt, own) in enumerate(zip(part, np.stack(columns, axis=1), strict=True)):
            sums[prompt.data_source] += own
            index = batch.tokens_of([sample])
            trained[prompt.data_source].append(losses[index[batch.mask[index] > 0]])
    means = {f"val-core/{source}": total / count for source, (total, count) in sums.items()}
    total, count = sum(sums.values(), np.zeros(2))
    means["val"] = total / count
    found = {
        f"{name}/{key}": float(value)
        for name, loss in means.items()
        for key, value in (("loss", loss), ("perplexity", np.exp(loss)))
    }
    check_losses(trained, found, prompts)
    return found


def validation_sampling(config: Config) -> Sampling:
    """Return the sampling for several responses per prompt."""
    validation = config.validation
    return replace(
        train_sampling(config),
        samples_per_prompt=validation.samples_per_prompt,
        temperature=validation.temperature,
        top_p=validation.top_p or config.rollout.top_p,
        top_k=validation.top_k or config.rollout.top_k,
    )


def _measure(
    phases: Phases, prompts: list[Prompt], sampling: Sampling, *, is_greedy: bool
) -> tuple[Batch, list[str | None] | None]:
    """Sample and score all prompts, and log the metrics; return the batch and its answers."""
    purpose = "validation" if is_greedy else "validation.sampled"
    batch = phases.sampler.sample(SampleCall(prompts, sampling, purpose, timing="testing"))
    if batch.turns is not None:
        batch = batch.merge_rows().delivered()
        turns = spread("num_turns", num_turns(batch))
        phases.step.metrics |= {f"val-aux/{name}": value for name, value in turns.items()}
    several = sampling.samples_per_prompt > 1
    predictions = phases.scoring.fill_scores(batch, timing="testing", predictions=several)
    k = sampling.samples_per_prompt
    phases.checks.validated(batch, prompts, samples_per_prompt=k, is_greedy=is_greedy)
    variables = {"acc": batch.outcomes, "score": batch.column("scores")}
    variables |= {
        name: column for name, column in batch.score_details.items() if name not in ("acc", "failed")
    }
    shape = len(prompts), sampling.samples_per_prompt
    tables = {name: column.double().reshape(shape).numpy() for name, column in variables.items()}
    answers = np.array(predictions, dtype=object).reshape(shape) if several else None
    members: dict[str, list[int]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        members[prompt.data_source].append(number)
    values = {
        source: {name: table[rows] for name, table in tables.items()} for source, rows in members.items()
    }
    votes = None if answers is None else {source: answers[rows].tolist() for source, rows in members.items()}
    phases.step.metrics |= (found := validation_metrics(values, votes))
    check_table(batch, found, predictions or ())
    if batch.turns is not None:
        failed = batch.score_details["failed"].double().reshape(shape).numpy()
        shares = {f"val-core/{name}/failed/mean@{k}": failed[rows].mean() for name, rows in members.items()}
        phases.step.metrics |= {name: float(share) for name, share in shares.items()}
    return batch, predictions
