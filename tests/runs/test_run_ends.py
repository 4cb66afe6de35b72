"""Runs with a rank that hangs, fails, dies or computes something else: train_rl.py with an injected fault."""

import contextlib
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.spawn import ROOT, RanksFailed, run_ranks
from tests.toy import SFT, write_config

FAULTY = Path(__file__).with_name("faulty_train.py")
LIMIT_S = 6


CHECKPOINTS = ("checkpoint.every=1", "watchdog.beat_s=1", "watchdog.lost_s=60")


@pytest.fixture
def sft(toy, tmp_path) -> Path:
    """Return the config of a supervised run of two steps, with a checkpoint at each."""
    return write_config(tmp_path, toy, *SFT, *CHECKPOINTS)


@pytest.fixture
def grpo(toy, tmp_path) -> Path:
    return write_config(tmp_path, toy, *CHECKPOINTS)


def failed_run(
    kind: str,
    place: str,
    rank: int,
    config: Path,
    *overrides: str,
    call: int = 1,
    world_size: int = 2,
    grace: float = 30,
) -> RanksFailed:
    """A run with that fault, which must fail. The other ranks have `grace` seconds to end by themselves."""
    fault = (kind, place, rank, call)
    with pytest.raises(RanksFailed) as failure:
        run_ranks(world_size, FAULTY, *fault, "--config", config, *overrides, timeout=300, grace=grace)
    return failure.value


def errors(failure: RanksFailed) -> list[str]:
    """The lines `error: ...` of each rank's stderr, joined."""
    return ["\n".join(re.findall(r"^error: .*$", text, re.MULTILINE)) for text in failure.stderr]


def ending(run: Path) -> tuple[str, str]:
    """Return state and reason of status.json."""
    status = json.loads((run / "status.json").read_text())
    return status["state"], status["reason"]


def files_of(run: Path) -> dict[str, bytes]:
    """Return the content of every file below a directory."""
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


# Hangs --------------------------------------------------------------------------------------------


def check_hang(failure: RanksFailed, run: Path, phase: str, frame: str) -> None:
    """Every rank ended with code 1; one named who hangs and where; the guilty rank's file has the frame."""
    assert set(failure.returncodes) == {1}, failure
    [said] = [line for line in errors(failure) if line]
    assert f"watchdog.limits.{phase}=" in said and re.search(
        rf"rank 1 \([^)]+\) in {phase} of step 1 for \d+ s at .*{frame}", said
    )
    assert "rank 0 in" in said  # where the other one waits
    assert ending(run) == ("failed", said.removeprefix("error: "))
    [file] = (run / "stacks").glob("step_*_rank_1.txt")
    assert frame in file.read_text() and list((run / "stacks").glob("step_*_rank_0.txt"))


@pytest.fixture(scope="module")
def silent(toy, tmp_path_factory) -> dict[str, tuple[RanksFailed, Path]]:
    """Return fault -> (failure, run directory). The runs mostly wait, so they run at once."""

    def run(fault: str) -> tuple[RanksFailed, Path]:
        directory = tmp_path_factory.mktemp(fault)
        config = write_config(directory, toy, *SFT, *CHECKPOINTS)
        limit, call = (f"watchdog.limits.update={LIMIT_S}", 1) if fault != "kill_this_rank" else ("", 2)
        failure = failed_run(fault, "update", 1, config, *filter(None, [limit]), call=call)
        return failure, directory / "run"

    faults = ("hang_here", "hold_the_interpreter_lock", "kill_this_rank")
    with ThreadPoolExecutor() as pool:
        return dict(zip(faults, pool.map(run, faults)))


def test_a_hang_in_an_update_is_dumped_and_its_rank_named(silent):
    check_hang(*silent["hang_here"], "update", "hang_here")


def test_a_hang_that_holds_the_interpreter_lock_is_dumped(silent):
    failure, run = silent["hold_the_interpreter_lock"]
    assert set(failure.returncodes) == {1}, failure
    [said] = [line for line in errors(failure) if line]
    assert "watchdog.limits.update=" in said and re.search(
        r"rank 1 \([^)]+\), last heartbeat \d+ s ago in .*native code", said
    ), said
    assert ending(run) == ("failed", said.removeprefix("error: "))
    stacks = (run / "stacks" / "native_rank_1.txt").read_text()
    # Its timer began with the phase. It ends 6 s after the limit; stacks must be there after 10 s.
    assert "hold_the_interpreter_lock" in stacks and f"Timeout (0:00:{LIMIT_S + 6:02d})!" in stacks


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["generate", "score", "log_probs", "refit", "save"])
def test_a_hang_in_each_phase_is_dumped_and_its_rank_named(phase, grpo, tmp_path):
    failure = failed_run("hang_here", phase, 1, grpo, f"watchdog.limits.{phase}={LIMIT_S}")
    check_hang(failure, tmp_path / "run", phase, "hang_here")


