import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl.config.schema import Config
from rl.faults.heartbeat import beat_path
from rl.faults.lock import FILE_NAME, LockLost, RunLock, check_lock, make_run_directory
from rl.faults.process import this_process
from tests.spawn import ROOT


def take(directory: Path) -> RunLock:
    return RunLock.take(directory, silent_s=60)


def leave_behind(directory: Path, **changes) -> None:
    """A lock of somebody else."""
    (directory / FILE_NAME).write_text(
        json.dumps(this_process().as_dict() | {"job": "", "restarts": 0, "token": "old"} | changes)
    )


@pytest.fixture
def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_free_directory_is_locked_with_host_pid_and_job_and_released(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    lock = take(tmp_path)
    record = json.loads((tmp_path / FILE_NAME).read_text())
    assert record["pid"] == os.getpid() and record["host"] and record["job"] == "4711" and lock.still_mine()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_use_is_refused_with_host_pid_and_job(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    lock = take(tmp_path)
    with pytest.raises(
        ValueError,
        match=rf"in use by a live run, process {os.getpid()} on .+, Slurm job 4711; .*another run.dir",
    ):
        take(tmp_path)
    assert lock.still_mine() and [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_the_lock_of_an_ended_process_is_taken_over_at_once(tmp_path, dead_pid, capsys):
    leave_behind(tmp_path, pid=dead_pid)
    assert take(tmp_path).still_mine()
    said = capsys.readouterr().err
    assert f"left behind by process {dead_pid}" in said and "its process has ended" in said


def test_a_pid_that_another_process_has_now_does_not_keep_the_lock(tmp_path):
    leave_behind(tmp_path, started=1)
    assert take(tmp_path).still_mine()


def test_a_lock_from_before_the_host_was_booted_is_stale(tmp_path):
    leave_behind(tmp_path, space="another boot/pid:[1]")
    assert take(tmp_path).still_mine()


class TestAnotherHost:
    ELSEWHERE = dict(host="node77", space="another boot/pid:[1]")

    def test_a_fresh_heartbeat_keeps_the_lock(self, tmp_path):
        leave_behind(tmp_path, **self.ELSEWHERE)
        os.utime(tmp_path / FILE_NAME, (0, 0))
        beat_path(str(tmp_path), 0).parent.mkdir()
        beat_path(str(tmp_path), 0).write_text("{}")
        with pytest.raises(ValueError, match="on node77"):
            take(tmp_path)

    def test_a_heartbeat_older_than_the_limit_does_not(self, tmp_path, capsys):
        leave_behind(tmp_path, **self.ELSEWHERE)
        beat_path(str(tmp_path), 0).parent.mkdir()
        beat_path(str(tmp_path), 0).write_text("{}")
        for path in (tmp_path / FILE_NAME, beat_path(str(tmp_path), 0)):
            os.utime(path, (time.time() - 100, time.time() - 100))
        assert take(tmp_path).still_mine() and "no heartbeat for" in capsys.readouterr().err

    def test_an_earlier_start_of_the_same_job_is_over(self, tmp_path, monkeypatch):
        leave_behind(tmp_path, **self.ELSEWHERE, job="12", restarts=1)
        monkeypatch.setenv("SLURM_JOB_ID", "12")
        monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
        assert take(tmp_path).still_mine()

    @pytest.mark.parametrize(("answer", "free"), [("RUNNING", False), ("NODE_FAIL", True), ("", True)])
    def test_slurm_is_asked_for_the_state_of_the_job(self, answer, free, tmp_path, monkeypatch):
        squeue = tmp_path / "bin" / "squeue"
        squeue.parent.mkdir()
        squeue.write_text(f'#!/bin/sh\ncase "$*" in *--jobs=12*) echo {answer};; *) exit 1;; esac\n')
        squeue.chmod(0o755)
        monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
        (tmp_path / "run").mkdir()
        leave_behind(tmp_path / "run", **self.ELSEWHERE, job="12")
        if free:
            assert take(tmp_path / "run").still_mine()
        else:
            with pytest.raises(ValueError, match="Slurm job 12"):
                take(tmp_path / "run")


def test_of_many_that_come_for_one_stale_lock_one_gets_it(tmp_path, dead_pid):
    leave_behind(tmp_path, pid=dead_pid)
    program = (
        "import sys\nfrom pathlib import Path\nfrom rl.faults.lock import RunLock\n"
        "print('ready', flush=True)\nsys.stdin.readline()\n"
        "try:\n    RunLock.take(Path(sys.argv[1]), silent_s=60)\n    print('mine', flush=True)\n"
        "except ValueError:\n    print('refused', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, tmp_path]
    takers = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    assert [taker.stdout.readline() for taker in takers] == ["ready\n"] * 6
    for taker in takers:  # all have imported what they need: from here on they race
        taker.stdin.write("go\n")
        taker.stdin.flush()
    answers = [taker.stdout.readline().strip() for taker in takers]
    for taker in takers:
        taker.communicate()
    assert sorted(answers) == ["mine"] + ["refused"] * 5
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_a_run_that_was_taken_over_notices_and_does_not_release_the_lock_of_the_other(tmp_path):
    lock = take(tmp_path)
    leave_behind(tmp_path, host="node78")
    with pytest.raises(LockLost, match="that of process .* on node78"):
        check_lock(lock)
    lock.release()
    assert (tmp_path / FILE_NAME).exists()
    check_lock(None)  # ranks other than 0


class TestRunDirectory:
    @pytest.fixture
    def config(self, tmp_path) -> Config:
        config = Config()
        config.run.dir = str(tmp_path / "run")
        return config

    @pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
    def test_it_is_made_with_the_umask_of_the_user(self, umask, config):
        before = os.umask(umask)
        try:
            make_run_directory(config)
        finally:
            os.umask(before)
        assert stat.S_IMODE(Path(config.run.dir).stat().st_mode) == 0o777 & ~umask

    def test_it_may_itself_be_a_link(self, config, tmp_path):
        (tmp_path / "scratch").mkdir()
        (tmp_path / "run").symlink_to(tmp_path / "scratch")
        make_run_directory(config)
        assert (tmp_path / "scratch" / FILE_NAME).exists()

    def test_what_is_in_it_may_not_lead_out_of_it(self, config, tmp_path):
        (tmp_path / "precious").mkdir()
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "precious")
        with pytest.raises(
            ValueError, match="checkpoints is a symbolic link to .*precious.*make run.dir itself the link"
        ):
            make_run_directory(config)

    def test_links_within_it_are_no_harm(self, config, tmp_path):
        (tmp_path / "run" / "checkpoints").mkdir(parents=True)
        (tmp_path / "run" / "newest").symlink_to("checkpoints")
        make_run_directory(config)
