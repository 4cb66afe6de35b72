"""tools/compare.py: which of two runs is better, how often it errs, and whether its power is true."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl.run_directory.rollout_files import VALIDATIONS
from tools.compare import main
from tools.comparison.paired import compare

SHIFT = 0.06
"""Planted difference of accuracy."""


def store(run, accuracies, *, step=4, source="math", scores=0.0):
    directory = run / VALIDATIONS["greedy"]
    directory.mkdir(parents=True, exist_ok=True)
    scores = np.broadcast_to(scores, len(accuracies))
    rows = [
        {
            "data_source": source,
            "prompt_index": index,
            "prompt": f"question {index}",
            "score": float(scores[index]),
            "score_details": json.dumps({"acc": float(value), "pred": "7"}),
        }
        for index, value in enumerate(accuracies)
    ]
    pq.write_table(pa.Table.from_pylist(rows), directory / f"step_{step:06d}.parquet")


def arm(rng, difficulty, *, seeds, samples, shift=0.0, spread=0.0):
    """Return the accuracies of runs with seeds that differ by `spread`, float64 [seeds, prompts]."""
    own = rng.normal(0, 0.1, len(difficulty))  # what a recipe is good at
    rates = [difficulty + shift + own + rng.normal(0, spread) for _ in range(seeds)]
    return np.array([rng.binomial(samples, np.clip(rate, 0, 1)) / samples for rate in rates])


def test_the_answer_says_better_none_or_what_is_needed(tmp_path, capsys):
    rng = np.random.default_rng(1)
    bad, good = (rng.random(400) < rate for rate in (0.3, 0.6))
    for step in (2, 4):
        store(tmp_path / "a", bad, step=step)
        store(tmp_path / "b", good, step=step)
    store(tmp_path / "same", bad)
    store(tmp_path / "few", rng.permutation(bad)[:40])
    assert main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    first, last, curve = capsys.readouterr().out.splitlines()
    assert "not about another seed" in first
    assert "step 4: " in last and "B is better by 0." in last and "2 steps: " in curve
    main([str(tmp_path / "a"), str(tmp_path / "same")])
    assert "no difference: B - A is +0.0000" in capsys.readouterr().out
    main([str(tmp_path / "a"), str(tmp_path / "few")])
    assert "greedy, all sources, 40 prompts" in (found := capsys.readouterr().out)
    assert "unknown: " in found and "more prompts (power now" in found
    seeds = [f"{tmp_path}/a,{tmp_path}/same", f"{tmp_path}/b,{tmp_path}/b"]
    main(seeds)
    assert "2 seeds of A, 2 of B" in capsys.readouterr().out
    with pytest.raises(ValueError, match="there is no directory .*absent"):
        main([str(tmp_path / "a"), str(tmp_path / "absent")])
    (tmp_path / "absent").mkdir()
    with pytest.raises(ValueError, match="no stored validation of a step in common"):
        main([str(tmp_path / "a"), str(tmp_path / "absent")])


def test_a_metric_that_is_constant_tells_nothing(tmp_path, capsys):
    scores = np.random.default_rng(1).random(100)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    store(tmp_path / "a", np.zeros(100), scores=scores)
    store(tmp_path / "b", np.zeros(100), scores=scores + 0.5)
    main([a, b])
    found = capsys.readouterr().out
    assert "acc is 0 in all samples of A and B, so it tells nothing; try --metric score" in found
    assert "difference" not in found
    main([a, b, "--metric", "score"])
    assert "B is better by 0.5000" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--metric pred: .*; use one of acc, score."):
        main([a, b, "--metric", "pred"])


@pytest.mark.parametrize("more", [[], ["--parting"]])
def test_a_run_is_not_compared_with_itself(tmp_path, more):
    store(tmp_path / "a", np.ones(2))
    with pytest.raises(ValueError, match="A and B both name .*; name two different runs."):
        main([str(tmp_path / "a"), f"{tmp_path}/../{tmp_path.name}/a", *more])


def store_step(run, change=lambda row: None, *, lr=1.0, norm=0.5):
    (run / "rollouts").mkdir(parents=True)
    for step in (1, 2):
        rows = [
            {"group": 0, "sample": sample, "prompt_ids": [1, 2], "response_ids": [3, 4, 5], "score": 1.0}
            | {name: [-0.1, -2.0, -3.0] for name in ("rollout_logprobs", "old_logprobs", "advantages")}
            for sample in range(2)
        ]
        if step == 2:
            change(rows[1])
        pq.write_table(pa.Table.from_pylist(rows), run / "rollouts" / f"step_{step:06d}.parquet")
    metrics = [
        {"training/global_step": step, "actor/grad_norm": norm if step == 2 else 1.0} for step in (1, 2)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in metrics))
    (run / "config.yaml").write_text(f"run: {{dir: {run}}}\ntraining: {{optimizer: {{lr: {lr}}}}}\n")
    (run / "environment.json").write_text(json.dumps({"time": 1.0, "git_revision": f"of lr {lr}"}))
    return run


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("prompt_ids", [1, 7], "prompts, group 0 sample 1 token 1: 2 and 7 (another value)"),
        ("response_ids", [3, 4], "tokens, group 0 sample 1: 3 and 2 tokens"),
        ("rollout_logprobs", [-0.1, -2.00001, -3.0], "engine log-probs, group 0 sample 1 token 1: "),
        ("score", 0.0, "scores, group 0 sample 1: 1.0 and 0.0 (another value)"),
        (
            "old_logprobs",
            [-0.1, -2.5, -3.0],
            "old log-probs, group 0 sample 1 token 1: -2.0 and -2.5 (another",
        ),
        (
            "advantages",
            [1.0, -2.0, -3.0],
            "advantages, group 0 sample 1 token 0: -0.1 and 1.0 (another value)",
        ),
    ],
)
def test_the_step_stage_and_token_where_two_runs_part(tmp_path, capsys, name, value, words):
    a, b = (
        store_step(tmp_path / "a"),
        store_step(tmp_path / "b", lambda row: row.update({name: value}), lr=2.0),
    )
    main([str(a), str(b), "--parting"])
    first, *settings = capsys.readouterr().out.splitlines()
    assert first.startswith(f"the runs part at step 2: {words}")
    assert first.endswith("(rounding)") == (name == "rollout_logprobs")
    assert settings == [
        "config: training.optimizer.lr: 1.0 and 2.0",
        "environment: git_revision: of lr 1.0 and of lr 2.0",
    ]


def test_equal_steps_do_not_part_and_a_gradient_may(tmp_path, capsys):
    a, b, c = (store_step(tmp_path / name, norm=norm) for name, norm in (("a", 0.5), ("b", 0.5), ("c", 0.6)))
    main([str(a), str(b), "--parting"])
    assert capsys.readouterr().out == "the runs do not part in the 2 steps that both have stored\n"
    main([str(a), str(c), "--parting"])
    assert "part at step 2: gradient, norm: 0.5 and 0.6 (another value)" in capsys.readouterr().out
    main([str(a), str(store_step(tmp_path / "d", norm=0.5, lr=2.0)), "--parting"])
    assert "the keys below have had no effect on what is stored" in capsys.readouterr().out


@pytest.mark.slow
def test_equal_runs_are_called_different_in_at_most_5_percent():
    rng = np.random.default_rng(1)
    stored = arm(rng, rng.beta(1, 1, 300), seeds=2, samples=4)
    found = 0
    for _ in range(1000):
        prompts = rng.integers(0, 300, 300)
        swap = rng.random(300) < 0.5  # of two equal runs, either could have given an answer
        pair = np.where(swap, stored[:, prompts], stored[::-1, prompts])
        found += compare(pair[:1], pair[1:]).is_different
    assert found <= 50


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "prompts", "spread"), [(1, 200, 0.0), (3, 200, 0.02), (5, 100, 0.01)])
def test_the_stated_power_is_the_share_that_is_found(seeds, prompts, spread):
    rng = np.random.default_rng(1)

    def pair(shift):
        difficulty = rng.beta(1, 1, prompts) * 0.5 + 0.25
        options = {"seeds": seeds, "samples": 4, "spread": spread}
        return arm(rng, difficulty, **options), arm(rng, difficulty, **options, shift=shift)

    planted = [compare(*pair(SHIFT), margin=SHIFT) for _ in range(1000)]
    assert abs(np.mean([c.power for c in planted]) - np.mean([c.is_different for c in planted])) < 0.05
    assert np.mean([compare(*pair(0.0)).is_different for _ in range(1000)]) <= 0.05
