import asyncio
import logging
import math
import time
from fractions import Fraction

import numpy as np
import pytest

from rl.rewards import exact
from rl.rewards.loading import load_reward_function
from rl.rewards.scoring import score_samples

SAMPLE = {"prompt": "1+1=", "response": "2", "ground_truth": "2", "data_source": "addition", "extra_info": {"index": 0}}


def score_one(result, **options):
    """What score_samples makes of a function that returns `result`."""
    options = {"kwargs": {}, "failure_score": -1.0, **options}
    (scores,) = score_samples(lambda **extra: result, [SAMPLE], **options)
    return scores


# ---- loading ----


def test_a_function_is_found_by_module_and_name():
    assert load_reward_function("rl.rewards.exact:score") is exact.score


def test_a_function_is_found_in_a_file(tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text("def half(prompt, response, ground_truth, **extra):\n    return 0.5\n")
    assert load_reward_function(f"{tmp_path}/my_reward.py:half")(**SAMPLE) == 0.5
    monkeypatch.chdir(tmp_path)
    assert load_reward_function("my_reward.py:half", kwargs={"scale": 2})(**SAMPLE) == 0.5


def test_a_file_may_hold_dataclasses(tmp_path):
    (tmp_path / "rules.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Rule:\n    weight: float = 0.25\n"
        "def score(**extra):\n    return Rule().weight\n"
    )
    assert load_reward_function(f"{tmp_path}/rules.py:score")(**SAMPLE) == 0.25


@pytest.mark.parametrize("spec", ["", "score", ":score", "rl.rewards.exact:", "rl.rewards.exact.score"])
def test_a_name_of_another_form_is_refused(spec):
    with pytest.raises(ValueError, match="must have the form package.module:name or path/to/file.py:name"):
        load_reward_function(spec)


def test_a_missing_module_file_or_function_is_named(tmp_path):
    with pytest.raises(ValueError, match="no.such.module cannot be imported: ModuleNotFoundError"):
        load_reward_function("no.such.module:score")
    with pytest.raises(ValueError, match="cannot be imported: FileNotFoundError: no file .*nowhere.py"):
        load_reward_function(f"{tmp_path}/nowhere.py:score")
    with pytest.raises(ValueError, match="rl.rewards.exact has no 'scored', only score"):
        load_reward_function("rl.rewards.exact:scored")


def test_a_module_that_fails_to_import_says_why(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ValueError, match="cannot be imported: ZeroDivisionError"):
        load_reward_function(f"{tmp_path}/broken.py:score")


def test_something_that_cannot_be_called_is_refused():
    with pytest.raises(ValueError, match="SAMPLE_KEYS is not callable, it is a tuple"):
        load_reward_function("rl.rewards.loading:SAMPLE_KEYS")


def test_a_signature_that_no_call_would_fit_is_refused_before_the_first_sample(tmp_path):
    (tmp_path / "narrow.py").write_text("def score(prompt, response, ground_truth):\n    return 1.0\n")
    with pytest.raises(ValueError, match="unexpected keyword argument 'data_source'.* take the rest as "):
        load_reward_function(f"{tmp_path}/narrow.py:score", kwargs={})
    with pytest.raises(ValueError, match="reward.kwargs must not set prompt"):
        load_reward_function("rl.rewards.exact:score", kwargs={"prompt": "a"})


# ---- scores ----


@pytest.mark.parametrize(
    "result", [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), Fraction(1), {"score": 1}]
)
def test_numbers_and_dicts_of_numbers_are_scores(result):
    scores = score_one(result)
    assert scores == {"score": 1.0, "failed": 0.0}
    assert type(scores["score"]) is float


def test_other_numbers_of_a_dict_are_kept_and_everything_else_is_left_out():
    result = {"score": 0.5, "acc": True, "length": 7, "text": "a", "bad": math.nan, "list": [1], "none": None, 3: 4}
    assert score_one(result) == {"score": 0.5, "acc": 1.0, "length": 7.0, "failed": 0.0}


@pytest.mark.parametrize(
    "result",
    [
        None,
        "1.0",
        math.nan,
        math.inf,
        [1.0],
        {},
        {"acc": 1.0},
        {"score": None},
        {"score": math.nan},
        10**400,
        1j,
        ValueError("a"),
    ],
)
def test_a_result_that_is_no_finite_score_counts_as_a_failure(result):
    assert score_one(result) == {"score": -1.0, "failed": 1.0}


