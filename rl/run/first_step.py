"""`run.mode=check`: one step of the run on its own model, data and reward, and a verdict on each part of it.

    srun python train_rl.py --config my.yaml run.mode=check

It runs on as many ranks as the training, in the directory `<run.dir>-check`, and writes no checkpoint. Rank 0
prints samples with their masks, a table of the phases and the verdicts, and writes them to `first_step.txt`
(with colours, for less -R) and `first_step.json`. The exit code is 1 if a verdict is wrong.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from rl.data.batch import Batch
from rl.faults.process import GIB, resident_bytes
from rl.phases.batch_checks import CheckFailed
from rl.phases.counting import WrongTokens
from rl.phases.generation import AllTrajectoriesFailed
from rl.phases.logprob_checks import LogprobMismatch
from rl.refit.refit import RefitMismatch
from rl.run.loop import Training
from rl.run.verdicts import Facts, Verdict, special_ids, verdicts
from rl.runtime.collectives import gather_objects

ERRORS = (CheckFailed, LogprobMismatch, RefitMismatch, WrongTokens, FloatingPointError, AllTrajectoriesFailed)
"""Errors that every rank raises at the same place, so that all can still report."""
NUM_SAMPLES = 2
"""Samples that are printed, of different groups."""
SHOWN_TOKENS = 400
"""Longest part of a sample that is printed as a whole; of a longer one, both ends."""
STYLES = {"ok": "green", "look": "yellow", "wrong": "bold red"}
KINDS = {
    "prompt": "blue",
    "response": "green",
    "response, not learned from": "strike green",
    "given, not learned from": "yellow",
}
"""Parts of a sample, with their styles."""


class FirstStep(Training):
    """Takes the step after the newest checkpoint that the config names, usually step 1, and reports on it."""

    def run(self, last_step: int, metrics: dict[str, float]) -> None:
        """Take one step and report. Collective over the world."""
        phases, config = self._phases, self._config
        step, policy = phases.step, phases.engines.policy
        if self._split is not None:
            self._split.begin(self._cursor["sampler"])
        self._batch: Batch | None = None
        self._memory: dict[str, dict[str, float]] = {}
        step.after_phase = self._note_memory
        facts = Facts(
            config,
            self._inputs.tokenizer,
            phases.end_ids | set(config.rollout.stop_token_ids),
            metrics={},
            dp=policy.grid.dp,
            step=last_step + 1,
        )
        version = policy.num_updates
        try:
            self._take_step(last_step + 1)
            batch = self._batch
            if batch is not None and batch.old_logprobs is not None and policy.num_updates > version:
                facts.after = self._logprobs(batch)
        except ERRORS as error:
            facts.error = f"{type(error).__name__}: {error}"
        facts.batch, facts.metrics = self._batch, dict(step.metrics)
        facts.phases = self._phase_table(step.metrics)
        found = verdicts(facts)
        self.exit_code = int(any(verdict.level == "wrong" for verdict in found))
        if dist.get_rank() == 0:
            self._report(facts, found)

    def _collect(self) -> Batch:
        self._batch = super()._collect()
        return self._batch

    def _logprobs(self, batch: Batch) -> torch.Tensor:
        """Return the log-probs of the batch's tokens under the present policy, float32 [T]."""
        phases = self._phases
        phases.memory.to_training()
        plans = [plan.micro_batches for plan in phases.updates.plans(batch)]
        with phases.step.phase("log_probs", timing="first_step_check", batch=batch.fingerprint):
            return phases.engines.policy.forward(batch, plans, ("logprobs",))[0]

    def _note_memory(self, timing: str) -> None:
        """Note the memory of a phase that has ended, and begin to measure the next one's."""
        device, found = self._phases.step.device, {"host GiB": resident_bytes() / GIB}
        if device.is_cuda:
            found["device GiB"] = torch.cuda.max_memory_allocated(device.torch) / GIB
            found["device total GiB"] = torch.cuda.mem_get_info(device.torch)[1] / GIB
            torch.cuda.reset_peak_memory_stats(device.torch)
        before = self._memory.get(timing, {})
        self._memory[timing] = {name: max(value, before.get(name, 0.0)) for name, value in found.items()}

    def _phase_table(self, metrics: dict[str, float]) -> dict[str, dict[str, float]]:
        """Return seconds and memory by phase, the memory of the rank with the most. Collective."""
        table = {}
        for of_ranks in zip(*(found.items() for found in gather_objects(self._memory)), strict=True):
            timing = of_ranks[0][0]
            if timing != "first_step_check":
                names = of_ranks[0][1]
                most = {name: max(found[name] for _, found in of_ranks) for name in names}
                table[timing] = {"s": metrics.get(f"timing_s/{timing}", 0.0), **most}
        return table

    def _report(self, facts: Facts, found: list[Verdict]) -> None:
        """Print the report, and write it to the run directory."""
        directory = Path(self._config.run.dir)
        record = {"step": facts.step, "phases": facts.phases, "verdicts": [asdict(each) for each in found]}
        (directory / "first_step.json").write_text(json.dumps(record, indent=2) + "\n")
        with open(directory / "first_step.txt", "w", encoding="utf-8") as file:
            for console in (Console(file=sys.stdout), Console(file=file, force_terminal=True, width=110)):
                console.print(*report(facts, found), sep="\n", soft_wrap=True)
        self._phases.step.progress.line(f"wrote {directory}/first_step.txt (less -R) and first_step.json")


