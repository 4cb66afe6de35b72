"""Query the rollouts that a run has stored (logging.rollouts).

    lockstep samples runs/grpo                                   statistics of each step
    lockstep samples runs/grpo --step 10:20 --score :0 --show 3  texts of three wrong samples
    lockstep samples runs/grpo --step 10 --sample 0 --show 3     one answer to each of three prompts
    lockstep samples runs/grpo --score 0 --sort length --reverse --show 1   the longest wrong sample
    lockstep samples runs/grpo --text 'boxed' --length 500: --table
    lockstep samples runs/grpo --source openai/gsm8k --export gsm8k.jsonl

A range is LOW:HIGH, both included, LOW:, :HIGH or one value. Filters are combined. --export writes parquet,
JSONL or CSV by the name of the file; parquet and JSONL have every column, CSV all columns without tokens.
"""

import argparse
import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

# As a script, Python searches only tools/ for modules.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl.config.command_line import bounds, make_parser
from rl.config.options import listed
from rl.run_directory.bad_entries import read_each, sentence_of
from rl.run_directory.record import config_of_step
from rl.run_directory.rollout_files import SAMPLED_GROUPS, read, stored_steps
from rl.run_directory.status import refuse_missing, why_no_step
from tools.report import aligned

if TYPE_CHECKING:
    import pyarrow as pa

TEXTS = ("prompt", "response", "messages")
"""Columns that --text searches."""
PLACE = ("step", "group", "sample", "row", "data_source", "score", "reward", "length", "truncated")
RANGES = ("group", "sample", "score", "reward", "length")
"""Columns with a filter by a range."""
CELL_CHARS = 60


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", type=Path, help="directory of a run")
    for name in ("step", *RANGES):
        add(f"--{name}", metavar="RANGE", type=bounds, help=f"{name} within this range")
    add("--source", metavar="NAME", help="data_source of this name")
    add("--text", metavar="REGEX", help="prompt, response or a message matches the regular expression (RE2)")
    add("--truncated", action="store_true", help="responses that ended at the length limit")
    add("--sort", choices=("length", "score"), help="all samples in this order, smallest first")
    add("--reverse", action="store_true", help="with --sort: largest first")
    add("--table", action="store_true", help="a line per sample")
    add("--show", metavar="N", type=int, default=0, help="texts of the first N samples")
    add("--export", metavar="FILE", type=Path, help="write the samples (.parquet, .jsonl or .csv)")
    args = parser.parse_args(argv)
    if args.reverse and not args.sort:
        parser.error("--reverse needs --sort")
    is_table = args.table or bool(args.sort)
    needed = (
        None if args.export or args.show else [*PLACE, *(("ground_truth", "response") if is_table else ())]
    )
    try:
        refuse_missing(args.run_dir)
        files = stored_steps(args.run_dir)
        if not files:
            why = why_no_step(args.run_dir) or "run with logging.rollouts=sample or all"
            raise ValueError(f"{args.run_dir} holds no rollouts; {why}.")
        first, last = args.step or (min(files), max(files))
        chosen = {step: path for step, path in files.items() if first <= step <= last}
        if not chosen:
            raise ValueError(
                f"--step: {args.run_dir} holds rollouts of {len(files)} steps from {min(files)} to "
                f"{max(files)}, and none of this range; name one of them."
            )
        print_share(args.run_dir, max(files))
        tables = any_of(select(chosen, args, needed), chosen)
        if args.sort:
            tables = ordered(tables, args.sort, is_descending=args.reverse)
        if args.export:
            print(f"{export(tables, args.export)} samples: {args.export}")
        elif args.show:
            show(tables, args.show)
        elif is_table:
            print_table(tables)
        else:
            print_statistics(tables)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {sentence_of(error)}")
    return 0


def print_share(run_dir: Path, step: int) -> None:
    """Print how many samples of a step are stored, unless the run's config says that all are."""
    configs = [path for path in [run_dir / "config.yaml"] if path.is_file()]
    for share in read_each(configs, lambda _: _share(run_dir, step)).values():
        print(share, end="", file=sys.stderr)  # the rows may go to a file


def _share(run_dir: Path, step: int) -> str:
    config = yaml.safe_load(config_of_step(run_dir, step).read_text())
    if config.get("logging", {}).get("rollouts") != "sample":
        return ""
    prompts, samples = config["data"]["prompts_per_step"], config["rollout"]["samples_per_prompt"]
    stored = f"{SAMPLED_GROUPS * samples} of {prompts * samples} samples"
    text = f"{stored} of each step are stored (logging.rollouts=sample)\n"
    return text if prompts > SAMPLED_GROUPS else ""


def ordered(tables: Iterator["pa.Table"], key: str, *, is_descending: bool) -> Iterator["pa.Table"]:
    """Yield the rows of all tables as one table, sorted by a column."""
    import pyarrow as pa

    table = pa.concat_tables(list(tables))
    yield table.sort_by([(key, "descending" if is_descending else "ascending")])


