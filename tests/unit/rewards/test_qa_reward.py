import numpy as np
import pytest

from rl.rewards.qa import normalize, score, token_f1
from tests.tables import rows
from tests.timing import assert_linear_in_text


def reward(response, ground_truth, **kwargs):
    return score("", response, ground_truth, data_source="nq", extra_info={}, **kwargs)


@pytest.mark.parametrize(
    "response, ground_truth",
    rows("""
        <answer>Paris</answer> => Paris ;; <answer> the  PARIS. </answer> => Paris ;;
        I think of Rome.\nParis => paris ;; <answer>U.S.A</answer> => the USA
        """)
    + [
        ("<answer>Rome</answer>\n<answer>Paris</answer> is it", ["Lutetia", "Paris"]),
        ("<answer>Paris</answer>", {"target": ["Paris"]}),
        ("<answer>Paris</answer>", {"answers": "Paris"}),
        ("<answer>Paris</answer>", {"target": np.array(["Paris", "Lutetia"], dtype=object)}),
        ("<answer>1,984</answer>", 1984),
    ],
)
def test_an_accepted_answer_is_right(response, ground_truth):
    result = reward(response, ground_truth)
    assert result["score"] == result["acc"] == result["f1"] == 1.0
    assert result["pred"] == normalize(result["pred"])


@pytest.mark.parametrize(
    "response",
    ["", "<answer></answer>", "<answer>the</answer>", "Paris\nRome", "<answer>Rome</answer> Paris"],
)
def test_another_answer_or_none_is_wrong(response):
    result = reward(response, "Paris")
    assert result["score"] == result["acc"] == result["f1"] == 0.0


def test_f1_of_the_best_accepted_answer():
    assert token_f1("a b b c".replace("a", "x"), "b b d") == pytest.approx(
        2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3)
    )
    result = reward("<answer>the Eiffel tower in Paris</answer>", ["Louvre", "Eiffel Tower"], metric="f1")
    assert result["score"] == result["f1"] == pytest.approx(2 * 0.5 * 1 / 1.5)
    assert result["acc"] == 0.0 and result["pred"] == "eiffel tower in paris"
    assert reward("The", "The")["f1"] == reward("A.", "A")["acc"] == 1.0  # articles alone are words
    assert reward("A", "B")["f1"] == reward("The", "A")["f1"] == 0.0


def test_the_tag_can_be_required():
    assert reward("Paris", "Paris", require_tag=True)["score"] == 0.0
    assert reward("<answer>Paris</answer>", "Paris", require_tag=True)["score"] == 1.0


def test_normalisation_is_that_of_squad():
    assert normalize("  The answer: an  APPLE, a Pear-tree; another ") == "answer apple peartree another"


@pytest.mark.parametrize("ground_truth", [None, [], {}, {"target": []}, {"other": "Paris"}, "?!"])
def test_no_accepted_answer_is_an_error(ground_truth):
    with pytest.raises(
        ValueError, match="reward_model.ground_truth.*(is missing|no answer|are none of|punctuation)"
    ):
        reward("Paris", ground_truth)


def test_another_metric_is_an_error():
    with pytest.raises(ValueError, match="metric='rouge': choose em or f1"):
        reward("Paris", "Paris", metric="rouge")


@pytest.mark.parametrize("unit", ["a ", "<answer>", "</answer>", "the", "\n", " ", ".", "<answer>a</answer>"])
def test_time_grows_linearly_up_to_100_000_characters(unit):
    around = (("", ""), ("<answer>", "</answer>"), ("", "<answer>Paris</answer>"))
    assert_linear_in_text(lambda response: reward(response, ["Paris", "Rome"]), unit, around)
