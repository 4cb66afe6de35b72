import pytest

from rl.rewards.judge import grade
from tests.tables import cells, rows


@pytest.mark.parametrize(
    "text, number",
    rows("""
        Grade: 7 => 0.7 ;; grade = 7.5. => 0.75 ;; **Grade: 10** => 1.0 ;; Grade: **8** => 0.8 ;;
        Grade: 5/10 => 0.5 ;; Grade: 3\nGrade: 9 => 0.9 ;; Good. (Grade: 0) => 0.0
        """),
)
def test_the_last_grade_is_read(text, number):
    assert grade(text) == float(number)


UNREADABLE = cells("""
        no grade ;; Grade: nan ;; Grade: inf ;; Grade: 1e39 ;; Grade: 11 ;; Grade: 100000 ;;
        Grade: -3 ;; Grade: \u22123 ;; Grade: 5/100 ;; Grade: 5/20 ;; Grade: 8,5 ;; Grade: 3-4 ;;
        Grade: 7.1234567 ;; Grade: 5% ;; Grade: seven ;; Grade: ;; Grade: 9 Grade: nan ;;
        Grade: 9, no: Grade: 99 ;; Grade: 1_0 ;; Grade: 0x7 ;; Grade: 5+5 ;; Grade: 7i
        """)


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_grade_that_is_no_number_from_0_to_10_fails(text):
    with pytest.raises(ValueError, match="the judge's (answer has no|grade is)"):
        grade(text)
