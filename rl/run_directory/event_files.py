"""Event logs of the replicas: for example `<run.dir>/events/step_12/train.12_replica_0.events`."""

import shutil
from pathlib import Path

DIRECTORY = "events"


def remove_after(run_dir: str, step: int) -> None:
    """Remove the logs of steps after `step`: a resumed run repeats them, perhaps with fewer replicas."""
    for directory in Path(run_dir, DIRECTORY).glob("step_*"):
        number = directory.name.removeprefix("step_")
        if number.isdecimal() and directory.is_dir() and int(number) > step:
            shutil.rmtree(directory)
