r"""Read an answer in LaTeX completely or not at all, and find its unit and its name.

Parsers of LaTeX skip parts that they do not know: for example, 101_2 becomes 101, 1+2\mathrm{i} becomes 3,
and f'(x) becomes f(x). Therefore `read` accepts a text only if it knows every token. It writes the numbers as
exact fractions. A comma between digits separates thousands if it is outside of brackets and three digits
follow, as in 1,500. Otherwise it separates elements: 1,5 has two. {,} is a comma within a number: 1{,}500 is
1500, and 1{,}5 is 1.5. A number in another base counts as a name: 101_2 equals neither 5 nor 101.
"""

import re
from fractions import Fraction

from rl.rewards.answers import ascii_signs

# A unit is one \text{...} at the end, or several with only signs between them, as in \text{ m}/\text{s}^2. It
# must not be "or less", "and 4" or "p.m.", and a number in it must be an exponent.
_ONE_UNIT = (
    r"\\text\{(?=( )?)(?! *(?:or|and|[apAP]\.?[mM])\b)(?:[^{}0-9^]|\^[0-9])*\}(?:\^(?:[0-9]|\{-?[0-9]\}))?"
)
_UNIT = re.compile(rf"{_ONE_UNIT}(?:(?:[ /.]|\\cdot)*{_ONE_UNIT})* ?$")
_UNIT_FRACTION = re.compile(r"\\frac\{(\\text\{[^{}]*\})\}\{(\\text\{[^{}]*\})\}")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_NO_WORDS = {"", "or", "and", "st", "nd", "rd", "th"}
_ORDINAL = re.compile(r"(?<=[0-9])(?:\^?\{?\\text\{(?:st|nd|rd|th)\}\}?)")
_DEGREES = re.compile(r"\^\\circ(?![a-zA-Z])")
_EQUALS = re.compile(r"(?<![<>!=\\])=(?!=)|\\in(?![a-zA-Z])")
NAME = re.compile(
    r"\([a-z](?:, ?[a-z])+\)|(?:m ?)?\\angle ?[A-Z]{1,3}|"
    r"(?:\\text\{[^{}]*\}|[A-Za-z]{1,2}'?(?:_(?:\w|\{\w+\}))?|\\[a-z]+)(?:\((?:[^()=<>{}]|\\text\{[^{}]*\})*\))?"
)
_USUAL_UNITS = (
    "mm millimeter millimetre ; cm centimeter centimetre ; m meter metre ; km kilometer kilometre ; "
    "in inch inches ; ft foot feet ; mi mile ; mi/h mph ; g gram ; kg kilogram ; s second sec ; min minute ; "
    "h hour hr ; $ dollar ; % percent ; degree deg ; / per ; 2 square squared sq ; 3 cubic cubed cu"
)
_UNIT_WORDS = {
    word: usual for row in _USUAL_UNITS.split(";") for usual, *words in [row.split()] for word in words
}
_UNIT_WORDS |= dict.fromkeys("unit st nd rd th and or of the".split(), "")
"""Word of a unit -> its usual spelling. A word that is missing here is its own usual spelling."""
_FACTORS = {"dozen": 12, "hundred": 10**2, "thousand": 10**3} | {
    f"{name}illion": 10 ** (6 + 3 * power) for power, name in enumerate(("m", "b", "tr"))
}
_FACTOR = re.compile(rf"(?<=[0-9}}]) *(\\text\{{ *)?({'|'.join(_FACTORS)})s?(?![a-z])")
_UNIT_FONT = re.compile(
    r"\\mathrm ?\{(?: (?=[a-zA-Z])|(?=[a-zA-Z]{2}|[a-zA-Z]/))([a-zA-Z]+(?:/[a-zA-Z]+)*)\}"
)
_BARE_UNIT = re.compile(r"(?<=[0-9}]) *([a-zA-Z]{2,}|k?m/(?:s|h|min))(?=$|\^)")
_ONE = r"([0-9a-zA-Z])"
_SIGNS = (
    "\u00d7 \\times \u00f7 \\div \u00b7 \\cdot \u22c5 \\cdot \u03c0 \\pi \u221e \\infty \u222a \\cup "
    "\u2264 \\le \u2265 \\ge \u2260 \\ne \u00b0 ^\\circ \\lvert | \\rvert | \\dfrac \\frac \\tfrac \\frac "
    "\\cfrac \\frac \\dbinom \\binom \\tbinom \\binom \\leq \\le \\leqslant \\le \\geq \\ge \\geqslant \\ge "
    "\\neq \\ne \\varnothing \\emptyset \\lt < \\gt > \\ast \\cdot \\lg \\log_{10} \\lbrace \\{ \\rbrace \\} "
    "<= \\le >= \\ge != \\ne \\{\\} \\emptyset"
).split()
"""Signs and commands, each followed by the command that the parser reads in its place."""
_REWRITES = [
    (re.compile(pattern), usual)
    for pattern, usual in (
        (r"\\\$|\\!", ""),
        (r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|~", " "),
        (r"\s+", " "),
        (r"^[ $]+|[ $]+$", ""),
        (r"^\\[(\[] ?(.*?) ?\\[)\]]$", r"\1"),
        (r"\\(?:displaystyle|left|right|[bB]igg?[lr]?)(?![a-zA-Z])\.?", ""),
        *(
            (
                re.escape(old) + r"(?![a-zA-Z])" * old[-1].isalpha(),
                new.replace("\\", "\\\\") + " " * new[-1].isalpha(),
            )
            for old, new in zip(_SIGNS[::2], _SIGNS[1::2])
        ),
        (r"\^ ?(?:\{ ?\\circ ?\}|\\circ(?![a-zA-Z]) ?)|\\degrees?(?![a-zA-Z])", r"^\\circ "),
        (r"\^\\circ ?(?:\\(?:text|mathrm) ?\{ *([CF]) *\}|([CF]))(?=\.?$)", r"\\text{ degree \1\2}"),
        # Arguments without braces.
        (r"\\frac *\\pi(?![a-zA-Z]) *", r"\\frac{\\pi}"),
        (rf"\\(frac|binom) *{_ONE} *{_ONE}", r"\\\1{\2}{\3}"),
        (rf"\\(frac|binom) *{_ONE} *(?=\{{)", r"\\\1{\2}"),
        (rf"(\\frac *\{{[^{{}}]*\}}) *{_ONE}", r"\1{\2}"),
        (rf"\\sqrt *{_ONE}", r"\\sqrt{\1}"),
        (r"^= *", ""),
        (r"\\(?:text(?:rm|up|normal|it)|mbox) *\{", r"\\text{"),
        (r"\\textbf *\{([a-zA-Z]{2,})\}", r"\\text{\1}"),
        (r"(\\(?:mathrm|text) ?\{[^{}]{2,}\}) ?/ ?\\mathrm ?\{ ?([a-zA-Z]+) ?\}", r"\1/\\text{\2}"),
        # Numbers and choices in bold become plain. Other letters stay bold, because a bold letter may be a
        # vector.
        (r"\\(?:textbf|mathbf|boldsymbol) ?\{ *(\([A-J]\)|-?[0-9.]+) *\}", r"\1"),
        (r"(?:\\textbf|(?<=\()\\text) ?\{ *([A-J]) *\}", r"\1"),
        (r"^\\text\{ *([0-9][^{}]*)\}$", r"\1"),
        (r"\\mathbb *([A-Z])", r"\\mathbb{\1}"),
        # Matrices, numbers of combinations, and numbers in other bases.
        (r"\\begin\{bmatrix\}", r"\\begin{pmatrix}"),
        (r"\\end\{bmatrix\}", r"\\end{pmatrix}"),
        (
            r"(?<!\|)(?<!\| )[(\[] ?\\begin\{array\} ?\{[lcr ]*\}(.*?)\\end\{array\} ?[)\]]",
            r"\\begin{pmatrix}\1\\end{pmatrix}",
        ),
        (r"^\\begin\{array\} ?\{([lcr ]{2,})\}(.*)\\end\{array\}$", r"\\begin{pmatrix}\2\\end{pmatrix}"),
        (r"\{ *([^{}]+?) *\\choose *([^{}]+?) *\}", r"\\binom{\1}{\2}"),
        (
            r"(?<![a-zA-Z\\{])(?:\\mathrm ?\{C\}|C)_\{?([0-9n]+)\}?\^\{?([0-9kmr]+)\}?(?![0-9])",
            r"\\binom{\1}{\2}",
        ),
        (r"_ ?(?:\{ ?\(([0-9]+)\) ?\}|\(([0-9]+)\))", r"_{\1\2}"),
        (r"_ ?\{ ?\\text ?\{ ?two ?\} ?\}", "_2"),
        (r"^\(([0-9A-F]+)\)(?=_)", r"\1"),
        # Integer parameters, such as (n \in Z), and moduli: brackets around them have no meaning.
        (r"[ ,]*\( ?([a-z] ?\\in ?(?:\\mathbb\{[NZ]\}|Z))(?:_\+|\^\+)? ?\)$", r",\1"),
        (r"\(? ?\\[bp]?mod *(?:\{([^{}]*)\}|([0-9a-z]+)) ?\)?$", r"\\pmod{\1\2}"),
    )
]
"""Regular expressions of unusual spellings, each with its replacement, in the order in which they are
used."""
_LISTS = re.compile(
    r"(?:\\\{ ?)?\\begin\{array\} ?\{[lcr]\}(.*?)\\end\{array\}\.?|\\begin\{cases\}(.*?)\\end\{cases\}"
)
_OR = re.compile(r"\\text\{ *,? *(or)\b *\}|\\text\{[^{}]*\}|\b(or)\b")
INEQUALITY = re.compile(r"[<>]|\\(?:le|ge|ne|not)(?![a-zA-Z])")
_ANGLE = re.compile(r"(?<![0-9.,^_])([0-9]+(?:\.[0-9]+)?) *\^\\circ(?![a-zA-Z])")
"""Matches an angle in degrees. In a trigonometric function it is an angle; elsewhere the degree sign is a
unit."""
_JOINED = re.compile(r"\\text\{ *,? *(?:or|and) *\}")
_FONT = re.compile(r"\\(?:mathrm|mathit|text|operatorname) ?\{ *([^{}]*?) *\}")
_FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp".split()
_THOUSANDS = re.compile(
    r"(?<![0-9.,])[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+(?!,?[0-9])|(?: +[0-9]{3})+(?! *[0-9]))"
)
_MIXED = re.compile(r"([0-9]+) +([0-9]+)/([0-9]+)(?![0-9.])")
_DOTS = re.compile(r"(?<=[.0-9])\\dot ?\{([0-9])\}(?:([0-9]*)\\dot ?\{([0-9])\})?")
"""Matches the first and the last digit of a repeating decimal, which have a dot above them."""
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar) ?\{([0-9]+)\}")
_SCIENTIFIC = re.compile(
    r"(?<![0-9.a-zA-Z])([0-9]+\.[0-9]+|[0-9]+(?=[eE]\+?[0-9]|E-))[eE]([+-]?[0-9]{1,3})(?![0-9.a-zA-Z])"
)
_DECIMAL = re.compile(r"(?<![0-9.])(?:[0-9]*\.[0-9]+|[0-9]+\.(?![0-9]))(?!\.)")
_COMMANDS = (
    _FUNCTIONS
    + (
        "frac sqrt binom cdot times div pm mp le ge ne in cup cap setminus infty emptyset varnothing pi "
        "lfloor rfloor lceil rceil alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi "
        "rho sigma tau phi chi psi omega Gamma Delta Theta Lambda Phi Psi Omega"
    ).split()
)
_KNOWN = re.compile(
    rf"\\sqrt *\[[0-9a-zA-Z]+\](?= *\{{)|"
    rf"\\(?:{'|'.join(_COMMANDS)})(?![a-zA-Z])|\\mathbb\{{[RZQNC]\}}|\\(?:begin|end)\{{[pb]?matrix\}}"
)
_PLAIN = re.compile(r"(?:\s|[0-9a-zA-Z]|\\[\\{}]|[-+*/^=<>()\[\]{}|,;:!&@])*")
_SUBSCRIPT = re.compile(r"(\\[a-z]+ ?|(?<![a-zA-Z])[a-zA-Z])_\{[0-9a-zA-Z]+\}")
_UNCLEAR = re.compile(
    r"[0-9]\s+[0-9]"  # 12 34
    r"|!\s*!"  # x!!
    r"|\^\s*\{?\s*(?:[THC](?![a-zA-Z])|[-+*/]?\s*(?:[\]})|,=]|$)|[*+/])"  # A^T, x^+, x^{*}
    r"|[a-zA-Z]{3}|[0-9][eE][-+]?[0-9]"  # words, and 1e-5, which may be e - 5
    r"|\[[^\[\],]*\]|[0-9]{4}-[0-9]{2}-[0-9]{2}|[0-9]+/[0-9]+/[0-9]"  # [x], 2020-01-02, 2/4/2020
    r"|[0-9)\]}]\s*[\[]|\]\s*[0-9a-zA-Z(]"  # 2[3], [x]y
    r"|/\s*[0-9]+\s*(?:[a-zA-Z(]|\\(?!\\))"  # 1/2x
    r"|(?<![0-9])[0-9]{1,2}:[0-9]{2}(?![0-9])|:[^:]*:"  # 12:30, 1:2:3
    r"|[a-zA-Z]\s*\^\s*\{\s*-\s*1\s*\}\s*\("  # f^{-1}(x)
)


