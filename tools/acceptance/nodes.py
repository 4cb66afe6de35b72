"""A run on two nodes, as a Slurm job of slurm/train.sbatch. It runs where sbatch does."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable

import yaml

from rl.run_directory.metric_log import FILE_NAME, STEP, read_records
from tools.acceptance.features import DENSE, TASKS
from tools.acceptance.runs import short_run, toy_data
from tools.acceptance.worker import ROOT, StageTask

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL"}
OPTIONS = ("--parsable", "--nodes=2", "--time=30", "--output=job.out", f"{ROOT}/slurm/train.sbatch")


def run(task: StageTask) -> None:
    """Kill a rank on the second node, later requeue the job; each start must continue the run.

    A pipeline stage is on each node, and every engine holds the whole model, so each refit sends weights
    between the nodes. Partition, account and GPUs of a node are sbatch's own variables (SBATCH_PARTITION).
    """
    from tools.tiny_models import save_tiny

    directory = task.out / "two-nodes"
    shutil.rmtree(directory, ignore_errors=True)
    output, check = directory / "run", task.findings.check
    config = short_run("two-nodes", save_tiny(DENSE, directory / "model", seed=0))
    (directory / "config.yaml").write_text(yaml.dump(config))
    overrides = (*toy_data(task), f"run.dir={output}", f"reward.function={ROOT}/{TASKS}:score")
    overrides += ("run.max_steps=100000", "checkpoint.every=2", "training.pp=2")
    size = task.size((), ("--gpus-per-node=0", "--ntasks-per-node=1"))
    variables = {"LOCKSTEP_ROOT": str(ROOT), "RETRY_CRASHED": "1", "MAX_ATTEMPTS": "9"}
    job = _said("sbatch", *size, *OPTIONS, "config.yaml", *overrides, cwd=directory, **variables).strip()

    def facts() -> dict[str, str]:
        words = _said("scontrol", "-o", "show", "job", job).split()
        return dict(word.partition("=")[::2] for word in words)

    def step() -> int:
        status = output / "status.json"
        return json.loads(status.read_text())["step"] if status.exists() else 0

    def log() -> str:
        return (directory / "job.out").read_text()

    def wait(condition: Callable[[], bool]) -> None:
        while not condition():
            if (state := facts()["JobState"]) in ENDED and not condition():
                raise RuntimeError(f"job {job} is {state}: {log()[-400:]}")
            time.sleep(0.5)

    def go_on(after: int) -> int:
        """Wait until the job has been restarted more often, and for three further steps; return how often."""
        wait(lambda: int(facts()["Restarts"]) > after)
        goal = step() + 3
        wait(lambda: step() >= goal)
        return int(facts()["Restarts"])

    started = go_on(-1)
    rank = len(list(output.glob("heartbeat/rank_*.json"))) - 1
    pid = json.loads((output / f"heartbeat/rank_{rank}.json").read_text())["pid"]
    node = _said("scontrol", "show", "hostnames", facts()["NodeList"]).split()[-1]
    there = (f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}")
    _said("srun", *there, "kill", "-KILL", str(pid))
    restarted = go_on(started)
    check("the log names the killed rank", f"{node}: task {rank}: Killed" in log(), f"{rank} on {node}")
    _said("scontrol", "requeue", job)
    restarts = go_on(restarted)
    (output / "stop").touch()
    wait(lambda: facts()["JobState"] in ENDED)
    check("the job completed", facts()["JobState"] == "COMPLETED", value=facts()["JobState"])
    check("each later start continued the run", log().count("resuming after step") == restarts >= 2)
    records = read_records(output / FILE_NAME)
    steps = [record[STEP] for record in records]
    check("no step is missing", steps == [*range(1, len(steps) + 1)], value=str(len(steps)))
    for key in ("perf/refit_bytes_received", "actor/grad_norm"):
        task.findings.at_least(key, max(record.get(key, 0.0) for record in records), 1e-9)


def _said(*command: str, cwd: object = ROOT, **variables: str) -> str:
    """Return a command's output. Raises RuntimeError with its errors if it fails."""
    done = subprocess.run(command, cwd=str(cwd), env=os.environ | variables, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command[:2])} ended with code {done.returncode}: {done.stderr.strip()}"
        )
    return done.stdout