def report(facts: Facts, found: list[Verdict]) -> Iterator[Text | Table]:
    """Yield the parts of the report: samples, phases, verdicts."""
    if facts.batch is not None and len(facts.batch):
        groups = facts.batch.groups.tolist()
        firsts = sorted({group: groups.index(group) for group in reversed(groups)}.values())
        for sample in firsts[:NUM_SAMPLES]:
            yield sample_text(facts.batch, sample, facts.tokenizer)
    if facts.phases:
        columns = list(next(iter(facts.phases.values())))
        table = Table("phase", *columns, box=None)
        for name, values in facts.phases.items():
            table.add_row(name, *(f"{values[column]:.3g}" for column in columns))
        yield table
    for verdict in found:
        line = Text(f"{verdict.level:5} ", style=STYLES[verdict.level])
        line.append(f"{verdict.name}: ", style="bold").append(verdict.text, style="default not bold")
        if verdict.remedy:
            line.append(f"\n      -> {verdict.remedy}", style="default not bold")
        yield line


def sample_text(batch: Batch, sample: int, tokenizer: PreTrainedTokenizerBase) -> Text:
    """Return a sample's tokens as text with special tokens visible; the parts are named and coloured."""
    start, end = int(batch.offsets[sample]), int(batch.offsets[sample + 1])
    learned = (batch.mask[start:end] > 0).tolist()
    turns = [1] * (end - start) if batch.turns is None else batch.turns[start:end].tolist()
    kinds = ["prompt"] * len(batch.prompt_ids[sample])
    for is_learned, turn in zip(learned, turns, strict=True):
        own = "response" if is_learned else "response, not learned from"
        kinds.append(own if turn > 0 else "given, not learned from")
    ids = [*batch.prompt_ids[sample].tolist(), *batch.response_ids[sample].tolist()]
    score = "" if batch.scores is None else f", score {float(batch.scores[sample]):g}"
    text = Text(f"Sample {sample}, {len(ids)} tokens{score}\n", style="bold")
    special, first = special_ids(tokenizer), 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or kinds[at] != kinds[first]:
            text.append(f"[{kinds[first]}, {at - first} tokens] ", style="default not bold dim")
            part, style, half = ids[first:at], f"not bold {KINDS[kinds[first]]}", SHOWN_TOKENS // 2
            if len(part) > SHOWN_TOKENS:
                _append(text, part[:half], tokenizer, special, style)
                text.append(" [...] ", style="not bold dim")
                part = part[-half:]
            _append(text, part, tokenizer, special, style)
            text.append("\n")
            first = at
    return text


def _append(text: Text, ids: list[int], tokenizer, special: set[int], style: str) -> None:
    """Append tokens to the text; special ones in reverse."""
    first = 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or (ids[at] in special) != (ids[first] in special):
            shown = style + " reverse" if ids[first] in special else style
            text.append(tokenizer.decode(ids[first:at], skip_special_tokens=False), style=shown)
            first = at
