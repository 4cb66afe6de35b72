"""Slurm's commands as sites wrap them; scripts play them."""

import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

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


@pytest.mark.parametrize("name", ["a|b", "a\n17|b\n", "\r\x1ea\u2028", " "])
def test_a_job_may_have_any_name_and_reason(play, name):
    rows = """for form in "${3//%i/1}" "${3//%i/2}"; do echo "${form//%[jr]/$NAME}"; done"""
    play("squeue", f"NAME={shlex.quote(name)}\n{rows}")
    name = name.replace("\r", "\n")
    assert slurm.table("%i %r %j", "squeue", "-h") == [["1", name, name], ["2", name, name]]


def test_other_columns_are_refused(play):
    words = "echo JOBID NAME"
    for script in ("printf '17|x\n'; " + words, words + '; echo "$2"', 'echo "$2"; ' + words):
        play("squeue", script)
        with pytest.raises(slurm.SlurmError, match="squeue printed '.*JOBID NAME.*, which has not 2 columns"):
            slurm.table("%i %j", "squeue")
    play("squeue", r'echo -e "${2//%j/na\\xe9}"')
    assert slurm.table("%i %j", "squeue") == [["%i", "na\ufffd"]]


PROGRAM = """
import signal, sys, threading
import numpy  # its threads take signals, too
from launch import slurm
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with slurm.undisturbed():
    print(slurm.submit("job.sbatch"), flush=True)
"""


@pytest.mark.parametrize("name, code", [("TERM", 3), ("INT", -signal.SIGINT), ("HUP", -signal.SIGHUP)])
def test_a_job_is_noted_before_a_signal_ends_the_process(play, monkeypatch, name, code):
    """Slurm sends it to all processes of a job at once, a terminal to all of the command line."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    play("sbatch", f"kill -{name} $PPID $$; sleep 0.2; echo 17")
    root, options = Path(slurm.__file__).parents[1], dict(capture_output=True, text=True, timeout=60)
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, **options)
    assert (done.returncode, done.stdout) == (code, "17\n")


def test_a_signal_comes_once_after_nested_blocks_that_fail():
    def strike() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, slurm.ENDING)
        signal.raise_signal(signal.SIGTERM)

    came: list[int] = []
    thread = threading.Thread(target=strike)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    before = signal.signal(signal.SIGTERM, handler := lambda number, _: came.append(number))
    try:
        with pytest.raises(slurm.SlurmError), slurm.undisturbed():
            try:
                with slurm.undisturbed():
                    thread.start()
                    thread.join()
                    raise slurm.SlurmError
            finally:
                assert not came
        assert came == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is handler
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_only_masks():
    found: list[object] = []

    def enter() -> None:
        with slurm.undisturbed():
            found.extend([signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGTERM)])

    (thread := threading.Thread(target=enter)).start()
    thread.join()
    mask, handler = found
    assert mask >= {*slurm.ENDING} and handler is signal.getsignal(signal.SIGTERM)


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
