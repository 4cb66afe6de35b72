"""Rank discovery, from environments with the variables that each launcher sets (Slurm 22.05, MPICH 5,
torchrun), and with variables that the manuals of PALS, jsrun and Flux name."""

import os
import socket
import subprocess
import sys
import textwrap
import types
from dataclasses import replace

import pytest

from rl.runtime.device import idle_gpus
from rl.runtime.proxies import without_proxies
from rl.runtime.ranks import Ranks, discover, expand_hostlist, expand_tasks_per_node
from rl.runtime.session import SPLIT_GROUPS, session
from tests.spawn import ROOT

TORCHRUN = dict(
    RANK="5",
    WORLD_SIZE="8",
    LOCAL_RANK="1",
    LOCAL_WORLD_SIZE="4",
    MASTER_ADDR="node1",
    MASTER_PORT="29511",
    GROUP_RANK="1",
    TORCHELASTIC_RUN_ID="none",
)


UNKNOWN = [
    dict(MV2_COMM_WORLD_RANK="0", MV2_COMM_WORLD_SIZE="4", MV2_COMM_WORLD_LOCAL_RANK="0"),
    dict(MVP_COMM_WORLD_RANK="1", MVP_COMM_WORLD_SIZE="4"),
    dict(PMI_RANK="0", PMI_SIZE="4", PMI_FD="5"),
    dict(PMI_RANK="0"),
    dict(PMIX_RANK="0", PMIX_NAMESPACE="prterun-n1-7@1"),
    dict(PALS_RANKID="0", PALS_NODEID="0"),
    dict(OMPI_COMM_WORLD_RANK="3", PMIX_RANK="3"),
    dict(ALPS_APP_PE="2"),
    dict(SLURM_PROCID="2", SLURM_JOB_ID="5"),
    dict(LOCAL_RANK="1"),
]


@pytest.mark.parametrize("variables", UNKNOWN, ids=lambda variables: next(iter(variables)))
def test_no_world_of_one_under_a_launcher_that_is_not_known(variables):
    name = next(iter(variables))
    with pytest.raises(
        ValueError, match=rf"^{name}={variables[name]}.* says that a launcher .* unset {name}"
    ):
        discover(variables)


def test_one_task_of_any_launcher_runs_alone():
    alone = [dict(PMI_RANK="0", PMI_SIZE="1"), dict(MV2_COMM_WORLD_RANK="0", MV2_COMM_WORLD_SIZE="1")]
    for variables in (*alone, dict(SLURM_PROCID="0", SLURM_NTASKS="1"), dict(LOCAL_RANK="0")):
        assert discover(variables).launcher == "single"


def test_torchrun_that_restarts_ranks_is_refused():
    assert discover(TORCHRUN | dict(TORCHELASTIC_MAX_RESTARTS="0")).rank == 5
    with pytest.raises(ValueError, match="--max-restarts=3 would start the ranks again .* leave it out"):
        discover(TORCHRUN | dict(TORCHELASTIC_MAX_RESTARTS="3"))


def test_proxies_do_not_see_the_jobs_own_traffic():
    ranks = Ranks(0, 4, 0, 2, "slurm", "node1")
    nodes = dict(SLURM_STEP_NODELIST="node[1-2]")
    assert without_proxies(ranks, "10.0.0.1", nodes) == {}
    for name in ("http_proxy", "HTTPS_PROXY", "all_proxy"):
        found = without_proxies(
            ranks, "10.0.0.1", nodes | {name: "http://proxy:3128", "no_proxy": "a.org, b"}
        )
        hosts = found["NO_PROXY"].split(",")
        assert (
            hosts[:5] == ["a.org", "b", "localhost", "127.0.0.1", "::1"]
            and found["no_proxy"] == found["NO_PROXY"]
        )
        assert {"node1", "node2", "10.0.0.1", socket.gethostname()} <= set(hosts)


