"""Batch files of PBS Pro, LSF and Flux: real runs on two "nodes" of this machine.

The schedulers' commands print what their manuals say, and start processes here. The schedulers themselves are
not tested.
"""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.batch_file import Resources
from launch.schedulers import SCHEDULERS
from tests.intruder import attacked
from tests.records import records
from tests.slurm.cluster import status, wait_for
from tests.slurm.test_batch_files import WEIRD
from tests.spawn import ROOT
from tests.toy import SFT

COMMANDS = {
    "apptainer": 'printf "%s\\n" "$@" >"$FAKE/apptainer"; while [ "$1" != /images/a.sif ]; do shift; done; '
    'shift; exec "$@"',
    # PBS Pro 2022.1 Reference Guide: pbs_tmrsh, qstat -f, qsub
    "pbs_tmrsh": 'shift; exec env -i PATH="$PATH" HOME="$HOME" FAKE="$FAKE" "$@"',
    "qstat": 'printf "Job Id: %s\\n    Job_Name = my-run\\n    Resource_List.walltime = 01:30:00\\n" "$2"',
    "qsub": '(printf "%s\\n" "$@"; for name in ${4//,/ }; do echo "$name=${!name}"; done) >"$FAKE/again"',
    # LSF 10.1 Command Reference: blaunch, bjobs -o time_left
    "blaunch": 'shift; exec "$@"',
    "bjobs": 'echo "1:30 L"',
    # flux-core: flux-getattr(1), flux-jobs(1), flux-hostlist(1), flux-job(1), flux-run(1), flux-batch(1)
    "flux": """case "$1 $2" in
"getattr jobid") echo f3XyZ ;;
"--parent jobs") echo my-run ;;
"hostlist --expand") printf '127.0.0.1\\nlocalhost' ;;
"job timeleft") echo 5400.25 ;;
"--parent batch") printf '%s\\n' "$@" "MASTER_ADDR=$MASTER_ADDR" >"$FAKE/again" ;;
run*)
    shift
    while [[ $1 == --* ]]; do shift; done
    FLUX_TASK_RANK=1 "$@" & FLUX_TASK_RANK=0 "$@"; code=$?
    wait $! || code=$?
    exit $code ;;
esac""",
}


class Scheduler:
    """Starts a batch file as its scheduler does; `again` is what it submitted to be continued."""

    def __init__(self, kind: str, directory, config):
        self.kind, self.directory, self.config = kind, directory, config
        for name, text in COMMANDS.items():
            path = directory / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"#!/bin/bash\n{text}\n")
            path.chmod(0o755)
        (directory / "hosts").write_text("127.0.0.1\nlocalhost\nlocalhost\n")

    def start(self, *overrides: str, file: Path | None = None, **more: str) -> subprocess.Popen:
        outside = {
            k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "LOCKSTEP", "RANK", "MASTER"))
        }
        hosts, here = str(self.directory / "hosts"), str(self.directory)
        of_scheduler = {
            "pbs": dict(PBS_JOBID="17.server", PBS_JOBNAME="my-run", PBS_NODEFILE=hosts, PBS_O_WORKDIR=here),
            "lsf": dict(LSB_JOBID="17", LSB_JOBNAME="my-run", LSB_DJOB_HOSTFILE=hosts, LS_SUBCWD=here),
            "flux": {},
        }[self.kind]
        env = outside | of_scheduler | dict(FAKE=here, RANKS="1", PYTHON=sys.executable) | more
        env |= dict(PATH=f"{here}/bin:{env['PATH']}", LOCKSTEP_ROOT=str(ROOT), PYTHONPATH=str(ROOT))
        arguments = [str(self.config), *overrides]
        if file:
            arguments = []
        elif self.kind != "flux":
            env |= dict(CONFIG=str(self.config), OVERRIDES=" ".join(overrides))
            arguments = []
        with open(self.directory / "job.out", "a") as out:
            return subprocess.Popen(
                ["bash", str(file or ROOT / "slurm" / f"train.{self.kind}"), *arguments],
                env=env,
                cwd=here,
                stdout=out,
                stderr=out,
            )

    @property
    def again(self) -> list[str]:
        file = self.directory / "again"
        return file.read_text().splitlines() if file.exists() else []

    @property
    def log(self) -> str:
        return (self.directory / "job.out").read_text()


@pytest.fixture(params=["pbs", "lsf", "flux"])
def scheduler(request, tmp_path, config):
    return Scheduler(request.param, tmp_path, config)


def test_a_job_without_a_config_says_how_to_submit_it(tmp_path, config):
    found = {}
    for kind in ("pbs", "lsf"):
        job = Scheduler(kind, tmp_path, "")
        assert job.start().wait(60) != 0
        found[kind] = job.log
    assert "qsub -v CONFIG=FILE" in found["pbs"] and "CONFIG=FILE bsub" in found["lsf"]


def test_the_error_of_another_node_is_in_the_jobs_log(scheduler, tmp_path):
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/bash\nif [ "$NODE_RANK" = 0 ]; then exit 0; fi; echo "error: no GPU" >&2; exit 3\n'
    )
    python.chmod(0o755)
    job = scheduler.start(PYTHON=str(python))
    assert job.wait(60) == 3, scheduler.log
    assert f"==> {tmp_path}/my-run.ranks/node-1.log\nerror: no GPU\n" in scheduler.log
    assert "the run failed" in scheduler.log and not scheduler.again


