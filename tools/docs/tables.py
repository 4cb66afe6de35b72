"""Tables of the documentation, from the declarations of formulas and from the metrics."""

from rl.config.declarations import Formula, literal_dict
from rl.config.schema import ADVANTAGES, LOSSES, Objective
from rl.run_directory.named_metrics import metrics


def table(titles: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table of cells whose bars are escaped."""
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def bars(text: str) -> str:
    """Return a text with its bars escaped."""
    return text.replace("|", "\\|")


def formula_tables() -> dict[str, str]:
    """Return name -> table of docs/algorithms.md."""
    means = [[f"`{name}`", formula] for name, formula in literal_dict("aggregate", "MODES").items()]
    divergences = [[f"`{name}`", bars(formula)] for name, formula in literal_dict("kl", "ESTIMATORS").items()]
    return {
        "advantages": formula_table("formula", ADVANTAGES),
        "losses": formula_table("loss of a token", LOSSES),
        "means": table(["name", "loss of a mini-batch"], means),
        "divergences": table(["name", "estimate of a token"], divergences),
    }


def formula_table(title: str, formulas: dict[str, Formula]) -> str:
    """Return the table of all advantage estimators, or of all losses."""
    rows, defaults = [], vars(Objective())
    for name, formula in formulas.items():
        shown = ", ".join(f"`{key}` {defaults[key]}" for key in defaults if key in formula.reads)
        rows.append([f"`{name}`", formula.formula, shown, formula.source])
    return table(["name", title, "keys, with defaults", "source"], rows)


def metric_tables() -> str:
    """Return the tables of docs/metrics.md."""
    parts = []
    for title, section in metrics().items():
        rows = [
            [f"`{name}`", *(bars(each.get(key, "")) for key in ("unit", "formula", "bad"))]
            for name, each in section.items()
        ]
        parts.append(f"### {title}\n\n{table(['metric', 'unit', 'formula', 'a bad value'], rows)}")
    return "\n" + "\n\n".join(parts) + "\n"
