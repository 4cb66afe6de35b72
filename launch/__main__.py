"""Submit runs and look after them.

    python -m launch submit --config FILE --nodes N [--time T] [...] [--dry-run] [-- key=value ...]
    python -m launch sweep SWEEP.yaml [--only failed] [--dry-run]
    python -m launch status [DIR ...]
    python -m launch report SWEEP

Each command has a --help of its own; docs/launch.md has examples. Exit code 0: done; 2: the input cannot work, said in one
sentence.
"""

import importlib
import sys

COMMANDS = {
    "submit": "launch.submit",
    "sweep": "launch.sweep",
    "status": "launch.status",
    "report": "launch.sweep_report",
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(
            f"error: there is no command {argv[0]}; the commands are {', '.join(COMMANDS)}.", file=sys.stderr
        )
        return 2
    try:
        return importlib.import_module(COMMANDS[argv[0]]).main(argv[1:])
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
