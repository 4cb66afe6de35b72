"""Commands of Slurm that an elastic run calls; fake ones note their arguments."""

import time

import pytest

from launch.elastic_files import Lease
from launch.elastic_jobs import JOIN, Jobs

COMMAND = '#!/bin/bash\necho "$(basename "$0") $*" >>"$CALLS"\n'


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Return a function that acts until there are so many calls, as a leader does; it returns them."""
    for name, answer in {"scontrol": "", "scancel": "", "sbatch": "echo 9", "squeue": "cat $QUEUE"}.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(COMMAND + answer)
        path.chmod(0o755)
    (tmp_path / "queue").touch()
    log = tmp_path / "calls"
    for name, value in {"CALLS": log, "QUEUE": tmp_path / "queue", JOIN: "--no-requeue my.sbatch"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")

    def wait(number: int, act, *arguments) -> list[str]:
        while act(*arguments) or len(found := log.read_text().splitlines() if log.exists() else []) < number:
            time.sleep(0.02)
        log.unlink()
        return [line for line in found if not line.startswith("squeue")]

    return wait


def leases(*jobs: str) -> list[Lease]:
    return [Lease(f"n{n}", f"n{n}", f"n{n}", 2, job, "c0", n) for n, job in enumerate(jobs)]


def test_slurm_requeues_no_job_while_the_run_lives_in_another(tmp_path, calls):
    jobs, later = Jobs(tmp_path, "1", print), Jobs(tmp_path, "2", print)
    jobs.tell(leases("1"), 0)  # nothing to tell
    assert calls(1, jobs.tell, leases("1", "1", "2"), 0) == ["scontrol update JobId=2 Requeue=0"]
    assert calls(1, later.tell, leases("1", "2"), 0) == ["scontrol update JobId=1 Requeue=0"]
    assert calls(1, later.tell, leases("2"), 0) == ["scontrol update JobId=2 Requeue=1"]
    of_script = calls(1, jobs.end, 75, ["n1"], ["n1", "n2"])  # which requeues the job
    assert of_script == ["scontrol update JobId=1 Requeue=1"]
    assert calls(1, jobs.end, 75, ["n2"], ["n1", "n2"]) == ["scontrol requeue 1"]


def test_one_job_at_a_time_brings_the_missing_nodes(tmp_path, calls):
    jobs, later, at = Jobs(tmp_path, "1", print), Jobs(tmp_path, "1", print), leases("1", "1")
    assert calls(2, jobs.tell, at, 2) == ["sbatch --parsable --nodes=2 --no-requeue my.sbatch"]
    while not (tmp_path / "job-9").exists() or not (noted := (tmp_path / "job-9").read_text()):
        time.sleep(0.02)
    assert noted == "0"
    (tmp_path / "queue").write_text("9 PENDING\n")
    assert calls(1, later.tell, at, 2) == []
    assert calls(2, jobs.end, 0, ["n0"], ["n0", "n1"]) == ["scancel 9"]
    assert calls(2, jobs.end, 0, ["n1"], ["n0", "n1"]) == ["scancel 9 1"]
