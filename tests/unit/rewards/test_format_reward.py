from functools import partial

import pytest

from rl.rewards.format import last_answer, last_line, score
from tests.tables import cells, rows
from tests.timing import assert_linear_in_text


def reward(response, **kwargs):
    result = score(prompt="", response=response, ground_truth=None, data_source="", extra_info={}, **kwargs)
    assert set(result) == {"score"}
    return result["score"]


@pytest.mark.parametrize(
    "response",
    [
        "<think>a</think><answer>b</answer>",
        "\n<think>\na\n</think>\n\n<answer>\nb\n</answer>\n",
        "<think></think> <answer>b</answer>",
        "<think>a < b > c </ answer></think><answer>1 < 2</answer>",
    ],
)
def test_reasoning_then_answer_is_the_form(response):
    assert reward(response) == 1.0


@pytest.mark.parametrize(
    "response",
    cells("""
        b ;; <answer>b</answer> ;; <think>a</think> ;; <think>a</think><answer>b ;;
        <think>a</think><answer> \n</answer> ;; <think>a</think>so<answer>b</answer> ;;
        so <think>a</think><answer>b</answer> ;; <think>a</think><answer>b</answer> so ;;
        <answer>b</answer><think>a</think> ;; <think>a<answer>b</answer></think> ;;
        <think>a<answer></think>b</answer> ;; <think>a</think><think>a</think><answer>b</answer> ;;
        <think>a</think><answer>b</answer><answer>b</answer> ;; <THINK>a</THINK><ANSWER>b</ANSWER> ;;
        </think><think><answer>b</answer>
        """)
    + [""],
)
def test_anything_else_is_not(response):
    assert reward(response) == 0.0


def test_the_opening_tag_may_be_part_of_the_prompt():
    assert reward("a</think><answer>b</answer>", think_in_prompt=True) == 1.0
    assert reward("<think>a</think><answer>b</answer>", think_in_prompt=True) == 0.0
    assert reward("a</think><answer>b</answer>") == 0.0


def test_a_pattern_must_match_the_whole_response():
    assert reward(" a\nb ", pattern="a.b") == 1.0
    assert reward("a\nbc", pattern="a.b") == 0.0
    assert reward("<think>" + "x" * 50_000 + "</think>\n7", pattern=r"<think>.*</think>\s*\d+") == 1.0
    # Of a long response only both ends are seen.
    assert reward("a" * 1000 + "b" + "a" * 1000, pattern="[a\n]*", max_chars=100) == 1.0
    assert reward("a" * 49 + "b" + "a" * 50, pattern="[a\n]*", max_chars=100) == 0.0


def test_a_pattern_that_is_none_is_refused():
    with pytest.raises(ValueError, match="must be a regular expression"):
        reward("a", pattern="(")
    with pytest.raises(ValueError, match="max_chars=1"):
        reward("a", pattern="a", max_chars=1)


@pytest.mark.parametrize(
    "text, answer",
    rows("""
        <answer> 7 </answer> => 7 ;; <answer>6</answer> no <answer>7</answer> => 7 ;;
        <answer>7</answer> <answer>8 => 7 ;; <answer>7</answer> </answer> => 7 ;;
        <answer><answer>7</answer> => 7
        """)
    + [("</answer>7<answer>", None), ("<answer></answer>", ""), ("7", None), ("", None)],
)
def test_the_last_complete_answer(text, answer):
    assert last_answer(text) == answer


def test_the_last_line_that_is_not_blank():
    assert last_line("a\n b \n\n  \n") == "b"
    assert last_line("a") == "a" and last_line(" \n") == ""


@pytest.mark.parametrize(
    "unit",
    ["<think>", "</think>", "<answer>", "</answer>", "<", " ", "\n", "<think></think>", "<answer></answer>"],
)
def test_time_grows_linearly_up_to_100_000_characters(unit):
    around = (("", ""), ("<think>", ""), ("", "</answer>"), ("<think></think>", "<answer>7</answer>"))
    by_pattern = partial(reward, pattern="<think>.*</think>.*x")
    for function in (reward, last_answer, last_line, by_pattern):
        assert_linear_in_text(function, unit, around)
