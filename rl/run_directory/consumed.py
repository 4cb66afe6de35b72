"""`<run.dir>/consumed.jsonl`: the prompts that each step consumed, if they are not those it drew.

A prompt is logged as [draw, index]: the number of prompts that the run had drawn before it, and its row in
the data. `tools/consumed.py` counts them.
"""

import json
from collections.abc import Sequence
from pathlib import Path

FILE_NAME = "consumed.jsonl"

Drawn = Sequence[tuple[int, int]]
"""(draw, index) of prompts."""


def append_consumed(
    path: Path, step: int, *, num_drawn: int, consumed: Drawn, dropped: Drawn, waiting: Drawn
) -> None:
    """Append the record of a step. Call it before the checkpoint of the step is written.

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
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
