"""Count the prompts that a run has consumed, and report lost and doubled ones.

    lockstep samples prompts runs/mine

Reads `consumed.jsonl` of a run directory, which a run with carry-over or roles writes. A prompt is identified
by its draw, the number of prompts that the run had drawn before it. Every draw must be consumed once, be
dropped (`rollout.on_stale=drop`), or wait for a later step. Exit code 1 if a draw is lost or doubled. Draws
of synchronous steps, before or between, are not in the file and not counted.

A synchronous run has no such file. From its stored rollouts (logging.rollouts) the command lists the rows of
the data that were drawn more than once, as each epoch does.
"""

import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

# As a script, Python searches only tools/ for modules.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl.config.command_line import make_parser
from rl.run_directory.bad_entries import read_each, read_lines, sentence_of
from rl.run_directory.consumed import FILE_NAME
from rl.run_directory.metric_log import STEP
from rl.run_directory.rollout_files import DIRECTORY, read, stored_steps
from rl.run_directory.status import refuse_missing, why_no_step
from tools.report import aligned
from tools.rollouts import cell, print_share

SHOWN = 8
"""Maximum number of prompts in the table of a synchronous run."""


@dataclass(frozen=True)
class Count:
    """The draws of a run."""

    steps: int
    drawn: int
    consumed: int
    dropped: int
    waiting: int
    lost: list[int]
    """Draws that are in none of the lists."""
    doubled: list[int]
    """Draws that were consumed or dropped more than once, or also wait."""
    renamed: list[int]
    """Draws that stand for several prompts."""

    @property
    def is_exact(self) -> bool:
        return not (self.lost or self.doubled or self.renamed)

    def line(self) -> str:
        return (
            f"{self.steps} steps: {self.drawn} prompts drawn, {self.consumed} consumed, "
            f"{self.dropped} dropped, {self.waiting} waiting, {len(self.lost)} lost {self.lost[:8] or ''}, "
            f"{len(self.doubled) + len(self.renamed)} doubled {[*self.doubled, *self.renamed][:8] or ''}"
        )


def count(run_dir: Path) -> Count:
    """Return the count of a run directory. Raises OSError if the run has written no such file."""
    # Draws of a line that is not a record count as lost.
    names = (STEP, "drawn", "consumed", "dropped", "waiting")
    records = read_lines(run_dir / FILE_NAME, lambda record: {name: record[name] for name in names})
    drawn, waiting = (records[-1]["drawn"], records[-1]["waiting"]) if records else (0, [])
    gone = [pair for record in records for name in ("consumed", "dropped") for pair in record[name]]
    seen = Counter(draw for draw, _ in gone + waiting)
    step, before, unknown = 0, 0, set[int]()
    for record in records:
        if record["training/global_step"] != step + 1:
            own = [d for name in ("consumed", "dropped", "waiting") for d, _ in record[name] if d >= before]
            unknown |= set(range(before, min(own, default=record["drawn"])))
        step, before = record["training/global_step"], record["drawn"]
    once_waiting = [pair for record in records for pair in record["waiting"]]
    pairs = Counter(draw for draw, _ in {tuple(pair) for pair in gone + once_waiting})
    return Count(
        steps=len(records),
        drawn=drawn,
        consumed=sum(len(record["consumed"]) for record in records),
        dropped=sum(len(record["dropped"]) for record in records),
        waiting=len(waiting),
        lost=sorted(set(range(drawn)) - seen.keys() - unknown),
        doubled=sorted(draw for draw, times in seen.items() if times > 1 or draw >= drawn),
        renamed=sorted(draw for draw, times in pairs.items() if times > 1),
    )


def drawn_again(run_dir: Path) -> str:
    """Return which prompts the stored rollouts have more than once. Raises ValueError if none are stored."""
    files = stored_steps(run_dir)
    if not files:
        why = why_no_step(run_dir) or "name a run with logging.rollouts=sample or all"
        raise ValueError(
            f"{run_dir} holds neither {FILE_NAME}, which rollout.carry_over=true and roles write, nor "
            f"rollouts; {why}."
        )
    tables = read_each(files.values(), lambda path: read(path, ["step", "group", "prompt_index", "prompt"]))
    steps: dict[int, list[int]] = defaultdict(list)
    prompts: dict[int, str] = {}
    for table in tables.values():
        groups = {row["group"]: row for row in table.to_pylist()}
        for row in groups.values():
            steps[row["prompt_index"]].append(row["step"])
            prompts[row["prompt_index"]] = row["prompt"]
    again = sorted((index for index, own in steps.items() if len(own) > 1), key=lambda i: -len(steps[i]))
    head = (
        f"{run_dir} has no {FILE_NAME}, so its steps are synchronous; its {DIRECTORY} of {len(tables)} steps "
        f"have {sum(map(len, steps.values()))} draws of {len(steps)} prompts, {len(again)} drawn more "
        "than once"
    )
    rows: list[tuple[str, ...]] = [("times", "prompt_index", "steps", "prompt")] if again else []
    for index in again[:SHOWN]:
        row = len(steps[index]), index, cell(", ".join(map(str, steps[index]))), cell(prompts[index])
        rows.append(tuple(map(str, row)))
    return "\n".join([head, *([aligned(rows)] if rows else [])])


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("run", type=Path, help="run directory")
    args = parser.parse_args(argv)
    try:
        refuse_missing(args.run)
        if not (args.run / FILE_NAME).is_file():
            print(drawn_again(args.run))
            print_share(args.run, max(stored_steps(args.run)))
            return 0
        found = count(args.run)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {sentence_of(error)}")
    print(found.line())
    return 0 if found.is_exact else 1


if __name__ == "__main__":
    sys.exit(main())
