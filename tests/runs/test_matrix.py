"""Features together: a few of the combinations of tests/matrix.py, and the page of all."""

import random

import pytest

from tests.matrix import FEATURES, draw, refusal, run, save_inputs
from tools.docs.matrix import covered, matrix_page

NUMBER = 3


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("matrix")
    save_inputs(directory)
    return directory


@pytest.mark.parametrize("names", draw(NUMBER, 2, random.Random(27)), ids=" + ".join)
def test_drawn_pairs_run(names, inputs, tmp_path):
    assert run(names, inputs, tmp_path, resumes=True) == ""


def test_a_combination_that_fails_says_why(inputs, tmp_path, monkeypatch):
    monkeypatch.setitem(FEATURES, "nothing to learn from", "data.train=[DIR/none.parquet]")
    assert "none.parquet" in run(["nothing to learn from"], inputs, tmp_path, resumes=False)


def test_the_page_has_every_refused_pair_and_every_test():
    page = matrix_page()
    for pair, test in covered().items():
        assert refusal(sorted(pair)) is None, (pair, "is refused")
        assert test in page
    assert "| roles + longest first | not built |" in page and "| critic + spin |" not in page
