import math
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from rl.rewards import exact
from rl.rewards.loading import load_reward_function
from rl.rewards.score import PREDICTION_CHARS, Score, to_score
from rl.workers.messages import RejectedResult

SAMPLE = {"prompt": "1+1=", "response": "2", "ground_truth": "2", "data_source": "addition"}
SAMPLE["extra_info"] = {"index": 0}


DATACLASS = """
from __future__ import annotations
from dataclasses import dataclass
@dataclass
class Rule:
    weight: float = 0.25
def score(**extra):
    return Rule().weight
"""


def load(spec, kwargs=None, **options):
    return load_reward_function(str(spec), kwargs=kwargs or {}, **options)


def test_a_function_is_found_in_a_module_and_in_a_file(tmp_path, monkeypatch):
    assert load("rl.rewards.exact:score") is exact.score
    (tmp_path / "my_reward.py").write_text("def half(prompt, response, ground_truth, **extra): return 0.5\n")
    assert load(f"{tmp_path}/my_reward.py:half")(**SAMPLE) == 0.5
    monkeypatch.chdir(tmp_path)
    assert load("my_reward.py:half", {"scale": 2})(**SAMPLE) == 0.5
    (tmp_path / "rules.py").write_text(DATACLASS)
    assert load("rules.py:score")(**SAMPLE) == 0.25


def test_files_of_one_name_are_told_apart_and_each_is_run_once(tmp_path):
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        source = f"def score(**extra):\n    return {value}\ndef other(**extra):\n    return score()\n"
        (tmp_path / folder / "reward.py").write_text(source)
    first, second = (load(f"{tmp_path}/{folder}/reward.py:score") for folder in "ab")
    assert (first(**SAMPLE), second(**SAMPLE)) == (1, 2)
    assert load(f"{tmp_path}/a/reward.py:other").__globals__ is first.__globals__


def test_what_cannot_be_loaded_is_refused(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "narrow.py").write_text("def score(prompt, response, ground_truth): return 1.0\n")
    form = "must have the form package.module:name or path/to/file.py:name"
    for spec, message in (
        *((spec, form) for spec in ("", "score", ":score", "rl.rewards.exact:", "rl.rewards.exact.score")),
        ("no.such.module:score", "no.such.module cannot be imported: ModuleNotFoundError"),
        (f"{tmp_path}/nowhere.py:score", "cannot be imported: FileNotFoundError: no file .*nowhere.py"),
        ("rl.rewards.exact:scored", "rl.rewards.exact has no 'scored', only score, check_truth"),
        ("rl.rewards.loading:SAMPLE_KEYS", "SAMPLE_KEYS' must be callable, not a tuple"),
        (
            f"{tmp_path}/narrow.py:score",
            "unexpected keyword argument 'data_source'.*add ..extra for the keywords",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            load(spec)
    with pytest.raises(ValueError, match="reward.kwargs must not set prompt"):
        load("rl.rewards.exact:score", {"prompt": "a"})
    for key in ("reward", "reward.sources.math[1]"):
        message = rf"^{re.escape(key)}\.function.*cannot be imported: ZeroDivisionError"
        with pytest.raises(ValueError, match=message):
            load(f"{tmp_path}/broken.py:score", key=key)


def test_numbers_and_dicts_of_numbers_are_scores():
    for result in (1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), Fraction(1), {"score": 1}):
        score = to_score(result)
        assert score == Score({"score": 1.0}) and type(score.values["score"]) is float


def test_only_other_numbers_of_a_dict_are_kept():
    result = {"score": 0.5, "acc": True, "length": 7, "text": "a", "bad": math.nan, "list": [1]}
    result |= {"none": None, 3: 4, "a\nb": 5, "\ud800": 6}
    assert to_score(result) == Score({"score": 0.5, "acc": 1.0, "length": 7.0})


def test_the_string_under_pred_is_the_prediction():
    assert to_score({"score": 1, "pred": "18"}) == Score({"score": 1.0}, "18")
    assert to_score({"score": 1, "pred": ""}).prediction == ""
    assert to_score({"score": 1, "pred": 18}) == Score({"score": 1.0, "pred": 18.0})
    assert to_score({"score": 1, "pred": None}).prediction is None
    assert len(to_score({"score": 1, "pred": "x" * 10**6}).prediction) == PREDICTION_CHARS
    assert to_score({"score": 1, "pred": "a\ud800"}).prediction == "a?"  # can be written to a file


NO_SCORE = [None, "1.0", math.nan, math.inf, [1.0], 10**400, 1e39, -1e39, 1j, Decimal("NaN"), ValueError()]
NO_SCORE += [{}, {"acc": 1.0}, {"score": None}, {"score": math.nan}]
NO_SCORE += [{"score": 1.0, "acc": None}, {"score": 1.0, "acc": math.nan}, {"score": 1.0, "acc": "no"}]


@pytest.mark.parametrize("result", NO_SCORE)
def test_a_result_without_a_finite_score_is_rejected(result):
    with pytest.raises(RejectedResult, match="the (score|acc) must be a finite number|has no 'score'"):
        to_score(result)


def test_exact_match_ignores_only_outer_white_space():
    right = [("95", "95"), (" 95\n", "95 "), ("95", 95)]
    wrong = [("095", "95"), ("95.", "95"), ("", "95")]
    for expected, table in ((1.0, right), (0.0, wrong)):
        for response, ground_truth in table:
            result = exact.score(**SAMPLE | {"response": response, "ground_truth": ground_truth})
            assert result["score"] == result["acc"] == expected, (response, ground_truth)
            assert result["pred"] == response.strip()
    assert exact.score(**SAMPLE | {"response": "", "ground_truth": ""}, literal=True)["score"] == 1.0
    with pytest.raises(ValueError, match="ground_truth is missing"):
        exact.score(**SAMPLE | {"response": "None", "ground_truth": None})