@pytest.mark.parametrize(
    "exception", [ZeroDivisionError, KeyError("a"), RecursionError, SystemExit(1), asyncio.CancelledError]
)
def test_a_function_that_raises_costs_that_sample_only(exception):
    def score(response, **extra):
        if response == "bad":
            raise exception
        return float(response)

    samples = [{**SAMPLE, "response": response} for response in ("1", "bad", "3")]
    scores = score_samples(score, samples, kwargs={}, failure_score=0.25)
    assert [s["score"] for s in scores] == [1.0, 0.25, 3.0]
    assert [s["failed"] for s in scores] == [0.0, 1.0, 0.0]


def test_interrupting_is_not_a_failed_sample():
    def score(**extra):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_samples(score, [SAMPLE], kwargs={}, failure_score=0.0)


def test_the_first_traceback_is_logged_once_with_the_number_of_failures(caplog):
    def score(response, **extra):
        raise RuntimeError(f"broken on {response}")

    samples = [{**SAMPLE, "response": str(i)} for i in range(5)]
    with caplog.at_level(logging.WARNING):
        score_samples(score, samples, kwargs={}, failure_score=0.0)
    (record,) = caplog.records
    assert "failed on 5 of 5 samples" in record.getMessage()
    assert "RuntimeError: broken on 0" in record.getMessage()
    assert "in score" in record.getMessage()  # the line of the user's function


def test_nothing_is_logged_when_nothing_fails(caplog):
    with caplog.at_level(logging.DEBUG, logger="rl.rewards.scoring"):
        score_one(1.0)
    assert caplog.records == []


def test_the_function_gets_the_sample_and_the_configured_keywords():
    seen = {}

    def score(**keywords):
        seen.update(keywords)
        return 0.0

    score_samples(score, [SAMPLE], kwargs={"method": "strict"}, failure_score=0.0)
    assert seen == {**SAMPLE, "method": "strict"}


def test_no_samples_give_no_scores():
    assert score_samples(exact.score, [], kwargs={}, failure_score=0.0) == []


# ---- async ----


def test_async_functions_run_concurrently_and_keep_the_order():
    async def score(response, **extra):
        await asyncio.sleep(0.3 - 0.01 * float(response))
        return float(response)

    samples = [{**SAMPLE, "response": str(i)} for i in range(20)]
    start = time.perf_counter()
    scores = score_samples(score, samples, kwargs={}, failure_score=0.0)
    assert time.perf_counter() - start < 3.0  # one after the other: 4.1 s
    assert [s["score"] for s in scores] == [float(i) for i in range(20)]


@pytest.mark.parametrize("exception", [ValueError, SystemExit, asyncio.CancelledError])
def test_an_async_function_that_raises_costs_that_sample_only(exception):
    async def score(response, **extra):
        await asyncio.sleep(0)
        if response == "bad":
            raise exception
        return {"score": 1.0, "acc": 1.0}

    samples = [{**SAMPLE, "response": response} for response in ("bad", "good")]
    assert score_samples(score, samples, kwargs={}, failure_score=0.0) == [
        {"score": 0.0, "failed": 1.0},
        {"score": 1.0, "acc": 1.0, "failed": 0.0},
    ]


# ---- exact match ----


@pytest.mark.parametrize(
    "response, ground_truth, expected",
    [
        ("95", "95", 1.0),
        (" 95\n", "95 ", 1.0),
        ("95", 95, 1.0),
        ("095", "95", 0.0),
        ("95.", "95", 0.0),
        ("", "95", 0.0),
        ("", "", 1.0),
    ],
)
def test_exact_match_ignores_white_space_around_and_nothing_else(response, ground_truth, expected):
    assert exact.score(**{**SAMPLE, "response": response, "ground_truth": ground_truth}) == {
        "score": expected,
        "acc": expected,
    }


def test_exact_match_without_ground_truth_is_a_failure_not_the_word_none():
    sample = {**SAMPLE, "response": "None", "ground_truth": None}
    assert score_samples(exact.score, [sample], kwargs={}, failure_score=0.0) == [{"score": 0.0, "failed": 1.0}]
