"""Ground truths are checked before training, each with its file and row."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from rl.config.reward_sources import make_plan
from rl.config.schema import load_config
from rl.data.prompts import Prompt
from rl.phases.truths import check_truths

OWN = """
def score(**extra): return 1.0
def check_truth(ground_truth, **kwargs):
    if ground_truth == 7:
        raise ValueError(f"7 is not graded, with {kwargs}")
    ground_truth["key"]
def try_truth(ground_truth, **kwargs): ...
"""


class Pool:
    """A pool that records the truths it scores, and fails for truths in `bad`."""

    name = "reward.function=x"

    def __init__(self, bad=()):
        self.bad, self.truths = bad, []

    def score(self, samples, *, logs):
        assert all(sample["response"] is None for sample in samples)
        self.truths = [sample["ground_truth"] for sample in samples]
        self.failures = {i: "it passes" for i, truth in enumerate(self.truths) if truth in self.bad}


@pytest.fixture(autouse=True)
def rows(tmp_path, monkeypatch):
    """The rows of which the prompts are."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"question": "q", "answer": "72"}\n' * 2)


def check(monkeypatch, truths, function, pool=None, *, overrides=(), rank=0, world=1, **kwargs):
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    ids = np.zeros(1, np.int32)
    prompts = [Prompt(i, ids, "", "toy", t, {}, place=f"a.jsonl, row {i + 1}") for i, t in enumerate(truths)]
    inputs = SimpleNamespace(prompts=prompts, held_out=[], rewards=make_plan(function, kwargs, {}))
    config = load_config(None, ["model.path=x", "data.train=[x]", "run.dir=x", *overrides])
    check_truths(config, inputs, pool or Pool())


@pytest.mark.parametrize("name", ["exact", "qa", "gsm8k", "dapo", "math", "countdown", "code"])
def test_a_truth_that_a_function_cannot_read_is_refused_with_its_row(name, monkeypatch):
    right = {"countdown": '{"target": 3, "numbers": [1, 2]}', "code": "assert f(1) == 2"}.get(name, "72")
    check(monkeypatch, [right, right], f"rl.rewards.{name}:score")
    with pytest.raises(ValueError, match="^a.jsonl, row 2: reward_model.ground_truth") as caught:
        check(monkeypatch, [right, None], f"rl.rewards.{name}:score")
    assert str(caught.value).endswith("set data.ground_truth_key to its column, one of question, answer.")
    with pytest.raises(ValueError, match="answer is missing, .*; fill in the value, leave out the row"):
        named = ("data.ground_truth_key=answer",)
        check(monkeypatch, [right, None], f"rl.rewards.{name}:score", overrides=named)


def test_each_rank_checks_its_share(monkeypatch, tmp_path):
    check(monkeypatch, ["72", None], "rl.rewards.exact:score", world=2)
    with pytest.raises(ValueError, match="row 2"):
        check(monkeypatch, ["72", None], "rl.rewards.exact:score", rank=1, world=2)


def test_a_function_of_ones_own_may_check_and_try_truths(monkeypatch, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    function, pool = f"{tmp_path}/own.py:score", Pool(bad=[{"key": 2}])
    check(monkeypatch, [{"key": 1}] * 300, function, pool)
    assert 64 <= len(pool.truths) <= 128
    for truths, message in (
        ([7], r"^a.jsonl, row 1: 7 is not graded, with \{'strict': True\}"),
        ([{"key": 1}, "text"], r"^a.jsonl, row 2: .*cannot be read by own \(TypeError"),
        ([{"key": 1}, {"key": 2}], "^a.jsonl, row 2: it passes"),
    ):
        with pytest.raises(ValueError, match=message):
            check(monkeypatch, truths, function, pool, strict=True)


def test_rows_without_any_truth_give_one_warning(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING):
        check(monkeypatch, [None, None], "rl.rewards.format:score")
        check(monkeypatch, [None, "72"], "rl.rewards.format:score")
    (record,) = caplog.records
    assert "none of the 2 rows that are scored has a reward_model.ground_truth" in record.getMessage()
    with pytest.raises(ValueError, match="is missing, which reward.function=x needs"):
        check(monkeypatch, [None, None], "rl.rewards.exact:score")
    assert len(caplog.records) == 1  # one message, and not two that contradict each other


def test_empty_truths_are_named_with_the_datas_own_key(monkeypatch, caplog):
    own = ["data.ground_truth_key=answer"]
    with caplog.at_level(logging.WARNING):
        check(monkeypatch, ["", "72", "", "x"], "rl.rewards.format:score", overrides=own)
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("2 of 4 rows that are scored have an empty answer, the first in a.jsonl, row 1: ")
    with pytest.raises(ValueError, match="^a.jsonl, row 1: answer='': it holds"):
        check(monkeypatch, [""], "rl.rewards.exact:score", overrides=own)


def test_the_truths_of_environments_are_their_own(monkeypatch):
    check(monkeypatch, [None], "rl.rewards.exact:score", overrides=["agents.environment=a.b:C"])
    gsm8k = "rl.features.agents.shipped.gsm8k:Gsm8k"
    for key in ("agents.environment", "agents.sources.toy"):
        check(monkeypatch, ["72"], "rl.rewards.exact:score", overrides=[f"{key}={gsm8k}"])
        with pytest.raises(ValueError, match="^a.jsonl, row 2: reward_model.ground_truth.*must be a number"):
            check(monkeypatch, ["72", "many"], "rl.rewards.exact:score", overrides=[f"{key}={gsm8k}"])
    # Tools have no score, and neither has another source's environment.
    for other in (
        "agents.tools=[rl.features.agents.shipped.calculator:calculate]",
        f"agents.sources.b={gsm8k}",
    ):
        with pytest.raises(ValueError, match="^a.jsonl, row 1: reward_model.ground_truth is missing"):
            check(monkeypatch, [None], "rl.rewards.exact:score", overrides=[other])
