import importlib.util
import logging
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl.rewards import expressions
from rl.rewards.expressions import MAX_EXPRESSION_CHARS, compare_symbolically, is_costly
from rl.rewards.math import MAX_ANSWER_CHARS, check_truth, is_equivalent, last_boxed, normalize, score
from tests.tables import cells, rows
from tests.timing import assert_linear_in_text

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="needs math-verify to compare expressions"
)


def reward(response, ground_truth, **kwargs):
    return score("", response, ground_truth, data_source="math", extra_info={}, **kwargs)


BOXES = rows(r"""
    \boxed{7} => 7 ;; so \boxed{6}, no, $\boxed{7}$. => 7 ;; \boxed{\frac{1}{2}} => \frac{1}{2} ;;
    \boxed{{{7}}} => {{7}} ;; \boxed{\{1, 2\}} => \{1, 2\} ;; \boxed{[0, 1\}} => [0, 1\} ;;
    \boxed{\boxed{7}} => 7 ;; \boxed {7} => 7 ;; \fbox{7} => 7 ;; \boxed{6} \fbox{7} => 7 ;;
    \fbox{6} \boxed{7} => 7 ;; $\boxed 7$ => 7 ;;
    \boxed{7} goes in \boxed{} => 7 ;; \boxed{7} in \fbox{ } => 7 ;; $\boxed{7}$, the \boxed sign => 7 ;;
    \boxed x => x ;; \boxed{7}\boxed => 7
    """)
NO_BOX = [
    "",
    "\\boxed{}",
    "\\boxed{ }",
    "the \\boxed command",
    "\\boxed{" + "7" * 2000 + "}",
    *r"\boxed{7 \boxed{7}\boxed{8 \boxed \boxed7 boxed{7}".split(),
]


def test_the_last_box():
    for text, content in BOXES:
        assert last_boxed(text) == content, text
    for text in NO_BOX:
        assert last_boxed(text) is None, text


@pytest.mark.parametrize(
    "answer, normal",
    rows(r"""
        $7$ => 7 ;; \$7 => 7 ;; 7. => 7 ;; x=7 => 7 ;; x = 7 => 7 ;; xyz=7 => xyz=7 ;; x=y=7 => x=y=7 ;;
        90^\circ => 90 ;; 90^{\circ} => 90 ;; 50\% => 50 ;; 50% => 50 ;; 5\text{ cm} => 5 ;;
        \text{east} => east ;; .5 => \frac{1}{2} ;; 0.5 => \frac{1}{2} ;; (.25, .75) => (0.25,0.75) ;;
        1/2 => \frac{1}{2} ;; -1/2 => \frac{-1}{2} ;; a/b => a/b ;; \frac12 => \frac{1}{2} ;;
        \frac1{72} => \frac{1}{72} ;; \dfrac{1}{2} => \frac{1}{2} ;; \tfrac 1 2 => \frac{1}{2} ;;
        \sqrt2 => \sqrt{2} ;; 3\sqrt 2 => 3\sqrt{2} ;; \sqrt[3]{2} => \sqrt[3]{2} ;;
        \left( 1, 2 \right) => (1,2) ;; 1{,}000 => 1,000 ;; 10\!000 => 10000 ;;
        a \leftarrow b => a\leftarrowb
        """)
    + [(" 7 ", "7"), ("", "")],
)
def test_the_normal_form(answer, normal):
    assert normalize(answer) == normal
    assert normalize(normal) == normal


def test_the_last_box_is_compared_and_given_as_prediction():
    assert reward("so \\boxed{\\frac12}", "0.5") == {"score": 1.0, "acc": 1.0, "pred": "\\frac{1}{2}"}
    assert reward("so \\boxed{7}", 7)["score"] == 1.0
    assert reward("so \\boxed{8}", "7") == {"score": 0.0, "acc": 0.0, "pred": "8"}
    assert reward("so 7", "7") == {"score": 0.0, "acc": 0.0, "pred": ""}
    with pytest.raises(ValueError, match="it holds no answer"):
        reward("\\boxed{}", "")
    assert reward("\\boxed{7}", "The whole solution, \\boxed{6}, that is \\boxed{7}.")["score"] == 1.0
    with pytest.raises(ValueError, match="reward_model.ground_truth is missing"):
        reward("\\boxed{7}", None)


def test_a_truth_that_no_box_can_hold_is_refused():
    for truth in (r"\frac{1}{2", r"\boxed{3", "a}", "7" * (MAX_ANSWER_CHARS + 1)):
        with pytest.raises(ValueError, match="no box holds it"):
            check_truth(truth)


def test_an_exact_and_a_rounded_truth_are_both_right():
    truth = r"x = \sqrt2 \approx 1.41"
    for answer, expected in (
        (r"\sqrt{2}", 1.0),
        ("1.41", 1.0),
        (r"\approx 1.41", 0.0),
        ("1.4", 0.0),
        ("x", 0.0),
    ):
        assert reward(f"\\boxed{{{answer}}}", truth)["score"] == expected, answer
    assert reward("\\boxed{3.1}", r"\approx 3.1")["score"] == 1.0


