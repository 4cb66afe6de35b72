"""Segments in /dev/shm, through which tensor parallel ranks of an engine on a CPU communicate."""

from pathlib import Path
from types import SimpleNamespace

from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

from rl.rollout.cpu_support import _shared_memory_names_of_this_job


def test_a_rank_removes_its_segment_of_a_killed_job_on_the_same_port(monkeypatch):
    monkeypatch.setattr(_CPUSHMDistributed, "make_group_name", _CPUSHMDistributed.make_group_name)  # restored
    monkeypatch.setenv("MASTER_PORT", "1")  # no test listens on it
    monkeypatch.setenv("VLLM_DIST_IDENT", "engine")
    _shared_memory_names_of_this_job()
    name = _CPUSHMDistributed.make_group_name(SimpleNamespace(unique_name="tp:0", ranks=[0, 1], rank=1))
    own, other = (Path("/dev/shm", f"{name}_{rank}") for rank in (1, 0))
    own.touch()
    other.touch()
    try:
        again = _CPUSHMDistributed.make_group_name(SimpleNamespace(unique_name="tp:0", ranks=[0, 1], rank=1))
        assert again == name and "-1-" in name
        assert not own.exists() and other.exists()
    finally:
        other.unlink()
