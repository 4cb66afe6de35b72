"""`<run.dir>/consumed.jsonl`: the prompts that each step consumed, if they differ from the prompts that it
drew.

A prompt is logged as [draw, index]: the number of prompts that the run had drawn before it, and its row in
the data. `lockstep samples prompts` counts them.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from rl.run_directory.delayed_writes import DelayedWrites

FILE_NAME = "consumed.jsonl"

Drawn = Sequence[tuple[int, int]]
"""(draw, index) of prompts."""


class ConsumedLog:
    """Writes the file of a run. For rank 0 only; not collective."""

    def __init__(self, run_dir: str | Path):
        self._writes = DelayedWrites(Path(run_dir, FILE_NAME))

    def append(self, step: int, *, num_drawn: int, consumed: Drawn, dropped: Drawn, waiting: Drawn) -> None:
        """Append the record of a step and wait until it is on the disk. If the disk is full, keep the record
        for later.

        Call it before the checkpoint of the step is written, so that no checkpoint has a step without a
        record.

        num_drawn: prompts that the run has drawn so far. consumed, dropped: prompts of this step. waiting:
        drawn prompts that later steps will train.
        """
        record = {
            "training/global_step": step,
            "drawn": num_drawn,
            "consumed": consumed,
            "dropped": dropped,
            "waiting": waiting,
        }
        self._writes.append(step, json.dumps(record), sync=True)
