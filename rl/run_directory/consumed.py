"""`<run.dir>/consumed.jsonl`: the prompts that each step consumed, if they are not those it drew.

A prompt is logged as [draw, index]: the number of prompts that the run had drawn before it, and its row in
the data. `tools/consumed.py` counts them.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

FILE_NAME = "consumed.jsonl"

Drawn = Sequence[tuple[int, int]]
"""(draw, index) of prompts."""


def append_consumed(
    run_dir: str | Path, step: int, *, num_drawn: int, consumed: Drawn, dropped: Drawn, waiting: Drawn
) -> None:
    """Append the record of a step and wait until it is on the disk.

    Call it before the checkpoint of the step is written, so that no checkpoint has a step without a record.

    num_drawn: prompts that the run has drawn so far. consumed, dropped: prompts of this step. waiting: drawn
    prompts that are left to later steps.
    """
    record = {
        "training/global_step": step,
        "drawn": num_drawn,
        "consumed": consumed,
        "dropped": dropped,
        "waiting": waiting,
    }
    path = Path(run_dir, FILE_NAME)
    is_new = not path.exists()
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        directory = os.open(path.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
