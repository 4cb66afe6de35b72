"""python -m launch from its command line; scripts stand in for Slurm's commands."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.runs import read_runs

ROOT = Path(__file__).resolve().parents[3]
CONFIG = """
algorithm: grpo
run: {name: test, max_steps: 20}
model: {path: model}
data: {train: [train.parquet]}
training: {optimizer: {lr: 1.0e-3}}
"""
SWEEP = """
name: sw
config: config.yaml
at_a_time: 2
overrides: {validation.every: 0}
grid:
  training.optimizer.lr: [1.0e-3, 2.0e-3]
  rollout.samples_per_prompt: [2, 3, 4]
job: {gpus_per_node: 0, ranks_per_node: 1, time: "00:20:00", signal_lead_s: 60}
"""


PROGRAMS = {
    "sbatch": 'echo "$*" >> sbatch.log; mapfile -t all < sbatch.log; echo $((100 + ${#all[@]}))',
    "squeue": "[ ! -f queue ] || printf '%s\\n' \"$(<queue)\"",
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Create a directory to launch from, with an sbatch that counts jobs and a squeue that reads a file."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    (tmp_path / "bin").mkdir()
    for name, script in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # and nothing else: this machine may have Slurm
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def sweep(place):
    """Submit the sweep of sweep.yaml and return its directory."""
    assert "submitted array 101 with 6 tasks" in launch("sweep", "sweep.yaml")
    return place / "runs" / "sw"


def python(*arguments, **options):
    options = {"capture_output": True, "timeout": 120} | options
    command, environment = [sys.executable, *arguments], os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, text=True, env=environment, **options)


def launch(*arguments, code=0):
    done = python("-m", "launch", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr


def write_status(run, state, **facts):
    run.mkdir(parents=True, exist_ok=True)
    status = dict(state=state, step=1, checkpoint_step=0, max_steps=20, reason="", job="", restarts=0)
    status |= dict(host="h", pid=1, time=time.time())
    (run / "status.json").write_text(json.dumps(status | facts))


def states(out):
    lines = [line.split() for line in out.splitlines() if "=" in line.split("  ")[0]]
    return {Path(name).name: state for name, state, *_ in lines}


def point_names(sweep):
    return [point["name"] for point in json.loads((sweep / "launch" / "sweep.json").read_text())["points"]]


NODES = "--config config.yaml --nodes 2 --gpus-per-node 0 --ranks-per-node 4".split()


class TestSubmit:
    def test_the_file_is_kept_and_submitted(self, place):
        assert "not submitted" in launch("submit", *NODES, "--dry-run")
        assert not (place / "sbatch.log").exists()
        out = launch("submit", *NODES, "--time", "03:00:00", "--", "run.max_steps=7")
        file = place / "runs" / "test" / "launch" / "job.sbatch"
        assert file.read_text() in out and "max_steps: 7" in out and "submitted job 101" in out
        assert str(file) in (place / "sbatch.log").read_text()
        (run,) = read_runs([place / "runs" / "test"])
        assert (run.state, run.job) == ("unstarted", "101")
        (place / "queue").write_text("101 PENDING\n")
        (run,) = read_runs([place / "runs" / "test"])
        assert run.state == "queued"

    def test_a_line_break_in_an_override_does_not_leave_the_comment(self, place):
        launch("submit", *NODES, "--dry-run", "--", 'reward.kwargs={a: "b\nexit 3"}')
        lines = (place / "runs" / "test" / "launch" / "job.sbatch").read_text().splitlines()
        assert [line for line in lines if line.startswith("exit 3")] == ["exit 3\"}'"]  # train's quotes

    def test_what_does_not_fit_is_not_submitted_unless_forced(self, place):
        big = "--config config.yaml --nodes 1 -- model.path=qwen2.5-0.5b rollout.gpu_memory_utilization=0.01"
        assert "does not fit" in launch("submit", *big.split(), code=2)
        assert not (place / "sbatch.log").exists()
        out = launch("submit", "--force", *big.split())
        assert "DOES NOT FIT" in out and "submitted job" in out
        assert "GPU-hours of the allocation, at most: 192.0" in out

    def test_a_typo_or_a_missing_slurm_is_one_sentence(self, place):
        assert "run.max_steps" in launch("submit", *NODES, "--", "run.max_stepz=7", code=2)
        (place / "bin" / "sbatch").unlink()
        assert "sbatch is not on this machine" in launch("submit", *NODES, code=2)


class TestSweep:
    def test_one_array_with_a_limit_and_a_directory_for_each_point(self, place):
        out = launch("sweep", "sweep.yaml")
        assert "submitted array 101 with 6 tasks" in out and "#SBATCH --array=0-5%2" in out
        points = place / "runs" / "sw" / "launch" / "points"
        assert len(list(points.iterdir())) == 6
        lines = (points / "4").read_text().splitlines()
        assert "run.name=lr=0.002_samples_per_prompt=3" in lines and "validation.every=0" in lines
        assert f"run.dir={place}/runs/sw/lr=0.002_samples_per_prompt=3" in lines

    def test_only_failed_submits_what_neither_finished_nor_waits(self, place, sweep):
        names = [f"lr={lr}_samples_per_prompt={n}" for lr in ("0.001", "0.002") for n in (2, 3, 4)]
        # Run 2 was killed: Slurm has no record of it.
        for number, state in enumerate("finished failed running stopped running".split()):
            reason = "OSError: disk" if state == "failed" else ""
            write_status(sweep / names[number], state, job=f"101_{number}", reason=reason)
        (place / "queue").write_text("101_4 RUNNING\n101_3 PENDING\n999 RUNNING\n")
        out = launch("status", "runs/sw")
        assert states(out) == dict(zip(names, "finished failed lost queued running unstarted".split()))
        assert "OSError: disk" in out
        out = launch("sweep", "sweep.yaml", "--only", "failed")
        assert "#SBATCH --array=1-2,5%2" in out and "submitted array 102 with 3 tasks" in out
        assert (sweep / "launch" / "job-1.sbatch").exists() and (sweep / "launch" / "job-2.sbatch").exists()
        (place / "queue").write_text("102_1 PENDING\n102_2 RUNNING\n102_5 PENDING\n")
        out = launch("sweep", "sweep.yaml", "--only", "failed")
        assert "#SBATCH --array=3-4%2" in out  # the first array has left the queue, the second waits

    def test_new_points_alone_are_submitted_and_old_numbers_stay(self, place, sweep):
        changed = SWEEP.replace("[2, 3, 4]", "[2, 3, 4, 5]").replace("[1.0e-3, 2.0e-3]", "[1.0e-3]")
        (place / "sweep.yaml").write_text(changed)
        out = launch("sweep", "sweep.yaml")
        assert "#SBATCH --array=6%2" in out and "samples_per_prompt=5" in out
        assert "nothing to submit" in launch("sweep", "sweep.yaml")

    def test_an_invalid_sweep_is_refused_before_anything_is_submitted(self, place):
        for old, new, words in (
            ("[2, 3, 4]", "[2, 0]", ("samples_per_prompt=0", "at least 1")),
            ("at_a_time: 2", "at_a_tim: 2", ("at_a_tim",)),
            ("name: sw", "", ("name is empty",)),
        ):
            (place / "sweep.yaml").write_text(SWEEP.replace(old, new))
            error = launch("sweep", "sweep.yaml", code=2)
            assert all(word in error for word in words) and not (place / "sbatch.log").exists()


class TestStatus:
    def test_the_columns(self, place):
        run = place / "runs" / "a=1"
        write_status(run, "running", step=7, restarts=2, job="55")
        record = {"training/global_step": 7, "critic/score/mean": 0.25, "time": 1}
        (run / "metrics.jsonl").write_text(json.dumps(record) + '\n{"training/glo')
        (run / "heartbeat").mkdir()
        for rank, age in enumerate((5, 400)):
            (run / "heartbeat" / f"rank_{rank}.json").write_text(json.dumps({"time": time.time() - age}))
        (place / "queue").write_text("55 RUNNING\n")
        line = next(line for line in launch("status").splitlines() if "a=1" in line)
        assert line.split() == ["runs/a=1", "running", "7/20", "0.2500", "6", "min", "3", "55"]

    def test_without_slurm_silence_decides(self, place):
        (place / "bin" / "squeue").unlink()
        for name, age in (("a=quiet", 1000), ("b=alive", 10)):
            write_status(place / "runs" / name, "running", time=time.time() - age)
        assert states(launch("status")) == {"a=quiet": "lost", "b=alive": "running"}

    def test_logs_of_ranks_are_no_run(self, place, sweep):
        """slurm/job.sh keeps a copy of status.json beside the ranks' logs."""
        alone = place / "runs" / "a=1"
        write_status(alone, "finished")
        for directory in (sweep, alone):
            write_status(directory / "launch" / "job-101_0.ranks", "finished")
        write_status(place / "job-7.ranks", "finished")  # a batch file that was submitted by hand, from here
        assert "6 runs: 6 unstarted" in launch("status", "runs/sw")
        assert "1 runs: 1 finished" in launch("status", "runs/a=1")
        assert "7 runs: 6 unstarted, 1 finished" in launch("status", ".")

    def test_states_follow_from_files_if_slurm_does_not_answer(self, place, sweep):
        points = point_names(sweep)
        write_status(sweep / points[0], "running", job="101_0")
        write_status(sweep / points[1], "running", job="101_1", time=time.time() - 1000)
        write_status(sweep / points[2], "failed", job="101_2")
        record = {"training/global_step": 1, "time": 1, "critic/score/mean": 0}
        (sweep / points[0] / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        no_controller = "#!/bin/bash\necho 'error: Unable to contact slurm controller' >&2\nexit 1\n"
        (place / "bin" / "squeue").write_text(no_controller)
        for name in ("report", "status"):
            done = python("-m", "launch", name, "runs/sw")
            assert done.returncode == 0 and len(done.stderr.splitlines()) == 1, done.stderr
            assert done.stderr.startswith("warning: the queue is not known")
            assert "Unable to contact" in done.stderr
        shown = states(done.stdout)
        assert [shown[name] for name in points[:4]] == ["running", "lost", "failed", "unstarted"]
        # What may wait in the queue is not submitted a second time.
        assert "Unable to contact" in launch("sweep", "sweep.yaml", "--only", "failed", code=2)

    def test_a_directory_that_is_not_there(self, place):
        assert "nowhere" in launch("status", "nowhere", code=2)


def test_report_shows_the_curves_of_a_sweep(place, sweep):
    assert "no" in launch("report", "runs/sw", code=2)
    for number, name in enumerate(point_names(sweep)[:3]):
        write_status(sweep / name, "finished")
        values = [{"time": s, "critic/score/mean": 0.1 * number * s, "a/b": 1.0} for s in (1, 2)]
        lines = [json.dumps({"training/global_step": record["time"]} | record) for record in values]
        (sweep / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert "3 of 6 runs have critic/score/mean" in launch("report", "runs/sw")
    assert (sweep / "report.png").read_bytes().startswith(b"\x89PNG")
    page = (sweep / "report.html").read_text()
    best = page.split("<tr>")[2]  # the largest last value comes first
    assert "samples_per_prompt=4" in best and "<td>0.4</td>" in best
    assert page.count("<tr>") == 7 and "data:image/png;base64," in page
    launch("report", "runs/sw", "--metric", "a/b")
    assert "no run has the metric x" in launch("report", "runs/sw", "--metric", "x", code=2)


def test_help_and_an_unknown_command(place):
    assert "launch sweep" in launch("--help")
    assert "there is no command sweeep" in launch("sweeep", code=2)


def run_into_closed_pipe(*arguments):
    """Run the command with a stdout whose reader has left, as in `... | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        return python("-m", "launch", *arguments, capture_output=False, stdout=pipe, stderr=subprocess.PIPE)


def test_a_command_whose_reader_has_left_ends(place):
    (place / "runs").mkdir()
    for arguments in (("--help",), ("status",), ("submit", "--help"), ("submit", *NODES, "--dry-run")):
        done = run_into_closed_pipe(*arguments)
        assert (done.returncode, done.stderr) == (-signal.SIGPIPE, ""), arguments
    done = run_into_closed_pipe("submit", *NODES)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "python -m launch status" in done.stderr


SUBMIT = """
import sys
for name in ("torch", "submitit", "matplotlib", "transformers"): sys.modules[name] = None
from launch.__main__ import main
assert main("submit --config config.yaml --nodes 1 -- model.path=qwen2.5-0.5b".split()) == 0
assert main(["sweep", "sweep.yaml"]) == 0 and main(["status", "runs"]) == 0
"""


def test_submitting_needs_neither_torch_nor_submitit(place):
    done = python("-c", SUBMIT)
    assert done.returncode == 0 and "FITS" in done.stdout, done.stderr
