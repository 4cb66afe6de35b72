import pytest

from rl.rewards.dapo import normalize, score
from tests.tables import cells, rows
from tests.timing import assert_linear_in_text


def reward(response, ground_truth="42", **kwargs):
    return score("", response, ground_truth, data_source="aime", extra_info={}, **kwargs)


@pytest.mark.parametrize(
    "response, ground_truth",
    rows("""
        so\nAnswer: 42 => 42 ;; Answer:\n42 => 42 ;; Answer: $42$ => 42 ;; Answer: x = 42 => 42 ;;
        Answer: \\boxed{42} => 42 ;; Answer: $\\boxed{42}$. => 42 ;;
        Answer: the answer is $42$, as said => 42 ;; Answer: 42 degrees => 42 ;; Answer: 42^\\circ => 42 ;;
        Answer: 1,042 => 1042 ;; Answer: \\frac12 => \\frac{1}{2} ;; Answer: \\sqrt2 => \\sqrt{2} ;;
        Answer: 42\\text{ cm} => 42 ;; Answer: \\text{east} => east
        """)
    + [("Answer:42", 42), ("answer : 42 ", "42"), ("Answer: 41\nAnswer: 42\n", "42")],
)
def test_the_last_answer_after_normalisation_earns_one(response, ground_truth):
    result = reward(response, ground_truth)
    assert (result["score"], result["acc"]) == (1.0, 1.0)
    assert result["pred"] == normalize(str(ground_truth))


@pytest.mark.parametrize(
    "response",
    cells("""
        42 ;; The answer is 42 ;; Answer: 43 ;; Answer: 42\nAnswer: 43 ;; \\boxed{42} ;; Answer: ;;
        Answer: 42.
        """)
    + ["", "Answer: 42" + " " * 300],
)
def test_everything_else_loses_one(response):
    result = reward(response)
    assert (result["score"], result["acc"]) == (-1.0, 0.0)
    assert result["pred"] != "42"


def test_only_the_last_300_characters_are_looked_at():
    assert reward("Answer: 42\n" + "x" * 289)["acc"] == 1.0
    assert reward("Answer: 42\n" + "x" * 290)["acc"] == 0.0


INVALID = {"score": -1.0, "acc": 0.0, "pred": "[INVALID]"}
RIGHT = {"score": 1.0, "acc": 1.0, "pred": "42"}
NOT_STRICT = ["\\boxed{42}" + "x" * 91]
NOT_STRICT += cells(r"Answer: 42 ;; \boxed{42 ;; \boxed{ 42} ;; \boxed{42} \boxed{43} ;; \boxed{{42}")


def test_a_bare_box_counts_only_with_strict_box():
    # As verl's math_dapo.compute_score without and with strict_box_verify.
    for response in ("so \\boxed{42}", "\\boxed{41}, no: \\boxed{42}."):
        assert reward(response) == INVALID
        assert reward(response, strict_box=True) == RIGHT
        assert reward(response + "\nAnswer: 43", strict_box=True)["score"] == 1.0
        assert reward(response.replace("42", "43") + "\nAnswer: 42")["score"] == 1.0
    assert reward("\\boxed{41} \\boxed{\\frac{1}{2}}", "\\frac{1}{2}", strict_box=True)["acc"] == 1.0
    for response in NOT_STRICT:
        assert reward(response, strict_box=True)["score"] == -1.0, response
    assert reward("", strict_box=True)["pred"] == "[INVALID]"


def test_a_bare_box_counts_without_an_answer_line_if_asked():
    assert reward("so \\boxed{42}", bare_box=True) == RIGHT
    assert reward("so \\boxed{43}", bare_box=True)["pred"] == "43"
    assert reward("\\boxed{42}\nAnswer: 43", bare_box=True)["score"] == -1.0
    assert reward("so 42", bare_box=True) == reward("\\boxed{42}" + "x" * 91, bare_box=True) == INVALID


# By hand from the listing in appendix D.1 of arXiv:2206.14858: a list of numbers counts as one number.
MINERVA = rows(r"""
    x=y=7 => 7 ;; 17 an hour => 17hour ;; 5 \text{ inches} => 5 ;; 5\mbox{ cm}^2 => 5 ;;
    x\text{and}y => x,y ;; 3\text{and}4 => 34 ;; $3$ and $4$ => 3 ;; \textbf{B} => B ;; \overline{AB} => AB ;;
    3\mathrm{th} => 3 ;; \frac3{4} => \frac{3}{{}4} ;; 1,234,567 => 1234567 ;; 1,234.5 => 1,234.5 ;;
    (1,2) => (1,2) ;; "yes" => yes ;; \$ 7 => 7
    """)


@pytest.mark.parametrize("answer, normal", MINERVA)
def test_the_normal_form_of_minerva(answer, normal):
    assert normalize(answer) == normal


def test_a_prompt_without_ground_truth_is_an_error():
    with pytest.raises(ValueError, match="reward_model.ground_truth is missing"):
        reward("Answer: 42", None)


@pytest.mark.parametrize(
    "unit", ["Answer:", "Answer", " ", "$", "\\boxed{", "{", "\\text{", "frac", "Answer:\n", "\\text{a}"]
)
@pytest.mark.parametrize("strict_box", [True, False])
def test_time_grows_linearly_up_to_100_000_characters(unit, strict_box):
    around = (("", ""), ("Answer: ", ""), ("", "Answer: 42"))
    assert_linear_in_text(lambda response: reward(response, strict_box=strict_box), unit, around)