def read(answer: str) -> str | None:
    """Return an answer, which has no words and units, as LaTeX with exact numbers; None if any part is
    unknown."""
    text = _ANGLE.sub(r"(\\frac{\1\\pi}{180})", answer)
    text = _JOINED.sub(",", text)
    text = _FONT.sub(lambda found: _letters(found[1]), text).replace("**", "^")
    text = _with_exact_numbers(text)
    text = re.sub(r"(?<=[_^])([0-9a-zA-Z])(?![0-9])", r"{\1}", text)
    rest = _KNOWN.sub(" @ ", _SUBSCRIPT.sub(r"\1 ", text))
    is_word = re.fullmatch(r"\s*[a-zA-Z]{2,}\s*", text)
    if is_word or "@" in text or not _PLAIN.fullmatch(rest) or _UNCLEAR.search(rest):
        return None
    # Factors side by side get a multiplication sign. Without it the parser would add them, as in
    # 3\frac{1}{2}.
    return re.sub(r"(?<=[0-9)])\s*(?=\()|(?<=\))\s*(?=\\frac|[0-9])", r"\\cdot ", text).strip()


def has_decimals(answer: str) -> bool:
    """Return whether an answer has a number with a decimal point."""
    return "." in answer or re.search(r"[0-9]\{,\}[0-9]", answer) is not None


