"""Real runs with the silent errors of other projects: a check ends each of them (tests/museum)."""

import re
from pathlib import Path

import pytest

from tests.museum.museum import PAGE, load_exhibits
from tests.museum.tour import CLEAN, Museum

ALWAYS = (
    "refit skipped",
    "attention across packed samples",
    "gradients not reduced",
    "optimizer state reset on resume",
    "order of the scores lost",
)
"""Exhibits of the default suite: of the engine, of a micro-batch, of ranks, of a resume and of the scores."""
EXHIBITS = load_exhibits()


@pytest.fixture(scope="module")
def museum(tmp_path_factory) -> Museum:
    return Museum(Path(tmp_path_factory.mktemp("museum")))


def test_the_page_describes_every_check():
    described = set(re.findall(r"^- \*\*(.+?)\*\*", PAGE.read_text(), re.MULTILINE))
    assert {exhibit.caught_by for exhibit in EXHIBITS.values()} <= described


def test_the_page_states_the_numbers_of_tokens_of_bfloat16():
    section = PAGE.read_text().partition("\n## bfloat16\n")[2].partition("\n## ")[0]
    stated = {int(number) for number in re.findall(r"(\d+)\s+tokens", section)}
    assert stated == {exhibit.tokens for exhibit in EXHIBITS.values() if exhibit.is_bfloat16}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.slow, id=n) for n in EXHIBITS]
)
def test_a_check_ends_the_run(museum, name):
    seen = museum.visit(EXHIBITS[name])
    assert seen.is_caught, (seen.acted, seen.found, seen.line)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLEAN)
def test_clean_runs_raise_nothing(museum, name):
    assert museum.clean(name, 20) == (20, [])
