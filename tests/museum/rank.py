"""One rank of a run with a bug: `rank.py EXHIBIT DIRECTORY` and the arguments of train_rl.py."""

import sys
from pathlib import Path


def main() -> int:
    name, directory, *arguments = sys.argv[1:]
    from tests.museum.museum import Bug, load_exhibits

    found = load_exhibits()[name]
    bug = Bug(found.at, Path(directory))
    from rl.phases.step_record import StepRecord

    begin = StepRecord.begin

    def begin_and_note(step: StepRecord, number: int) -> None:
        bug.step = number
        begin(step, number)

    StepRecord.begin = begin_and_note  # type: ignore[method-assign]
    if found.warns:
        print_warnings()
    found.inject(bug)
    sys.argv = ["train_rl.py", *arguments]
    import train_rl

    return train_rl.main()


def print_warnings() -> None:
    """Print warnings of the run to stdout too, because stderr is kept only of runs that fail."""
    from rl.run_directory.progress import Progress

    write = Progress.line

    def line(self: Progress, text: str) -> None:
        if text.startswith("warning: "):
            print(text)
        write(self, text)

    Progress.line = line  # type: ignore[method-assign]


if __name__ == "__main__":
    from train_rl import leave

    leave(main())
