"""Pairs of different answers that share a form, none of them equal, and pairs of equal ones.

A digit that the comparison does not read, and a decoration that it drops, would make two of them equal.
"""

import importlib.util
from itertools import combinations

import pytest

from rl.rewards.math import is_equivalent
from tests.tables import cells, rows

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="needs math-verify to compare expressions"
)

FORMS = cells(r"""
    @ ;; -@ ;; @.5 ;; 0.@ ;; 0.000000@ ;; 1@,000 ;; 1,@00 ;; 1\,@00 ;; 1 @00 ;; 1{,}@ ;; 1{,}@00 ;; 1,@ ;;
    @,1 ;; 12 3@ ;; @^2 ;; 2^@ ;; 10^{-1@} ;; 10^{-@} ;; @.5 \times 10^{-20} ;; 1.5 \times 10^{-2@} ;;
    6.@e-34 ;; 1.5e-1@ ;; @e8 ;; 1e-@ ;; \frac{@}{11} ;; \frac{1}{@} ;; \frac1@ ;; @/11 ;; 1/@ ;;
    2\frac{@}{11} ;; @\frac{1}{2} ;; 2 @/11 ;; \sqrt{@} ;; \sqrt@ ;; \sqrt[@]{7} ;; \sqrt[3]{@} ;; @\pi ;;
    @x ;; x^@ ;; x_@ ;; x_{1@} ;; x+@ ;; (x+1)^@ ;; @! ;; 1@_7 ;; 101_@ ;; \log_@ 7 ;; \log_{@} x ;;
    \binom{9}{@} + 1@ ;; |x-@| ;; \lfloor @.5 \rfloor ;; e^{@} ;; \mathrm{e}^@ ;; 1-@/\mathrm{e} ;;
    1+@\mathrm{i} ;; @ + 2i ;; \sin @ ;; \sin^{@} x ;; f(@) ;; f^{(@)}(x) ;; 0.\overline{@} ;;
    0.1\overline{@} ;; 0.\dot{@} ;; @(4) ;; (@)(4) ;; @:7 ;; 12:1@ ;; 1.@.3 ;; (@, 9) ;; [0, @) ;;
    (0, 1@0) ;; (9, @) ;; \{@, 9\} ;; @, 9 ;; \pm @ ;; 1 \pm @ ;; x = @ ;; x < @ ;; x \ne @ ;; 0 < x < @ ;;
    (-\infty, @] ;; (0, @) \cup (8, 9) ;; \begin{pmatrix} 1 & @ \\ 3 & 4 \end{pmatrix} ;; @\% ;; @^\circ ;;
    \$@ ;; @ \text{ cm} ;; 1 \text{ m}^@ ;; @ \text{ or } 9 ;; 5 \text{ feet } @ \text{ inches} ;;
    x \equiv @ \pmod{9} ;; x \equiv 1 \pmod{@} ;; 7 \bmod @ ;; \int_0^@ x dx ;; \sum_{k=1}^@ k ;;
    \approx @ ;; \langle @, 9 \rangle ;; \vec{v}_@ ;; \hat{x}^@ ;; A_@^T ;; y = @x + 1 ;; 2x + @y = 7 ;;
    x^2 + y^2 = @ ;; \frac{x^@}{y} ;; a_{n+@} ;; n(n+@) ;; \text{row } @ ;;
    @\text{ million} ;; \overline{A@} ;; \angle @ ;; @'' ;; \frac{d^@y}{dx^@}
    """)
"""Forms of answers: two digits in the place of @ give different answers."""


@pytest.mark.parametrize("form", FORMS)
def test_a_digit_makes_another_answer(form):
    for one, other in combinations("256", 2):
        assert not is_equivalent(form.replace("@", one), form.replace("@", other)), (one, other)
    # The answer itself is right, in whatever form.
    assert is_equivalent(form.replace("@", "2"), form.replace("@", "2"))


