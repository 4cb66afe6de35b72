"""Manages the Slurm jobs of an elastic run: tells Slurm which jobs it may requeue, and submits a job for
further nodes.

An elastic run may use nodes of several jobs. `<run.dir>/elastic/job-4711` holds 1 if Slurm requeues job 4711
when its last node fails, else 0. Slurm must not requeue job 4711 while the run continues in another job.
"""

import os
import shlex
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from launch import slurm
from launch.elastic_files import Lease

ASK_S = 60.0
"""Shortest time between two requests for further nodes, in seconds."""
JOIN = "LOCKSTEP_JOIN"
"""Environment variable with the options and arguments of sbatch for a job that brings further nodes."""


class Jobs:
    """The jobs of the run, as the agent of one node sees them.

    directory: `<run.dir>/elastic`, which has a file per job, and a lease (a file) per living agent.
    own: id of the job that this node belongs to; empty outside of Slurm.
    say: function that writes a line to the agent's log.
    """

    def __init__(self, directory: Path, own: str, say: Callable[[str], None]):
        self._directory, self._own, self._say = directory, own, say
        self._asked = -ASK_S
        self._thread = threading.Thread()
        if own:
            self._note(own, self._known().get(own, True))

    def tell(self, alive: Sequence[Lease], missing: int) -> None:
        """Tell Slurm which jobs it may requeue, and submit a job for missing nodes. Only the leader calls
        this.

        A thread calls Slurm, because the agent must renew its lease even if Slurm does not answer.
        alive: the living leases. missing: number of nodes to request.
        """
        if self._thread.is_alive():
            return
        nodes, known = Counter(lease.job for lease in alive if lease.job and not lease.leaving), self._known()
        requeues = {job: number > 1 or len(nodes) == 1 for job, number in nodes.items()}
        changes = {job: requeue for job, requeue in requeues.items() if known.get(job, True) != requeue}
        if missing and (now := time.monotonic()) - self._asked > ASK_S:
            self._asked = now
        else:
            missing = 0
        if changes or missing:
            self._thread = threading.Thread(target=self._tell, args=(changes, missing), daemon=True)
            self._thread.start()

    def end(self, code: int, nodes_left: Sequence[str], nodes: Sequence[str]) -> None:
        """Make this node's job end in the same way as the run. Only the last agent of a job calls this.

        Usually the batch script ends or requeues the job. The script runs on the first node of the job, so if
        that node is lost, the agent does it instead.
        code: exit code of the run. nodes_left: living nodes of the job. nodes: all nodes of the job.
        """
        again = code == 75 and os.environ.get("NO_REQUEUE", "0") != "1"
        try:
            if again:
                self._set_requeue(self._own, True)
            states = {} if code == 75 else slurm.states(self._known())
            useless = [job for job, state in states.items() if state == "PENDING"]
            if nodes and nodes[0] not in nodes_left:
                if again:
                    slurm.run("scontrol", "requeue", self._own)
                else:
                    useless.append(self._own)
            if useless:
                slurm.run("scancel", *useless)
        except (slurm.SlurmError, OSError) as error:
            self._say(str(error))

    def _tell(self, changes: dict[str, bool], missing: int) -> None:
        try:
            for job, requeue in changes.items():
                self._set_requeue(job, requeue)
            words = os.environ.get(JOIN)
            if missing and words and "PENDING" not in slurm.states(self._known()).values():
                job = slurm.submit(f"--nodes={missing}", *shlex.split(words))
                self._note(job, "--no-requeue" not in words)
                self._say(f"job {job} is to bring {missing} nodes")
        except (slurm.SlurmError, OSError) as error:
            self._say(str(error))

    def _set_requeue(self, job: str, requeue: bool) -> None:
        if self._known().get(job, True) == requeue:
            return
        self._note(job, requeue)
        try:
            slurm.run("scontrol", "update", f"JobId={job}", f"Requeue={requeue:d}")
        except slurm.SlurmError as error:  # if Slurm requeues the job later, its nodes join the run as spares
            self._say(str(error))

    def _known(self) -> dict[str, bool]:
        return {path.name[4:]: path.read_text() == "1" for path in self._directory.glob("job-*")}

    def _note(self, job: str, requeues: bool) -> None:
        (self._directory / f"job-{job}").write_text(f"{requeues:d}")