@needs_math_verify
@pytest.mark.parametrize(
    "answer, truth",
    rows(r"""
        0.25 => \frac{1}{4} ;; (x+1)^2 => x^2+2x+1 ;; 2\sqrt{2} => \sqrt{8} ;; \{2, 1\} => \{1, 2\} ;;
        \frac{\sqrt{2}}{2} => \frac{1}{\sqrt{2}} ;; 1000 => 1,000 ;; 2\pi r => 2 r \pi ;;
        \begin{pmatrix} 1 \\ 2 \end{pmatrix} => \begin{pmatrix}2-1\\2\end{pmatrix} ;; 2^{10} => 1024 ;;
        5! => 120 ;; \binom{5}{2} => 10 ;; e^{x^2} => e^{x \cdot x}
        """),
)
def test_equal_expressions_are_right_and_only_with_symbolic(answer, truth):
    assert is_equivalent(answer, truth)
    assert not is_equivalent(answer, truth, symbolic=False)


@needs_math_verify
@pytest.mark.parametrize(
    "answer, truth",
    rows(r"""
        6 => 7 ;; 0.26 => \frac{1}{4} ;; (1,2] => (1,2) ;; x^2 => x^3 ;; east => west ;; }{ => 7 ;;
        \frac => 7 ;; 1/0 => 7
        """)
    + [("", "7"), ("^" * 300, "7"), ("^(" * 150, "7")],
)
def test_other_expressions_are_wrong(answer, truth):
    assert not is_equivalent(answer, truth)


@pytest.mark.parametrize("symbolic", [False, pytest.param(True, marks=needs_math_verify)])
@pytest.mark.parametrize(
    "answer, truth",
    rows(r"""
        x<=5 => 5 ;; x>=5 => 5 ;; x!=5 => 5 ;; x<=5 => x>=5 ;; x<5 => 5 ;; x \le 5 => 5 ;; x \ne 5 => 5 ;;
        >=5 => 5 ;; \ge 5 => 5 ;; \le 5 => \ge 5 ;; x<5 => x \le 5 ;; |x|<5 => 5 ;; 2=x => 3 ;;
        3 => 3 or -3 ;; 3 => 3 \text{ or } -3 ;; 3 \text{ or }-3 => 3\text{ or } 4 ;;
        x=3 \text{ or } x=-3 => 3 ;; 6 => x=5 \text{ or } 6 ;; 3 => 3 \text{ and } 4 ;; 3 => 3, -3 ;;
        3 => 3 \text{ or 4} ;; 5 \text{ or less} => 5 ;; x>2 => x>2 \text{ or } x<-2 ;; 3 => \pm 3 ;;
        2+\sqrt3 => 2 \pm \sqrt3 ;; 5\text{ feet }2\text{ inches} => 5 ;;
        5\text{ feet }2\text{ inches} => 5 \text{ feet } 3 \text{ inches} ;;
        10 \text{ men and } 4 \text{ women} => 10 ;; 5\text{ p.m.} => 5\text{ a.m.} ;; 5\text{ p.m.} => 5 ;;
        \text{at least } 5 => 5 ;; 5\text{ PM} => 5\text{ AM} ;;
        [1,2] => (1,2) ;; (-\infty,5) => (-\infty,5] ;; (-\infty,5] => 5 ;;
        (1,2) => (1,2)\cup(3,4) ;; \{1,2\} => 1 ;; (1,2) => (2,1) ;; 6\text{ cm} => 7\text{ cm}
        """),
)
def test_part_of_an_answer_is_wrong(answer, truth, symbolic):
    assert not is_equivalent(answer, truth, symbolic=symbolic)
    assert not is_equivalent(truth, answer, symbolic=symbolic)


@needs_math_verify
@pytest.mark.parametrize(
    "answer, truth",
    rows(r"""
        x=5 => 5 ;; x'=5 => 5 ;; x<=5 => x \le 5 ;; (-\infty,5] => x\le5 ;; x \in [1,2] => [1,2] ;;
        -3 \text{ or } 3 => 3 \text{ or } -3 ;; 3, -3 => 3 \text{ or } -3 ;; 3, -3 => \pm 3 ;;
        x=5 \text{ cm} => 5 ;; 6 \text{ cm}^2 => 6 ;; 6 \text{ m/s^2} => 6 ;; 6\,\text{cm} => 6 ;;
        \text{Area}=12 => 12 ;; 1\frac12\text{ cups} => 1.5 ;; 5 \text{ solutions} => 5 ;;
        5 \text{ feet } 2 \text{ inches} => 5\text{ feet }2\text{ inches} ;; \text{(A)} => A ;;
        5 \frac{\text{m}}{\text{s}} => 5 ;; 5 \text{ m} / \text{s}^2 => 5 ;;
        5 \text{ m s}^{-1} => 5 ;; 5 \text{ N} \cdot \text{m} => 5 ;;
        7 \text{ km}\text{/h} => 7 ;; 18\text{ hours}\, => 18 ;;
        \leq 5 => \le 5 ;; >=5 => \geqslant 5 ;; 6 \text{ PM} => 6\text{ p.m.} ;; 5^{\text{th}} => 5 ;;
        3\text{, }4 => 3,4 ;; P(\text{red}) = 0.5 => \frac12 ;; \text{A}, \text{B} => A,B
        """),
)
def test_other_forms_of_an_answer_are_right(answer, truth):
    assert is_equivalent(answer, truth)


