"""The parts of a start-up, and imports without garbage collection."""

import gc
import os

import pytest

from rl.runtime import start_up


@pytest.fixture(autouse=True)
def parts():
    saved = dict(start_up.parts)
    yield
    start_up.parts.clear()
    start_up.parts.update(saved)


def test_parts_cover_the_time_since_the_launcher(monkeypatch):
    start_up.begin(has_launcher=False)
    assert start_up.parts == {}
    start_up.begin(has_launcher=True)
    for name in ("torch", "inputs", "torch"):
        start_up.mark(name)
    assert list(start_up.parts) == ["launcher", "torch", "inputs"]
    assert all(seconds >= 0 for seconds in start_up.parts.values())
    monkeypatch.setattr(os, "getppid", lambda: 0)  # as in a container's first process
    start_up.begin(has_launcher=True)
    start_up.mark("config")
    assert list(start_up.parts) == ["config"]


def test_counted_seconds_are_not_those_of_the_part_around_them():
    start_up.begin(has_launcher=False)
    start_up.mark("imports")
    before = sum(start_up.parts.values())  # the process may be old
    start_up.count("compilation", 1000.0)
    start_up.mark("engine")
    assert start_up.parts["compilation"] == 1000.0 and start_up.parts["engine"] < 0
    assert sum(start_up.parts.values()) < before + 1000.0


def test_starts_of_processes_are_ordered():
    assert start_up._started(1) <= start_up._started(os.getppid()) <= start_up._started(os.getpid())


def test_summary_names_long_parts_first():
    start_up.parts.clear()
    start_up.parts.update({"torch": 1.24, "groups": 0.04, "vLLM": 3.0})
    assert start_up.summary() == "4.3 s (vLLM 3.0, torch 1.2)"


def test_collection_ignores_objects_of_imports():
    start_up.pause_collection()
    try:
        assert not gc.isenabled()
        cycle = []
        cycle.append(cycle)
    finally:
        start_up.resume_collection()
    try:
        assert gc.isenabled() and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
