"""What cuts a run short on a real Slurm cluster: its own time limit, a requeue, pre-emption, a node that dies. Each run is resumed
by Slurm and compared with one that nobody disturbed."""

import re

import pytest

from tests.records import comparable, records
from tests.slurm.cluster import TWO_NODES, status, wait_for
from tests.spawn import ROOT

pytestmark = pytest.mark.slow

FILE = ROOT / "slurm" / "train.sbatch"


@pytest.fixture
def start(cluster, config, tmp_path):
    """Submit a run of two nodes, as `start(sbatch options, overrides)`; returns its job and a function for its log."""

    def submit(options=(), overrides=(), **env):
        job = cluster.submit(*TWO_NODES, *options, FILE, config, *overrides, cwd=tmp_path, **env)
        return job, (tmp_path / f"train-{job}.out").read_text

    return submit


def at_step(run, step):
    wait_for(lambda: status(run)["step"] >= step, f"step {step}")


def test_a_time_limit_ends_in_a_checkpoint_and_the_job_goes_on(cluster, start, tmp_path):
    long = ("run.max_steps=50",)
    job, log = start(("--time=2", "--signal=USR2@30"), long, LOCKSTEP_SIGNAL_LEAD="30", MAX_ATTEMPTS="9")
    whole, its_log = start(overrides=(*long, f"run.dir={tmp_path}/whole"))  # on the other two nodes
    facts = cluster.wait(job, timeout=900)
    assert facts["JobState"] == "COMPLETED" and int(facts["Restarts"]) >= 1, log()
    assert re.search(r"stopped before step \d+: (SIGUSR2|the job's end is near)", log())
    assert cluster.wait(whole)["JobState"] == "COMPLETED", its_log()
    assert comparable(tmp_path / "run") == comparable(tmp_path / "whole")


def test_scontrol_requeue(cluster, start, undisturbed, tmp_path):
    every = ("checkpoint.every=2",)
    job, log = start(overrides=every)
    at_step(tmp_path / "run", 3)
    cluster.run("scontrol", "requeue", job)
    facts = cluster.wait(job)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), log()
    assert "resuming after step" in log()
    assert comparable(tmp_path / "run") == undisturbed


def test_preemption_by_a_higher_partition(cluster, start, undisturbed, tmp_path):
    job, log = start(("--partition=main",))
    at_step(tmp_path / "run", 2)
    urgent = cluster.submit("--partition=urgent", "--nodes=4", "--exclusive", "--wrap=true", cwd=tmp_path)
    assert cluster.wait(urgent)["JobState"] == "COMPLETED"
    facts = cluster.wait(job)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), log()
    assert re.search(r"stopped before step \d: SIGTERM", log()) and "requeue, to go on after step" in log()
    assert comparable(tmp_path / "run") == undisturbed


def test_a_node_that_loses_power(cluster, start, undisturbed, tmp_path):
    every = ("checkpoint.every=2",)
    job, log = start(overrides=every)
    at_step(tmp_path / "run", 3)
    node = cluster.run("scontrol", "show", "hostnames", cluster.job(job)["NodeList"]).split()[1]
    cluster.switch("lose-node", node)
    try:
        cluster.wait(job, states=("PENDING", "REQUEUED", "COMPLETING"), timeout=60)
        facts = cluster.wait(job)
    finally:
        cluster.switch("start-node", node)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), log()
    assert node not in cluster.run("scontrol", "show", "hostnames", facts["NodeList"]).split()
    assert re.search(r"resuming after step [2-4]", log())
    assert comparable(tmp_path / "run") == undisturbed


def test_a_chain_of_jobs_for_sites_that_forbid_requeue(cluster, config, tmp_path):
    """Three links of one run: the first is stopped, the second finishes, the third finds nothing to do."""
    links = [
        cluster.submit(*TWO_NODES, "--job-name=link", ROOT / "slurm" / "chain.sbatch", config, cwd=tmp_path)
        for _ in range(3)
    ]
    at_step(tmp_path / "run", 2)
    assert {cluster.job(link)["JobState"] for link in links[1:]} == {"PENDING"}
    cluster.run("scancel", "--signal=USR2", links[0])
    ended = [cluster.wait(link) for link in links]
    assert [facts["ExitCode"] for facts in ended] == ["75:0", "0:0", "0:0"]
    assert len(records(tmp_path / "run")) == 6
    assert "nothing to train" in (tmp_path / f"link-{links[2]}.out").read_text()
