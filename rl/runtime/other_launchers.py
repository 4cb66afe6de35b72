"""Rank discovery under the launchers of PBS Pro (HPE's PALS), LSF (jsrun) and Flux, for `rl.runtime.ranks`.

    python -m launch.node ...                             slurm/train.pbs, train.lsf and train.flux
    mpiexec -n 16 --ppn 8 lockstep train ...              PBS Pro on HPE Cray
    jsrun --smpiargs=none -n 16 lockstep train ...        LSF, without Spectrum MPI
    flux run -N 2 -n 16 lockstep train ...                Flux

These launchers give each process its rank, but do not name the node of rank 0. This node is in MASTER_ADDR,
which a batch script sets, or in the first line of PBS's file of nodes.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Launcher(NamedTuple):
    """Names of a launcher's environment variables."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    """Number of processes on this node; "" if the launcher sets only the number of nodes, `num_nodes`."""
    step: str
    """Id of this start, identical on all ranks."""
    num_nodes: str = ""
    hosts: str = ""
    """File with the node of rank 0 in its first line."""


_OWN = [f"LOCKSTEP_{name}" for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "STEP")]
_PALS = ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", "PALS_APID")
_JSM = ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE")
UNKNOWN = (
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH2
    ("MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE"),  # MVAPICH 3
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("PALS_RANKID", "PMI_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),  # Hydra of MPICH and Intel MPI without MPI_LOCALNRANKS, aprun
    ("PMIX_RANK", "PMIX_SIZE"),  # prterun, prun; PMIx itself sets no size
    ("ALPS_APP_PE", "ALPS_APP_SIZE"),
    ("MPIRUN_RANK", "MPIRUN_NPROCS"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
)
"""Variables of a rank and a size that other launchers set without naming the other processes.
"""
LAUNCHERS = {
    launcher.name: launcher
    for launcher in (
        Launcher("node", *_OWN),  # first: the scheduler's variables may describe its process per node
        Launcher("pals", *_PALS, hosts="PBS_NODEFILE"),
        Launcher("jsrun", *_JSM, "LSB_JOBID"),
        Launcher(
            "flux",
            "FLUX_TASK_RANK",
            "FLUX_JOB_SIZE",
            "FLUX_TASK_LOCAL_ID",
            "",
            "FLUX_JOB_ID",
            "FLUX_JOB_NNODES",
        ),
    )
}


def started_by(env: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that started this process as one of several, or None."""
    for launcher in LAUNCHERS.values():
        if launcher.rank in env and env.get(launcher.world_size, "1") != "1":
            return launcher
    return None


def refuse_unknown(env: Mapping[str, str]) -> None:
    """Raise ValueError if an unknown launcher started this process as one of several.

    Each process would train alone, in the same run directory.
    """
    for rank, size in UNKNOWN:
        is_alone = env.get(size) == "1" or (rank.startswith(("SLURM", "LOCAL")) and env.get(rank) == "0")
        if rank in env and not is_alone:
            of = f" of {size}={env[size]}" if size in env else ""
            raise ValueError(
                f"{rank}={env[rank]}{of} says that a launcher started this process as one of several, but "
                "not where the others are; start the program with srun, torchrun, or mpirun and the `mpi` "
                "extra, set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as "
                f"torchrun does, or unset {rank} to run one process."
            )


def read_number(env: Mapping[str, str], name: str, default: int | None = None, *, least: int = 0) -> int:
    """Return the whole number in a variable of the environment, or `default` if the variable is not set.

    Raises KeyError if it is not set and has no default, ValueError if it is not a whole number of at least
    `least`.
    """
    if name not in env and default is not None:
        return default
    text = env[name]
    if not (text.isascii() and text.isdecimal() and int(text) >= least):
        raise ValueError(
            f"{name}={text!r} is not a whole number of at least {least}, which launchers set; unset {name}, "
            "or correct it."
        )
    return int(text)


def sizes_and_address(launcher: Launcher, env: Mapping[str, str]) -> tuple[int, int, str]:
    """Return world size, number of ranks of this node, and the address of rank 0's node.

    Raises ValueError if the address is unknown, or if a variable for a number holds no number.
    """
    world_size = read_number(env, launcher.world_size, least=1)
    if launcher.local_world_size:
        local = read_number(env, launcher.local_world_size, least=1)
    else:
        local, rest = divmod(world_size, read_number(env, launcher.num_nodes, least=1))
        if rest:
            raise ValueError(
                f"{world_size} tasks on {env[launcher.num_nodes]} nodes are not equally many on each; use "
                "--tasks-per-node, or slurm/train.flux."
            )
    if local == world_size:
        return world_size, local, "127.0.0.1"
    if "MASTER_ADDR" in env:
        return world_size, local, env["MASTER_ADDR"]
    with contextlib.suppress(KeyError, OSError, IndexError):  # a container may not have the file
        return world_size, local, Path(env[launcher.hosts]).read_text().split()[0]
    raise ValueError(
        f"{launcher.name} started {world_size} ranks without the address of the first one's node; add "
        "`export MASTER_ADDR=$(hostname)` to the batch script, which runs on that node."
    )