def test_every_character_reaches_the_ranks_of_all_nodes(tmp_path):
    here = tmp_path / WEIRD
    here.mkdir()
    python = here / "python"
    python.write_text('#!/bin/bash\nprintf "%s\\0" "$@" >"$FAKE/arguments-$NODE_RANK"; exit 75\n')
    python.chmod(0o755)
    values = [f"reward.kwargs.x={chr(code)} {chr(code)}a" for code in range(32, 127)] + [f"run.name={WEIRD}"]
    for kind in ("pbs", "lsf", "flux"):
        job = Scheduler(kind, here, here / "my conf.yaml")
        words = values if kind == "flux" else [shlex.quote(value) for value in values]
        assert job.start(*words, PYTHON=str(python), RETRY_CRASHED="1", MAX_ATTEMPTS="9").wait(60) == 75, (
            job.log
        )
        for node in (0, 1):
            found = (here / f"arguments-{node}").read_text().split("\0")[:-1]
            assert found[-len(values) - 1 :] == [str(here / "my conf.yaml"), *values]
        if kind != "lsf":  # the next job has other nodes
            assert {"pbs": f"CONFIG={here / 'my conf.yaml'}", "flux": "MASTER_ADDR="}[kind] in job.again


def test_the_end_of_an_earlier_start_is_not_that_of_this_one(scheduler, tmp_path):
    """The first start stops by a signal. The second is invalid input, the third crashes."""
    python = tmp_path / "python"
    report = 'echo "{\\"state\\": \\"stopped\\", \\"checkpoint_step\\": 3}" >"$LOCKSTEP_STATUS"'
    text = '#!/bin/bash\nif [ "$REPORTS" = 1 ]; then %s; fi; exit "$CODE"\n'
    python.write_text(text % report)
    python.chmod(0o755)

    def end(code: str, **env: str) -> tuple[int, bool]:
        (tmp_path / "again").unlink(missing_ok=True)
        found = scheduler.start(PYTHON=str(python), CODE=code, MAX_ATTEMPTS="9", **env).wait(60)
        return found, "runs again" in scheduler.log.rpartition(" nodes (")[2]

    by_code = scheduler.kind == "lsf"
    assert end("75", REPORTS="1") == (75, True)
    assert end("2", RETRY_CRASHED="1") == (2, False), scheduler.log
    assert end("1", RETRY_CRASHED="1") == (75 if by_code else 1, True)
    assert end("75", REPORTS="1", NO_REQUEUE="1") == (1 if by_code else 75, False)


@pytest.mark.slow
def test_two_nodes_train_and_a_stopped_run_is_run_again(scheduler, tmp_path):
    """A signal stops the first job; the second one ends the run."""
    run = tmp_path / "run"
    job = scheduler.start(*SFT, "run.max_steps=400")
    with attacked(payload := tmp_path / "payload", [job.pid]) as found:
        wait_for(lambda: status(run)["step"] >= 2 or job.poll() is not None, "step 2")
    assert job.poll() is None, scheduler.log
    assert found["questions"] and not found["answers"] and not payload.exists()
    os.kill(status(run)["pid"], signal.SIGUSR2)
    assert job.wait(120) == 75, scheduler.log
    assert "2 nodes (127.0.0.1 localhost), attempt 1 after step 0" in scheduler.log
    step = status(run)["checkpoint_step"]
    assert status(run)["state"] == "stopped" and f"runs again, to go on after step {step}" in scheduler.log
    if scheduler.kind != "lsf":  # LSF runs a job with the exit code 75 again by itself
        assert any(str(scheduler.config) in word for word in scheduler.again)
    assert scheduler.start(*SFT, f"run.max_steps={step + 2}").wait(300) == 0, scheduler.log
    assert f"resuming after step {step}" in scheduler.log and status(run)["state"] == "finished"
    assert [record["training/global_step"] for record in records(run)] == list(range(1, step + 3))
    environment = tmp_path / "my-run.ranks" / "environment"
    end = environment.read_text().partition('LOCKSTEP_JOB_END="')[2].partition('"')[0]
    assert abs(int(end) - environment.stat().st_mtime - 5400) < 600  # 1 h 30 min after the start
    assert environment.stat().st_mode & 0o77 == 0


@pytest.mark.slow
def test_a_task_of_a_sweep_trains_and_submits_itself_again(scheduler, tmp_path):
    run, logs, file = tmp_path / "run", tmp_path / "logs", tmp_path / f"job.{scheduler.kind}"
    (tmp_path / "points").mkdir()
    (tmp_path / "points" / "2").write_text("\n".join([*SFT, "run.max_steps=400"]))
    cpu = Resources(gpus_per_node=0, ranks_per_node=1, nodes=2)
    facts = dict(name="sw", logs=logs, config=str(scheduler.config), points=tmp_path / "points", command="x")
    file.write_text(SCHEDULERS[scheduler.kind].render_sweep(cpu, tasks=[1, 2], at_a_time=0, **facts))
    task = {"pbs": {"PBS_ARRAY_INDEX": "2"}, "lsf": {"LSB_JOBINDEX": "3"}, "flux": {"POINT": "2"}}
    job = scheduler.start(file=file, CONTAINER="apptainer:/images/a.sif", **task[scheduler.kind])
    wait_for(lambda: status(run)["step"] >= 1 or job.poll() is not None, "step 1")
    assert job.poll() is None, scheduler.log
    os.kill(status(run)["pid"], signal.SIGUSR2)
    assert job.wait(120) == 75, scheduler.log
    assert (logs / "sw-2.ranks" / "status.json").exists()
    words = (tmp_path / "apptainer").read_text().splitlines()
    assert words[:2] == ["exec", "--bind"] and words.index("/images/a.sif") + 1 == words.index(sys.executable)
    if scheduler.kind == "pbs":
        assert any("POINT=2" in word for word in scheduler.again) and "-J" not in scheduler.again
