"""Tests that depend on rights, again as an ordinary user: for example, root may read and remove any file."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.ordinary_user import as_ordinary_user

SANDBOX = (
    "tests/ranks/sandbox/test_sandbox.py tests/ranks/sandbox/test_hostile_programs.py "
    "--deselect tests/ranks/sandbox/test_sandbox.py::test_limits_of_processor_time_and_wall_time"
)
SERVERS = (
    "tests/unit/agents/test_endpoint.py tests/unit/agents/test_endpoint_strangers.py "
    "tests/unit/runtime/test_cache_directories.py tests/unit/sandbox/test_private_directory.py "
    "tests/unit/runtime/test_job_key.py tests/ranks/runtime/test_job_store.py"
)
POOLS = (
    "tests/ranks/rewards/test_code_reward.py tests/ranks/agents/test_environment_pool.py "
    "tests/ranks/sandbox/test_container.py tests/ranks/sandbox/test_grades.py "
    "tests/ranks/sandbox/test_image_archives.py"
)


@pytest.mark.parametrize("files", [f"{SANDBOX} {SERVERS}", pytest.param(POOLS, marks=pytest.mark.slow)])
def test_passes_as_an_ordinary_user(files):
    if os.geteuid() != 0:
        pytest.skip("the suite runs as an ordinary user")
    # Not tmp_path, which is too long for the name of a Unix socket below it.
    with tempfile.TemporaryDirectory() as scratch:
        pytest_options = ["-p", "no:cacheprovider", "-q"]
        done = as_ordinary_user(
            Path(scratch), [sys.executable, "-m", "pytest", *pytest_options, *files.split()]
        )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
