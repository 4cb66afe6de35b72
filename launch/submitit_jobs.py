"""Submits runs from Python as submitit jobs, including arrays (map_array) and requeueing by submitit.

    from launch.submitit_jobs import Train, executor

    jobs = executor("runs/jobs", nodes=2, ntasks_per_node=8, gpus_per_node=8, time=240)
    job = jobs.submit(Train(), "configs/quickstart.yaml", ["run.name=a"])
    many = jobs.map_array(Train(), ["configs/quickstart.yaml"] * 2, [["run.name=b"], ["run.name=c"]])
    print(job.result())                 # {'state': 'finished', 'step': 150, ...}: the run's status.json

submitit starts one task per rank. When the time of the job is over, or the job is pre-empted, the first task
receives SIGUSR2 and submitit calls `Train.checkpoint` there. `Train.checkpoint` sends the signal on to
train_rl.py and waits until train_rl.py has stopped with a checkpoint. It then returns the same call to
submitit. submitit requeues the job, and the run continues under its name.

No other part of Lockstep needs submitit.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch import slurm
from launch.batch_file import ROOT
from rl.config.options import ConfigError
from rl.config.schema import load_config
from rl.sandbox.private_directory import make_private

if TYPE_CHECKING:
    import submitit
    from submitit.helpers import DelayedSubmission

STOPPED_EXIT = 75
"""Exit code of train_rl.py for a run that stopped and can continue."""


class RunFailed(RuntimeError):
    """Raised when train_rl.py ended with an error. The log of the task contains the error."""


def executor(folder: str, *, max_restarts: int = 100, **parameters: Any) -> "submitit.SlurmExecutor":
    """Return a submitit executor for Slurm. Raises ConfigError if submitit or Slurm is missing.

    folder: directory for submitit's pickles and logs, on a disk that all nodes share.
    max_restarts: how many times a job may be requeued after its time limit.
    parameters: parameters of submitit's SlurmExecutor, such as nodes, ntasks_per_node (ranks), gpus_per_node,
        time (in minutes), array_parallelism and signal_delay_s (seconds before the time limit at which the
        ranks get the signal). `additional_parameters` holds further options of sbatch.
    """
    try:
        import submitit
    except ImportError:
        raise ConfigError(
            "submitit is not installed: pip install 'lockstep-rl[slurm]', or use lockstep submit."
        ) from None
    if not slurm.available():
        raise ConfigError("there is no Slurm on this machine; submit from a login node of a cluster.")
    make_private(Path(folder.partition("%")[0]))  # `%j` is submitit's job
    made = submitit.SlurmExecutor(folder=folder, max_num_timeout=max_restarts)
    more = {"requeue": True, **parameters.pop("additional_parameters", {})}
    # As in slurm/job.sh: a rank that fails ends all ranks, and each rank sees all GPUs of its node.
    srun = ["--kill-on-bad-exit=1", *(["--gpu-bind=none"] if parameters.get("gpus_per_node") else [])]
    defaults = {"nodes": 1, "ntasks_per_node": 1, "time": 60, "signal_delay_s": 90}
    made.update_parameters(srun_args=srun, additional_parameters=more, **{**defaults, **parameters})
    return made


class Train:
    """A run of train_rl.py as a function that submitit calls on every rank."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._code: int | None = None

    def __getstate__(self) -> dict:
        return {"_process": None, "_code": None}

    def __call__(self, config: str | Sequence[str], overrides: Sequence[str] = ()) -> dict:
        """Run to the end; return the run's status.json. Raises RunFailed.

        config: YAML file of the run, or several, of which later ones win.
        """
        files = [config] if isinstance(config, str) else config
        given = [*(f"--config={file}" for file in files), *overrides]
        command = [sys.executable, "-u", str(ROOT / "train_rl.py"), *given]
        # The program inherits the block, so that a signal stays pending until the program can handle it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        try:
            self._process = subprocess.Popen(command, env=_environment())
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
        code = self._wait()
        if code == STOPPED_EXIT and os.environ.get("SLURM_PROCID", "0") == "0":
            # The run stopped by itself (run.max_time). This signal makes submitit requeue the job, as it does
            # at the time limit.
            os.kill(os.getpid(), signal.SIGUSR2)
        if code not in (0, STOPPED_EXIT):
            raise RunFailed(f"train_rl.py {shlex.join(given)} ended with exit code {code}")
        status = Path(load_config(config, overrides).run.dir, "status.json")
        return json.loads(status.read_text())

    def checkpoint(self, config: str | Sequence[str], overrides: Sequence[str] = ()) -> "DelayedSubmission":
        """Stop the run and return the same call. submitit's SIGUSR2 handler calls this on the first rank."""
        from submitit.helpers import DelayedSubmission

        if self._process is not None and self._wait(stop=True) not in (0, STOPPED_EXIT):
            print(
                f"train_rl.py exited with {self._code}, not {STOPPED_EXIT}; it continues from a checkpoint",
                file=sys.stderr,
            )
        return DelayedSubmission(Train(), config, overrides)

    def _wait(self, *, stop: bool = False) -> int:
        """Wait for the program and return its exit code. stop: whether to send it SIGUSR2 first."""
        assert self._process is not None
        if stop and self._code is None:
            self._process.send_signal(signal.SIGUSR2)
        # Popen.wait is not used: the signal handler may have interrupted a call of Popen.wait in this thread,
        # and that call would hold the lock.
        while self._code is None:
            status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            assert status is not None  # without WNOHANG the call waits
            self._code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        return self._code


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
