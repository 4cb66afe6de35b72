from decimal import Decimal

import pytest

from rl.rewards.gsm8k import last_number, score
from tests.tables import rows
from tests.timing import assert_linear_in_text


def acc(response, ground_truth, method="strict"):
    result = score("", response, ground_truth, method=method, data_source="openai/gsm8k", extra_info={})
    assert result["score"] == result["acc"]
    return result["acc"]


RIGHT = {
    "strict": rows("""
        So 18.\n#### 18 => 18 ;; ####18 => 18 ;; #### 1,234,567 => 1234567 ;; #### 1234567 => 1,234,567 ;;
        #### $18 => 18 ;; #### $ 18 => 18 ;; #### \\$18 => 18 ;; #### -18 => -18 ;; #### -$18 => -18 ;;
        #### $-18 => -18 ;; #### +18 => 18 ;; #### 18. => 18 ;; #### 18.00 => 18 ;; #### 0.5 => .5 ;;
        #### .5 => 0.5 ;; #### 18% => 18 ;; #### 5\nNo, wait.\n#### 18 => 18 ;; #### 18\n#### => 18 ;;
        ##### 18 => 18 ;; #### 18 dollars. => 18 ;; #### \u221218 => -18 ;; #### 1,00,000 => 100000 ;;
        #### 12345678901234567890123456789012345678901 => 12345678901234567890123456789012345678901
        """),
    "flexible": rows(r"""
        18 => 18 ;; First 5, then 13, in all 18. => 18 ;; She pays $1,234.50. => 1234.5 ;;
        it costs \boxed{\$18} => 18 ;; the balance is -$18 => -18 ;; the balance is (-18) => -18 ;;
        #### 18 => 18 ;; 10-5 => 5 ;; x=23-5=18. => 18 ;; (3)-5 => 5 ;; 18, as I said. => 18
        """),
}
WRONG = {
    "strict": rows("""
        18 => 18 ;; The answer is 18. => 18 ;; ### 18 => 18 ;; #### eighteen, that is 18 => 18 ;;
        #### 18\n#### 19 => 18 ;; #### -18 => 18 ;; #### 18 => -18 ;; #### 18.5 => 18 ;; #### 181 => 18 ;;
        #### 18,5 => 185 ;; #### 18,5 => 18 ;; #### 18/5 => 18 ;; #### 18e-3 => 18 ;; #### 18:30 => 18 ;;
        #### 18^2 => 18 ;; #### 18-20 => 18 ;; #### \u221218 => 18 ;; #### 1.8.2 => 1.8 ;;
        #### 0.1 => 0.10000000000000001 ;; => 18 ;;
        #### -12345678901234567890123456789012345678902 => -12345678901234567890123456789012345678901
        """),
    "flexible": rows("""
        => 18 ;; none => 18 ;; 18, or 19 => 18 ;; ...,,,$- => 0 ;; $-18 => 18 ;; 1/18 => 18 ;; 12:18 => 18 ;;
        6,18 => 18
        """),
}


@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_the_number_of_each_form_is_found(method):
    for expected, table in ((1.0, RIGHT), (0.0, WRONG)):
        for response, ground_truth in table[method]:
            assert acc(response, ground_truth, method) == expected, (response, ground_truth)
    assert acc("#### 18", 18) == 1.0


def test_wrong_method_or_ground_truth_raises():
    with pytest.raises(ValueError, match="choose strict or flexible"):
        acc("#### 18", "18", "lenient")
    for ground_truth in (None, "", "eighteen", "18 dollars", "1,5", "1/2", "nan", ["1", "2"], True):
        with pytest.raises(ValueError, match="must be a number|is missing|no answer|2 answers"):
            acc("#### 18", ground_truth)


UNITS = "# #### 1 1, 1. - -$ $ . , -1 0 .1 ####1".split()
UNITS += ["#### ", "#### -", "#### $", "\\$ ", " ", "a-1 ", "\t", "1 "]


@pytest.mark.parametrize("method", ["strict", "flexible"])
@pytest.mark.parametrize("unit", UNITS)
def test_time_grows_linearly_up_to_100_000_characters(unit, method):
    around = (("", ""), ("####", ""), ("#### 1", ""), ("", "#### 7"), ("#### ", "x"), ("#### 0.", ""))
    assert_linear_in_text(lambda response: score("", response, "7", method=method), unit, around)


def test_last_number_is_a_decimal_or_none():
    assert last_number("#### 1,5.250 and 3", strict=True) is None
    assert last_number("#### 1,5.250 and 3", strict=False) == Decimal(3)
    assert last_number("nothing", strict=False) is None
