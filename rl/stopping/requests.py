"""Stopping in order, so that a run goes on later: who may ask for it, and how the ranks agree.

A stop is asked for by SIGUSR2 (`#SBATCH --signal=USR2@600`), in a Slurm job also by SIGTERM (pre-emption), by `run.max_time`,
by the end of the Slurm job coming near, and by a file `stop` in the run directory; a file `save` asks for a checkpoint now.
Signals reach ranks at different moments, so nobody acts on one alone: all agree between two steps, in one collective.
In a generation, which may take long, a rank that knows of a stop puts a key into the job's store, and all look there now and
then; the generation is then dropped and its step redone by the next start (`run.on_stop_in_generation`).

SIGUSR2 is blocked rather than handled: it stays pending, which is all the flag there needs to be, no handler runs in the
middle of anything, and processes started from here inherit the block, so that none of them dies of a signal that Slurm
sends to every process of a step.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from rl.config.durations import seconds_of
from rl.stopping import deadline
from rl.stopping.signals import asked_by_signal

STOP_FILE, SAVE_FILE = "stop", "save"
STOPPED_EXIT = 75
"""Exit code of a run that stopped and is to be continued: EX_TEMPFAIL of sysexits.h."""
MARGIN_S = 30.0
"""Of a job's end: Slurm's clock is checked every half minute, and leaving takes time too."""
LOOK_EVERY_S = 1.0
"""Least time between two looks into the store, and at files, within a generation."""
REMEMBERED_STEPS = 5
"""Steps whose time counts for the prediction; the first of a run are slow and must not count for ever."""

_KEY = "stop"
REASONS = ("", "run.max_time is over", "the job's end is near", "SIGUSR2", "SIGTERM", "the file 'stop'")


class StepAborted(Exception):
    """A stop was asked for within a generation: nothing of this step has changed any weight. Raised on every rank alike."""


@dataclass(frozen=True)
class Asked:
    """What all ranks agreed on."""

    reason: str
    """Why to stop; '' for going on."""
    save: bool
    """Whether a checkpoint is asked for; the file is gone already."""

    @property
    def by_hand(self) -> bool:
        """Whether it is for a person to say when the run goes on."""
        return self.reason == REASONS[-1]


class StopRequests:
    """What asks this run to stop. One per rank."""

    def __init__(self, run_dir: str, *, max_time: str, environ: Mapping[str, str] | None = None):
        """max_time: `run.max_time`, '' for none."""
        env = os.environ if environ is None else environ
        self._leads = dist.get_rank() == 0
        self._directory = Path(run_dir)
        self._deadline = deadline.STARTED + seconds_of(max_time) if max_time else None
        self._job_end = deadline.job_end(env)
        lead = env.get("LOCKSTEP_SIGNAL_LEAD", "")
        self._lead = float(lead) if lead.isdigit() else None
        self._steps: list[float] = []
        self._save = 0.0
        self._looked = 0.0
        self._known = 0
        self._told = False

    def agree(self) -> Asked:
        """What is asked for at this moment. Collective over the world; between two steps."""
        save = self._leads and (self._directory / SAVE_FILE).exists()
        asked = torch.tensor([self._reason(predict=True), int(save)])
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        if save:
            (self._directory / SAVE_FILE).unlink(missing_ok=True)
        return Asked(REASONS[int(asked[0])], bool(asked[1]))

    def within_generation(self) -> bool:
        """Whether some rank knows of a stop, as far as this one can see. Not collective, and cheap."""
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return False
        self._looked = now
        store = dist.distributed_c10d._get_default_store()
        if not self._told and self._reason(predict=False):
            store.set(_KEY, "1")
            self._told = True
        return store.check([_KEY])

    def measured(self, step: float, save: float, *, unstoppable: float) -> str:
        """Take note of the seconds of a step with all that follows it, and of its checkpoint if there was one. Returns a warning
        if the signal will come too late for the next ones, else ''. `unstoppable`: the part of the step that a stop waits for."""
        self._steps = [*self._steps, step][-REMEMBERED_STEPS:]
        self._save = max(self._save, save)
        if self._lead is None or unstoppable + self._save <= self._lead:
            return ""
        lead, self._lead = self._lead, None  # said once
        return (
            f"warning: the signal before the end of the job comes {lead:.0f} s early, but a step ({unstoppable:.0f} s) and a "
            f"checkpoint ({self._save:.0f} s) take longer: sbatch --signal=USR2@{2 * (unstoppable + self._save) + 60:.0f}"
        )

    def _reason(self, *, predict: bool) -> int:
        """Index in REASONS of what this rank knows, or has known, of. `predict`: the job's end is a reason if the next step
        would not be over by then."""
        self._known = self._known or self._look(predict)
        return self._known

    def _look(self, predict: bool) -> int:
        """The clock and files are rank 0's to look at."""
        number = asked_by_signal()
        if not self._leads:
            return 0 if number is None else REASONS.index(number.name)
        if (self._directory / STOP_FILE).exists():
            return 5
        if number is not None:
            return REASONS.index(number.name)
        now = time.time()
        if self._deadline is not None and now >= self._deadline:
            return 1
        if self._job_end is not None and self._steps and predict:
            return 2 if now + max(self._steps) + self._save + MARGIN_S > self._job_end else 0
        return 0


def refuse_if_stopped_by_hand(run_dir: str) -> None:
    """ValueError if the file that stopped the run is still there. For rank 0."""
    path = Path(run_dir, STOP_FILE)
    if path.exists():
        raise ValueError(f"{path} is there, which stopped this run; remove it to let the run go on.")
