"""Run the museum, and print a table of its exhibits.

    python -m tests.museum                       all exhibits
    python -m tests.museum "refit skipped"       some exhibits
    python -m tests.museum --bfloat16            the float32 exhibits, in bfloat16
    python -m tests.museum --second              each exhibit again without the check that caught it
    python -m tests.museum --list                the exhibits by check, each with its report and effect
    python -m tests.museum --lines               lines of code that only audit, by file
    python -m tests.museum --model DIR           the exhibits of dense models, on a pretrained model
    python -m tests.museum --clean 2000          clean steps with all checks on, which may raise nothing
    python -m tests.museum --clean 900 --model DIR    the clean runs of dense models, on a pretrained model

Exit code 0 if every exhibit was caught, or if no check raised in the clean runs.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.museum.lines import counted
from tests.museum.museum import Exhibit, load_exhibits
from tests.museum.tour import CLEAN, DENSE, Museum, fits_pretrained
from tests.spawn import RanksFailed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="exhibits; all if none is given")
    parser.add_argument("--list", action="store_true", help="print the exhibits and run none")
    parser.add_argument("--lines", action="store_true", help="count the code that only audits")
    parser.add_argument("--clean", type=int, metavar="STEPS", help="run clean steps instead")
    parser.add_argument("--model", type=Path, metavar="DIR", help="checkpoint of a pretrained dense model")
    parser.add_argument("--bfloat16", action="store_true", help="run the exhibits in bfloat16")
    parser.add_argument("--second", action="store_true", help="also show which check catches it second")
    parser.add_argument(
        "--out", help="directory of the runs and their logs; the default is removed at the end"
    )
    args = parser.parse_args()
    if args.lines:
        for file, number in sorted((lines := counted()).items(), key=lambda pair: -pair[1]):
            print(f"{number:5} {file}")
        print(f"{sum(lines.values()):5} lines")
        return 0
    exhibits = load_exhibits()
    if args.bfloat16:
        exhibits = {name: found.in_bfloat16 for name, found in exhibits.items() if not found.is_bfloat16}
    if args.model:
        exhibits = {name: found for name, found in exhibits.items() if found.model in DENSE}
    if args.list:
        for exhibit in sorted(exhibits.values(), key=lambda exhibit: exhibit.caught_by.lower()):
            tokens = f"\n    bfloat16, within {exhibit.tokens} tokens" if exhibit.is_bfloat16 else ""
            print(f"{exhibit.caught_by}: {exhibit.name} ({exhibit.peer})\n    {exhibit.saw}{tokens}")
        return 0
    if unknown := set(args.names) - (set(CLEAN) if args.clean else set(exhibits)):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="museum-") as directory:
        museum = Museum(Path(args.out or directory).resolve(), args.model and args.model.resolve())
        if args.clean:
            return clean(museum, args.clean, args.names)
        return visit(museum, [exhibits[name] for name in args.names or exhibits], args.second)


def visit(museum: Museum, chosen: list[Exhibit], again: bool) -> int:
    num_caught = 0
    print(f"{'exhibit':38} {'peer':34} {'caught by':34} {'bug':>4} {'end':>4} {'rank':>4} {'s':>5}")
    for found in chosen:
        seen = museum.visit(found)
        num_caught += seen.is_caught
        steps = f"{seen.acted or '-':>4} {seen.found or seen.acted or '-':>4} {seen.rank:>4}"
        by = found.caught_by if seen.is_caught else "NOT CAUGHT"
        print(f"{found.name:38} {found.peer:34} {by:34} {steps} {seen.seconds:5.1f}", flush=True)
        if not seen.is_caught:
            print(f"    expected {found.expects!r}\n    found    {seen.line or 'no error'}", flush=True)
        elif again:
            check, lines = seen.check
            second = museum.visit(found, silenced=check) if check else seen
            text = second.line.partition("\n")[0] if second.is_in_time else "silent"
            text = "it hangs" if " did not end within " in text else text
            text = text if check else "not run, because the check has no function of its own"
            print(f"    without {check} ({lines} lines): {text}", flush=True)
    print(f"{num_caught} of {len(chosen)} caught")
    return int(num_caught < len(chosen))


def clean(museum: Museum, steps: int, names: list[str]) -> int:
    possible = [name for name in CLEAN if not museum.pretrained or fits_pretrained(name)]
    chosen, taken, alarms, num_warnings = names or possible, 0, 0, 0
    for number, name in enumerate(chosen):
        share = steps * (number + 1) // len(chosen) - steps * number // len(chosen)
        start = time.monotonic()
        try:
            found, warnings = museum.clean(name, share)
        except RanksFailed as error:
            alarms += 1
            print(f"{name}: {error}", flush=True)
            continue
        taken += found
        num_warnings += len(warnings)
        print(
            f"{name}: {found} steps in {time.monotonic() - start:.0f} s", *warnings, sep="\n    ", flush=True
        )
    print(f"{taken} clean steps, {alarms} runs with an alarm, {num_warnings} warnings")
    return int(alarms > 0 or taken < steps)


if __name__ == "__main__":
    sys.exit(main())