def any_of(tables: Iterator["pa.Table"], files: dict[int, Path]) -> Iterator["pa.Table"]:
    """Yield the tables with rows. Raises ValueError at the end if none has any."""
    is_empty = True
    for table in tables:
        if table.num_rows:
            is_empty = False
            yield table
    if is_empty:
        found = read_each(files.values(), lambda path: read(path, ["data_source", "score"]))
        columns = [table.to_pydict() for table in found.values()]
        sources = {str(source) for each in columns for source in each["data_source"]}
        scores = [score for each in columns for score in each["score"] if score is not None]
        bounds = f", scores from {min(scores):g} to {max(scores):g}" if scores else ""
        raise ValueError(
            f"no stored sample of these {len(files)} steps matches the filters; their data_source is "
            f"{listed(sorted(sources)[:8] or ['(none)'], 'or')}{bounds}; leave a filter out."
        )


def select(
    files: dict[int, Path], args: argparse.Namespace, columns: list[str] | None = None
) -> Iterator["pa.Table"]:
    """Yield the matching rows of each step. columns: columns that the caller reads; None for all."""
    import pyarrow.compute as pc

    ranges = {name: getattr(args, name) for name in RANGES}
    ranges = {name: found for name, found in ranges.items() if found is not None}
    needed = (
        None if columns is None else list(dict.fromkeys([*columns, *ranges, *(TEXTS if args.text else ())]))
    )
    for path in files.values():
        table = read_each([path], lambda path: read(path, needed)).get(path)
        if table is None:
            continue
        for name, (low, high) in ranges.items():
            values = table.column(name).cast("float64")
            table = table.filter(pc.and_(pc.greater_equal(values, low), pc.less_equal(values, high)))
        if args.source:
            table = table.filter(pc.equal(table.column("data_source"), args.source))
        if args.truncated:
            table = table.filter(table.column("truncated"))
        if args.text:
            texts = [_all_text(row) for row in table.select(TEXTS).to_pylist()]
            try:
                table = table.filter(pc.match_substring_regex(_strings(texts), args.text))
            except ValueError as error:
                raise ValueError(f"--text={args.text!r} is no regular expression: {error}.") from error
        yield table


def _all_text(row: dict[str, Any]) -> str:
    messages = [message["content"] for message in row["messages"] or ()]
    return "\n".join([row["prompt"], row["response"], *messages])


def _strings(texts: list[str]) -> "pa.Array":
    import pyarrow as pa

    return pa.array(texts, pa.string())


def print_statistics(tables: Iterator["pa.Table"]) -> None:
    import pyarrow.compute as pc

    rows: list[tuple[str, ...]] = [
        ("step", "samples", "groups", "score", "min", "max", "length", "max", "truncated")
    ]
    for table in tables:
        score, length = pc.min_max(table["score"]), pc.min_max(table["length"])
        numbers = pc.mean(table["score"]), score["min"], score["max"], pc.mean(table["length"]), length["max"]
        counts = table["step"][0], table.num_rows, pc.count_distinct(table["group"])
        share = pc.mean(table["truncated"].cast("int32")).as_py()
        found = [f"{value.as_py():.4g}" if value.is_valid else "-" for value in numbers]
        rows.append((*map(str, counts), *found, f"{share:.1%}"))
    print(aligned(rows))


def print_table(tables: Iterator["pa.Table"]) -> None:
    rows: list[tuple[str, ...]] = [(*PLACE, "ground_truth", "response")]
    rows += [tuple(cell(row[name]) for name in rows[0]) for table in tables for row in table.to_pylist()]
    print(aligned(rows))


def cell(value: Any) -> str:
    text = (
        f"{value:.4g}" if isinstance(value, float) else "-" if value is None else " ".join(str(value).split())
    )
    return text if len(text) <= CELL_CHARS else "..." + text[3 - CELL_CHARS :]


def show(tables: Iterator["pa.Table"], number: int) -> None:
    """Print the texts of the first rows."""
    left = number
    for table in tables:
        for row in table.slice(0, left).to_pylist():
            print("=" * 80)
            print(
                "  ".join(f"{name}={cell(row[name])}" for name in (*PLACE, "ground_truth", "score_details"))
            )
            messages = [
                {"role": "prompt", "content": row["prompt"]},
                {"role": "response", "content": row["response"]},
            ]
            for message in row["messages"] or messages:
                print(f"--- {message['role']}\n{message['content']}")
        left -= min(left, table.num_rows)
        if not left:
            return


def export(tables: Iterator["pa.Table"], path: Path) -> int:
    """Write the rows to a file; return their number. Raises ValueError for another kind of file."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet as pq

    if path.suffix not in (".parquet", ".jsonl", ".csv"):
        raise ValueError(f"--export={path} must end with .parquet, .jsonl or .csv.")
    table = pa.concat_tables(list(tables))
    if path.suffix == ".parquet":
        pq.write_table(table, path, compression="zstd")
    elif path.suffix == ".csv":
        pyarrow.csv.write_csv(
            table.select([each.name for each in table.schema if not pa.types.is_list(each.type)]), path
        )
    else:
        with open(path, "w", encoding="utf-8") as file:
            rows = (json.dumps(row, ensure_ascii=False, default=_base64) for row in table.to_pylist())
            file.writelines(row + "\n" for row in rows)
    return table.num_rows


def _base64(file: bytes) -> str:
    """Return an image's file as JSON can hold it."""
    return base64.b64encode(file).decode()


if __name__ == "__main__":
    sys.exit(main())
