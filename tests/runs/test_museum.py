"""Real runs with the silent errors of other projects: a check ends each of them (tests/museum)."""

from pathlib import Path

import pytest

from tests.museum.museum import load_exhibits
from tests.museum.tour import CLEAN, Museum

ALWAYS = ()
"""Exhibits of the default suite, one of each kind."""
EXHIBITS = load_exhibits()


@pytest.fixture(scope="module")
def museum(tmp_path_factory) -> Museum:
    return Museum(Path(tmp_path_factory.mktemp("museum")))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.slow, id=n) for n in EXHIBITS]
)
def test_a_check_ends_the_run(museum, name):
    seen = museum.visit(EXHIBITS[name])
    assert seen.is_caught, (seen.acted, seen.found, seen.line)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLEAN)
def test_clean_runs_raise_nothing(museum, name):
    museum.clean(name, 20)