DECORATED = cells(r"""
    x ;; x' ;; x'' ;; x^\prime ;; \bar{x} ;; \overline{x} ;; \vec{x} ;; \hat{x} ;; \dot{x} ;; \ddot{x} ;;
    \tilde{x} ;; x^* ;; x^{T} ;; x^\dagger ;; x^+ ;; x_1 ;; x_n ;; x_{n+1} ;; |x| ;; \|x\| ;; -x ;;
    x^{-1} ;; x! ;; x!! ;; \lfloor x \rfloor ;; \lceil x \rceil ;; \Re x ;; \Im x ;; \angle x ;; \nabla x ;;
    \Delta x ;; \partial x ;; \neg x ;; \sqrt{x} ;; X
    """)
VALUES = cells(r"""
    30 ;; \overline{30} ;; 30_7 ;; 30' ;; 30'' ;; -30 ;; \pm 30 ;; \approx 30 ;; 30 \text{ million} ;;
    30! ;; 30^2 ;; 0.30 ;; 30, 30 ;; (30, 30) ;; [30, 30] ;; 3 0 ;; 3, 0 ;; (3, 0) ;; [3, 0] ;; [3, 0) ;;
    (3, 0] ;; \{3, 0\} + 1 ;; 3:01 ;; 3.0.0 ;; x < 30 ;; x > 30 ;; x \le 30 ;; \sin 30 ;; \sin 30^\circ ;;
    30 \text{ or more} ;; \text{at most } 30
    """)
UNITS = cells(r"""
    30\% ;; 30^\circ ;; \$30 ;; 30\text{ cents} ;; 30\text{ cm} ;; 30\text{ m} ;; 30\text{ cm}^2 ;;
    30\text{ cm}^3 ;; 30\text{ apples} ;; 30\text{ m/s} ;; 30\text{ km/h} ;; 30\text{ hours} ;;
    30\text{ minutes} ;; 30\text{ dozen}
    """)


@pytest.mark.parametrize("group", [DECORATED, VALUES, UNITS], ids=["symbols", "numbers", "units"])
def test_a_decoration_makes_another_answer(group):
    equal = [(a, b) for a, b in combinations(group, 2) if is_equivalent(a, b) or is_equivalent(b, a)]
    # The brackets of a point may be left out.
    assert set(equal) <= {("30, 30", "(30, 30)"), ("3, 0", "(3, 0)")}


