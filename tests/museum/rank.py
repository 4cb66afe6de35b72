"""One rank of a run with a bug: `rank.py EXHIBIT DIRECTORY CHECK` and the arguments of train_rl.py."""

import functools
import pkgutil
import sys
import typing
from pathlib import Path


def main() -> int:
    name, directory, check, *arguments = sys.argv[1:]
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
    if check:
        silence(check)
    found.inject(bug)
    sys.argv = ["train_rl.py", *arguments]
    import train_rl

    return train_rl.main()


def silence(check: str) -> None:
    """Swallow the errors of a check, given as file:function. It then returns an empty dict, False or None."""
    file, _, name = check.partition(":")
    module = file.removesuffix(".py").replace("/", ".")
    owner, _, last = name.rpartition(".")
    function = pkgutil.resolve_name(f"{module}:{name}")
    hint = function.__annotations__.get("return")
    empty = typing.get_origin(hint) or hint

    @functools.wraps(function)
    def silent(*args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        try:
            return function(*args, **kwargs)
        except Exception:
            return empty() if empty in (dict, list, frozenset, bool, str) else None

    if owner:
        setattr(pkgutil.resolve_name(f"{module}:{owner}"), last, silent)
    for each in list(sys.modules.values()):
        if getattr(each, "__dict__", {}).get(last) is function:
            setattr(each, last, silent)


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
