"""Every metric that a run logs, from metrics.yaml, and checks of config keys that name a metric."""

import difflib
import re
import textwrap
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path

import yaml

from rl.config.declarations import shipped
from rl.config.needs import validates
from rl.config.options import ConfigError, listed
from rl.config.schema import Config


@cache
def metrics() -> dict[str, dict[str, dict[str, str]]]:
    """Return section -> name -> unit, formula and meaning of a bad value; metrics.yaml has their form."""
    return yaml.safe_load(Path(__file__).with_name("metrics.yaml").read_text(encoding="utf-8"))


@cache
def alternatives() -> list[str]:
    """Return all names, one for each alternative of `{a,b}`; `<x>` stays."""
    return [each for section in metrics().values() for name in section for each in _expanded(name)]


def _expanded(name: str) -> list[str]:
    parts = re.split(r"\{([^}]*)\}", name)
    choices = [part.split(",") if place % 2 else [part] for place, part in enumerate(parts)]
    return ["".join(chosen) for chosen in product(*choices)]


def first_curves() -> dict[str, dict[str, str]]:
    """Return name -> entry of the metrics that a report shows first: the metrics with a plain name."""
    entries = (entry for section in metrics().values() for entry in section.items())
    return {_expanded(name)[0]: entry for name, entry in entries if "plain" in entry}


def metrics_help(word: str) -> str:
    """Return the metrics with a word in their name, each with its formula and what a bad value means; "" if
    there are none."""
    entries = (entry for section in metrics().values() for entry in section.items())
    found = {
        name: entry
        for name, entry in entries
        if any(word.lower() in each for each in _expanded(name.lower()))
    }
    lines = ["metrics of a run (docs/metrics.md)"] if found else []
    for name, entry in found.items():
        text = " ".join(f"{entry['formula']}. {entry.get('bad', '')}".split())
        lines += [f"  {name}", textwrap.fill(text, 100, initial_indent=" " * 6, subsequent_indent=" " * 6)]
    return "\n".join(lines)


@cache
def _names() -> re.Pattern:
    """Return the regular expression of all names."""
    forms = []
    for name in alternatives():
        parts = re.split("(<[^>]*>)", name)
        placeholders = {"<k>": r"\d+", "<n>": r"\d+"}
        forms.append(
            "".join(
                placeholders.get(part, ".+") if place % 2 else re.escape(part)
                for place, part in enumerate(parts)
            )
        )
    return re.compile("|".join(forms))


def is_documented(name: str) -> bool:
    """Whether metrics.yaml has a metric of this name."""
    return _names().fullmatch(name) is not None


def check_named_metrics(config: Config, points: Sequence[Config] = ()) -> None:
    """Raise ConfigError for a key that names a metric that no run of the config logs.

    A user's algorithm may log metrics of any name.

    points: result of `load_points`.
    """
    named = {}
    if config.sweep.stop != "none":
        named["sweep.metric"] = config.sweep.metric
    if config.checkpoint.keep_best:
        named["checkpoint.best_metric"] = config.checkpoint.best_metric
    runs = points or [config]
    for key, name in named.items():
        if not is_documented(name) and all(run.algorithm in shipped() for run in runs):
            near = difflib.get_close_matches(name, alternatives(), cutoff=0.7)
            advice = f"did you mean {listed(near, 'or')}?" if near else "docs/metrics.md lists them."
            raise ConfigError(f"{key}={name} is not a metric that runs log; {advice}")
    if config.sweep.stop != "none" and config.sweep.metric.startswith("val") and not validates(config):
        raise ConfigError(
            f"sweep.metric={config.sweep.metric} is a metric of validation, which this run does not have; "
            "set data.val and validation.every, or another sweep.metric."
        )