def _letters(content: str) -> str:
    """Return what replaces a font command: a letter, the command of a function, or a text that `read`
    refuses."""
    if content in _FUNCTIONS:
        return f"\\{content} "
    return content if len(content) == 1 or not content.isalpha() else f"\\text{{{content}}}"


def _with_exact_numbers(text: str) -> str:
    text = re.sub(r"(?<=[0-9])\{,\}(?=[0-9]{3}(?![0-9]))", "", text)
    text = re.sub(r"(?<=[0-9])\{,\}(?=[0-9])", ".", text)
    if not re.search(r"[()\[\]]|\\\{", text):
        text = _THOUSANDS.sub(lambda found: re.sub("[, ]", "", found[0]), text)
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    text = _DOTS.sub(lambda found: f"\\overline{{{''.join(filter(None, found.groups()))}}}", text)
    text = _REPEATING.sub(lambda found: _exact(_repeating(*found.groups())), text)
    text = _SCIENTIFIC.sub(lambda found: f"{found[1]}\\cdot 10^{{{int(found[2])}}}", text)
    return _DECIMAL.sub(lambda found: _exact(Fraction(found[0])), text)


def _repeating(whole: str, fixed: str, repeated: str) -> Fraction:
    ones = 10 ** len(fixed) * (10 ** len(repeated) - 1)
    return Fraction(int(whole + fixed + repeated or "0") - int(whole + fixed or "0"), ones)


