"""The commands, their submitit front and `lockstep doctor` on a real Slurm cluster of CPU nodes."""

import ast
import json
import subprocess
import sys

import pytest

from tests.records import records
from tests.slurm.cluster import PATIENCE_S, status, wait_for
from tests.slurm.test_batch_files import WEIRD
from tests.toy import SFT, write_config

pytestmark = pytest.mark.slow

SETTLED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
SUBMIT = """
import sys

from launch.submitit_jobs import Train, executor

kind, folder, config, *overrides = sys.argv[1:]
ranks = 2 if kind == "one" else 1
jobs = executor(
    folder, ntasks_per_node=ranks, time=30, array_parallelism=1, signal_delay_s=60, partition="main"
)
if kind == "one":
    print(jobs.submit(Train(), config, overrides).job_id)
else:
    points = [[*overrides, f"run.dir={folder}/{name}"] for name in "ab"]
    print(jobs.map_array(Train(), [config] * 2, points)[0].job_id)
"""
RESULT = """
import sys

from submitit import SlurmJob

print([SlurmJob(sys.argv[1], job, tasks=[0]).result() for job in sys.argv[2:]])
"""


@pytest.fixture
def launch(cluster, tmp_path):
    """`lockstep` on the cluster, in tmp_path; returns what it prints."""

    def run(*arguments):
        return cluster.run(sys.executable, "-m", "lockstep", *arguments, cwd=tmp_path)

    return run


@pytest.fixture
def sweep(config, tmp_path):
    """2 x 3 points of two steps; two points run at a time."""
    path = tmp_path / "sweep.yaml"
    path.write_text(
        f"""
        name: sweep
        config: {config}
        at_a_time: 2
        overrides: {{run.max_steps: 2}}
        grid:
          training.optimizer.lr: [1.0e-3, 2.0e-3]
          rollout.samples_per_prompt: [2, 3, 4]
        job: {{gpus_per_node: 0, ranks_per_node: 1, time: "00:30:00", signal_lead_s: 60}}
        """
    )
    return path


def states(out):
    """Point -> state, from the table of `launch status`."""
    return {
        line.split()[0].rsplit("/")[-1]: line.split()[1]
        for line in out.splitlines()
        if "samples_per_prompt=" in line
    }


def test_a_sweep_runs_two_at_a_time_and_repeats_the_failed(cluster, launch, sweep, tmp_path):
    assert "with 6 tasks" in launch("sweep", sweep)
    runs = tmp_path / "runs" / "sweep"
    points = [point["name"] for point in json.loads((runs / "launch" / "sweep.json").read_text())["points"]]
    job = json.loads((runs / "launch" / "jobs.jsonl").read_text())["job"]
    victim = points[2]
    wait_for(
        lambda: status(runs / victim)["state"] == "running", "the run to be killed", timeout=2 * PATIENCE_S
    )
    assert len(cluster.run("squeue", "-h", "-r", "-t", "RUNNING", "-o", "%i").split()) <= 2
    cluster.run("scancel", f"{job}_2")
    for task in range(6):
        cluster.wait(f"{job}_{task}", SETTLED, timeout=3 * PATIENCE_S)
    found = states(launch("status", runs))
    assert found.pop(victim) in ("stopped", "lost")  # it had seconds to say something
    assert found == {point: "finished" for point in points if point != victim}

    assert "with 1 tasks" in launch("sweep", sweep, "--only", "failed")
    again = json.loads((runs / "launch" / "jobs.jsonl").read_text().splitlines()[1])["job"]
    assert cluster.wait(f"{again}_2", SETTLED)["JobState"] == "COMPLETED"
    assert states(launch("status", runs)) == dict.fromkeys(points, "finished")
    assert "nothing to submit" in launch("sweep", sweep, "--only", "failed")

    assert all(
        [record["training/global_step"] for record in records(runs / point)] == [1, 2] for point in points
    )
    assert "6 of 6 runs" in launch("report", runs)
    assert (runs / "report.png").read_bytes().startswith(b"\x89PNG") and (
        runs / "report.html"
    ).read_text().count("<tr>") == 7


def test_a_sweep_in_one_job_is_cancelled_and_goes_on(cluster, launch, config, tmp_path):
    (tmp_path / "joint.yaml").write_text(
        f"""
        name: joint
        mode: adapters
        config: {config}
        overrides: {{adapter.kind: lora, adapter.in_engine: adapter, run.max_steps: 8, checkpoint.every: 1}}
        grid: {{training.optimizer.lr: [1.0e-3, 2.0e-3]}}
        seeds: 2
        job: {{nodes: 2, gpus_per_node: 0, ranks_per_node: 1, time: "00:30:00", signal_lead_s: 60}}
        """
    )
    launch("sweep", "joint.yaml")
    runs = tmp_path / "runs" / "joint"
    points = [point["name"] for point in json.loads((runs / "launch" / "sweep.json").read_text())["points"]]
    job = json.loads((runs / "launch" / "jobs.jsonl").read_text())["job"]
    wait_for(lambda: status(runs / points[3])["step"] >= 2, "step 2", timeout=2 * PATIENCE_S)
    cluster.run("scancel", job)
    cluster.wait(job, SETTLED)
    assert "finished" not in launch("status", runs)
    launch("sweep", "joint.yaml", "--only", "failed")
    again = json.loads((runs / "launch" / "jobs.jsonl").read_text().splitlines()[1])["job"]
    facts = cluster.wait(again, SETTLED, timeout=2 * PATIENCE_S)
    assert facts["JobState"] == "COMPLETED" and facts["NumNodes"] == "2"
    assert "4 runs: 4 finished" in launch("status", runs)
    for point in points:
        assert [record["training/global_step"] for record in records(runs / point)] == [*range(1, 9)]
    assert "resuming after step" in (runs / "launch" / f"joint-{again}.out").read_text()
    assert "nothing to submit" in launch("sweep", "joint.yaml", "--only", "failed")


