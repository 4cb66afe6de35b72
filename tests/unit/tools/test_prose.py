"""The English of comments, docstrings and pages, as tools/docs/prose.py counts it."""

from collections import Counter

import pytest

from tools.docs.prose import FIGURES, count, files, marks, prose, rates


@pytest.fixture(scope="module")
def by_file() -> dict:
    return {path: count(prose(path)) for path in files()}


@pytest.mark.parametrize("figure", FIGURES)
def test_comments_docstrings_and_docs_stay_within_the_bounds(figure, by_file):
    total: Counter[str] = sum(by_file.values(), Counter())
    worst = sorted(by_file, key=lambda path: -marks(by_file[path]))[:5]
    rate, bound = rates(total)[figure], FIGURES[figure][1]
    assert rate >= bound if figure == "example" else rate <= bound, (figure, rate, bound, worst)


def test_figures_count_comments_docstrings_and_fields_but_no_code(tmp_path):
    path = tmp_path / "a.py"
    path.write_text('x = "those"\ny = 1  # those of which\n"""Whose, for example."""\n')
    found = count(prose(path))
    assert (found["words"], found["those"], found["of which"], found["example"]) == (6, 1, 2, 1)
