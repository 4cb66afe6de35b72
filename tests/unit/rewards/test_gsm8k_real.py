"""The GSM8K reward on reference solutions of the data set."""

import json

import pytest

from rl.rewards.gsm8k import score
from tests.spawn import ROOT
from tests.tables import rows

GSM8K = ROOT / "tests" / "data" / "gsm8k" / "test.jsonl"


def solutions():
    return [json.loads(line)["answer"] for line in GSM8K.read_text(encoding="utf-8").splitlines()]


def reward(response, truth, method):
    return score("", response, truth, data_source="gsm8k", extra_info={}, method=method)


@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_every_reference_solution_is_right(method):
    answers = solutions()
    assert len(answers) == 48
    for answer in answers:
        truth = answer.rpartition("####")[2].strip()
        result = reward(answer, truth, method)
        assert (result["score"], result["acc"], result["pred"]) == (1.0, 1.0, truth.replace(",", "")), answer


@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_another_final_number_is_wrong(method):
    for answer in solutions():
        steps, _, number = answer.rpartition("####")
        truth = int(number.strip().replace(",", ""))
        for wrong in (truth + 1, -truth - 1, truth * 10 or 10, f"{truth}.5", f"{truth}0001"):
            result = reward(f"{steps}#### {wrong}", truth, method)
            assert (result["score"], result["pred"]) == (0.0, str(wrong)), (answer, wrong)


def test_the_prediction_is_one_text_per_number():
    predictions = rows("""
        #### $1,234.50 => 1234.5 ;; #### 18.00 => 18 ;; #### 100 => 100 ;; #### -0.0 => 0 ;; #### .5 => 0.5 ;;
        #### none =>
        """)
    for response, pred in [*predictions, ("#### " + "7" * 5000, "7" * 100)]:
        assert reward(response, "18", "strict")["pred"] == pred