DIFFERENT = rows(r"""
    1-1/\mathrm{e} => 1+1/\mathrm{e} ;; 6.63e-34 => 1.6e-19 ;; 6.63e-34 => 0 ;; 1+2\mathrm{i} => 3 ;;
    10^{40}+1 => 10^{40} ;; 0.3333333 => 0.3333334 ;; 0.333 => \frac13 ;; 1000000.0000001 => 1000000 ;;
    6.63e-34 x => 1.6e-19 x ;; 2x=6 => 6 ;; 3(4) => 7 ;; (2)(3) => 5 ;; 12 34 => 46 ;; 12:30 => \frac25 ;;
    1\,000 => 2\,000 ;; 1,5 => 1.5 ;; 1,5 => 15 ;; 1{,}5 => 15 ;; 1{,}5 => 1,5 ;; 1{,}500 => 1.5 ;;
    (1,500) => 1500 ;; x=5 => y=5 ;; \text{no} => \text{on} ;; r => R ;; \pi R^2 => \pi r^2 ;;
    1/2x => x/2 ;; x \to 0 => 0 ;; a \circ b => ab ;; A \cup B => A \cap B ;; \max(1,2) => 1,2 ;;
    x^2=-1 => x^2=-2 ;; f(2)=3 => f(3)=3 ;; 0=1 => 0=2 ;; 1/0 => 2/0 ;; f^{-1}(x) => \frac{1}{f(x)} ;;
    5\Omega => 5\omega ;; 1:2:3 => \frac16 ;; \mathbf{v} => v ;; x+y=1 => x+y=2 ;;
    \begin{vmatrix}1&2\\3&4\end{vmatrix} => \begin{pmatrix}1&2\\3&4\end{pmatrix} ;; 5\text{ million} => 5 ;;
    x<2 => (-\infty,2] ;; x<2 => (2,\infty) ;; y<2 => x\in(-\infty,2) ;; y<2 => x<2 ;; 1<x<3 => [1,3) ;;
    1<x<3 => 1,3 ;; 1<x<3 => \{1,3\} ;; x\ne2 => x=2 ;; x<2 \text{ or } x>3 => (-\infty,2) ;;
    x<2 \text{ or } y>3 => (-\infty,2)\cup(3,\infty) ;; a<x<b => (a,b) ;; x^2<-1 => x^2<-2 ;;
    x<2 \text{ or } 5 => x<2 ;; 0<x<y<1 => (0,1) ;; C_5^2 => 25 ;; C_2^5 => 32 ;; (2n)! => 2n! ;; n! => n ;;
    4\cdot i => 4 ;; i^2 => 1 ;; 5\text{ million} => 5 ;; 1,5;2,5 => 1,5,2,5 ;; (1;2) => (2;1) ;;
    5 or 6 => 5 ;; \text{5 or 6} => 5 ;; \text{15 cm} => 15\text{ m} ;; 3 m/s => 3 m/h ;; (101)_2 => 101_3 ;;
    n \equiv 1 \pmod{3} => n \equiv 1 \mod 4 ;; k\pi (k\in\mathbb{Z}) => k\pi ;; (1)\frac12 => \frac32 ;;
    \begin{cases}x=1\\y=2\end{cases} => (2,1) ;; A \cup B => A \cup C ;;
    |\begin{array}{cc}1&2\\3&4\end{array}| => \begin{pmatrix}1&2\\3&4\end{pmatrix} ;;
    2,2 => 2 ;; 2020-01-02 => 2017 ;; 2/4/2020 => \frac{1}{4040} ;; [\frac{n}{2}] => \frac{n}{2} ;;
    25^\circ\text{C} => 25^\circ\text{F} ;; 25^\circ C => 25^\circ\mathrm{F} ;; (x,y)=(1,2) => (y,x)=(1,2) ;;
    \sin 30^\circ => \sin 30 ;; 0.1\dot{2} => 0.\dot{1}\dot{2} ;; 5\mathrm{~m} => 5\mathrm{~s} ;;
    5\mathrm{m/s} => 5\mathrm{m/h} ;; \text{AB} => \text{Ab} ;; \textbf{v} => v ;; \emptyset => \{0\}
    """)