def _exact(number: Fraction) -> str:
    # A fraction gets brackets. Otherwise a number before it would make it a mixed number.
    return (
        f"(\\frac{{{number.numerator}}}{{{number.denominator}}})" if number.denominator > 1 else str(number)
    )


# ---- units, names and words ----


def strip(answer: str) -> str:
    """Return an answer in a uniform spelling: no signs without meaning, units as m/s, matrices as pmatrix."""
    text = ascii_signs(answer)
    for pattern, usual in _REWRITES:
        text = pattern.sub(usual, text)
    text = _LISTS.sub(lambda found: _lines(found[0], found[1] or found[2]), text)
    text = _FACTOR.sub(lambda found: f"\\cdot {_FACTORS[found[2]]}" + "\\text{" * bool(found[1]), text)
    text = _UNIT_FONT.sub(lambda found: found[0] if found[1] in _FUNCTIONS else f"\\text{{{found[1]}}}", text)
    text = _BARE_UNIT.sub(lambda found: f"\\text{{ {found[1]}}}" if _unit_word(found[1]) else found[0], text)
    # Alternatives ("or") become a union if they are inequalities, and a list if they are values.
    either = "\\cup " if INEQUALITY.search(text) else "\\text{ or }"
    text = _OR.sub(lambda found: either if found[1] or found[2] else found[0], text)
    # A semicolon becomes a comma, which also separates elements. A text with both, such as 1,5; 2,5, stays as
    # it is.
    if "," not in re.sub(r"\([^();]*\)|\{,\}", "", text):
        text = text.replace(";", ",")
    return _UNIT_FRACTION.sub(r"\1/\2", text)


