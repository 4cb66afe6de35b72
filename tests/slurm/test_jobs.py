"""The batch files on a real Slurm cluster of four nodes. What CI does not run is in test_interruptions.py."""

import shutil
import textwrap

import pytest

from tests.intruder import assert_harmless, attacked
from tests.records import comparable, records
from tests.slurm.cluster import TWO_NODES, status, wait_for
from tests.spawn import ROOT
from tests.toy import SFT

SHORT_SFT = (*SFT, "run.max_steps=2")


def log_of(directory, name):
    return (directory / name).read_text()


def test_the_quickstart_trains_on_two_nodes_beside_another_job(cluster, toy, tmp_path):
    # As tools/make_toy.py and the warm-up leave them; what they make is learned in test_quickstart.py.
    (tmp_path / "runs" / "quickstart-sft").mkdir(parents=True)
    (tmp_path / "runs" / "toy").symlink_to(toy)
    shutil.copytree(toy / "model", tmp_path / "runs" / "quickstart-sft" / "hf")
    small = ["run.max_steps=3", "data.prompts_per_step=8", "validation.max_prompts=16"]
    small += ["training.prompts_per_minibatch=4"]
    file = ROOT / "slurm" / "quickstart.sbatch"
    job = cluster.submit("--nodes=2", "--nodelist=node1,node2", file, *small, cwd=tmp_path)
    one_task = ("--ntasks-per-node=1", "--nodelist=node1", file)
    beside = cluster.submit(*one_task, *small, "run.name=beside", cwd=tmp_path)
    log = f"quickstart-{job}.out"
    for each in (job, beside):
        assert cluster.wait(each)["ExitCode"] == "0:0", log_of(tmp_path, f"quickstart-{each}.out")
    assert "quickstart: grpo, 4 ranks" in log_of(tmp_path, log)
    assert all(f"step {step}/3 | reward" in log_of(tmp_path, log) for step in range(1, 4))
    assert "beside: grpo, 1 rank," in log_of(tmp_path, f"quickstart-{beside}.out")
    run = tmp_path / "runs" / "quickstart"
    assert [record["training/global_step"] for record in records(run)] == list(range(4))
    parts = "config.yaml environment.json code/rl/run/loop.py checkpoints hf/config.json rollouts"
    for part in parts.split():
        assert (run / part).exists(), part
    assert status(run)["state"] == "finished" and status(run)["job"] == job
    logs = (tmp_path / f"quickstart-{job}.ranks").glob("rank-*")
    assert sorted(path.name for path in logs) == [f"rank-{i}.log" for i in range(4)]
    lines = (cluster.lab / "log" / "jobcomp.txt").read_text().splitlines()
    [done] = [line for line in lines if f"JobId={job} " in line]
    assert "JobState=COMPLETED" in done


@pytest.mark.slow
def test_a_signalled_task_of_an_array_goes_on_exactly(cluster, config, undisturbed, tmp_path):
    """Ranks by (fake) GPUs."""
    (tmp_path / "points.txt").write_text("run.name=first\nrun.name=second\n")
    command = (ROOT / "slurm" / "sweep.sbatch", "points.txt", config)
    job = cluster.submit("--array=1", "--gpus-per-node=2", *command, cwd=tmp_path)
    run, task, log = tmp_path / "run", f"{job}_1", f"sweep-{job}_1.out"
    wait_for(lambda: status(run)["step"] >= 2, "step 2")
    cluster.run("scancel", "--signal=USR2", task)
    wait_for(lambda: "requeue, to go on" in log_of(tmp_path, log), "the requeue")
    stopped = status(run)
    assert (stopped["state"], stopped["reason"]) == ("stopped", "SIGUSR2")
    assert 2 <= stopped["checkpoint_step"] < 6
    facts = cluster.wait(task)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), log_of(tmp_path, log)
    assert comparable(run) == undisturbed
    assert f"resuming after step {stopped['checkpoint_step']}" in log_of(tmp_path, log)
    assert "second: grpo, 2 ranks" in log_of(tmp_path, log)
    assert (tmp_path / f"sweep-{task}.ranks" / "rank-1.log").exists()