# Errors and deaths --------------------------------------------------------------------------------


def test_the_first_error_is_the_last_line_of_the_log(sft, tmp_path):
    failure = failed_run("raise_here", "update", 1, sft, call=2)
    assert set(failure.returncodes) == {1}
    said = errors(failure)
    assert said[0] == said[1] and last_line(failure.stderr[0]) == said[0]
    assert re.fullmatch(
        r"error: rank 1 \(.+\) failed in update of step 2: ValueError: injected: "
        r"the reactor is on fire; see .*",
        said[0],
    )
    assert "Traceback" not in failure.stderr[0] and "raise_here" in failure.stderr[1]
    assert "raise_here" in (tmp_path / "run" / "errors" / "rank_1.txt").read_text()
    assert ending(tmp_path / "run") == ("failed", said[0].removeprefix("error: "))
    assert not (tmp_path / "run" / "lock.json").exists()  # the next run need not wait


@pytest.mark.slow
def test_an_error_is_reported_even_if_nothing_can_be_written(sft, tmp_path):
    (tmp_path / "run" / "errors" / "rank_1.txt").mkdir(
        parents=True
    )  # as good as a full disk, and works for root
    said = errors(failed_run("raise_here", "update", 1, sft))
    assert said[0] == said[1] and "the reactor is on fire; its traceback cannot be written: " in said[0]


def test_a_killed_rank_is_reported_as_lost(silent):
    failure, run = silent["kill_this_rank"]
    assert failure.returncodes == [1, -9]
    said = errors(failure)[0]
    assert re.search(r"^error: lost rank 1 \(.+\), last heartbeat \d+ s ago in .*: killed from outside", said)
    assert ending(run) == ("failed", said.removeprefix("error: "))


@pytest.mark.slow
def test_the_rank_that_holds_the_store_is_reported_as_lost_too(sft, tmp_path):
    failure = failed_run("kill_this_rank", "update", 0, sft, call=2)
    assert failure.returncodes == [-9, 1]
    said = errors(failure)[1]
    assert re.search(r"^error: lost rank 0 \(.+\), last heartbeat \d+ s ago in", said)
    assert ending(tmp_path / "run") == ("failed", said.removeprefix("error: "))


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_stands_still_is_reported_as_lost(rank, sft, tmp_path):
    # The stopped rank never ends, so nothing is to be waited for after the other one.
    failure = failed_run("stop_this_rank", "update", rank, sft, "watchdog.lost_s=6", call=2, grace=0)
    assert failure.returncodes[1 - rank] == 1 and failure.returncodes[rank] is None
    assert re.search(
        rf"^error: lost rank {rank} \(.+\), last heartbeat \d+ s ago in", errors(failure)[1 - rank]
    )
    assert ending(tmp_path / "run") == ("failed", errors(failure)[1 - rank].removeprefix("error: "))


@pytest.mark.slow
def test_the_end_of_the_store_alone_is_reported_as_that(sft, tmp_path):
    failure = failed_run("kill_the_store", "update", 0, sft)
    assert failure.returncodes == [1, 1]
    [said] = [line for line in errors(failure) if line]
    assert said.startswith("error: the job's store, a process beside rank 0, was killed from outside")
    assert ending(tmp_path / "run") == ("failed", said.removeprefix("error: "))


@pytest.mark.slow
def test_out_of_memory_on_one_rank_is_reported_as_that(sft):
    failure = failed_run("run_out_of_memory", "update", 0, sft)
    assert set(failure.returncodes) == {1}
    assert "rank 0" in errors(failure)[0] and "MemoryError" in errors(failure)[0] and not errors(failure)[1]