def _lines(text: str, content: str) -> str:
    """Return the lines of a system of equations as a list. An array with columns or brackets becomes a
    matrix."""
    lines = [line.strip(" ,;") for line in content.split("\\\\")]
    return text if "&" in content else ", ".join(filter(None, lines))


def unit(text: str) -> re.Match[str] | None:
    """Return the unit at the end of an answer; None if there is none, or if another \\text{...} comes before
    it."""
    start = text.find("\\text{")
    return _UNIT.match(text, start) if start >= 0 else None


def _unit_word(word: str) -> str:
    """Return the usual spelling of a unit's word; "" if the word is not a unit."""
    word = word.lower()
    usual = _UNIT_WORDS.get(word) or _UNIT_WORDS.get(word.removesuffix("s"), "")
    return usual or word * ("/" in word or len(word) > 1 and word in _UNIT_WORDS.values())


def unit_of(answer: str) -> str:
    """Return the unit of an answer in its usual spelling, or `%`, `degree` or `$`; empty if it has none."""
    if "%" in answer:
        return "%"
    found = unit(text := strip(answer))
    if _DEGREES.search(text):
        return "degree"
    if found is None or not text[: found.start()].rstrip(" ,"):
        return "$" if "\\$" in answer else ""
    words = re.findall(r"[a-z]+|-?[0-9]|/", re.sub(r"\\[a-zA-Z]+", "", found[0]).lower())
    known = [_UNIT_WORDS.get(word, _UNIT_WORDS.get(word.removesuffix("s"), word)) for word in words]
    # The words are sorted, because their order does not matter.
    return " ".join(sorted(word.removesuffix("s") if len(word) > 2 else word for word in known if word))


def without_unit(answer: str) -> str:
    """Return an answer without its unit, percent and degree signs, ordinals, and a period at the end."""
    found = unit(answer)
    text = answer[: found.start()] if found and answer[: found.start()].rstrip(" ,") else answer
    text = _ORDINAL.sub("", without_degrees(text).replace("\\%", "").replace("%", ""))
    return text.strip().removesuffix(".")


def without_degrees(text: str) -> str:
    """Remove degree signs that are units. In an argument they stay: \\sin 30 is not \\sin 30^\\circ."""
    return text if re.search(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)", text) else _DEGREES.sub("", text)


def split_name(answer: str) -> tuple[str, str]:
    """Return the name before the only `=` or `\\in` of an answer (x, f(x), P(\\text{red})) and the rest.

    Without such a name, as in 2x = 6, the name is empty and the rest is the whole answer.
    """
    parts = _EQUALS.split(answer)
    name = re.sub(r"(?<=,) ", "", parts[0].strip(" $")) if len(parts) == 2 else ""
    return (name, parts[1]) if NAME.fullmatch(name) else ("", answer)


def has_words(answer: str) -> bool:
    """Return whether the value of an answer has words in \\text{...}. Units, ordinals, "or" and "and" do not
    count."""
    value = answer.rpartition("=")[2] if answer.count("=") == 1 else answer
    return not unit(value) and not _NO_WORDS.issuperset(text.strip(" ,;") for text in _TEXT.findall(value))