def test_submit_writes_a_file_that_runs(cluster, launch, config, tmp_path):
    asked = ("--nodes", "2", "--gpus-per-node", "0", "--ranks-per-node", "1", "--time", "00:30:00")
    launch("submit", "--config", config, *asked, "--", "run.max_steps=1")
    job = json.loads((tmp_path / "run" / "launch" / "jobs.jsonl").read_text())["job"]
    facts = cluster.wait(job, SETTLED)
    assert facts["JobState"] == "COMPLETED" and facts["NumNodes"] == "2"
    assert "finished" in launch("status", tmp_path / "run")


def test_every_character_of_names_and_paths_reaches_the_job(cluster, toy, tmp_path):
    here = tmp_path / WEIRD
    here.mkdir()
    config = write_config(tmp_path, toy, *SFT, "run.max_steps=1").rename(here / "my config.yaml")
    asked = ("--nodes", "2", "--gpus-per-node", "0", "--ranks-per-node", "1", "--time", "00:30:00")
    name = 'it\'s $HOME #1 "x" 100%j'
    command = (
        sys.executable,
        "-m",
        "lockstep",
        "submit",
        "--config",
        config,
        *asked,
        "--",
        f"run.name={name}",
    )
    command = (*command, "run.dir=run")
    cluster.run(*command, cwd=here)
    job = json.loads((here / "run" / "launch" / "jobs.jsonl").read_text())["job"]
    facts = cluster.wait(job, SETTLED)
    logs = here / "run" / "launch"
    assert facts["JobState"] == "COMPLETED", [path.name for path in logs.iterdir()]
    assert (logs / f"{name}-{job}.out").is_file() and (logs / f"{name}-{job}.ranks" / "rank-1.log").is_file()
    assert status(here / "run")["state"] == "finished"


class TestSubmitit:
    def python(self, cluster, code, *arguments, cwd):
        return cluster.run(sys.executable, "-c", code, *arguments, cwd=cwd).strip()

    def test_a_job_is_pre_empted_and_goes_on(self, cluster, config, tmp_path):
        job = self.python(cluster, SUBMIT, "one", tmp_path / "jobs", config, cwd=tmp_path)
        run = tmp_path / "run"
        wait_for(lambda: status(run)["step"] >= 2, "step 2")
        urgent = ("--partition=urgent", "--nodes=4", "--exclusive", "--wrap=true")
        cluster.wait(cluster.submit(*urgent, cwd=tmp_path), SETTLED)
        facts = cluster.wait(job, SETTLED, timeout=2 * PATIENCE_S)
        assert facts["JobState"] == "COMPLETED" and int(facts["Restarts"]) >= 1
        [result] = ast.literal_eval(self.python(cluster, RESULT, tmp_path / "jobs", job, cwd=tmp_path))
        assert (result["state"], result["step"]) == ("finished", 6) and result["restarts"] >= 1
        assert [record["training/global_step"] for record in records(run)] == [1, 2, 3, 4, 5, 6]
        log = "".join(path.read_text() for path in (tmp_path / "jobs").glob("*_0_log.*"))
        assert "resuming after step" in log

    def test_an_array_through_map_array(self, cluster, config, tmp_path):
        folder = tmp_path / "jobs"
        job = self.python(cluster, SUBMIT, "array", folder, config, "run.max_steps=1", cwd=tmp_path)
        tasks = [job, job.replace("_0", "_1")]
        for task in tasks:
            assert cluster.wait(task, SETTLED)["JobState"] == "COMPLETED"
        results = ast.literal_eval(self.python(cluster, RESULT, folder, *tasks, cwd=tmp_path))
        assert [result["state"] for result in results] == ["finished"] * 2
        assert all(len(records(folder / name)) == 1 for name in "ab")


def test_the_doctor_names_the_node_that_does_not_see_the_data(cluster, config, tmp_path):
    (tmp_path / "train.jsonl").write_text("{}")
    options = f"--mib 4 --slow-share 0.01 --min-free-gib 0 --config {config} data.train=train.jsonl"
    examine = f"exec {sys.executable} -m lockstep doctor {options}"
    srun = ("srun", "--nodes=4", "--ntasks-per-node=1", "bash", "-c")
    assert "4 nodes, 0 with a failed check" in cluster.run(*srun, examine, cwd=tmp_path)
    blind = f"if [ $(hostname) = node3 ]; then cd /; fi; {examine}"
    done = subprocess.run(
        [*srun, blind], env=cluster.env, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 2 and "bad   node3: paths: data.train: train.jsonl" in done.stdout
    assert done.stdout.rstrip().endswith("--exclude=node3")
