"""Tests in which rights matter, again as an ordinary user: root may read and remove what a user may not."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.ordinary_user import as_ordinary_user

FILES = {
    "sandbox": "tests/ranks/sandbox/test_sandbox.py tests/ranks/sandbox/test_hostile_programs.py",
    "endpoint": "tests/unit/agents/test_endpoint.py tests/unit/agents/test_endpoint_strangers.py",
    "caches": "tests/unit/runtime/test_cache_directories.py",
    "store": "tests/unit/runtime/test_job_key.py tests/ranks/runtime/test_job_store.py",
    "rewards": "tests/ranks/rewards/test_code_reward.py",
    "environments": "tests/ranks/agents/test_environment_pool.py",
}
SLOW = ("rewards", "environments")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in FILES]
)
def test_passes_as_an_ordinary_user(name):
    if os.geteuid() != 0:
        pytest.skip("the suite runs as an ordinary user")
    # Not tmp_path, which is too long for the name of a Unix socket below it.
    with tempfile.TemporaryDirectory() as scratch:
        pytest_options = ["-p", "no:cacheprovider", "-q"]
        done = as_ordinary_user(
            Path(scratch), [sys.executable, "-m", "pytest", *pytest_options, *FILES[name].split()]
        )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
