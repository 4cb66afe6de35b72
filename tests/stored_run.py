"""A small run directory with metrics, configs and rollouts, for tests of what reads them."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from rl.data.batch import Batch
from rl.data.prompts import Prompt
from rl.run.rollout_writer import FILE_COLUMNS, columns_of, stored_arrays
from rl.run_directory.rollout_files import RolloutLog

TOKENS = ["<end>", " two", " and", " four", " is", " six", "\n"]


def decode(ids, special: bool) -> list[str]:
    return ["".join(TOKENS[i] for i in own if special or i) for own in ids]


def batch(seed: int = 0, *, agents: bool = False) -> Batch:
    """Return three groups of two samples, with what `collect` fills; with agents each has three turns."""
    rng, number = np.random.default_rng(seed), 6
    lengths = rng.integers(3, 9, number)
    responses = [np.append(rng.integers(1, 7, n - 1), 0).astype(np.int32) for n in lengths]
    count = int(lengths.sum())
    prompts = [
        Prompt(7 + g, np.array([1, 2, 3], np.int32), f"two and four, {g}?", source, truth, {"index": g})
        for g, source, truth in ((0, "sums", "6"), (1, "sums", [6, 7]), (2, "texts", None))
    ]
    scores = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.5, 0.0]) if seed == 0 else torch.rand(number)
    turns = None
    if agents:
        turns = torch.cat([torch.tensor([1, 0, *[2] * (n - 2)], dtype=torch.int32) for n in lengths])
    return Batch(
        prompt_ids=[prompts[i // 2].token_ids for i in range(number)],
        response_ids=responses,
        groups=torch.arange(3).repeat_interleave(2),
        truncated=torch.tensor([False, True] * 3),
        prompts=prompts,
        turns=turns,
        extra={} if turns is None else {"turn_rewards": torch.rand(count)},
        mask=None if turns is None else (turns > 0).float(),
        rollout_logprobs=-torch.rand(count),
        weight_versions=torch.full((count,), seed, dtype=torch.int32),
        scores=scores,
        rewards=scores - 0.25,
        score_details={"acc": (scores > 0.9).float(), "failed": torch.zeros(number)},
    )


def columns(step: int, of: Batch) -> dict[str, list]:
    """Return the stored columns of a batch that was learned from."""
    old_logprobs = of.rollout_logprobs + 0.01
    advantages = (of.rewards - of.rewards.mean()).repeat_interleave(of.lengths)
    arrays = stored_arrays(of, replace(of, old_logprobs=old_logprobs, advantages=advantages))
    return columns_of(step, of, list(range(len(of))), arrays, decode)


def save_rollouts(run: Path, steps: int, *, agents: bool = False) -> None:
    log = RolloutLog(run, FILE_COLUMNS, kind="all", token_texts=lambda: TOKENS)
    for step in range(1, steps + 1):
        log.write(step, partial(columns, step, batch(step, agents=agents)))
    log.close()


def save_run(run: Path, *, steps: int = 3, lr: float = 0.1, agents: bool = False) -> Path:
    """Write a run that was resumed after its first step and failed after its last; return its directory."""
    run.mkdir(parents=True)
    names = (
        "critic/score/mean",
        "actor/entropy",
        "timing_s/gen",
        "timing_s/step",
        "val-core/sums/acc/mean@1",
    )
    records = [
        {"training/global_step": step, "time": 100.0 + step, **{name: step / 8 for name in names}}
        for step in range(1, steps + 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for mark, rate, time, step in (("-after-step-0", lr, 90.0, 0), ("", lr / 2, 101.5, 1)):
        config = f"run: {{name: {run.name}}}\ntraining: {{optimizer: {{lr: {rate}}}}}\n"
        (run / f"config{mark}.yaml").write_text(config)
        facts = {"world_size": 2, "host": "node1", "time": time, "after_step": step}
        (run / f"environment{mark}.json").write_text(json.dumps(facts))
    (run / "errors").mkdir()
    (run / "errors" / "rank_1.txt").write_text(
        "rank 1 (node1) in update of step 3 at 1970-01-01T00:03:10+00:00\nValueError: on fire\n"
    )
    status = {"state": "failed", "step": steps, "reason": "rank 1 failed in update", "job": "", "time": 200.0}
    (run / "status.json").write_text(json.dumps(status))
    save_rollouts(run, steps, agents=agents)
    return run
