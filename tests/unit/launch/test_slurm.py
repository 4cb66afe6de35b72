"""Slurm's commands as sites wrap them; scripts play them."""

import pytest

from launch import slurm


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Return a function that makes a command of a bash script."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def make(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return make


@pytest.mark.parametrize(
    "output", ["17", "17;cluster", "Welcome, job 3!\n17\n", "17\n17", "3 credits\n17;c\nBye"]
)
def test_the_id_is_found_among_a_wrappers_words(play, output):
    play("sbatch", f"printf '%s' '{output}'")
    assert slurm.submit("job.sbatch") == "17"


def test_an_answer_without_an_id_is_no_job(play):
    play("sbatch", "echo submitted")
    with pytest.raises(slurm.SlurmError, match="'submitted\\\\n' in place of a job's id; squeue"):
        slurm.submit("job.sbatch")


def test_other_columns_are_refused(play):
    play("squeue", r"printf '17|x|y\nJOBID NAME\n'")
    with pytest.raises(slurm.SlurmError, match="squeue printed 'JOBID NAME', which has not 3 columns"):
        slurm.table(3, "squeue")
    play("squeue", r"printf '17|x|na|me\xe9\n'")
    assert slurm.table(3, "squeue") == [["17", "x", "na|me\ufffd"]]


def test_a_command_that_hangs_gives_no_answer(play, monkeypatch):
    monkeypatch.setattr(slurm, "TIMEOUT_S", 0.2)
    play("squeue", "sleep 30")
    with pytest.raises(slurm.NoAnswer, match="did not answer within 0.2 s"):
        slurm.run("squeue")


def test_a_job_inherits_what_the_job_that_submits_it_was_given(play, monkeypatch, tmp_path):
    """And not what site.sh sets for its node; sbatch itself may be in a directory that site.sh adds."""
    (tmp_path / "given").write_bytes(b"PATH=/usr/bin\0TOKEN=a=b\nc\0SLURM_JOB_ID=7\0")
    monkeypatch.setenv(slurm.GIVEN, str(tmp_path / "given"))
    monkeypatch.setenv("MASTER_ADDR", "n1-ib0")
    play("sbatch", f"env >{tmp_path}/passed; echo 17")
    assert slurm.submit("job.sbatch") == "17"
    passed = (tmp_path / "passed").read_text()
    assert "TOKEN=a=b\nc\n" in passed and "MASTER_ADDR" not in passed and "SLURM_JOB_ID" not in passed
    monkeypatch.setenv(slurm.GIVEN, str(tmp_path / "missing"))  # as in a container
    assert slurm.submit("job.sbatch") == "17"
    play("squeue", "echo $MASTER_ADDR $TZ")
    assert slurm.run("squeue") == "n1-ib0 UTC\n"


def test_variables_that_hide_jobs_do_not_reach_slurm(play, monkeypatch):
    for name in ("SQUEUE_STATES", "SINFO_PARTITION", "SLURM_TIME_FORMAT", "SLURM_CONF"):
        monkeypatch.setenv(name, "x")
    play("squeue", "env")
    kept = [line for line in slurm.run("squeue").splitlines() if line.startswith(slurm.OWN_VARIABLES)]
    assert kept == ["SLURM_CONF=x"]
