"""Train, examine and compare runs with one command.

    lockstep COMMAND [...]            python -m lockstep COMMAND [...] in a checkout
    lockstep --help WORD              what a command does; else the keys of `train` with this word

Each rank of a run is this command, so a launcher starts several ranks:

    lockstep train --config my.yaml                                       one rank
    torchrun --nproc-per-node 8 -m lockstep train --config my.yaml        one node
    srun --ntasks-per-node 8 lockstep train --config my.yaml              a Slurm allocation

Exit codes: 0, done; 2, the input is invalid, and one sentence says why; 75, `train` was stopped and the same
command continues it; 1, a fault.
"""

import argparse
import difflib
import importlib
import os
import signal
import sys
from typing import NoReturn

from lockstep.commands import COMMANDS, Command
from rl import __version__
from rl.run_directory.bad_entries import sentence_of
from rl.runtime.torchrun_summary import show_in_summary
from train_rl import advice_on, leave

PRINTING = {"-h", "--help", "--print-config", "--dry-run"}
"""Options with which a command only prints."""


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command `argv` (None: sys.argv) and end the process with its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["help"]:
        argv = ["--help", *argv[1:]]
    if argv[:1] in (["-h"], ["--help"]) and argv[1:]:
        word = argv[1]
        argv = [*argv[1:], "--help"] if any(word in words.split() for words in COMMANDS) else ["train", *argv]
    if argv == ["--version"]:
        print(__version__)
        raise SystemExit(0)
    if not argv or argv[0] in ("-h", "--help"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `lockstep --help | head` ends silently
        print(usage())
        raise SystemExit(0 if argv else 2)
    words = next((words for n in (2, 1) if (words := " ".join(argv[:n])) in COMMANDS), "")
    if not words:
        near = difflib.get_close_matches(argv[0], COMMANDS, 1)
        advice = f"did you mean {near[0]}?" if near else f"use one of {', '.join(COMMANDS)}."
        raise SystemExit(refuse(f"{argv[0]} is no command of lockstep; {advice}"))
    command, rest = COMMANDS[words], argv[len(words.split()) :]
    sys.argv = [f"lockstep {words}", *rest]  # argparse takes the program's name from there
    argparse.ArgumentParser.error = refuse_arguments  # type: ignore
    if not command.acts or PRINTING & set(rest):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    leave(call(command, rest))


def call(command: Command, argv: list[str]) -> int:
    """Call the module of a command; return its exit code, and 2 with one sentence for what it raises."""
    try:
        about = {name: text for name in ("about", "first") if (text := getattr(command, name))}
        code = importlib.import_module(command.module).main([*argv, *command.after], **about)
        sys.stdout.flush()
        return code or 0
    except ModuleNotFoundError as error:
        if not (advice := advice_on(error)):
            raise
        return refuse(advice)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit fails again
        return refuse("the output was closed; `lockstep status` shows what was submitted.")
    except (ValueError, OSError) as error:
        if command.module == "train_rl":  # it refuses invalid input itself, so that this is a fault
            raise
        return refuse(error)
    except SystemExit as error:  # argparse
        if isinstance(error.code, str):
            return refuse(error.code)
        return error.code or 0


def refuse(error: object) -> int:
    """Print one sentence and return exit code 2."""
    text = sentence_of(error) if isinstance(error, OSError) else str(error)
    sentence = f"error: {text.removeprefix('error: ')}"
    show_in_summary(sentence)
    print(sentence, file=sys.stderr)
    return 2


def refuse_arguments(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Refuse the arguments of any command in one sentence; argparse would print its usage before."""
    advice = "" if message.endswith("?") else f"; {parser.prog} --help lists the arguments."
    raise SystemExit(refuse(f"{message.removesuffix('.')}{advice}"))


def usage() -> str:
    """Return the text of `lockstep --help`."""
    width = max(map(len, COMMANDS))
    return f"{__doc__}\n" + "\n".join(f"  {word:{width}}  {each.help}" for word, each in COMMANDS.items())


if __name__ == "__main__":
    main()
