"""Ranks of tests, forked and started: what they are given, and how they end."""

import subprocess
import time
from pathlib import Path

import pytest

from tests import fork_server
from tests.spawn import RanksFailed, _Forked, run_ranks

ADD = """
    import os
    import sys

    import torch
    import torch.distributed as dist

    assert __name__ == "__main__" and os.environ["MARK"] == "here"
    dist.init_process_group("gloo")
    total = torch.tensor(int(sys.argv[1]) + dist.get_rank())
    dist.all_reduce(total)
    print(int(total))
    dist.barrier()
    dist.destroy_process_group()
"""
ENDS = """
    import os
    import signal
    import subprocess
    import sys

    def failing():
        raise ValueError("a sentence")

    if os.environ["RANK"] == "1":
        {action}
    child = subprocess.Popen(["sleep", "1000"])
    open(sys.argv[1], "w").write(str(child.pid))
    child.wait()
"""


@pytest.mark.parametrize("fresh", [False, True], ids=["forked", "started"])
def test_ranks_meet_with_arguments_and_variables(fresh):
    assert run_ranks(2, ADD, 5, env={"MARK": "here"}, fresh=fresh) == ["11\n", "11\n"]


@pytest.mark.parametrize(
    ("action", "code", "words"),
    [
        ("failing()", 1, "ValueError: a sentence"),
        ("sys.exit('a sentence')", 1, "a sentence"),
        ("sys.exit(7)", 7, ""),
        ("os._exit(8)", 8, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
    ],
)
def test_a_rank_that_fails_ends_all(tmp_path, action, code, words):
    with pytest.raises(RanksFailed, match=f"rank 1 of 2 exited with {code}") as failure:
        run_ranks(2, ENDS.format(action=action), tmp_path / "pid", grace=1)
    assert failure.value.returncodes == [None, code]
    assert words in failure.value.stderr[1] and words in str(failure.value)
    assert "failing" in failure.value.stderr[1] or "ValueError" not in words  # a line of the program


def test_ranks_that_hang_are_killed_with_their_children(tmp_path):
    with pytest.raises(RanksFailed, match="rank 0, 1 of 2 did not end within 2 s") as failure:
        run_ranks(2, ENDS.format(action="signal.pause()"), tmp_path / "pid", timeout=2)
    assert failure.value.returncodes == [None, None]
    pid = (tmp_path / "pid").read_text()
    while is_running(pid):
        time.sleep(0.01)


def test_a_rank_with_the_number_of_an_earlier_one_runs(monkeypatch):
    ranks, child = fork_server.Ranks(), subprocess.Popen(["sleep", "1000"])
    monkeypatch.setattr(fork_server, "fork_rank", lambda **options: child.pid)
    ranks.codes[child.pid] = 0
    assert ranks.start({}, answers=1) == child.pid and ranks.poll([child.pid]) == [None]
    child.kill()
    while ranks.poll([child.pid]) == [None]:
        time.sleep(0.01)
    assert ranks.poll([child.pid]) == [-9]


def test_a_rank_that_cannot_begin_fails_the_harness(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "touch", lambda path: None)  # as if its directory had been removed
    with pytest.raises(RuntimeError, match="could not start rank 0: .*No such file.*stdout.0"):
        _Forked(tmp_path / "removed", tmp_path / "program.py", (), {"RANK": "0"})


def is_running(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