@pytest.mark.slow
def test_a_rank_above_the_host_memory_limit_ends_the_run(sft, tmp_path):
    failure = failed_run("grow", "update", 1, sft, "memory.host_limit_gib=1.6", "run.max_steps=500")
    assert set(failure.returncodes) == {1}
    said = errors(failure)[0]
    limit = r"rank 1 \(.+\) holds \d\.\d+ GiB of host memory, more than memory.host_limit_gib=1.6, in"
    assert re.search(limit, said)
    assert ending(tmp_path / "run") == ("failed", said.removeprefix("error: "))
    assert json.loads((tmp_path / "run" / "heartbeat" / "rank_0.json").read_text())["host_memory_gib"] < 1.5


# Disagreement -------------------------------------------------------------------------------------


def test_a_rank_with_other_data_is_found_by_the_next_phase(sft):
    failure = failed_run("read_other_data", "draw", 1, sft, call=2)
    assert set(failure.returncodes) == {1}
    said = errors(failure)[0]
    assert said.startswith(
        "error: all ranks stopped in update of step 2: Disagreement: ranks disagree on the batch ids before"
    )
    assert re.search(r"rank 1 \([^)]+\) has [0-9a-f]+; rank 0 \([^)]+\): [0-9a-f]+; see", said), said


def test_a_flipped_bit_of_a_weight_is_found_when_compared(sft):
    failure = failed_run("flip_a_bit", "targets", 1, sft, "agreement.weights_every=2", call=2)
    assert set(failure.returncodes) == {1}
    said = errors(failure)[0]
    assert "Disagreement: decoder.layers.0.mlp.linear_fc2.weight of the policy on rank 1 differ" in said, said


# The run directory --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_without_its_lock_writes_nothing(sft, tmp_path):
    said = errors(failed_run("lose_the_lock", "targets", 0, sft))[0]
    assert re.search(r"error: .*/run is now that of process \d+ on node7: this run was considered dead", said)
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()
    assert not list((tmp_path / "run").glob("checkpoints/step*"))
    assert (tmp_path / "run" / "lock.json").exists()  # it is the other run's
    assert ending(tmp_path / "run")[0] == "running"  # so is the status


CARRIES_OVER = (
    "rollout.carry_over=true",
    "rollout.max_staleness=1",
    "rollout_correction.truncate_tokens=2.0",
    "logging.rollouts=all",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "call", "overrides"),
    [
        ("update", 2, CARRIES_OVER),
        ("learned", 2, CARRIES_OVER),
        ("save", 1, ()),
        ("export", 1, ("checkpoint.every=0", "checkpoint.export_hf=true")),
        ("end", 1, ()),
    ],
)
def test_a_run_that_was_taken_over_touches_no_file(place, call, overrides, toy, tmp_path):
    algorithm = () if overrides == CARRIES_OVER else SFT
    config = write_config(tmp_path, toy, *CHECKPOINTS, *algorithm, *overrides)
    failure = failed_run("be_taken_over", place, 0, config, call=call, world_size=1)
    assert failure.returncodes == [1], failure
    assert re.search(r"error: .*/run .*: this run was considered dead, and ends", errors(failure)[0]), failure
    run = tmp_path / "run"
    assert files_of(run) == files_of(run.with_name("run-of-the-other"))
    assert ending(run) == ("finished", "")


@pytest.mark.slow
def test_a_run_does_not_compare_the_clocks_of_hosts(sft, tmp_path):
    arguments = ("set_the_clock_back", "update", 1, 2, "--config", sft, "watchdog.lost_s=10")
    run_ranks(2, FAULTY, *arguments, timeout=300)
    assert ending(tmp_path / "run") == ("finished", "")


@pytest.mark.slow
def test_a_second_run_in_the_directory_of_a_live_one_is_refused(sft, tmp_path):
    command = [
        sys.executable,
        ROOT / "train_rl.py",
        "--config",
        sft,
        "run.max_steps=100000",
        "checkpoint.every=0",
    ]
    first = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
    try:
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.fail(f"the first run ended with {first.wait(timeout=0.2)}")
        with pytest.raises(RanksFailed) as failure:
            run_ranks(2, ROOT / "train_rl.py", "--config", sft, timeout=100)
        assert set(failure.value.returncodes) == {2} and first.poll() is None
        [said] = [line for line in errors(failure.value) if line]
        assert re.search(
            rf"run is in use by a live run, process {first.pid} on .+; "
            "wait for it, end it, or set another run.dir",
            said,
        )
    finally:
        first.kill()
        first.wait()
    run_ranks(
        2, ROOT / "train_rl.py", "--config", sft, timeout=200
    )  # the lock of a killed run does not keep the next one out
