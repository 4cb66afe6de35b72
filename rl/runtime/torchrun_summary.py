"""The summary with which torchrun ends when a rank fails.

The summary has forty lines, at the end of a job's output. torchrun shows in it what a rank has written to the
file TORCHELASTIC_ERROR_FILE; torch.distributed.elastic.multiprocessing.errors describes the format.
"""

import contextlib
import json
import os
import time
from pathlib import Path


def show_in_summary(message: str) -> None:
    """Show why this rank ends in torchrun's summary. Does nothing under another launcher. Never raises."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        when = {"timestamp": str(int(time.time()))}  # torchrun's root cause is the earliest failure
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": when}}))
