"""Commands of `launch`, with Slurm's commands played by scripts: what is written, submitted and shown."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.runs import read_runs

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory to launch from, with an sbatch that counts jobs and a squeue that reads a file."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    programs = {
        "sbatch": 'printf "%s\\n" "$*" >> sbatch.log; mapfile -t all < sbatch.log\n'
        "echo $((100 + ${#all[@]}))",
        "qsub": 'printf "%s\\n" "$*" >> qsub.log; echo 17.server',
        "bsub": 'printf "%s\\n" "$(</dev/stdin)" >bsub.stdin; echo "Job <17> is submitted."',
        "flux": 'printf "%s\\n" "$*" >> flux.log; echo f3XyZ',
        "squeue": "[ ! -f queue ] || printf '%s\\n' \"$(<queue)\"",
    }
    (tmp_path / "bin").mkdir()
    for name, script in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv(
        "PATH", str(tmp_path / "bin")
    )  # and nothing else: this machine may have a Slurm of its own
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_launch(*arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "lockstep", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def launch(*arguments, code=0):
    done = run_launch(*arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr


def write_status(run, state, **facts):
    run.mkdir(parents=True, exist_ok=True)
    status = {
        "state": state,
        "step": 1,
        "checkpoint_step": 0,
        "max_steps": 20,
        "reason": "",
        "job": "",
        "restarts": 0,
        "host": "h",
        "pid": 1,
        "time": time.time(),
    }
    (run / "status.json").write_text(json.dumps(status | facts))


def file_of(out):
    """The batch file that a command names first."""
    return Path(out.splitlines()[0].removeprefix("# ")).read_text()


def states(out):
    return {
        Path(line.split()[0]).name: line.split()[1] for line in out.splitlines() if "=" in line.split("  ")[0]
    }


class TestSubmit:
    arguments = ("--config", "config.yaml", "--nodes", "2", "--gpus-per-node", "0", "--ranks-per-node", "4")

    def test_the_file_is_kept_and_submitted(self, place):
        out = launch("submit", *self.arguments, "--time", "03:00:00", "--", "run.max_steps=7")
        file = place / "runs" / "test" / "launch" / "job.sbatch"
        assert "run.max_steps=7" in file.read_text() and "submitted job 101" in out
        assert out.startswith(f"# {file}\n") and len(out.splitlines()) < 10
        assert str(file) in (place / "sbatch.log").read_text()
        (run,) = read_runs([place / "runs" / "test"])
        assert (run.state, run.job) == ("unstarted", "101")
        (place / "queue").write_text("101 PENDING\n")
        (run,) = read_runs([place / "runs" / "test"])
        assert run.state == "queued"

    def test_a_user_who_interrupts_sbatch_learns_of_the_job(self, place, monkeypatch):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # numpy's threads take signals
        (place / "bin" / "sbatch").write_text("#!/bin/bash\nkill -TERM $PPID $$; echo 17\n")
        done = run_launch("submit", *self.arguments)
        assert done.returncode == -signal.SIGTERM and "submitted job 17" in done.stdout
        assert read_runs([place / "runs" / "test"])[0].job == "17"
        done = run_launch("sweep", "sweep.yaml")
        assert done.returncode == -signal.SIGTERM and "submitted array 17 with 6 tasks" in done.stdout

    @pytest.mark.parametrize("kind, job", [("pbs", "17.server"), ("lsf", "17"), ("flux", "f3XyZ")])
    def test_other_schedulers_get_a_file_of_their_own(self, place, kind, job):
        out = launch("submit", *self.arguments, "--scheduler", kind, "--dry-run")
        file = place / "runs" / "test" / "launch" / f"job.{kind}"
        command = {"pbs": f"qsub {file}", "lsf": f"bsub <{file}", "flux": f"flux batch {file}"}[kind]
        assert f"not submitted (--dry-run); {command}" in out and file.read_text() in out
        assert f"submitted job {job};" in launch("submit", *self.arguments, "--scheduler", kind)
        (run,) = read_runs([place / "runs" / "test"])
        assert (run.state, run.job) == ("unstarted", job)
        if kind == "lsf":
            assert (place / "bsub.stdin").read_text() == file.read_text()

    def test_of_several_files_later_ones_win(self, place):
        (place / "more.yaml").write_text("run: {name: test, max_steps: 9}\n")
        out = launch("submit", *self.arguments, "--config", "more.yaml", "run.seed=5", "--dry-run")
        words = f"train {place}/config.yaml {place}/more.yaml run.seed=5"
        assert "max_steps: 9" in out and words in out.replace(" \\\n    ", " ")
        (place / "sweep.yaml").write_text(
            SWEEP.replace("config: config.yaml", "config: [config.yaml, more.yaml]")
        )
        assert f'train {place}/config.yaml {place}/more.yaml "$' in launch("sweep", "sweep.yaml", "--dry-run")
        (place / "sweep.yaml").write_text(SWEEP.replace("config: config.yaml", "config: {a: 1}"))
        assert "must be a path or a list of paths" in launch("sweep", "sweep.yaml", code=2)

    def test_a_line_break_in_an_override_does_not_leave_the_comment(self, place):
        launch("submit", *self.arguments, "--dry-run", "--", 'reward.kwargs={a: "b\nexit 3"}')
        text = (place / "runs" / "test" / "launch" / "job.sbatch").read_text()
        assert [line for line in text.splitlines() if line.startswith("exit 3")] == [
            "exit 3\"}'"
        ]  # within train's quotes

    def test_the_limits_of_jobs_that_start_now_are_keys(self, place):
        limits = "{jobs: 4, node_hours: 9, partitions: [a, b], not_before: 2026-12-24 18:00:00}"
        keys = "model.path=models/qwen2.5-7b", "checkpoint.every=1", f"run.limits={limits}"
        own = ("--nodes=2", "--", *keys)
        launch("submit", "--anywhen", "--dry-run", "--config", "config.yaml", *own)
        plan = json.loads((place / "runs" / "test" / "anywhen" / "plan.json").read_text())
        assert plan["limits"]["jobs"] == 4 and plan["partitions"] == ["a", "b"]
        assert time.localtime(plan["not_before"])[:4] == (2026, 12, 24, 18)
        live = place / "runs" / "test" / "anywhen"
        (live / "000001-asked.json").write_text("{}")
        launch("submit", "--anywhen", "--dry-run", "--config", "config.yaml", "--nodes=1", "--", *keys)
        assert json.loads((live / "plan.json").read_text()) == plan
        assert len(json.loads((live / "dry-run" / "plan.json").read_text())["sizes"]) == 1
        done = run_launch("submit", *self.arguments, "--", "run.limits.jobs=4")
        assert "run.limits has no effect on one job; add --anywhen" in done.stderr

    def test_a_dry_run_submits_nothing(self, place):
        assert "not submitted" in launch("submit", *self.arguments, "--dry-run")
        assert not (place / "sbatch.log").exists()

    def test_what_does_not_fit_is_not_submitted_unless_forced(self, place):
        big = (
            "--config",
            "config.yaml",
            "--nodes",
            "1",
            "--",
            "model.path=qwen2.5-0.5b",
            "rollout.gpu_memory_utilization=0.01",
        )
        said = launch("submit", *big, code=2)
        assert "does not fit" in said and not (place / "sbatch.log").exists()
        out = launch("submit", "--force", *big)
        assert (
            "DOES NOT FIT" in out
            and "GPU-hours of the allocation, at most: 192.0" in out
            and "submitted job" in out
        )

    def test_a_typo_is_one_sentence(self, place):
        assert "run.max_steps" in launch("submit", *self.arguments, "--", "run.max_stepz=7", code=2)

    def test_a_machine_without_slurm_says_so(self, place):
        (place / "bin" / "sbatch").unlink()
        assert "sbatch is not on this machine" in launch("submit", *self.arguments, code=2)


class TestSweep:
    def test_one_array_with_a_limit_and_a_directory_for_each_point(self, place):
        out = launch("sweep", "sweep.yaml")
        assert "submitted array 101 with 6 tasks" in out and "#SBATCH --array=0-5%2" in file_of(out)
        points = place / "runs" / "sw" / "launch" / "points"
        assert len(list(points.iterdir())) == 6
        lines = (points / "4").read_text().splitlines()
        assert "run.name=lr=0.002_samples_per_prompt=3" in lines and "validation.every=0" in lines
        assert f"run.dir={place}/runs/sw/lr=0.002_samples_per_prompt=3" in lines

    def test_only_failed_submits_what_neither_finished_nor_waits(self, place):
        launch("sweep", "sweep.yaml")
        sweep = place / "runs" / "sw"
        names = [f"lr={lr}_samples_per_prompt={n}" for lr in ("0.001", "0.002") for n in (2, 3, 4)]
        write_status(sweep / names[0], "finished", job="101_0")
        write_status(sweep / names[1], "failed", job="101_1", reason="OSError: disk")
        write_status(sweep / names[2], "running", job="101_2")  # killed: Slurm knows nothing of it
        write_status(sweep / names[3], "stopped", job="101_3")
        write_status(sweep / names[4], "running", job="101_4")
        (place / "queue").write_text("101_4 RUNNING\n101_3 PENDING\n999 RUNNING\n")
        out = launch("status", "runs/sw")
        assert states(out) == dict(
            zip(names, ["finished", "failed", "lost", "queued", "running", "unstarted"])
        )
        assert "OSError: disk" in out
        out = launch("sweep", "sweep.yaml", "--only", "failed")
        assert "#SBATCH --array=1-2,5%2" in file_of(out) and "submitted array 102 with 3 tasks" in out
        assert (sweep / "launch" / "job-1.sbatch").exists() and (sweep / "launch" / "job-2.sbatch").exists()
        (place / "queue").write_text("102_1 PENDING\n102_2 RUNNING\n102_5 PENDING\n")
        out = launch("sweep", "sweep.yaml", "--only", "failed")
        assert "#SBATCH --array=3-4%2" in file_of(out)  # the first array's are gone now, the second's wait

    def test_a_dry_run_writes_nothing(self, place):
        out = launch("sweep", "sweep.yaml", "--dry-run")
        assert "#SBATCH --array=0-5%2" in out and "lr=0.002_samples_per_prompt=3" in out
        assert "nothing is written" in out and not (place / "runs").exists()

    def test_only_new_points_are_submitted(self, place):
        launch("sweep", "sweep.yaml")
        (place / "sweep.yaml").write_text(
            SWEEP.replace("[2, 3, 4]", "[2, 3, 4, 5]").replace("[1.0e-3, 2.0e-3]", "[1.0e-3]")
        )
        out = launch("sweep", "sweep.yaml")
        assert "#SBATCH --array=6%2" in file_of(out) and "samples_per_prompt=5" in out
        assert "nothing to submit" in launch("sweep", "sweep.yaml")

    def test_an_invalid_point_is_named_before_a_submission(self, place):
        (place / "sweep.yaml").write_text(SWEEP.replace("[2, 3, 4]", "[2, 0]"))
        said = launch("sweep", "sweep.yaml", code=2)
        assert "samples_per_prompt=0" in said and "at least 1" in said and not (place / "sbatch.log").exists()

    @pytest.mark.parametrize("change, words", [("at_a_time: 2", "at_a_tim"), ("name: sw", "name is empty")])
    def test_a_typo_in_the_file(self, place, change, words):
        wrong = "at_a_tim: 2" if change.startswith("at") else ""
        (place / "sweep.yaml").write_text(SWEEP.replace(change, wrong))
        assert words in launch("sweep", "sweep.yaml", code=2)


class TestStatus:
    def test_the_columns(self, place):
        run = place / "runs" / "a=1"
        write_status(run, "running", step=7, restarts=2, job="55")
        (run / "metrics.jsonl").write_text(
            '{"training/global_step": 7, "critic/score/mean": 0.25, "time": 1}\n{"training/glo'
        )
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

    def test_logs_of_ranks_are_no_run(self, place):
        """slurm/job.sh keeps a copy of status.json beside the ranks' logs."""
        launch("sweep", "sweep.yaml")
        sweep, alone = place / "runs" / "sw", place / "runs" / "a=1"
        write_status(alone, "finished")
        for directory in (sweep, alone):
            write_status(directory / "launch" / "job-101_0.ranks", "finished")
        write_status(place / "job-7.ranks", "finished")  # a batch file that was submitted by hand, from here
        assert "6 runs: 6 unstarted" in launch("status", "runs/sw")
        assert "1 runs: 1 finished" in launch("status", "runs/a=1")
        assert "7 runs: 6 unstarted, 1 finished" in launch("status", ".")

    def test_states_follow_from_files_if_slurm_does_not_answer(self, place):
        launch("sweep", "sweep.yaml")
        sweep = place / "runs" / "sw"
        written = json.loads((sweep / "launch" / "sweep.json").read_text())
        points = [point["name"] for point in written["points"]]
        write_status(sweep / points[0], "running", job="101_0")
        write_status(sweep / points[1], "running", job="101_1", time=time.time() - 1000)
        write_status(sweep / points[2], "failed", job="101_2")
        record = {"training/global_step": 1, "time": 1, "critic/score/mean": 0}
        (sweep / points[0] / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        no_controller = "#!/bin/bash\necho 'error: Unable to contact slurm controller' >&2\nexit 1\n"
        (place / "bin" / "squeue").write_text(no_controller)
        commands = {name: run_launch(*name.split(), "runs/sw") for name in ("status", "sweep report")}
        for done in commands.values():
            assert done.returncode == 0 and len(done.stderr.splitlines()) == 1, done.stderr
            assert done.stderr.startswith("warning: Slurm's queue is unavailable")
            assert "Unable to contact" in done.stderr
        shown = states(commands["status"].stdout)
        assert [shown[name] for name in points[:4]] == ["running", "lost", "failed", "unstarted"]
        # What may wait in the queue is not submitted a second time.
        assert "Unable to contact" in launch("sweep", "sweep.yaml", "--only", "failed", code=2)

    def test_a_directory_that_is_not_there(self, place):
        assert "nowhere" in launch("status", "nowhere", code=2)


class TestReport:
    def test_the_curves_of_a_sweep(self, place):
        launch("sweep", "sweep.yaml")
        sweep = place / "runs" / "sw"
        for number, point in enumerate(
            json.loads((sweep / "launch" / "sweep.json").read_text())["points"][:3]
        ):
            run = sweep / point["name"]
            write_status(run, "finished")
            records = [
                {"training/global_step": s, "time": s, "critic/score/mean": 0.1 * number * s, "a/b": 1.0}
                for s in (1, 2)
            ]
            (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        out = launch("sweep", "report", "runs/sw")
        assert "3 of 6 runs have critic/score/mean" in out
        assert (sweep / "report.png").read_bytes().startswith(b"\x89PNG")
        page = (sweep / "report.html").read_text()
        rows = [row for row in page.split("<tr>")[2:]]
        assert "samples_per_prompt=4" in rows[0] and "<td>0.4</td>" in rows[0]  # the best last value first
        assert page.count("<tr>") == 7 and "data:image/png;base64," in page
        launch("sweep", "report", "runs/sw", "--metric", "a/b")
        assert "--metric=x is in the log of no run" in launch(
            "sweep", "report", "runs/sw", "--metric", "x", code=2
        )

    def test_a_sweep_without_records(self, place):
        launch("sweep", "sweep.yaml")
        assert "no" in launch("sweep", "report", "runs/sw", code=2)


def test_help_and_an_unknown_command(place):
    assert "Submit many runs" in launch("--help")
    assert "sweeep is no command" in launch("sweeep", code=2)
    for command in ("submit", "sweep", "status"):
        assert "usage" in launch(command, "--help")


def run_into_closed_pipe(*arguments):
    """Run the command with a closed reader of its stdout, for example as in `... | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "lockstep", *arguments]
        options = dict(stderr=subprocess.PIPE, env=environment, text=True, timeout=60)
        return subprocess.run(command, stdout=pipe, **options)


def test_a_reader_that_leaves_ends_it_silently(place):
    (place / "runs").mkdir()
    dry = ("submit", *TestSubmit.arguments, "--dry-run")
    for arguments in (("--help",), ("status",), ("submit", "--help"), dry):
        done = run_into_closed_pipe(*arguments)
        assert (done.returncode, done.stderr) == (-signal.SIGPIPE, ""), arguments


def test_a_submission_nobody_reads_says_where_to_look(place):
    done = run_into_closed_pipe("submit", *TestSubmit.arguments)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "lockstep status" in done.stderr


def test_submitting_needs_neither_torch_nor_submitit(place):
    code = (
        "import sys\n"
        "for name in ('torch', 'submitit', 'matplotlib', 'transformers'): sys.modules[name] = None\n"
        "from launch import status, submit, sweep\n"
        "given = ['--config', 'config.yaml', '--nodes', '1', '--', 'model.path=qwen2.5-0.5b']\n"
        "assert submit.main(given) == 0\n"
        "assert sweep.main(['sweep.yaml']) == 0\n"
        "assert status.main(['runs']) == 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "FITS" in done.stdout  # the estimate needs no torch either
