"""The list of code that only audits is complete, and docs/checks.md has its size."""

import ast
import re

from tests.museum.lines import AUDITS, MIXED, ROOT, counted, definitions

ERRORS = (
    r"ChangedSinceStart|CheckFailed|Disagreement|LogprobMismatch|RefitMismatch|SamplesDiffer|StaleTokens|StateChanged|"
    r"Wrong(Answer|Backward|Distribution|Gradient|Images|Learning|LearningRate|Reduction|Routes|Step|Tokens)|"
    r"Wrongly(Exported|Loaded|Saved)"
)


def raises(node: ast.stmt) -> bool:
    found = [each for each in ast.walk(node) if isinstance(each, ast.Raise) and each.exc is not None]
    return any(re.search(rf"\b({ERRORS})\b", ast.unparse(each.exc)) for each in found if each.exc)


def test_every_function_that_raises_an_audit_is_listed():
    missing = []
    for path in sorted((ROOT / "rl").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if AUDITS.get(file) == ():
            continue
        for name, node, *_ in definitions(path):
            listed = any(name == own or name.startswith(f"{own}.") for own in AUDITS.get(file, ()))
            is_function = isinstance(node, ast.FunctionDef)
            if is_function and raises(node) and not listed and f"{file}:{name}" not in MIXED:
                missing.append(f"{file}:{name}")
    assert missing == []


def test_the_page_has_the_number_of_lines():
    page = (ROOT / "docs" / "checks.md").read_text()
    (number,) = re.findall(r"([\d,]+) lines of code only audit", page)
    assert abs(int(number.replace(",", "")) - sum(counted().values())) <= 100