ALGORITHM = """
    import os, signal
    import torch.distributed as dist
    from rl.algorithms.sft import loss

    NEEDS = ("responses",)
    DEFAULTS = {{}}

    def collect(phases):
        if phases.step.number == 2 and dist.get_rank() == 1:
            {misdeed}
        return phases.targets(phases.draw_prompts())

    def learn(phases, batch):
        phases.update(batch, loss)
"""
FAILURES = {
    "raises": (
        "node1,node2",
        "raise RuntimeError('the misdeed of rank 1')",
        "error: rank 1 (node2) failed in other of step 2: RuntimeError: the misdeed of rank 1; see",
    ),
    "killed": ("node3,node4", "os.kill(os.getpid(), signal.SIGKILL)", "node4: task 1: Killed"),
    "absent": (
        "node1,node2",
        "pass",
        "rank 1 of 2 did not come within 8 s of rank 0's start; ranks are missing on node2 (0 of 1 came)",
    ),
}
"""Kind -> nodes, code of the second rank in the second step, and words at the end of the log.

For example, "absent": the second rank never joins, and the log names node2.
"""


def test_a_rank_that_fails_or_never_comes_ends_its_job(cluster, config, tmp_path):
    jobs = {}
    for name, (nodes, misdeed, _) in FAILURES.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(ALGORITHM.format(misdeed=misdeed)))
        env = {"LOCKSTEP_JOIN_TIMEOUT": "8"}
        if name == "absent":  # an interpreter that never comes to its program on the second node
            env["PYTHON"] = str(tmp_path / "hanging")
            (tmp_path / "hanging").write_text(
                '#!/bin/sh\n[ "$SLURM_PROCID" = 0 ] || exec sleep 1000\nexec python "$@"\n'
            )
            (tmp_path / "hanging").chmod(0o755)
        overrides = [f"algorithm={tmp_path}/{name}.py", f"run.dir={tmp_path}/{name}"]
        overrides += ["training.prompts_per_minibatch=0"]
        options = (*TWO_NODES, f"--nodelist={nodes}", f"--job-name={name}")
        file = ROOT / "slurm" / "train.sbatch"
        jobs[name] = cluster.submit(*options, file, config, *overrides, cwd=tmp_path, **env)
    for name, (_, _, words) in FAILURES.items():
        facts = cluster.wait(jobs[name])
        log = log_of(tmp_path, f"{name}-{jobs[name]}.out")
        assert facts["JobState"] == "FAILED", log
        assert words in "\n".join(log.splitlines()[-25:]), log
        assert "the run failed with exit code" in log
    for name in ("raises", "killed"):  # from the last sign of life to the end of the job
        alive = max(path.stat().st_mtime for path in (tmp_path / name).glob("metrics.jsonl"))
        ended = cluster.run("date", "-d", cluster.job(jobs[name])["EndTime"], "+%s")
        assert float(ended) - alive < 60


MEETING = """
    import os, sys, time
    from pathlib import Path
    from rl.runtime.ranks import discover
    from rl.runtime.rendezvous import join_ranks

    ranks = join_ranks(discover())
    here = Path(sys.argv[1])
    Path(here, f"{os.environ['SLURM_JOB_ID']}.{ranks.rank}").write_text(str(ranks.master_port))
    deadline = time.monotonic() + 120
    while len(list(here.iterdir())) < 40 and time.monotonic() < deadline:  # all jobs hold their ports at once
        time.sleep(0.1)
"""


def test_twenty_tasks_of_an_array_at_once_do_not_collide(cluster, tmp_path):
    (tmp_path / "meeting.py").write_text(textwrap.dedent(MEETING))
    (tmp_path / "met").mkdir()
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\nexec srun python meeting.py met\n")
    job = cluster.submit("--array=0-19", "--nodes=1", "--ntasks=2", "--output=out-%a", script, cwd=tmp_path)
    wait_for(lambda: len(list((tmp_path / "met").iterdir())) == 40, "the meeting of 20 times 2 ranks")
    for task in range(20):
        assert cluster.wait(f"{job}_{task}")["JobState"] == "COMPLETED", log_of(tmp_path, f"out-{task}")
    ports = {}
    for path in (tmp_path / "met").iterdir():
        ports.setdefault(path.stem, set()).add(path.read_text())
    assert len(ports) == 20 and all(len(port) == 1 for port in ports.values())
    assert len(set.union(*ports.values())) == 20  # the nodes of this cluster share the ports of one machine


