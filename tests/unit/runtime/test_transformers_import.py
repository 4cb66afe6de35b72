"""The scan of transformers' model files is cached between starts and repeated if the installation changes."""

import os
from pathlib import Path

import pytest

from rl.runtime.transformers_import import cached_scan

FOUND = {"qwen2": {frozenset({"torch"}): {"modeling_qwen2": {"Qwen2Model"}}}}


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    models = tmp_path / "transformers" / "models"
    models.mkdir(parents=True)
    for file in (models.parent / "__init__.py", models / "__init__.py"):
        file.touch()
    return models


def scans(path, times=2):
    """Return how many of several starts scanned; check that all return the same result."""
    count = 0

    def scan(path):
        nonlocal count
        count += 1
        return FOUND

    assert [cached_scan(scan, path) for _ in range(times)] == [FOUND] * times
    return count


def test_a_scan_is_repeated_for_another_installation_or_a_broken_file(models, tmp_path):
    assert scans(models) == 1 and scans(models / "__init__.py") == 0
    os.utime(models.parent / "__init__.py", ns=(1, 1))
    assert scans(models) == 1
    for file in (tmp_path / "cache" / "lockstep" / "transformers-plain").iterdir():
        file.write_bytes(file.read_bytes()[:10])
    assert scans(models) == 1


def test_the_scan_of_a_single_model_is_not_cached(models):
    (models / "qwen2").mkdir()
    assert scans(models / "qwen2") == 2


def test_the_cached_scan_equals_that_of_transformers(tmp_path, monkeypatch):
    from transformers.utils import import_utils

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    scan = import_utils.create_import_structure_from_path
    models = Path(import_utils.__file__).parents[1] / "models"
    first = cached_scan(scan, models)
    assert first == cached_scan(scan, models) and "Qwen2Config" in str(first["qwen2"])


def test_a_cache_that_others_may_write_is_not_read(models, tmp_path):
    assert scans(models) == 1
    (tmp_path / "cache" / "lockstep").chmod(0o777)
    assert scans(models) == 2
    (tmp_path / "cache" / "lockstep").chmod(0o755)
    assert scans(models) == 0
