"""Give random input from outside to the program, and report what ended in anything but content or a sentence.

    python -m tests.fuzz datasets --count 200           random data sets
    python -m tests.fuzz models --count 100             damaged model directories
    python -m tests.fuzz configs --count 3000           edits of configs and command lines
    python -m tests.fuzz templates --count 100          chat templates, with all that a message may hold
    python -m tests.fuzz rewards --count 100            reward functions
    python -m tests.fuzz datasets --seed 7 --only 12    one case again, with its whole report

Each case must be read completely or refused in one sentence, within seconds. `--out FILE` writes a line of
JSON for each case. Exit code 0 if no case failed.
"""

import argparse
import importlib
import sys
from collections import Counter

from tests.fuzz.cases import FAULTS, line, try_cases

KINDS = ("datasets", "models", "configs", "templates", "rewards")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--count", type=int, default=100, help="number of cases")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--only", type=int, help="number of one case")
    parser.add_argument("--out", help="file for a line of JSON per case")
    args = parser.parse_args()
    kind = importlib.import_module(f"tests.fuzz.{args.kind}").case
    numbers = list(range(args.count)) if args.only is None else [args.only]
    outcomes: Counter[str] = Counter()
    with open(args.out or "/dev/null", "w") as out:
        for verdict in try_cases(kind, numbers, seed=args.seed):
            outcomes[verdict.outcome] += 1
            print(line(verdict), file=out, flush=True)
            if verdict.outcome in FAULTS or args.only is not None:
                text = f"{verdict.number}: {verdict.outcome}: {verdict.what}\n    {verdict.detail}"
                print(text.encode(errors="backslashreplace").decode(), flush=True)
    print(f"{args.kind}, seed {args.seed}: " + ", ".join(f"{n} {name}" for name, n in outcomes.most_common()))
    return int(any(outcomes[name] for name in FAULTS))


if __name__ == "__main__":
    sys.exit(main())
