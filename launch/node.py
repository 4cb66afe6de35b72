"""Starts the ranks of one node of a PBS, LSF or Flux job. slurm/nodes.sh calls it.

    NODE_RANK=1 python -m launch.node NODES RANKS LOGS PROGRAM [argument ...]

NODE_RANK is the number of this node, from 0. Rank 0 writes to the output of this process, and every other
rank writes to LOGS/rank-N.log. The ranks find each other in the same way as the ranks of a Slurm step
(`rl.runtime.rendezvous`). When a rank ends with an error, the others have GRACE_S seconds to report the
cause; then they are killed. The exit code follows from the exit codes of the ranks
(`elastic_files.exit_code`).
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launch.elastic_files import exit_code
from launch.elastic_ranks import end_with_parent

GRACE_S = 60.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
"""Signals that this process passes on to its ranks."""


def main(argv: Sequence[str]) -> int:
    nodes, ranks, logs, node = int(argv[0]), int(argv[1]), Path(argv[2]), int(os.environ["NODE_RANK"])
    processes: list[subprocess.Popen] = []

    def send(number: int, frame: object) -> None:
        for process in processes:
            process.send_signal(number)

    for number in SIGNALS:
        signal.signal(number, send)
    for local_rank in range(ranks):
        rank = node * ranks + local_rank
        place = dict(RANK=rank, WORLD_SIZE=nodes * ranks, LOCAL_RANK=local_rank, LOCAL_WORLD_SIZE=ranks)
        env = os.environ | {f"LOCKSTEP_{name}": str(value) for name, value in place.items()}
        log = None if rank == 0 else (logs / f"rank-{rank}.log").open("a")
        command, nothing = [sys.executable, *argv[3:]], subprocess.DEVNULL
        processes.append(
            subprocess.Popen(
                command, env=env, preexec_fn=end_with_parent, stdin=nothing, stdout=log, stderr=log
            )
        )
    failed_at = None
    while None in (codes := [process.poll() for process in processes]):
        if failed_at is None and any(codes):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE_S:
            send(signal.SIGKILL, None)
        time.sleep(0.2)
    return exit_code([code for code in codes if code is not None])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