def test_idle_gpus_are_named(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    assert idle_gpus(8) == "" and "7 of 8 GPUs of this host are idle" in idle_gpus(1)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    assert idle_gpus(2) == "" and "1 of 2 GPUs" in idle_gpus(1)


def slurm_batch(**more):
    """The batch script of `sbatch -N2 --ntasks-per-node=2`: it looks like rank 0 of 4 but is no step."""
    return {
        "SLURM_JOB_ID": "10002",
        "SLURM_NTASKS": "4",
        "SLURM_NPROCS": "4",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "node[1-2]",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_TASKS_PER_NODE": "2(x2)",
        "SLURM_GTIDS": "0",
        "SLURMD_NODENAME": "node1",
        **more,
    }


def slurm_step(procid, localid, nodeid, *, tasks="2(x2)", num_tasks=4, nodes="node[1-2]", step="0", **more):
    """A rank that srun started."""
    step_of_job = {
        "SLURM_NTASKS": str(num_tasks),
        "SLURM_NPROCS": str(num_tasks),
        "SLURM_STEP_NUM_TASKS": str(num_tasks),
        "SLURM_STEP_ID": step,
        "SLURM_STEPID": step,
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_PROCID": str(procid),
        "SLURM_LOCALID": str(localid),
        "SLURM_NODEID": str(nodeid),
        "SLURMD_NODENAME": f"node{nodeid + 1}",
    }
    return slurm_batch() | step_of_job | more


def place(ranks):
    return ranks.rank, ranks.local_rank, ranks.local_world_size


@pytest.fixture(autouse=True)
def no_mpi(monkeypatch):
    """`import mpi4py` fails, as it does where no MPI is installed."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)


# torchrun, one process ----------------------------------------------------------------------------------


def test_torchrun(monkeypatch):
    assert discover(TORCHRUN) == Ranks(5, 8, 1, 4, "torchrun", "node1", 29511)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert discover() == discover(TORCHRUN)


@pytest.mark.parametrize(
    "changes, message",
    [
        *[
            ({name: None}, f"RANK and WORLD_SIZE are set but {name} is not")
            for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        ],
        (
            dict.fromkeys(("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")),
            "LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not",
        ),
        ({"RANK": "8"}, "RANK"),
        ({"RANK": "-1"}, "RANK"),
    ],
)
def test_wrong_variables_of_torchrun_are_refused(changes, message):
    env = {name: value for name, value in (TORCHRUN | changes).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        discover(env)


@pytest.mark.parametrize("env", [{"HOME": "/root"}, {"RANK": "1"}, {"WORLD_SIZE": "1"}])
def test_a_plain_python_is_a_world_of_one(env):
    assert discover(env) == Ranks(0, 1, 0, 1, "single", "127.0.0.1")


def test_export_writes_what_torch_reads():
    env = {"KEPT": "1", "RANK": "9"}
    ranks = Ranks(3, 4, 1, 2, "slurm", "node1", 12345)
    ranks.export(env)
    assert env["KEPT"] == "1" and discover(env) == replace(ranks, launcher="torchrun")


# srun ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "where, tasks, sizes",
    [
        ([(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)], "2(x2)", (2, 2, 2, 2)),
        ([(0, 0, 0), (1, 1, 0), (2, 2, 0), (3, 0, 1)], "3,1", (3, 3, 3, 1)),  # srun without --ntasks-per-node
        ([(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)], "2(x2)", (2, 2, 2, 2)),  # srun -m cyclic
    ],
)
def test_a_step_of_two_nodes(where, tasks, sizes):
    all_ranks = [discover(slurm_step(*each, tasks=tasks)) for each in where]
    assert [place(ranks) for ranks in all_ranks] == [(r, local, n) for (r, local, _), n in zip(where, sizes)]
    assert {(r.world_size, r.launcher, r.master_addr) for r in all_ranks} == {(4, "slurm", "node1")}


def test_a_step_uses_its_own_first_node():
    env = slurm_step(1, 0, 1, tasks="1(x2)", num_tasks=2, nodes="node[3-4]", SLURM_JOB_NODELIST="node[1-4]")
    ranks = discover(env)
    assert (ranks.master_addr, ranks.world_size, place(ranks)) == ("node3", 2, (1, 0, 1))


def test_a_heterogeneous_job_is_one_world():
    """Facts of Slurm 22.05: the step's nodes are listed by name, and numbered by component."""
    job = {
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "node[3-4]",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "node[1-2]",
    }
    where = [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1), (4, 0, 2), (5, 0, 3)]
    step = dict(tasks="1(x2),2(x2)", num_tasks=6, nodes="node[1-4]")
    all_ranks = [discover(slurm_step(*w, **step, **job)) for w in where]
    assert [place(r) for r in all_ranks] == [(0, 0, 2), (1, 1, 2), (2, 0, 2), (3, 1, 2), (4, 0, 1), (5, 0, 1)]
    assert {(ranks.world_size, ranks.master_addr) for ranks in all_ranks} == {(6, "node3")}
    of_generators = discover(slurm_step(0, 0, 0, tasks="1", num_tasks=1, nodes="node2", **job))
    assert (of_generators.master_addr, of_generators.local_world_size) == ("127.0.0.1", 1)
    shared = job | {"SLURM_JOB_NODELIST_HET_GROUP_1": "node3"}
    with pytest.raises(ValueError, match="share a node"):
        discover(slurm_step(0, 0, 0, tasks="3", num_tasks=3, nodes="node3", **shared))


