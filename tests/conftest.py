"""Options and fixtures of all tests. A test marked `slow` is skipped unless --slow is given."""

from pathlib import Path

import pytest

from tests.toy import save_toy, write_config


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more than half a minute; runs only with --slow")
    config.addinivalue_line("markers", "covers(*features): runs these features of tests/matrix.py together")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--slow"):
        return
    skip = pytest.mark.skip(reason="slow; run with --slow")
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> Path:
    """Return the directory of the toy task (tests/toy.py), which no test may change."""
    return save_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def config(toy, tmp_path) -> Path:
    """Return the config of a GRPO run of two steps on the toy task, into tmp_path/run."""
    return write_config(tmp_path, toy)
