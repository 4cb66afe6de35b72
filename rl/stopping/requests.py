"""Requests for an orderly stop, after which a run can continue, and the ranks' agreement on them.

A stop is requested by SIGUSR2 (`#SBATCH --signal=USR2@600`), in a Slurm job also by SIGTERM (pre-emption), by
`run.max_time`, by the approaching end of the Slurm job, and by a file `stop` in the run directory.
After a stop the process exits with code 75 (STOPPED_EXIT), or 0 after the file `stop`. A file `save` requests
a checkpoint without a stop.

Signals reach ranks at different moments. Therefore no rank acts alone: all ranks agree between two steps, in
one collective. During a generation, which may take long, a rank with a request sets a key in the job's store,
which all ranks check from time to time. The generation is then dropped, and the next start repeats its step
(`run.on_stop_in_generation`).

SIGUSR2 is blocked, not handled. It stays pending, which serves as the flag, and no handler interrupts
anything. Child processes inherit the block, so none of them dies when Slurm sends the signal to every process
of a step.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from rl.config.durations import seconds_of
from rl.runtime import session
from rl.runtime.job_store import look_s
from rl.sandbox.private_directory import refuse_untrusted
from rl.stopping import deadline
from rl.stopping.signals import requested_signal

STOP_FILE, SAVE_FILE = "stop", "save"
STOPPED_EXIT = 75
"""Exit code of a run that stopped and can continue: EX_TEMPFAIL of sysexits.h."""
MARGIN_S = 30.0
"""Safety margin before the job's end, in seconds: Slurm checks its time limit every half minute."""
POLL_S = 1.0
"""Shortest time between two checks of the store and of files during a generation, in seconds."""
REMEMBERED_STEPS = 5
"""Number of latest steps that predict the time of the next one; the first steps of a run are slow."""

_KEY = "stop"
REASONS = ("", "run.max_time is over", "the job's end is near", "SIGUSR2", "SIGTERM", "the file 'stop'")


class StepAborted(Exception):
    """Raised on every rank when a stop ends a generation; no weight has changed in this step."""


@dataclass(frozen=True)
class StopDecision:
    """The decision of all ranks between two steps."""

    reason: str
    """Why to stop; '' to continue."""
    save: bool
    """Whether a checkpoint was requested; the request's file is removed."""
    is_final: bool = False
    """Whether no later start continues the run."""

    @property
    def by_hand(self) -> bool:
        """Whether a person stopped the run with a file, and has to restart it."""
        return self.reason == REASONS[-1]


class StopRequests:
    """The stop requests of one rank."""

    def __init__(self, run_dir: str, *, max_time: str, environ: Mapping[str, str] | None = None):
        """Read the deadlines. max_time: `run.max_time`, '' for no limit."""
        env = os.environ if environ is None else environ
        self._store, self._leads = session.job().store, session.job().rank == 0
        self._directory = Path(run_dir)
        self._deadline = deadline.STARTED + seconds_of(max_time) if max_time else None
        self._job_end = deadline.job_end(env)
        lead = env.get("LOCKSTEP_SIGNAL_LEAD", "")
        self._signal_lead = float(lead) if lead.isdigit() else None
        self._step_seconds: list[float] = []
        self._save_seconds = 0.0
        self._checked = 0.0
        self._known = 0
        self._is_shared = False

    def agree(self) -> StopDecision:
        """Return the pending requests of all ranks. Collective over the world; call it between two steps.

        With roles, the trainers decide for all ranks; generators share their requests by `is_requested`.
        """
        save = self._leads and (self._directory / SAVE_FILE).exists()
        requests = torch.tensor([self._reason(predict=True), int(save)])
        dist.all_reduce(requests, op=dist.ReduceOp.MAX)
        if save:
            (self._directory / SAVE_FILE).unlink(missing_ok=True)
        return StopDecision(REASONS[int(requests[0])], bool(requests[1]))

    def is_requested(self) -> bool:
        """Return whether a stop is in the store. Cheap and not collective; called during a generation."""
        now = time.monotonic()
        if now - self._checked < max(POLL_S, look_s(session.job().world_size)):
            return False
        self._checked = now
        if not self._is_shared and (reason := self._reason(predict=False)):
            self._store.set(_KEY, str(reason))
            self._is_shared = True
        return self._store.check([_KEY])

    def record_step(self, step: float, save: float, *, unstoppable: float) -> str:
        """Record the seconds of a step without its checkpoint, and of its checkpoint (0 if none).

        unstoppable: seconds of the step during which a stop has to wait, for example the update. Returns a
        warning, once, if the signal of later steps will come too late; else ''.
        """
        self._step_seconds = [*self._step_seconds, step][-REMEMBERED_STEPS:]
        self._save_seconds = max(self._save_seconds, save)
        if self._signal_lead is None or unstoppable + self._save_seconds <= self._signal_lead:
            return ""
        lead, self._signal_lead = self._signal_lead, None
        return (
            f"warning: the signal before the end of the job comes {lead:.0f} s early, but a step "
            f"({unstoppable:.0f} s) and a checkpoint ({self._save_seconds:.0f} s) take longer; "
            f"submit with --signal=USR2@{2 * (unstoppable + self._save_seconds) + 60:.0f}"
        )

    def _reason(self, *, predict: bool) -> int:
        """Return the index in REASONS of this rank's request, now or earlier.

        predict: stop before the job's end if the next step would not fit.
        """
        self._known = self._known or self._check(predict)
        return self._known

    def _check(self, predict: bool) -> int:
        number = requested_signal()
        if not self._leads:  # only rank 0 checks clocks and files
            return 0 if number is None else REASONS.index(number.name)
        if (self._directory / STOP_FILE).exists():
            return 5
        if number is not None:
            return REASONS.index(number.name)
        is_part = dist.get_world_size() < session.job().world_size
        if is_part and (shared := self._store.get(_KEY)):
            return int(shared)  # of any rank of the other role
        now = time.time()
        if self._deadline is not None and now >= self._deadline:
            return 1
        if self._job_end is not None and self._step_seconds and predict:
            end_of_next = now + max(self._step_seconds) + self._save_seconds + MARGIN_S
            return 2 if end_of_next > self._job_end else 0
        return 0


def refuse_if_stopped_by_hand(run_dir: str) -> None:
    """Raise ValueError if the file that stopped the run still exists. For rank 0."""
    path = Path(run_dir, STOP_FILE)
    if path.exists():
        refuse_untrusted(path.parent)  # in a directory of somebody else the file means nothing
        raise ValueError(f"{path} exists, which stopped this run; remove it to continue the run.")