def test_older_names_of_slurms_variables():
    env = slurm_step(2, 0, 1)
    for name in ("SLURM_STEP_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"):
        del env[name]
    assert discover(env) == discover(slurm_step(2, 0, 1))


def test_master_addr_may_be_given_in_the_batch_script():
    ranks = discover(slurm_step(0, 0, 0, MASTER_ADDR="10.0.0.7"))
    assert (ranks.launcher, ranks.master_addr) == ("slurm", "10.0.0.7")


def test_a_batch_script_runs_one_process_of_one_task_only():
    message = r"SLURM_NTASKS=4, but this is a batch script, not a step: .* `srun lockstep train"
    with pytest.raises(ValueError, match=message):
        discover(slurm_batch())
    assert discover(slurm_batch(SLURM_NTASKS="1")).launcher == "single"


# Other schedulers ---------------------------------------------------------------------------------------


def pals(rank, local_rank, hosts):
    """HPE PALS 1.2, mpiexec(1), in a job of PBS Pro 2022.1."""
    job = {"PBS_JOBID": "17.server", "PBS_NODEFILE": str(hosts), "PBS_O_WORKDIR": "/home/me"}
    of_rank = {"PALS_RANKID": str(rank), "PALS_LOCAL_RANKID": str(local_rank), "PALS_LOCAL_SIZE": "2"}
    return job | of_rank | {"PALS_APID": "f2c0b6a0", "PMI_RANK": str(rank), "PMI_SIZE": "4"}


def jsrun(rank, local_rank, **more):
    """IBM Job Step Manager, jsrun(1), in a job of LSF 10.1."""
    job = {"LSB_JOBID": "17", "LSB_DJOB_NUMPROC": "4", "LSB_MCPU_HOSTS": "n1 2 n2 2"}
    values = {"RANK": rank, "SIZE": 4, "LOCAL_RANK": local_rank, "LOCAL_SIZE": 2}
    return job | {f"JSM_NAMESPACE_{name}": str(value) for name, value in values.items()} | more


def flux_run(rank, local_rank, *, nodes="2", **more):
    """flux-core, flux-environment(7)."""
    task = {"FLUX_TASK_RANK": str(rank), "FLUX_TASK_LOCAL_ID": str(local_rank), "FLUX_JOB_ID": "f3XyZ"}
    return task | {"FLUX_JOB_SIZE": "4", "FLUX_JOB_NNODES": nodes, "FLUX_URI": "local:///run/local"} | more


