"""Rank discovery under torchrun, srun, mpirun, other launchers and a plain `python`, before
`rl.runtime.rendezvous`.

Precedence: torchrun's variables, MPI, a Slurm step, a launcher of `rl.runtime.other_launchers`, one process.
`SLURM_PROCID` alone does not show a step: the batch script has it too, and `lockstep train` without srun
would look like rank 0 of N there and wait forever. Only a step has `SLURM_STEP_ID` and
`SLURM_STEP_NUM_TASKS`. mpi4py initialises MPI on import, so it is imported only when mpirun started the
program.
"""

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace

from rl.runtime.job_key import KEY_VARIABLE, JobKey, key_from
from rl.runtime.other_launchers import read_number, refuse_unknown, sizes_and_address, started_by

HOST_BYTES = 256
"""Size of the buffer for a host's name, in bytes."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, and the address of the rendezvous."""

    rank: int
    world_size: int
    local_rank: int
    """Rank among the processes of the same host."""
    local_world_size: int
    """Number of processes on this host."""
    launcher: str
    """torchrun, mpi, slurm, node, pals, jsrun, flux or single."""
    master_addr: str
    master_port: int = 0
    """0 before `rendezvous.join_ranks`; torchrun sets it."""
    listener: socket.socket | None = field(default=None, compare=False, repr=False)
    """Rank 0's listening socket at that port, except under torchrun."""
    key: JobKey | None = field(default=None, compare=False, repr=False)
    """The job's key after `rendezvous.join_ranks`; a job of one rank has none."""

    run_dir: str = ""
    """Directory of the file with the key; '' means the user's cache."""

    @property
    def on_one_host(self) -> bool:
        return self.local_world_size == self.world_size

    def export(self, environ: MutableMapping[str, str] | None = None) -> None:
        """Set the environment variables that torch.distributed and vLLM read."""
        environ = os.environ if environ is None else environ
        environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(self.local_rank),
            LOCAL_WORLD_SIZE=str(self.local_world_size),
            MASTER_ADDR=self.master_addr,
            MASTER_PORT=str(self.master_port),
        )


def discover(environ: Mapping[str, str] | None = None) -> Ranks:
    """Return this process's rank, world and address. Collective over MPI_COMM_WORLD under mpirun, else local.

    Raises ValueError if the launcher's variables contradict each other.
    """
    env = os.environ if environ is None else environ
    key = key_from(env)
    os.environ.pop(KEY_VARIABLE, None)  # worker processes do not inherit it
    try:
        ranks = _discover(env)
    except KeyError as error:
        raise ValueError(
            f"{error.args[0]} is not set, but other variables of its launcher are; a container or `env -i` "
            "must pass on all of them."
        ) from error
    if not (
        0 <= ranks.rank < ranks.world_size
        and 0 <= ranks.local_rank < ranks.local_world_size <= ranks.world_size
    ):
        raise ValueError(
            f"{ranks.launcher} says RANK={ranks.rank} of {ranks.world_size}, on its node "
            f"{ranks.local_rank} of {ranks.local_world_size}, which is a contradiction; ranks count from 0; "
            "unset the variables of another job or step."
        )
    return replace(ranks, key=key)


def _discover(env: Mapping[str, str]) -> Ranks:
    if "RANK" in env and "WORLD_SIZE" in env:
        return _from_torchrun(env)
    if _started_by_mpirun(env):
        return _from_mpi(env)
    if "SLURM_STEP_NUM_TASKS" in env and ("SLURM_STEP_ID" in env or "SLURM_STEPID" in env):
        return _from_slurm(env)
    if launcher := started_by(env):
        world_size, local_world_size, first = sizes_and_address(launcher, env)
        rank, local_rank = read_number(env, launcher.rank), read_number(env, launcher.local_rank)
        return Ranks(rank, world_size, local_rank, local_world_size, launcher.name, first)
    if read_number(env, "SLURM_NTASKS", 1) > 1:
        raise ValueError(
            f"SLURM_NTASKS={env['SLURM_NTASKS']}, but this is a batch script, not a step: start the program "
            "with `srun lockstep train ...`, or unset SLURM_NTASKS to run one process."
        )
    refuse_unknown(env)
    return Ranks(0, 1, 0, 1, "single", "127.0.0.1")