COSTLY = cells(r"""
    10^{10^{10}} ;; 10**10**10 ;; 9^9^9 ;; 2^{10}^{10} ;; (10^{10})^{10^{5}} ;; ((10^{100})^{100})^{100} ;;
    10^{10 \cdot 10^9} ;; 10^{1000000} ;; 10^10000000 ;; 10^(10^10) ;; x^{-10^{10^{2}}} + 10^{9^9} ;;
    \frac{1}{10^{9999999}} ;; 100000! ;; ((10!)!)! ;; 3!!! ;; (10^5)! ;; (x+10^9)! ;; (x+99)! ;;
    \binom{1000000000}{100000000} ;; \sum_{i=1}^{1000000000} i ;; \prod_{i=1}^{100000} i ;; \int x dx ;;
    \lim_{x \to 0} x ;; 1e1000000000
    """) + ["1" * 301, "(" * 100_000, "^{9" * 99]


@pytest.mark.parametrize("expression", COSTLY, ids=lambda text: text[:30])
def test_what_could_take_sympy_long_is_not_given_to_it(expression, monkeypatch):
    def parse(*args, **kwargs):
        raise AssertionError("it was")

    monkeypatch.setattr(expressions, "_math_verify", lambda: (parse, parse))
    assert is_costly(expression)
    assert not compare_symbolically(expression, "7") and not compare_symbolically("7", expression)
    assert is_equivalent(expression, expression)  # as strings


@pytest.mark.parametrize("unit", ["(", "^{9", "10^", "1", "!", "3!", "\\frac{1}{", "\\sum ", "x "])
def test_what_sympy_gets_is_chosen_in_linear_time(unit):
    assert_linear_in_text(is_costly, unit, size=MAX_EXPRESSION_CHARS)


@pytest.mark.parametrize(
    "expression",
    cells(r"2^{2024} ;; 2^{2024} - 1 ;; 10^{100} ;; e^{-x^2/2} ;; x^{100} ;; 7! ;; \binom{10}{3} ;; \limits")
    + ["1" * 40],
)
def test_what_answers_look_like_is(expression):
    assert not is_costly(expression)


def test_a_long_comparison_is_aborted_and_timers_restored(monkeypatch, caplog):
    def parse(text, **kwargs):
        while True:
            try:
                while True:
                    pass
            except Exception:  # what sympy does with timeouts of the usual kind
                continue

    alarms = []
    monkeypatch.setattr(expressions, "_math_verify", lambda: (parse, parse))
    monkeypatch.setattr(expressions, "COMPARE_CPU_S", 0.1)
    before = signal.signal(signal.SIGALRM, lambda *_: alarms.append(1))
    signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        with caplog.at_level(logging.WARNING):
            assert not compare_symbolically("x", "7")
        # The caller's own alarm goes on.
        assert signal.setitimer(signal.ITIMER_REAL, 0)[0] > 400 and not alarms
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert "took too long" in caplog.text
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) == signal.SIG_DFL


@needs_math_verify
def test_outside_the_main_thread_it_compares_too():
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(is_equivalent, "0.25", "\\frac{1}{4}").result()


def test_without_math_verify_only_strings_are_compared(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    expressions._math_verify.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert reward("\\boxed{\\frac12}", "1/2")["score"] == 1.0
            assert reward("\\boxed{0.25}", "1/4")["score"] == 0.0
            assert reward("\\boxed{0.25}", "1/4")["score"] == 0.0
    finally:
        expressions._math_verify.cache_clear()
    (record,) = caplog.records
    assert "compared as strings only" in record.getMessage()
    assert "pip install --no-deps math-verify" in record.getMessage()


UNITS = "\\boxed{ \\boxed { } \\ \\{ $ \\frac ^ \\boxed{1} =.".split() + [
    " ",
    "\\sqrt ",
    "\\boxed ",
    "\\text{ ",
    "\\text{ a}/",
]


@pytest.mark.parametrize("unit", UNITS)
def test_time_grows_linearly_up_to_100_000_characters(unit):
    around = (("", ""), ("\\boxed{", "}"), ("", "\\boxed{7}"))

    def score_of(response):
        return reward(response, "7", symbolic=False)

    assert_linear_in_text(score_of, unit, around)
    # Longer answers are not read.
    assert_linear_in_text(score_of, unit, [("\\boxed{", "}")], size=MAX_ANSWER_CHARS - 10)
    assert_linear_in_text(normalize, unit)
