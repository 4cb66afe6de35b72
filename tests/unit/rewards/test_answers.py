"""Truths of every shape in files, for example SQuAD's: read by each reward function, or refused."""

import functools
import math

import numpy as np
import pytest

from rl.rewards import countdown, dapo, exact, gsm8k, qa
from rl.rewards import math as math_reward
from rl.rewards.answers import accepted

SQUAD = {"text": ["Paris", "Lutetia"], "answer_start": [3, 9]}
READ = [
    ("Paris", ["Paris"]),
    (72, ["72"]),
    (72.0, ["72"]),  # from a column of integers with nulls
    (np.float64(72.0), ["72"]),
    (0.5, ["0.5"]),
    (True, ["True"]),
    (["Paris", None, math.nan, "Lutetia"], ["Paris", "Lutetia"]),
    (np.array(["Paris", "Lutetia"], dtype=object), ["Paris", "Lutetia"]),
    (SQUAD, ["Paris", "Lutetia"]),
    ({"text": np.array(["Paris"], dtype=object), "answer_start": np.array([3])}, ["Paris"]),
    ([{"text": "Paris", "answer_start": 3}, {"text": "Lutetia", "answer_start": 9}], ["Paris", "Lutetia"]),
    ({"value": "Paris", "aliases": ["Lutetia"]}, ["Paris", "Lutetia"]),
    ({"answers": SQUAD}, ["Paris", "Lutetia"]),
    ({"target": '["Paris", "Lutetia"]'}, ["Paris", "Lutetia"]),
    ('["Paris", "Lutetia"]', ["Paris", "Lutetia"]),
    ("['Paris', \"the Queen's\"]", ["Paris", "the Queen's"]),
    ('{"text": ["Paris"], "answer_start": [3]}', ["Paris"]),
    ('[{"text": "Paris"}]', ["Paris"]),
    ("('Paris', 'Lutetia')", ["Paris", "Lutetia"]),
    ("('Paris')", ["('Paris')"]),
    ("[1, 2]", ["[1, 2]"]),  # may be an answer in mathematics
    ("{1, 2}", ["{1, 2}"]),
]
REFUSED = [None, math.nan, "", "  ", [], [None], {}, {"answer_start": [3]}, {"text": []}, b"Paris", [b"a"]]
REFUSED += ["['Paris' 'Lutetia']", "{'text': array(['Paris'], dtype=object)}", '["Paris", ']


def test_each_shape_of_truth_is_read():
    for truth, expected in READ:
        assert accepted(truth) == expected, truth


FUNCTIONS = [exact, qa, gsm8k, dapo, math_reward, countdown]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda module: module.__name__)
def test_no_function_scores_a_truth_that_it_cannot_read(function):
    for truth in REFUSED:
        for call in (lambda: function.check_truth(truth), lambda: function.score("", "", truth)):  # noqa: B023
            with pytest.raises(ValueError, match="reward_model.ground_truth"):
                call()


ONE = [72, 72.0, "72", np.int64(72), np.float64(72), ["72"], np.array([72]), '["72"]', {"answer": "72"}]


@pytest.mark.parametrize("function", FUNCTIONS[:-1], ids=lambda module: module.__name__)
def test_every_function_reads_the_shapes_of_one_answer(function):
    response = {gsm8k: "#### 72", dapo: "Answer: 72", math_reward: r"\boxed{72}"}.get(function, "72")
    for truth in ONE:
        assert function.score("", response, truth)["acc"] == 1.0, truth
        assert function.score("", response.replace("72", "73"), truth)["acc"] == 0.0, truth
    for module in (gsm8k, dapo, math_reward):
        with pytest.raises(ValueError, match="it holds 2 answers"):
            module.check_truth(["72", "73"])


def test_a_truth_that_normalises_to_nothing_earns_nothing():
    for function, truths in ((dapo, ["points", "degrees", "a "]), (qa, ["?", "..."]), (math_reward, ["$$"])):
        for truth in truths:
            with pytest.raises(ValueError, match="reward_model.ground_truth"):
                function.check_truth(truth)
    assert dapo.score("", "Answer: meters", "42")["acc"] == 0.0
    assert qa.score("", "B", "A")["acc"] == 0.0 and qa.score("", "A.", "A")["acc"] == 1.0


MINUS = [
    (gsm8k, "#### \u22127", "-7"),
    (dapo, "Answer: \u22127", "-7"),
    (math_reward, "\\boxed{\u22127}", "-7"),
    (exact, "\u22127", "-7"),
    (qa, "\u22127 degrees", "-7 degrees"),
    (countdown, "<answer>9 \u2212 2</answer>", {"target": 7, "numbers": [9, 2]}),
]


@pytest.mark.parametrize("function, response, truth", MINUS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_minus_of_typeset_mathematics_is_a_minus(function, response, truth):
    assert function.score("", response, truth)["acc"] == 1.0
    assert function.score("", response.replace("\u2212", "-"), truth)["acc"] == 1.0
    if isinstance(truth, str):
        assert function.score("", response, truth.replace("-", "\u2212"))["acc"] == 1.0
    if function in (gsm8k, dapo, math_reward, exact):
        assert function.score("", response.replace("\u2212", ""), truth)["acc"] == 0.0


def test_a_countdown_task_in_text_is_read_and_its_numbers_are_whole():
    for numbers in ("[9, 2]", [9.0, 2], ["9", "2"], np.array([9, 2])):
        assert countdown.check_truth({"target": 7.0, "numbers": numbers}) == (7, [9, 2])
    for task in (
        {"target": 7.5, "numbers": [9, 2]},
        {"target": 7, "numbers": "92"},
        {"target": 7, "numbers": [9, True]},
        {"target": math.inf, "numbers": [9]},
        {"target": 7, "numbers": [None]},
    ):
        with pytest.raises(ValueError, match="countdown needs the form"):
            countdown.check_truth(task)


def test_the_last_answer_with_content_counts():
    assert qa.score("", "<answer>Paris</answer> is in <answer></answer>", "Paris")["acc"] == 1.0
    assert math_reward.score("", r"\boxed{7} is in the \boxed{}", "7")["acc"] == 1.0
    assert dapo.score("", r"\boxed{7} is in \boxed{}", "7", strict_box=True)["acc"] == 1.0


def test_a_truth_longer_than_what_is_read_is_refused():
    for check, truth in (
        (dapo.check_truth, "12\n13"),
        (dapo.check_truth, "7" * 400),
        (functools.partial(dapo.check_truth, strict_box=True), "\\frac{1}{2"),
        (qa.check_truth, "word " * 500),
        (qa.check_truth, ["word " * 500, "..."]),
    ):
        with pytest.raises(ValueError, match="reward_model.ground_truth="):
            check(truth)
    assert qa.check_truth(["word " * 500, "word"]) == ["word"]