def _from_torchrun(env: Mapping[str, str]) -> Ranks:
    if (restarts := env.get("TORCHELASTIC_MAX_RESTARTS", "0")) != "0":
        raise ValueError(
            f"torchrun --max-restarts={restarts} would start the ranks again after a stop, too, and after "
            "invalid input; leave it out. A scheduler continues a run (slurm/job.sh with RETRY_CRASHED=1), "
            "or the agents of run.elastic."
        )
    missing = [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise ValueError(
            f"RANK and WORLD_SIZE are set but {', '.join(missing)} is not; torchrun sets all of them."
        )
    rank, world_size, local_rank = (read_number(env, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=read_number(env, "LOCAL_WORLD_SIZE", local_rank + 1),
        launcher="torchrun",
        master_addr=env["MASTER_ADDR"],
        master_port=read_number(env, "MASTER_PORT"),
    )


def _started_by_mpirun(env: Mapping[str, str]) -> bool:
    """Return whether mpirun started this process.

    Open MPI sets the first variable, MPICH the second; srun sets neither.
    """
    return "OMPI_COMM_WORLD_SIZE" in env or "MPI_LOCALNRANKS" in env


def _from_mpi(env: Mapping[str, str]) -> Ranks:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ValueError(
            f"mpirun started this program but mpi4py cannot be imported ({error}); install the `mpi` extra, "
            "or use torchrun or srun."
        ) from error
    world = MPI.COMM_WORLD
    expected = read_number(env, "OMPI_COMM_WORLD_SIZE", read_number(env, "PMI_SIZE", world.size))
    if world.size != expected:
        # Otherwise each process would be a run of its own, in the same run directory.
        raise ValueError(
            f"mpirun started {expected} processes but mpi4py sees a world of {world.size}: mpirun and mpi4py "
            "belong to different MPI libraries; install mpi4py for this mpirun."
        )
    local = world.Split_type(MPI.COMM_TYPE_SHARED)
    name = bytearray(socket.gethostname().encode().ljust(HOST_BYTES, b"\0"))
    world.Bcast(name)  # rank 0's, as bytes: bcast would send a pickle
    host = name.rstrip(b"\0").decode()
    if local.size == world.size:
        host = "127.0.0.1"  # one host: its own name need not resolve
    return Ranks(world.rank, world.size, local.rank, local.size, "mpi", host)


def _from_slurm(env: Mapping[str, str]) -> Ranks:
    rank, world_size = read_number(env, "SLURM_PROCID"), read_number(env, "SLURM_STEP_NUM_TASKS")
    nodes, node = tasks_of_nodes(env), read_number(env, "SLURM_NODEID")
    if node >= len(nodes):
        raise ValueError(
            f"SLURM_NODEID={node}, but the step has {len(nodes)} nodes ({', '.join(nodes)}); unset the "
            "variables of another step."
        )
    first = "127.0.0.1" if len(nodes) == 1 else env.get("MASTER_ADDR", next(iter(nodes)))
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=read_number(env, "SLURM_LOCALID"),
        local_world_size=list(nodes.values())[node],
        launcher="slurm",
        master_addr=first,
    )


def tasks_of_nodes(env: Mapping[str, str]) -> dict[str, int]:
    """Return the number of ranks of each node of a step, in the order of SLURM_NODEID.

    Slurm numbers ranks and nodes of a heterogeneous job by component, but lists the step's nodes by name.
    Raises ValueError if two components share a node, because their ranks would have equal local ranks.
    """
    nodes = expand_hostlist(env.get("SLURM_STEP_NODELIST") or env["SLURM_NODELIST"])
    tasks = expand_tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env["SLURM_TASKS_PER_NODE"])
    counts = dict(zip(nodes, tasks))
    ordered = [
        node
        for component in range(read_number(env, "SLURM_HET_SIZE", 0))
        for node in expand_hostlist(env[f"SLURM_JOB_NODELIST_HET_GROUP_{component}"])
        if node in counts
    ]
    if len(set(ordered)) < len(ordered):
        raise ValueError(
            f"components of the heterogeneous job {env['SLURM_JOB_ID']} share a node: {', '.join(ordered)}; "
            "submit it with --exclusive, or as one job."
        )
    return {node: counts[node] for node in ordered or nodes}


def expand_tasks_per_node(text: str) -> list[int]:
    """Expand `2(x3),1`, the form of SLURM_TASKS_PER_NODE, to [2, 2, 2, 1].

    Raises ValueError for another form.
    """
    if not re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        raise ValueError(
            f"{text!r} is not a list of tasks per node such as 2(x3),1; unset the variable with it."
        )
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * (int(times.rstrip(")")) if times else 1)
    return counts


def expand_hostlist(text: str) -> list[str]:
    """Expand Slurm's `gpu[01-03,7],login` to ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login'].

    `scontrol show hostnames` does the same, but containers often lack it.
    Raises ValueError if a bracket is open or holds something else than numbers.
    """
    if not re.fullmatch(r"(?:[^\[\]]|\[\d+(-\d+)?(,\d+(-\d+)?)*\])*", text):
        raise ValueError(
            f"{text!r} is not a list of hosts such as gpu[01-03,7],login; unset the variable with it."
        )
    return [host for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text) for host in _expand(part)]


def _expand(name: str) -> list[str]:
    """Expand one name with any number of brackets; the last bracket varies fastest."""
    match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", name)
    if match is None:
        return [name]
    prefix, ranges, rest = match.groups()
    heads = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        heads += [f"{prefix}{n:0{len(first)}d}" for n in range(int(first), int(last or first) + 1)]
    return [head + tail for head in heads for tail in _expand(rest)]
