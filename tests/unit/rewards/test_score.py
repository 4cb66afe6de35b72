import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from rl.rewards import exact
from rl.rewards.loading import load_reward_function
from rl.rewards.score import PREDICTION_CHARS, RejectedResult, Score, to_score

ROOT = Path(__file__).resolve().parents[3]
SAMPLE = {
    "prompt": "1+1=",
    "response": "2",
    "ground_truth": "2",
    "data_source": "addition",
    "extra_info": {"index": 0},
}


def test_a_function_is_found_by_module_and_name():
    assert load_reward_function("rl.rewards.exact:score", kwargs={}) is exact.score


def test_a_function_is_found_in_a_file(tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text(
        "def half(prompt, response, ground_truth, **extra):\n    return 0.5\n"
    )
    assert load_reward_function(f"{tmp_path}/my_reward.py:half", kwargs={})(**SAMPLE) == 0.5
    monkeypatch.chdir(tmp_path)
    assert load_reward_function("my_reward.py:half", kwargs={"scale": 2})(**SAMPLE) == 0.5


def test_a_file_may_hold_dataclasses(tmp_path):
    (tmp_path / "rules.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Rule:\n    weight: float = 0.25\n"
        "def score(**extra):\n    return Rule().weight\n"
    )
    assert load_reward_function(f"{tmp_path}/rules.py:score", kwargs={})(**SAMPLE) == 0.25


def test_files_of_one_name_are_told_apart_and_each_is_run_once(tmp_path):
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        source = f"def score(**extra):\n    return {value}\ndef other(**extra):\n    return score()\n"
        (tmp_path / folder / "reward.py").write_text(source)
    first = load_reward_function(f"{tmp_path}/a/reward.py:score", kwargs={})
    second = load_reward_function(f"{tmp_path}/b/reward.py:score", kwargs={})
    assert (first(**SAMPLE), second(**SAMPLE)) == (1, 2)
    assert load_reward_function(f"{tmp_path}/a/reward.py:other", kwargs={}).__globals__ is first.__globals__


@pytest.mark.parametrize("spec", ["", "score", ":score", "rl.rewards.exact:", "rl.rewards.exact.score"])
def test_a_name_of_another_form_is_refused(spec):
    with pytest.raises(ValueError, match="must have the form package.module:name or path/to/file.py:name"):
        load_reward_function(spec, kwargs={})


def test_a_missing_module_file_or_function_is_named(tmp_path):
    with pytest.raises(ValueError, match="no.such.module cannot be imported: ModuleNotFoundError"):
        load_reward_function("no.such.module:score", kwargs={})
    with pytest.raises(ValueError, match="cannot be imported: FileNotFoundError: no file .*nowhere.py"):
        load_reward_function(f"{tmp_path}/nowhere.py:score", kwargs={})
    with pytest.raises(ValueError, match="rl.rewards.exact has no 'scored', only score"):
        load_reward_function("rl.rewards.exact:scored", kwargs={})


def test_a_failed_import_names_reason_and_key(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    for key in ("reward", "reward.sources.math[1]"):
        with pytest.raises(ValueError) as caught:
            load_reward_function(f"{tmp_path}/broken.py:score", kwargs={}, key=key)
        assert str(caught.value).startswith(
            f"{key}.function"
        ) and "cannot be imported: ZeroDivisionError" in str(caught.value)


def test_something_that_cannot_be_called_is_refused():
    with pytest.raises(ValueError, match="SAMPLE_KEYS' must be callable, not a tuple"):
        load_reward_function("rl.rewards.loading:SAMPLE_KEYS", kwargs={})


def test_a_wrong_signature_is_refused_at_loading(tmp_path):
    (tmp_path / "narrow.py").write_text("def score(prompt, response, ground_truth):\n    return 1.0\n")
    with pytest.raises(ValueError, match="unexpected keyword argument 'data_source'.* does not read as "):
        load_reward_function(f"{tmp_path}/narrow.py:score", kwargs={})
    with pytest.raises(ValueError, match="reward.kwargs must not set prompt"):
        load_reward_function("rl.rewards.exact:score", kwargs={"prompt": "a"})


@pytest.mark.parametrize(
    "result", [1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), Fraction(1), {"score": 1}]
)
def test_numbers_and_dicts_of_numbers_are_scores(result):
    score = to_score(result)
    assert score == Score({"score": 1.0})
    assert type(score.values["score"]) is float


def test_only_other_numbers_of_a_dict_are_kept():
    result = {
        "score": 0.5,
        "acc": True,
        "length": 7,
        "text": "a",
        "bad": math.nan,
        "list": [1],
        "none": None,
        3: 4,
        "a\nb": 5,
        "\ud800": 6,
    }
    assert to_score(result) == Score({"score": 0.5, "acc": 1.0, "length": 7.0})


def test_the_string_under_pred_is_the_prediction():
    assert to_score({"score": 1, "pred": "18"}) == Score({"score": 1.0}, "18")
    assert to_score({"score": 1, "pred": ""}).prediction == ""
    assert to_score({"score": 1, "pred": 18}) == Score(
        {"score": 1.0, "pred": 18.0}
    )  # a number like any other
    assert to_score({"score": 1, "pred": None}).prediction is None
    assert len(to_score({"score": 1, "pred": "x" * 10**6}).prediction) == PREDICTION_CHARS
    assert to_score({"score": 1, "pred": "a\ud800"}).prediction == "a?"  # can be written to a file


@pytest.mark.parametrize(
    "result",
    [
        None,
        "1.0",
        math.nan,
        math.inf,
        [1.0],
        10**400,
        1j,
        ValueError(),
        {},
        {"acc": 1.0},
        {"score": None},
        {"score": math.nan},
    ],
)
def test_a_result_without_a_finite_score_is_rejected(result):
    with pytest.raises(RejectedResult, match="the score must be a finite number|has no 'score'"):
        to_score(result)


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
def test_exact_match_ignores_only_outer_white_space(response, ground_truth, expected):
    result = exact.score(**{**SAMPLE, "response": response, "ground_truth": ground_truth})
    assert result["score"] == result["acc"] == expected


def test_exact_match_needs_a_ground_truth():
    with pytest.raises(ValueError, match="ground_truth is missing"):
        exact.score(**{**SAMPLE, "response": "None", "ground_truth": None})
