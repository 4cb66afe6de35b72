"""The directory of compile caches, and what another user of the node may have made in its place."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from rl.runtime.compile_caches import CACHES, PREDICTABLE, use_private_caches
from tests.spawn import ROOT

OTHER = 64321
RANK = """
import os
from rl.runtime.ranks import discover
from rl.runtime.session import session
with session(discover()):
    print(os.environ["TRITON_CACHE_DIR"])
"""


def caches_below(root):
    """Return the directories of a job's caches if its batch file named `root`."""
    environ = {"LOCKSTEP_CACHE": str(root), **{name: f"{root}/{name}" for name in CACHES}}
    use_private_caches(environ)
    return [Path(environ[name]) for name in CACHES]


def mode_of(path):
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("mode", [None, 0o700, 0o755])
def test_a_directory_of_this_user_is_used_and_closed(mode, tmp_path):
    root = tmp_path / "cache"
    if mode is not None:
        root.mkdir()
        root.chmod(mode)
    assert {cache.parent for cache in caches_below(root)} == {root} and mode_of(root) == 0o700


ELSEWHERE = {
    "DEFAULT_CACHE_DIR": "a constant, no variable",
    "FLASHINFER_CACHE_DIR": "a constant, no variable",
    "GLOBAL_CACHE_DIR": "a constant, no variable",
    "_FACTS_CACHE_DIR": "a constant, no variable",
    "FLASHINFER_AUTOTUNE_CACHE_DIR": "its default is below FLASHINFER_WORKSPACE_BASE",
    "TRTLLM_DG_CACHE_DIR": "only in a text",
    "DG_JIT_CACHE_DIR": "vLLM sets it below VLLM_CACHE_ROOT",
    "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "its default is below VLLM_CACHE_ROOT",
    "VLLM_XLA_CACHE_PATH": "for TPUs; below VLLM_CACHE_ROOT",
    "FLYDSL_RUNTIME_CACHE_DIR": "for AMD's GPUs",
    "OUTLINES_CACHE_DIR": "only grammars with VLLM_V1_USE_OUTLINES_CACHE",
    "VLLM_LORA_RESOLVER_CACHE_DIR": "adapters, nothing compiled",
}
"""Names of caches in the source of libraries that need no entry in CACHES, each with the reason."""


OF_WHEELS = ("flashinfer", "cutlass", "quack", "tilelang", "humming", "tvm_ffi", "tokenspeed_triton")
"""Packages that compile in a job, of which the set for CPUs has only tvm_ffi."""


def test_every_cache_of_the_libraries_is_below_the_root(tmp_path):
    found = map(find_spec, ("torch", "vllm", "megatron.core", *OF_WHEELS))
    folders = [folder for spec in found if spec for folder in spec.submodule_search_locations]
    name = "[A-Z_]+_(CACHE_(DIR|PATH|ROOT)|WORKSPACE_BASE|EXTENSIONS_DIR)"
    search = ["grep", "-rhowE", name, "--include=*.py", *folders]
    found = set(subprocess.run(search, capture_output=True, text=True, check=True).stdout.split())
    assert {"TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR"} <= found <= CACHES.keys() | ELSEWHERE.keys()
    environ = {"LOCKSTEP_CACHE": str(tmp_path / "cache")}
    use_private_caches(environ)
    compiled = [environ[name] for name, (folder, _) in CACHES.items() if folder]
    assert len({*compiled}) == len(CACHES) - 1  # XDG_CACHE_HOME also has files of other programs
    assert all(place.startswith(environ["LOCKSTEP_CACHE"] + "/") for place in compiled)


def made_by_another(root):
    if os.geteuid() != 0:
        pytest.skip("only root can make another user's directory")
    root.mkdir(mode=0o700)
    os.chown(root, OTHER, OTHER)


def linked(root):
    (root.parent / "elsewhere").mkdir(mode=0o700)
    root.symlink_to("elsewhere")


def open_to_all(root):
    root.mkdir()
    root.chmod(0o777)


def replaceable(root):
    root.mkdir(mode=0o700)
    root.parent.chmod(0o777)


@pytest.mark.parametrize("make", [made_by_another, linked, open_to_all, replaceable])
def test_what_another_user_could_write_is_not_used(make, tmp_path, caplog):
    root = tmp_path / "shared" / "cache"
    root.parent.mkdir()
    make(root)
    (fresh,) = {cache.parent for cache in caches_below(root)}
    assert fresh != root and mode_of(fresh) == 0o700 and fresh.stat().st_uid == os.geteuid()
    assert f"{fresh}, and start empty: {root.parent}" in caplog.text
    fresh.rmdir()


def test_a_directory_of_the_system_is_not_used():
    if os.geteuid() == 0:
        pytest.skip("it is root's own")
    (fresh,) = {cache.parent for cache in caches_below("/usr")}
    assert fresh != Path("/usr")
    fresh.rmdir()


def test_predictable_default_directories_are_checked_too(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    root = tmp_path / f"lockstep-cache-{os.geteuid()}"
    linked(root)
    environ: dict[str, str] = {}
    use_private_caches(environ)
    assert environ.keys() == {name for name, (_, default) in CACHES.items() if default == PREDICTABLE}
    (fresh,) = {Path(place).parent for place in environ.values()}
    assert fresh.parent == tmp_path and fresh != root


def test_a_rank_checks_the_directories_of_its_job(tmp_path):
    open_to_all(root := tmp_path / "lockstep-cache")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "TORCHINDUCTOR", "VLLM_CACHE"))}
    caches = dict(LOCKSTEP_CACHE=str(root), TRITON_CACHE_DIR=f"{root}/triton", TMPDIR=str(tmp_path))
    command = [sys.executable, "-c", RANK]
    done = subprocess.run(command, env=kept | caches, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1].startswith(f"{tmp_path}/lockstep-cache-")
    assert f"{root} can be written by other users" in done.stderr
