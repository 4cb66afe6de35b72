import json
import os
import stat
import subprocess
import time
from pathlib import Path

import pytest

from rl.config.schema import Config
from rl.faults import lock as lock_module
from rl.faults.heartbeat import heartbeat_path
from rl.faults.lock import (
    FILE_NAME,
    LockLost,
    RunLock,
    check_lock,
    is_of_another,
    make_run_directory,
    refuse_links,
)
from rl.faults.process import this_process
from rl.run_directory.status import FILE_NAME as STATUS

ELSEWHERE = dict(host="node77", space="another boot/pid:[1]")
NO_PID = 1 << 23
"""Above the largest pid that Linux allows."""


def take(directory: Path) -> RunLock:
    return RunLock.take(directory, silent_s=60)


def write_lock(directory: Path, **changes) -> None:
    """Write the lock of another run."""
    record = this_process().as_dict() | {"job": "", "restarts": 0, "token": "old"} | changes
    (directory / FILE_NAME).write_text(json.dumps(record))


def write_heartbeat(directory: Path, age: float) -> None:
    path = heartbeat_path(str(directory), 0)
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    os.utime(path, (time.time() - age, time.time() - age))


def test_lock_names_host_pid_and_job_until_its_release(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    lock = take(tmp_path)
    record = json.loads((tmp_path / FILE_NAME).read_text())
    assert record["pid"] == os.getpid() and record["host"] and record["job"] == "4711" and lock.is_held()
    in_use = rf"in use by a live run, process {os.getpid()} on .+, Slurm job 4711; .*another run.dir"
    with pytest.raises(ValueError, match=in_use):
        take(tmp_path)
    assert lock.is_held() and [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    lock.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "changes",
    [{"pid": NO_PID}, {"started": 1}, {"space": "another boot/pid:[1]"}],
    ids=["pid", "start", "boot"],
)
def test_lock_of_an_ended_process_is_replaced(tmp_path, changes, capsys):
    write_lock(tmp_path, **changes)
    assert take(tmp_path).is_held()
    report = capsys.readouterr().err
    assert "left behind by process" in report and "its process has ended" in report


def test_the_heartbeat_decides_on_a_lock_of_another_host(tmp_path, monkeypatch, capsys):
    write_lock(tmp_path, **ELSEWHERE)
    os.utime(tmp_path / FILE_NAME, (0, 0))
    write_heartbeat(tmp_path, age=0)
    with pytest.raises(ValueError, match="on node77"):
        take(tmp_path)
    write_heartbeat(tmp_path, age=100)
    beat = heartbeat_path(str(tmp_path), 0)
    with monkeypatch.context() as patch:  # an old date, but it changes
        patch.setattr(lock_module.time, "sleep", lambda seconds: beat.write_text('{"number": 1}'))
        with pytest.raises(ValueError, match="on node77"):
            RunLock.take(tmp_path, silent_s=60, watch_s=20)
    write_heartbeat(tmp_path, age=100)
    assert take(tmp_path).is_held() and "no heartbeat for" in capsys.readouterr().err


def test_the_status_of_the_start_before_is_no_takeover(tmp_path):
    (tmp_path / STATUS).write_text(json.dumps({"state": "stopped", "start": "before"}))
    lock = take(tmp_path)
    lock.release()  # as rank 0 does after an input that it refuses, while other ranks still look

    def is_taken_over() -> bool:
        return is_of_another(str(tmp_path), lock.token, lock.before)

    assert not is_taken_over()
    (tmp_path / STATUS).write_text(json.dumps({"state": "finished", "start": "after"}))
    assert is_taken_over()


def test_a_repeated_link_request_takes_the_lock(tmp_path, monkeypatch):
    link = os.link

    def answer_lost(source, target):
        link(source, target)
        link(source, target)  # as an NFS client repeats it: the file exists

    monkeypatch.setattr(lock_module.os, "link", answer_lost)
    lock = take(tmp_path)
    assert lock.is_held() and [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    write_lock(tmp_path, pid=NO_PID)
    assert take(tmp_path).is_held() and not lock.is_held()


def test_a_lock_that_is_released_while_it_is_compared_is_taken(tmp_path, monkeypatch):
    write_lock(tmp_path)

    def samefile(mine: Path, path: Path) -> bool:
        path.unlink()
        return os.path.samefile(mine, path)

    monkeypatch.setattr(Path, "samefile", samefile)
    assert take(tmp_path).is_held()


def test_lock_of_an_earlier_start_of_the_job_is_stale(tmp_path, monkeypatch):
    write_lock(tmp_path, **ELSEWHERE, job="12", restarts=1)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert take(tmp_path).is_held()


def test_the_next_generation_of_an_elastic_run_takes_what_a_killed_one_held(tmp_path, monkeypatch):
    """The killed one left its claim beside the lock."""
    write_lock(tmp_path, **ELSEWHERE, generation=1)
    (tmp_path / FILE_NAME).rename(tmp_path / f"{FILE_NAME}.after-old")
    write_lock(tmp_path, **ELSEWHERE, generation=1)
    monkeypatch.setenv("LOCKSTEP_GENERATION", "1")
    with pytest.raises(ValueError):
        take(tmp_path)
    monkeypatch.setenv("LOCKSTEP_GENERATION", "2")
    assert take(tmp_path).is_held() and not list(tmp_path.glob("*.after-*"))


@pytest.mark.parametrize(
    ("out", "steps", "error", "free"),
    [
        ("RUNNING\n", "", "", False),
        ("COMPLETING\n", "12.0\n12.extern\n", "", False),
        ("COMPLETING\n", "12.extern\n", "", True),
        ("NODE_FAIL\n", "", "", True),
        ("", "", "", True),
        ("", "", "slurm_load_jobs error: Invalid job id specified", True),
        ("", "", "Unable to contact slurm controller", False),
    ],
)
def test_slurm_decides_on_a_lock_of_another_host(out, steps, error, free, tmp_path, monkeypatch):
    def squeue(command, **options):
        assert command[0] == "squeue" and "--jobs=12" in command
        found = steps if "--steps" in command else out
        return subprocess.CompletedProcess(command, int(bool(error)), found, error)

    monkeypatch.setattr(lock_module.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(lock_module.subprocess, "run", squeue)
    write_lock(tmp_path, **ELSEWHERE, job="12")
    if free:
        assert take(tmp_path).is_held()
    else:
        with pytest.raises(ValueError, match="Slurm job 12"):
            take(tmp_path)


def test_run_that_was_taken_over_keeps_the_other_lock(tmp_path):
    lock = take(tmp_path)
    write_lock(tmp_path, host="node78")
    with pytest.raises(LockLost, match="that of process .* on node78"):
        check_lock(lock)
    lock.release()
    assert (tmp_path / FILE_NAME).exists()
    check_lock(None)  # ranks other than 0


@pytest.fixture
def config(tmp_path) -> Config:
    config = Config()
    config.run.dir = str(tmp_path / "run")
    return config


def test_run_directory_is_closed_to_other_users(config):
    for umask in (0o022, 0o077, 0o002, 0):
        config.run.dir += "x"
        before = os.umask(umask)
        try:
            make_run_directory(config)
        finally:
            os.umask(before)
        assert stat.S_IMODE(Path(config.run.dir).stat().st_mode) == 0o770 & ~umask


def test_links_out_of_the_run_directory_are_refused(config, tmp_path):
    (tmp_path / "scratch" / "inside").mkdir(parents=True)
    (tmp_path / "run").symlink_to(tmp_path / "scratch")  # which the run directory itself may be
    (tmp_path / "run" / "newest").symlink_to("inside")
    make_run_directory(config).release()
    (tmp_path / "precious").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "precious")
    message = "checkpoints is a symbolic link to .*precious.*make run.dir itself the link"
    with pytest.raises(ValueError, match=message):
        make_run_directory(config)


def test_a_run_directory_that_cannot_be_made_is_named_with_its_key(config):
    config.run.dir = "/proc/x"
    with pytest.raises(ValueError, match=r"^run.dir=/proc/x cannot be written: .*; correct run.dir"):
        make_run_directory(config)


@pytest.mark.parametrize("name", ["", "checkpoints"])
@pytest.mark.parametrize("is_mine", [True, False])
def test_a_directory_that_others_may_write_is_not_continued(name, is_mine, config):
    directory = Path(config.run.dir)
    (directory / "checkpoints").mkdir(parents=True)
    if is_mine:
        (directory / name).chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(directory / name, 64321, 64321)
    else:
        pytest.skip("only root can make another user's directory")
    with pytest.raises(ValueError, match="can be written by other|belongs to user 64321"):
        make_run_directory(config)
    assert not (directory / FILE_NAME).exists()
    (directory / name).chmod(0o770)
    os.chown(directory / name, os.geteuid(), -1)
    make_run_directory(config).release()


def test_a_loop_of_links_in_a_run_directory_raises_no_traceback(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    assert refuse_links(tmp_path) is None
    (tmp_path / "out").symlink_to("/")
    with pytest.raises(ValueError, match="out is a symbolic link to /, outside"):
        refuse_links(tmp_path)