def node(rank, local_rank, **more):
    """A rank of `launch.node`, which `flux run` has started once per node."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "STEP")
    own = zip(names, (rank, 4, local_rank, 2, "f3XyZ 17"))
    return flux_run(rank // 2, 0, FLUX_JOB_SIZE="2") | {f"LOCKSTEP_{k}": str(v) for k, v in own} | more


def test_the_launchers_of_other_schedulers(tmp_path):
    (tmp_path / "nodes").write_text("n1.site\nn2.site\n")
    started = {
        "pals": lambda *rank: pals(*rank, tmp_path / "nodes"),
        "jsrun": lambda *rank: jsrun(*rank, MASTER_ADDR="n1.site"),
        "flux": lambda *rank: flux_run(*rank, MASTER_ADDR="n1.site"),
        "node": lambda *rank: node(*rank, MASTER_ADDR="n1.site"),
    }
    for name, env in started.items():
        all_ranks = [discover(env(*rank)) for rank in ((0, 0), (1, 1), (2, 0), (3, 1))]
        assert [place(ranks) for ranks in all_ranks] == [(0, 0, 2), (1, 1, 2), (2, 0, 2), (3, 1, 2)]
        found = {(ranks.world_size, ranks.launcher, ranks.master_addr) for ranks in all_ranks}
        assert found == {(4, name, "n1.site")}


def test_one_node_of_another_scheduler_needs_no_address():
    assert discover(flux_run(3, 3, nodes="1")).master_addr == "127.0.0.1"
    assert discover(flux_run(0, 0, FLUX_JOB_SIZE="1", nodes="1")).launcher == "single"
    assert discover(flux_run(1, 1) | TORCHRUN).launcher == "torchrun"


@pytest.mark.parametrize("env", [jsrun(0, 0), flux_run(0, 0)])
def test_an_unknown_first_node_is_refused(env):
    with pytest.raises(ValueError, match=r"export MASTER_ADDR=\$\(hostname\)"):
        discover(env)


@pytest.mark.parametrize(
    "env, message",
    [
        (
            jsrun(4, 0, MASTER_ADDR="n1"),
            "jsrun says RANK=4 of 4, on its node 0 of 2, which is a contradiction",
        ),
        (node(0, 2, MASTER_ADDR="n1"), "node says RANK=0 of 4, on its node 2 of 2"),
        (slurm_step(0, 0, 2), r"SLURM_NODEID=2, but the step has 2 nodes \(node1, node2\)"),
        (
            {k: v for k, v in node(0, 0, MASTER_ADDR="n1").items() if k != "LOCKSTEP_LOCAL_RANK"},
            "LOCKSTEP_LOCAL_RANK is not set",
        ),
        (flux_run(0, 0, nodes="0", MASTER_ADDR="n1"), "FLUX_JOB_NNODES='0' is not a whole number"),
        (
            jsrun(0, 0, MASTER_ADDR="n1", JSM_NAMESPACE_SIZE="four"),
            "JSM_NAMESPACE_SIZE='four' is not a whole number",
        ),
        (pals(0, 0, "/nowhere") | {"PMI_SIZE": "4"}, "pals started 4 ranks without the address"),
    ],
)
def test_variables_that_miss_or_contradict_each_other_are_refused(env, message):
    with pytest.raises(ValueError, match=message):
        discover(env)


def test_unequal_nodes_of_flux_are_refused():
    with pytest.raises(ValueError, match="4 tasks on 3 nodes"):
        discover(flux_run(0, 0, nodes="3"))


# Precedence ---------------------------------------------------------------------------------------------


def test_torchrun_within_a_step_wins_over_the_step_of_its_agent():
    assert discover(slurm_step(1, 0, 1) | TORCHRUN) == discover(TORCHRUN)


def test_torchrun_within_mpirun_wins():
    mpirun = {"OMPI_COMM_WORLD_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    assert discover(mpirun | TORCHRUN).launcher == "torchrun"


def test_srun_with_pmi_is_slurm_without_mpi4py():
    pmi2 = dict(PMI_RANK="3", PMI_SIZE="4", PMI_FD="8", SLURM_MPI_TYPE="pmi2")
    for pmi in (pmi2, dict(PMIX_RANK="3", PMIX_NAMESPACE="slurm.pmix.10002.0")):
        assert discover(slurm_step(3, 1, 1, **pmi)).launcher == "slurm"


@pytest.mark.parametrize(
    "variables", [{"OMPI_COMM_WORLD_SIZE": "2"}, {"MPI_LOCALNRANKS": "2", "PMI_SIZE": "2"}]
)
@pytest.mark.parametrize(
    "around", [{}, slurm_batch(), slurm_step(0, 0, 0)], ids=["alone", "in a batch script", "in a step"]
)
def test_mpirun_without_mpi4py_is_refused(variables, around):
    with pytest.raises(
        ValueError, match="mpirun started this program but mpi4py cannot be imported.*install the `mpi` extra"
    ):
        discover(around | variables)


# mpirun -------------------------------------------------------------------------------------------------


def fake_mpi(monkeypatch, *, size, local_size):
    """An mpi4py with a world of `size` ranks. This process is rank 0, on a host with `local_size` ranks."""
    local = types.SimpleNamespace(rank=0, size=local_size)
    world = types.SimpleNamespace(rank=0, size=size, Split_type=lambda kind: local, Bcast=lambda buffer: None)
    package = types.ModuleType("mpi4py")
    package.MPI = types.SimpleNamespace(COMM_WORLD=world, COMM_TYPE_SHARED=0)
    monkeypatch.setitem(sys.modules, "mpi4py", package)


def test_the_address_of_mpi_is_a_name_only_for_several_hosts(monkeypatch):
    fake_mpi(monkeypatch, size=8, local_size=4)
    ranks = discover({"OMPI_COMM_WORLD_SIZE": "8"})
    assert (ranks.launcher, ranks.world_size, ranks.local_world_size) == ("mpi", 8, 4)
    assert ranks.master_addr == socket.gethostname()
    fake_mpi(monkeypatch, size=4, local_size=4)
    assert discover({"OMPI_COMM_WORLD_SIZE": "4"}).master_addr == "127.0.0.1"


@pytest.mark.parametrize(
    "variables", [{"OMPI_COMM_WORLD_SIZE": "4"}, {"MPI_LOCALNRANKS": "4", "PMI_SIZE": "4"}]
)
def test_mpirun_and_mpi4py_of_different_mpis_are_refused(monkeypatch, variables):
    """Each process is then alone in its MPI_COMM_WORLD, and no error comes from MPI."""
    fake_mpi(monkeypatch, size=1, local_size=1)
    with pytest.raises(ValueError, match="4"):
        discover(variables)


# Slurm's lists ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node1,login", ["node1", "login"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[3]", ["node3"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("gpu[9-11]", ["gpu9", "gpu10", "gpu11"]),
        ("n[001,010-012]", ["n001", "n010", "n011", "n012"]),
        ("a[1-2]-ib,b-3,c[5,7].site.org", ["a1-ib", "a2-ib", "b-3", "c5.site.org", "c7.site.org"]),
        ("ip-10-0-[0-1]", ["ip-10-0-0", "ip-10-0-1"]),
        ("rack[1-2]node[1-2]", ["rack1node1", "rack1node2", "rack2node1", "rack2node2"]),
    ],
)
def test_hostlists_are_expanded(text, hosts):
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("4", [4]),
        ("2(x2)", [2, 2]),
        ("3,1", [3, 1]),
        ("2(x3),1", [2, 2, 2, 1]),
        ("8(x2),4,2(x3)", [8, 8, 4, 2, 2, 2]),
    ],
)
def test_tasks_per_node_are_expanded(text, counts):
    assert expand_tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["n[1-2", "n1-2]", "n[a-b]", "n[]", "n[1-]"])
def test_a_damaged_hostlist_is_no_list_of_other_hosts(text):
    with pytest.raises(ValueError, match="is not a list of hosts"):
        expand_hostlist(text)


@pytest.mark.parametrize("text", ["", "2(x", "2x3", "two"])
def test_damaged_tasks_per_node_are_refused(text):
    with pytest.raises(ValueError, match="is not a list of tasks per node"):
        expand_tasks_per_node(text)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
def test_a_variable_that_is_no_number_is_named(name):
    with pytest.raises(ValueError, match=f"{name}='x' is not a whole number"):
        discover(TORCHRUN | {name: "x"})


def test_groups_split_from_the_world_are_refused(monkeypatch):
    import vllm.envs

    assert SPLIT_GROUPS in vllm.envs.environment_variables
    monkeypatch.setenv(SPLIT_GROUPS, "1")
    with pytest.raises(ValueError, match="unset it"), session(discover(TORCHRUN)):
        pass


def test_a_rank_may_open_as_many_files_as_the_hard_limit():
    program = """
        from resource import RLIMIT_NOFILE, getrlimit, setrlimit
        from rl.runtime.ranks import discover
        from train_rl import prepare_environment

        setrlimit(RLIMIT_NOFILE, (128, 256))
        prepare_environment(discover())
        print(*getrlimit(RLIMIT_NOFILE))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout == b"256 256\n"


@pytest.mark.parametrize(
    "first, expected", [("192.0.2.9", True), ("127.0.0.1", False), ("no.invalid", False)]
)
def test_vllm_listens_in_the_network_of_the_first_node(monkeypatch, first, expected):
    from train_rl import prepare_environment

    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    prepare_environment(discover(slurm_step(2, 0, 1, MASTER_ADDR=first)))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if expected and probe.connect_ex((first, 9)):
            pytest.skip("this machine has no route there")
        own = probe.getsockname()[0]
    assert os.environ.get("VLLM_HOST_IP") == (own if expected else None)


@pytest.mark.parametrize("in_order, expected", [(True, "1"), (False, None)])
def test_only_the_gpu_of_a_run_without_roles_has_one_queue(monkeypatch, in_order, expected):
    from train_rl import prepare_environment

    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    prepare_environment(discover(), in_order=in_order)
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected
