"""Tables and lists of the documentation, from the declarations of formulas and from the metrics."""

import textwrap

from rl.config.declarations import Formula, literal_dict
from rl.config.objective import ADVANTAGES, LOSSES, Objective
from rl.run_directory.named_metrics import metrics


def table(titles: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table of cells with escaped bars."""
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def bars(text: str) -> str:
    """Return a text with its bars escaped."""
    return text.replace("|", "\\|")


def plain_text(text: str) -> str:
    """Return a text without tags outside of code."""
    parts = text.replace("\n", " ").split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(parts))


def wrapped(text: str, indent: str = "") -> str:
    """Return a text in lines of at most 120 columns."""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def formula_tables() -> dict[str, str]:
    """Return name -> table or list of docs/algorithms.md."""
    means = [[f"`{name}`", formula] for name, formula in literal_dict("aggregate", "MODES").items()]
    divergences = [[f"`{name}`", bars(formula)] for name, formula in literal_dict("kl", "ESTIMATORS").items()]
    return {
        "advantages": formula_list(ADVANTAGES),
        "losses": formula_list(LOSSES),
        "means": table(["name", "loss of a mini-batch"], means),
        "divergences": table(["name", "estimate of a token"], divergences),
    }


def formula_list(formulas: dict[str, Formula]) -> str:
    """Return the list of all advantage estimators, or of all losses."""
    lines = []
    for name, formula in formulas.items():
        defaults = vars(Objective()) | formula.recipe
        shown = ", ".join(
            f"`{k}` {v}" for k, v in defaults.items() if k in formula.reads | formula.recipe.keys()
        )
        keys = f" Keys: {shown}." if shown else ""
        lines.append(wrapped(f"- `{name}` ({formula.source}): {formula.formula}.{keys}", "  "))
    return "\n".join(lines)


def metric_lists() -> str:
    """Return the lists of docs/metrics.md."""
    parts = []
    for title, section in metrics().items():
        lines = []
        for name, each in section.items():
            unit = f" ({each['unit']})" if each.get("unit") else ""
            bad = f" *Bad:* {each['bad']}" if each.get("bad") else ""
            lines.append(wrapped(f"- `{name}`{unit}: {each['formula']}.{bad}", "  "))
        parts.append(f"### {title}\n\n" + "\n".join(lines))
    return "\n" + "\n\n".join(parts) + "\n"
