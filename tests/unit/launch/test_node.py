"""The process that starts the ranks of one node under PBS, LSF and Flux."""

import os
import signal
import subprocess
import sys

import pytest

from tests.spawn import ROOT

RANK = """
import os, signal, sys, time
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
print(*(os.environ[f"LOCKSTEP_{name}"] for name in names), flush=True)
word = sys.argv[1 + int(os.environ["LOCKSTEP_LOCAL_RANK"])]
if word == "sleep":
    time.sleep(600)
if word == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(word))
"""


def start(tmp_path, node: int, *words: str) -> subprocess.Popen:
    (tmp_path / "rank.py").write_text(RANK)
    command = [
        sys.executable,
        "-m",
        "launch.node",
        "2",
        str(len(words)),
        tmp_path,
        tmp_path / "rank.py",
        *words,
    ]
    env = os.environ | {"NODE_RANK": str(node), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "words, code", [(("0", "0"), 0), (("75", "75"), 75), (("75", "kill"), 137), (("2", "1"), 2)]
)
def test_ranks_know_their_places_and_their_end_is_that_of_the_node(tmp_path, words, code):
    first, second = (start(tmp_path, node, *words) for node in range(2))
    assert (first.communicate()[0], second.communicate()[0]) == ("0 4 0 2\n", "")
    assert [first.returncode, second.returncode] == [code, code]
    logs = {path.name: path.read_text() for path in tmp_path.glob("*.log")}
    assert logs == {"rank-1.log": "1 4 1 2\n", "rank-2.log": "2 4 0 2\n", "rank-3.log": "3 4 1 2\n"}


def test_a_signal_reaches_the_ranks(tmp_path):
    node = start(tmp_path, 0, "sleep", "0")
    assert node.stdout.readline() == "0 4 0 2\n"
    node.send_signal(signal.SIGTERM)
    assert node.wait() == 128 + signal.SIGTERM
