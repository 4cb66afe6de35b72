"""Submit runs and show their state.

    python -m launch submit --config FILE --nodes N [--time T] [...] [--dry-run] [-- key=value ...]
    python -m launch sweep SWEEP.yaml [--only failed] [--dry-run]
    python -m launch status [DIR ...]
    python -m launch watch RUN
    python -m launch report SWEEP

Each command has its own --help; docs/launch.md has examples. Exit codes: 0, done; 2, the input is invalid,
and one sentence is printed.
"""

import importlib
import os
import sys

from rl.stopping.signals import end_on_closed_pipe

COMMANDS = {
    "submit": "launch.submit",
    "sweep": "launch.sweep",
    "status": "launch.status",
    "watch": "launch.watch",
    "report": "launch.sweep_report",
}
SUBMITTING = ("submit", "sweep")


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"error: {argv[0]} is no command; use one of {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    try:
        code = importlib.import_module(COMMANDS[argv[0]]).main(argv[1:])
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the flush at exit fails again
        print(
            "error: the output was closed; `python -m launch status` shows what was submitted.",
            file=sys.stderr,
        )
        return 2
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    if not set(SUBMITTING) & set(sys.argv[1:2]) or {"-h", "--help", "--dry-run"} & set(sys.argv):
        end_on_closed_pipe()  # not for a real submission: a closed pipe would interrupt it
    sys.exit(main(sys.argv[1:]))
