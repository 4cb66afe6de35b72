"""One rank of a run with a bug: `rank.py EXHIBIT DIRECTORY` and the arguments of train_rl.py."""

import sys
from pathlib import Path


def main() -> int:
    name, directory, *arguments = sys.argv[1:]
    from tests.museum.museum import Bug, load_exhibits

    found = load_exhibits()[name]
    bug = Bug(found.at, Path(directory))
    from rl.phases.step import Step

    begin = Step.begin

    def begin_and_note(step: Step, number: int) -> None:
        bug.step = number
        begin(step, number)

    Step.begin = begin_and_note  # type: ignore[method-assign]
    found.inject(bug)
    sys.argv = ["train_rl.py", *arguments]
    import train_rl

    return train_rl.main()


if __name__ == "__main__":
    from train_rl import leave

    leave(main())