EQUAL = rows(r"""
    0.25 => \frac14 ;; 1{,}000 => 1000 ;; 1\,000 => 1,000 ;; 1 000 => 1000 ;; 1{,}5 => 1.5 ;;
    A^{T} => A^T ;; x^{*} => x^* ;; 12。 => 12 ;;
    1+2\mathrm{i} => 1+2i ;; 1-1/\mathrm{e} => 1-\frac1e ;; 6.63e-34 => 6.63 \times 10^{-34} ;;
    3e8 => 3 \cdot 10^8 ;; 0.\overline{3} => \frac13 ;; 0.1\bar{6} => \frac16 ;; 0.333333 => \frac13 ;;
    1.414214 => \sqrt2 ;; 50\% => 0.5 ;; 50\% => 50 ;; 90^\circ => 90 ;; 5\text{ cm} => 5 ;;
    5\text{ cm} => 5\mathrm{~centimeters} ;; 5 cm => 5\text{ cm} ;; \$5 => 5\text{ dollars} ;;
    3\text{ square meters} => 3\text{ m}^2 ;; y = 2x+1 => 1+2x ;; x \in [1,2] => [1,2] ;;
    (1,500) => (1, 500) ;; 2, 1 => \{1, 2\} ;; (0.5, 1) => (\frac12, 1) ;; 3\frac12 => 3.5 ;;
    2 3/4 => 2.75 ;; 3(4) => 12 ;; x+y=1 => y=1-x ;; \log_2 8 => 3 ;; 10^{-7} => 0.0000001 ;; x_1 => x_{1} ;;
    101_2 => 101_{2} ;; \pm 3 => 3, -3 ;; x=2, y=3 => (2, 3) ;; \{3\} => 3 ;;
    \begin{pmatrix}0.5\\2\end{pmatrix} => \begin{pmatrix}\frac12\\2\end{pmatrix} ;;
    \sin^2 x + \cos^2 x => 1 ;; b => B ;;
    \textbf{(B)} => B ;; \mathbf{5} => 5 ;; \(\frac12\) => 0.5 ;;
    12\ \text{cm}^2 => 12 ;; 5\text{ m/s} => 5\ \mathrm{m/s} ;; 5\mathrm{~m} => 5 ;;
    25^\circ\mathrm{C} => 25 ;;
    0.\dot{3} => \frac13 ;; 0.1\dot{2}\dot{3} => \frac{122}{990} ;; \sin 30^\circ => \frac12 ;;
    \cos^2 45^{\circ} => 0.5 ;; \frac\pi3 => \frac{\pi}{3} ;; \mathbb R => \mathbb{R} ;;
    \{\} => \varnothing ;;
    (x, y) = (1, 2) => (1,2) ;; \angle A = 30^\circ => 30 ;; \text{Yes} => yes ;; \sqrt[3]{8} => 2 ;;
    x\equiv 3\pmod{7} => x \equiv 3 \pmod 7 ;;
    x<2 => (-\infty,2) ;; x \geq 2 => [2, +\infty) ;; 1<x\le 3 => (1,3] ;; 3 \ge x > 1 => x \in (1,3] ;;
    x\ne 2 => (-\infty,2)\cup(2,\infty) ;; x<2 \text{ or } x>3 => (-\infty,2)\cup(3,\infty) ;;
    x<-1 \text{ or } x>1 => x>1 or x<-1 ;; -2<x<2 => |x|<2 ;; 0\le\theta\le\pi => \theta\in[0,\pi] ;;
    C_5^2 => 10 ;; \mathrm{C}_{5}^{2} => 10 ;; {5 \choose 2} => 10 ;; 4\cdot i => 4i ;; (1+i)^2 => 2i ;;
    e^{i\pi} => -1 ;; (n+1)! => (n+1) \cdot n! ;; \frac{n!}{k!(n-k)!} => \binom{n}{k} ;;
    \left(\begin{array}{cc}1&2\\3&4\end{array}\right) => \begin{bmatrix}1&2\\3&4\end{bmatrix} ;;
    \begin{pmatrix} 1/2 \\ 3 \end{pmatrix} => \begin{pmatrix} 0.5 \\ 3 \end{pmatrix} ;;
    \left\{\begin{array}{l}x=1\\y=2\end{array}\right. => x=1, y=2 ;; (\text{A}) => A ;; \textbf{yes} => yes ;;
    A \cup B => B \cup A ;; (101)_2 => 101_{(2)} ;; 101_{\text{two}} => 101_2 ;; 5 million => 5000000 ;;
    3 m/s => 3 ;;
    15 \mathrm{~km} / \mathrm{h} => 15 \text{ km/h} ;;
    \text{15 cm} => 15 ;; 3\textrm{ cm} => 3 ;; (1;2) => (1,2) ;; (-\infty;2] => (-\infty,2] ;;
    1;2 => 1, 2 ;; \lbrace 1,2\rbrace => \{2,1\} ;; \lg 100 => 2 ;; n\equiv1(\bmod 3) => n \equiv 1 \mod 3 ;;
    \frac{\pi}{2}+k\pi,k\in\mathbb{Z} => k\pi+\frac{\pi}{2} (k\in\mathbb{Z})
    """)


@pytest.mark.parametrize("answer, truth", DIFFERENT)
def test_different_answers_are_not_equal(answer, truth):
    assert not is_equivalent(answer, truth) and not is_equivalent(truth, answer)


@pytest.mark.parametrize("answer, truth", EQUAL)
def test_equal_answers_stay_equal(answer, truth):
    assert is_equivalent(answer, truth) and is_equivalent(truth, answer)


def test_typeset_signs_are_read():
    signs = [
        ("2 \u00d7 3", "6"),
        ("6 \u00f7 2", "3"),
        ("2\u03c0", "2\\pi"),
        ("\u22127", "-7"),
        ("90\u00b0", "90"),
        ("\uff11\uff12\uff0e\uff15", "12.5"),
        ("\uff081\uff0c2\uff09", "(1,2)"),
    ]
    for answer, truth in signs:
        assert is_equivalent(answer, truth), answer
