"""Requests to stop, and the agreement of the ranks on them. Two real ranks; signals are sent for real."""

import json

from tests.spawn import run_ranks

HEAD = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from rl.stopping.signals import requested_signal, expect_signals

expect_signals()
import torch.distributed as dist

from rl.runtime.ranks import discover
from rl.runtime.session import session
from rl.stopping.requests import StopRequests

started = session(discover())
started.__enter__()
rank, run = dist.get_rank(), Path(sys.argv[1])
out = {}

def requests(max_time="", **environ):
    return StopRequests(str(run), max_time=max_time, environ=environ)

def seen(stop, deadline=60.0):
    # During a generation ranks check the store from time to time; the other rank must have set its key.
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        if stop.is_requested():
            return True
    return False
"""
TAIL = """
dist.barrier()
print(json.dumps(out))
started.__exit__(None, None, None)
"""


def ranks(body, run, **env):
    return [json.loads(text) for text in run_ranks(2, HEAD + body + TAIL, run, timeout=120, env=env)]


def test_clocks_and_files_are_reasons_on_all_ranks(tmp_path):
    both = ranks(
        """
stop = requests()
out["nothing"] = stop.agree().reason
if rank == 0:
    (run / "save").touch()
out["save"] = [stop.agree().save, stop.agree().save]   # the file is gone after the first
dist.barrier()
out["long"] = requests("1-0").agree().reason
time.sleep(1.5)
out["short"] = requests("0:00:01").agree().reason

# A job that ends in 60 s: before anything was measured no step is too long, then one of 40 s is.
near = requests(SLURM_JOB_END_TIME=str(int(time.time()) + 60))
out["unmeasured"] = near.agree().reason
near.record_step(10.0, 5.0, unstoppable=10.0)
out["fits"] = near.agree().reason
near.record_step(40.0, 0.0, unstoppable=10.0)
out["in a generation"] = seen(near, 2.0)
out["near"] = near.agree().reason

# Only rank 0 sees the file: both learn of it, within a generation too.
if rank == 0:
    (run / "stop").touch()
stop = requests()
out["hand"] = [seen(stop), stop.agree().reason, stop.agree().by_hand]
""",
        tmp_path,
    )
    assert (
        both[0]
        == both[1]
        == {
            "nothing": "",
            "save": [True, False],
            "long": "",
            "short": "run.max_time is over",
            "unmeasured": "",
            "fits": "",
            "in a generation": False,
            "near": "the job's end is near",
            "hand": [True, "the file 'stop'", True],
        }
    )
    assert not (tmp_path / "save").exists() and (tmp_path / "stop").exists()


def test_a_signal_to_one_rank_stops_both_but_no_child(tmp_path):
    both = ranks(
        """
child = subprocess.Popen(["sleep", "30"])
stop = requests()
out["before"] = [stop.agree().reason, str(requested_signal())]
if rank == 1:
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(child.pid, signal.SIGUSR2)   # Slurm sends it to every process of a step
out["in a generation"] = seen(stop)
out["agreed"] = stop.agree().reason
time.sleep(0.2)
out["child"] = child.poll()
child.terminate()
out["terminated"] = child.wait(10)
if rank == 1:
    os.kill(os.getpid(), signal.SIGTERM)
out["terminate"] = requests().agree().reason
""",
        tmp_path,
        SLURM_JOB_ID="5",
    )
    assert (
        both[0]
        == both[1]
        == {
            "before": ["", "None"],
            "in a generation": True,
            "agreed": "SIGUSR2",
            "child": None,
            "terminated": -15,
            "terminate": "SIGTERM",
        }
    )


def test_a_lead_that_is_too_short_is_reported_once(tmp_path):
    [first, _] = ranks(
        """
stop = requests(LOCKSTEP_SIGNAL_LEAD="120")
steps = [(0.0, 80.0), (41.0, 80.0), (0.0, 900.0)]  # (checkpoint, unstoppable) in seconds
out["warnings"] = [stop.record_step(500.0, save, unstoppable=rest) for save, rest in steps]
out["unknown"] = requests(LOCKSTEP_SIGNAL_LEAD="").record_step(500.0, 500.0, unstoppable=500.0)
""",
        tmp_path,
    )
    fine, warning, again = first["warnings"]
    assert fine == again == first["unknown"] == ""
    assert (
        "comes 120 s early" in warning
        and "a step (80 s) and a checkpoint (41 s)" in warning
        and "USR2@302" in warning
    )
