"""`run.mode=check`: one step of the run on its own model, data and reward, and a verdict on each part of it.

    srun lockstep train --config my.yaml run.mode=check

The check runs on as many ranks as the training, in the directory `<run.dir>-check`, and writes no checkpoint.
Rank 0 prints samples with their masks, a table of the phases and the verdicts, and writes them to
`first_step.txt` (with colours, for less -R) and `first_step.json`. The exit code is 1 if a verdict is wrong.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from rl.checkpoint.start import ChangedSinceStart
from rl.checks.batches import CheckFailed
from rl.checks.logprobs import LogprobMismatch
from rl.checks.updates import WrongGradient, WrongTokens
from rl.data.batch import Batch
from rl.faults.process import GIB, resident_bytes
from rl.features.first_step.report import report
from rl.features.first_step.verdicts import Facts, Verdict, verdicts
from rl.phases.dialogues import AllTrajectoriesFailed
from rl.refit.gather import RefitMismatch
from rl.run.loop import TrainingLoop
from rl.runtime.collectives import gather_objects
from rl.stopping.requests import StepAborted, StopDecision
from rl.training.gradients import StateChanged, WrongReduction
from rl.training.optimizer import WrongStep
from rl.training.parts import WrongInputs

ERRORS = (
    ChangedSinceStart,
    CheckFailed,
    LogprobMismatch,
    RefitMismatch,
    StateChanged,
    WrongGradient,
    WrongInputs,
    WrongReduction,
    WrongStep,
    WrongTokens,
    FloatingPointError,
    AllTrajectoriesFailed,
)
"""Errors that every rank raises at the same place. After such an error all ranks can still report."""


class FirstStep(TrainingLoop):
    """Takes the step after the newest checkpoint that the config names, and reports on the step. Without a
    checkpoint, for example, it takes step 1."""

    def run(self, last_step: int, metrics: dict[str, float]) -> StopDecision | None:
        """Take one step and report. Returns the stop request if one aborted the step, else None.

        Collective over the world.
        """
        phases, config = self._phases, self._config
        step, policy = phases.step, phases.engines.policy
        phases.sampler.begin(self._cursor)
        self._batch: Batch | None = None
        self._memory: dict[str, dict[str, float]] = {}
        step.after_phase = self._note_memory
        facts = Facts(
            config,
            self._inputs.tokenizer,
            phases.end_ids | set(config.rollout.stop_token_ids),
            metrics={},
            dp=policy.grid.dp,
            row_tokens=phases.row_tokens,
            shares_prompts=policy.shares_prompts,
            step=last_step + 1,
            noise=phases.checks.noise,
        )
        version = policy.num_updates
        try:
            self._take_step(last_step + 1)
            facts.metrics, step.after_phase, batch = dict(step.metrics), None, self._batch
            if batch is not None and batch.old_logprobs is not None and policy.num_updates > version:
                facts.after = phases.inference.present_logprobs(batch)
        except StepAborted:
            return self._stop.agree()
        except ERRORS as error:
            facts.error, facts.metrics = f"{type(error).__name__}: {error}", dict(step.metrics)
        facts.batch, facts.phases = self._batch, self._phase_table(facts.metrics)
        found = verdicts(facts)
        self.exit_code = int(any(verdict.level == "wrong" for verdict in found))
        if dist.get_rank() == 0:
            self._report(facts, found)
        return None

    def _collect(self) -> Batch:
        self._batch = super()._collect()
        return self._batch

    def _note_memory(self, timing: str) -> None:
        """Note the memory of the ended phase, and begin to measure the next phase."""
        device, found = self._phases.step.device, {"host GiB": resident_bytes() / GIB}
        if device.is_cuda:
            found["device GiB"] = torch.cuda.max_memory_allocated(device.torch) / GIB
            found["device total GiB"] = torch.cuda.mem_get_info(device.torch)[1] / GIB
            torch.cuda.reset_peak_memory_stats(device.torch)
        before = self._memory.get(timing, {})
        self._memory[timing] = {name: max(value, before.get(name, 0.0)) for name, value in found.items()}

    def _phase_table(self, metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """Return seconds and memory by phase; memory is the maximum over the ranks. Collective over the
        world."""
        table = {}
        for of_ranks in zip(*(found.items() for found in gather_objects(self._memory)), strict=True):
            timing, names = of_ranks[0]
            most = {name: max(found[name] for _, found in of_ranks) for name in names}
            table[timing] = {"s": metrics.get(f"timing_s/{timing}", 0.0), **most}
        return table

    def _report(self, facts: Facts, found: list[Verdict]) -> None:
        """Print the report, and write it to the run directory."""
        self._phases.step.fence()
        directory = Path(self._config.run.dir)
        record = {"step": facts.step, "phases": facts.phases, "verdicts": [asdict(each) for each in found]}
        (directory / "first_step.json").write_text(json.dumps(record, indent=2) + "\n")
        with open(directory / "first_step.txt", "w", encoding="utf-8") as file:
            for console in (Console(file=sys.stdout), Console(file=file, force_terminal=True, width=110)):
                console.print(*report(facts, found), sep="\n", soft_wrap=True)
        self._phases.step.progress.line(f"wrote {directory}/first_step.txt (less -R) and first_step.json")