def test_srun_with_pmi2_trains_two_steps(cluster, config, tmp_path):
    step = ("srun", "--mpi=pmi2", "--nodes=2", "--ntasks=2", "--mem-per-cpu=2G")
    command = (*step, "python", ROOT / "train_rl.py", "--config", config)
    cluster.run(*command, *SHORT_SFT, cwd=tmp_path)
    assert len(records(tmp_path / "run")) == 2


WORLD = """#!/bin/sh
exec python - <<'END'
from rl.runtime.ranks import discover
from rl.runtime.rendezvous import join_ranks

ranks = join_ranks(discover())
print("world", ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size, ranks.master_addr)
END
"""


def test_components_of_a_heterogeneous_job_are_one_world(cluster, tmp_path):
    """The ranks begin with the first component, although the nodes' names sort the second one first."""
    (tmp_path / "world").write_text(WORLD)
    (tmp_path / "world").chmod(0o755)
    train = "--gpus-per-node=2 --nodes=1 --nodelist=node3".split()
    rollout = "--gpus-per-node=0 --ntasks-per-node=1 --nodes=2 --nodelist=node1,node2".split()
    command = (*train, ":", *rollout, ROOT / "slurm" / "roles.sbatch", "any.yaml")
    job = cluster.submit(*command, cwd=tmp_path, PYTHON=str(tmp_path / "world"))
    log = log_of(tmp_path, f"roles-{job}.out") if cluster.wait(job) else ""
    logs = (path.read_text() for path in (tmp_path / f"roles-{job}.ranks").glob("rank-[1-9].log"))
    found = [line for text in (log, *logs) for line in text.splitlines() if line.startswith("world")]
    places = ["0 4 0 2", "1 4 1 2", "2 4 0 1", "3 4 0 1"]
    assert sorted(found) == [f"world {place} node3" for place in places], log


ONE_RANK = ("--gpus-per-node=0", "--ntasks-per-node=1", "--nodes=1")
JOBS_WITH_ROLES = {
    "one-node": ("train", "--gpus-per-node=0", "--ntasks-per-node=2", "--nodes=1"),
    "two-nodes": ("train", *TWO_NODES),
    "heterogeneous": ("roles", *ONE_RANK, "--nodelist=node3", ":", *ONE_RANK, "--nodelist=node1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", JOBS_WITH_ROLES)
def test_trainers_beside_generators_in_one_job(cluster, config, tmp_path, kind):
    name, *sizes = JOBS_WITH_ROLES[kind]
    roles = ("roles.train=0-0", "roles.rollout=1-1", "rollout_correction.truncate_tokens=2")
    in_flight = ("roles.granularity=group", "run.max_steps=3")
    job = cluster.submit(*sizes, ROOT / "slurm" / f"{name}.sbatch", config, *roles, *in_flight, cwd=tmp_path)
    assert cluster.wait(job)["ExitCode"] == "0:0", log_of(tmp_path, f"{name}-{job}.out")
    assert [record["staleness/max"] for record in records(tmp_path / "run")] == [0.0, 1.0, 1.0]


@pytest.mark.slow
def test_another_user_of_two_nodes_changes_nothing(cluster, config, tmp_path):
    roles = ("roles.train=0-0", "roles.rollout=1-1", "rollout_correction.truncate_tokens=2", "roles.lag=0")
    nodes = [int(path.read_text()) for path in (cluster.lab / "run").glob("init-*.pid")]

    def run(name: str) -> list[dict]:
        own = (f"run.dir={tmp_path / name}", f"run.name={name}")
        job = cluster.submit(*TWO_NODES, ROOT / "slurm" / "train.sbatch", config, *roles, *own, cwd=tmp_path)
        assert cluster.wait(job)["ExitCode"] == "0:0", log_of(tmp_path, f"train-{job}.out")
        return comparable(tmp_path / name)

    with attacked(payload := tmp_path / "payload", nodes) as found:
        disturbed = run("disturbed")
    assert disturbed == run("undisturbed")
    assert_harmless(found, payload)
