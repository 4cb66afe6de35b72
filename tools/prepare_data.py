"""Convert data sets to the parquet files that training reads: one row per prompt, with verl's columns.

    lockstep data gsm8k     --source DIR --out DIR
    lockstep data math      --source DIR_OR_FILE --out DIR
    lockstep data dapo-math --source DIR_OR_FILE --out DIR
    lockstep data aime      --source DIR_OR_FILE --out DIR [--data-source aime_2025]
    lockstep data countdown --out DIR [--num-train 16384] [--num-test 512] [--seed 0]
    lockstep data hh-rlhf   --source DIR_OR_FILE --out DIR
    lockstep data geo3k     --source DIR_OR_FILE --out DIR
    lockstep data code      --source DIR_OR_FILE --out DIR [--data-source apps]

Nothing is downloaded, except with `--from-hub [ID]` instead of --source, on a machine with internet access.

    data set   content of --source                                         default of --from-hub
    gsm8k      {train,test}.jsonl of github.com/openai/grade-school-math   openai/gsm8k
    math       {train,test}/SUBJECT/N.json of MATH, or .jsonl              DigitalLearningGmbH/MATH-lighteval
    dapo-math  parquet or JSONL of DAPO-Math-17k                           BytedTsinghua-SIA/DAPO-Math-17k
    aime       parquet or JSONL with problem and answer                    HuggingFaceH4/aime_2024
    hh-rlhf    SUBSET/{train,test}.jsonl.gz of Anthropic/hh-rlhf           Anthropic/hh-rlhf
    geo3k      parquet of Geometry3K with images                           hiyouga/geometry3k
    code       JSONL or parquet of APPS, TACO or CodeContests              deepmind/code_contests

Files may be .parquet, .jsonl, .jsonl.gz or .json, in nested folders. The split of a file is given by a folder
named train or test, or by a file name that begins so; dapo-math is all train and aime is all test. Output is
OUT/{train,test}.parquet with the columns:

    data_source    name by which validation reports
    prompt         messages: the problem, and an instruction for the form that the reward function expects
    ability        "math", "code" or "alignment"
    reward_model   {"style": "rule" or "model", "ground_truth": argument of the reward function}
    extra_info     {"split", "index", and the fields below}

    data set   ground_truth                        reward.function             extra_info
    gsm8k      the number, without commas          rl.rewards.gsm8k:score      answer, question
    math       content of the last \\boxed         rl.rewards.math:score       answer, question, level, type
    dapo-math  the answer                          rl.rewards.dapo:score       question
    aime       the answer, an integer              rl.rewards.dapo:score       question
    countdown  {"target": int, "numbers": [int]}   rl.rewards.countdown:score
    hh-rlhf    the chosen response                 a reward model
    geo3k      the answer                          rl.rewards.math:score       answer, question
    code       JSON of inputs, outputs[, fn_name]  rl.rewards.code:score       difficulty

geo3k also has the column `images`, {bytes, path} for each anchor <image> in the problem (data.image_key).
hh-rlhf also has the columns `chosen` and `rejected`, for dpo and reward models. For sft on the solutions of
gsm8k and math set `data.response_key: extra_info.answer`. DAPO-Math-17k has 1.79 million rows, about a
hundred copies of each of 17 thousand problems: each problem is written once, and dropped if its copies have
different answers.
"""

import argparse
import gzip
import json
import logging
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

# As a script, Python searches only tools/ for modules.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl.config.command_line import make_parser
from tools import dataset_rows
from tools.dataset_rows import Row, Unusable

log = logging.getLogger(__name__)

Records = dict[str, Iterator[tuple[str, Any]]]
"""Split -> (position of the record for messages, record as published)."""
SPLITS = ("train", "test")
ROWS_PER_GROUP = 1000
"""Rows per row group of a parquet file; a group of code problems must stay below Arrow's limit of 2 GiB."""


# ---- data sets ----


def prepare_gsm8k(source: str | Path, out: str | Path) -> dict[str, int]:
    """Write `out`/{train,test}.parquet from `source`/{train,test}.jsonl; return the rows of each.

    Raises ValueError, before anything is written, if a file is missing or a line is not a GSM8K problem.
    """
    paths = {split: Path(source, f"{split}.jsonl") for split in SPLITS}
    missing = [path.name for path in paths.values() if not path.is_file()]
    if missing:
        raise ValueError(
            f"--source {source} lacks {' and '.join(missing)} of GSM8K: get them from "
            "https://github.com/openai/grade-school-math, folder grade_school_math/data."
        )
    return DATASETS["gsm8k"].write({split: read_file(path) for split, path in paths.items()}, out)


def write_rows(
    records: Records, out: str | Path, *, to_row: Callable[..., Row], what: str, **options: str
) -> dict[str, int]:
    """Write a row per record and return the rows of each split.

    Raises ValueError, before anything is written, for a record that is not `what`.
    """
    to_row = partial(to_row, **options)
    return write_splits({s: build_rows(found, to_row, s, what) for s, found in records.items()}, out)


def write_problems(
    records: Records,
    out: str | Path,
    *,
    to_answer: Callable[[str], str],
    what: str,
    split: str,
    data_source: str,
) -> dict[str, int]:
    """Write a row per distinct problem of a competition; all belong to `split`."""
    problems = distinct_problems(merge(records), to_answer, what)
    rows = [
        dataset_rows.dapo_row(*problem, split=split, index=index, data_source=data_source)
        for index, problem in enumerate(problems)
    ]
    return write_splits({split: rows}, out)


def write_countdown(out: str | Path, *, num_train: int, num_test: int, seed: int) -> dict[str, int]:
    """Write problems generated from `seed`; the splits are disjoint. Equal arguments give equal files."""
    if num_train < 1 or num_test < 1 or seed < 0:
        raise ValueError(
            f"--num-train {num_train} and --num-test {num_test} must be 1 or more and --seed {seed} 0 or "
            "more."
        )
    problems = dataset_rows.countdown_problems(seed=seed)
    rows = {
        # The test problems first, so that they do not depend on the number of training problems.
        split: [
            dataset_rows.countdown_row(*problem, split=split, index=index)
            for index, problem in enumerate(islice(problems, number))
        ]
        for split, number in (("test", num_test), ("train", num_train))
    }
    return write_splits(rows, out)


# ---- from records to rows and files ----


def build_rows(
    found: Iterator[tuple[str, Any]], to_row: Callable[..., Row], split: str, what: str
) -> list[Row]:
    """Return a row per record, with `index` counting the kept ones; log how many are dropped and why."""
    rows: list[Row] = []
    dropped: Counter[str] = Counter()
    for place, record in found:
        try:
            rows.append(to_row(record, split=split, index=len(rows)))
        except Unusable as reason:
            dropped[str(reason)] += 1
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{place} is not {what}: {error}") from error
    log_dropped(dropped, split)
    return rows


def distinct_problems(
    found: Iterator[tuple[str, Any]], to_answer: Callable[[str], str], what: str
) -> list[tuple[str, str]]:
    """Return (problem, answer) of each distinct problem in order; drop problems with several answers."""
    answers: dict[str, set[str]] = {}
    num_records = 0
    for place, record in found:
        num_records += 1
        try:
            problem, answer = dataset_rows.competition_problem(record)
            answers.setdefault(problem, set()).add(to_answer(answer))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{place} is not {what}: {error}") from error
    kept = [(problem, min(given)) for problem, given in answers.items() if len(given) == 1]
    if num_records != len(answers):
        log.info("%d rows are %d distinct problems", num_records, len(answers))
    log_dropped(Counter({"its copies have different answers": len(answers) - len(kept)}), "problems")
    return kept


def log_dropped(dropped: Counter[str], where: str) -> None:
    for reason, count in dropped.items():
        if count:
            log.info("%s: dropped %d: %s", where, count, reason)


def write_splits(rows: dict[str, list[Row]], out: str | Path) -> dict[str, int]:
    """Write `out`/SPLIT.parquet; return the rows of each split. Raises ValueError for an empty split."""
    for split, found in rows.items():
        if not found:
            raise ValueError(f"the split {split} is empty: all its records were dropped.")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    for split, found in rows.items():
        chunks = [found[start : start + ROWS_PER_GROUP] for start in range(0, len(found), ROWS_PER_GROUP)]
        # In chunks, because one array of all tests of a code data set would exceed Arrow's 2 GiB.
        table = pa.concat_tables(map(pa.Table.from_pylist, chunks), promote_options="permissive")
        pq.write_table(table, out / f"{split}.parquet", row_group_size=ROWS_PER_GROUP)
    return {split: len(rows[split]) for split in SPLITS if split in rows}


# ---- sources of records ----


def find_records(source: str | Path, *, only_split: str | None = None) -> Records:
    """Return the records of a file or of all files in a folder, by split; `only_split` applies to all files.

    Raises ValueError if there are no data files.
    """
    source = Path(source)
    if not source.exists():
        raise ValueError(
            f"--source {source} does not exist (working directory {Path.cwd()}); correct the path."
        )
    files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    by_split: dict[str, list[Path]] = {}
    for path in files:
        parts = path.relative_to(source).parts if source.is_dir() else (path.name,)
        split = only_split or _split_of(parts)
        if split and path.name.endswith(_SUFFIXES):
            by_split.setdefault(split, []).append(path)
    if not by_split:
        named = "" if only_split else " named train or test, or in a folder of that name"
        raise ValueError(f"--source {source} holds no {', '.join(_SUFFIXES)} files{named}.")
    return {
        split: (record for path in by_split[split] for record in read_file(path))
        for split in sorted(by_split)
    }


def _split_of(parts: tuple[str, ...]) -> str | None:
    """Return train or test according to the file name, else the innermost such folder."""
    *folders, name = parts
    named = [split for split in SPLITS if name.startswith(split)]
    named += [folder for folder in reversed(folders) if folder in SPLITS]
    return named[0] if named else None


_SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz", ".json")


def read_file(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (place, record) of a file. Raises ValueError if it cannot be read."""
    num_records = 0
    try:
        for place, record in _read_parquet(path) if path.suffix == ".parquet" else _read_json(path):
            num_records += 1
            yield place, record
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, pa.ArrowException) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not num_records:
        raise ValueError(f"{path} is empty.")


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    with pq.ParquetFile(path) as file:
        batches = file.iter_batches(batch_size=ROWS_PER_GROUP)
        records = (record for batch in batches for record in batch.to_pylist())
        yield from ((f"{path}, row {number},", record) for number, record in enumerate(records, start=1))


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the non-empty lines of a .jsonl or .jsonl.gz file, or the object or objects of a .json file."""
    opened = gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")
    with opened as file:
        texts = [(str(path), file.read())] if path.suffix == ".json" else _lines(path, file)
        for place, text in texts:
            try:
                record = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{place} is not JSON: {error}") from error
            if path.suffix == ".json" and isinstance(record, list):
                yield from ((f"{path}, item {number},", item) for number, item in enumerate(record, start=1))
            else:
                yield place, record


def _lines(path: Path, file: Iterator[str]) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield f"{path}, line {number},", line


def from_hub(dataset_id: str, config: str | None = None, *, only_split: str | None = None) -> Records:
    """Return the records of a data set on the Hugging Face hub, by split; `only_split` applies to all.

    Raises ValueError if it cannot be loaded or has neither a split train nor a split test.
    """
    import datasets  # imported here because it takes seconds and only this needs it

    try:
        loaded = datasets.load_dataset(dataset_id, config)
    except Exception as error:  # the hub, the network and the library may raise anything
        reason = (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(".")
        raise ValueError(
            f"{dataset_id} cannot be loaded from the Hugging Face hub ({reason}): without internet access, "
            "download it elsewhere and pass its files with --source."
        ) from error

    def read(name: str) -> Iterator[tuple[str, Any]]:
        rows = enumerate(loaded[name], start=1)
        return ((f"{dataset_id}, split {name}, row {number},", row) for number, row in rows)

    if only_split:
        return {only_split: (record for name in loaded for record in read(name))}
    found = {split: read(split) for split in SPLITS if split in loaded}
    if not found:
        raise ValueError(f"{dataset_id} has no split train or test, only {', '.join(loaded)}.")
    return found


def merge(records: Records) -> Iterator[tuple[str, Any]]:
    return (record for found in records.values() for record in found)


# ---- command line ----


@dataclass(frozen=True)
class Dataset:
    """Sources of a data set and the function that writes it."""

    help: str
    hub: str
    """Default id on the Hugging Face hub."""
    write: Callable[..., dict[str, int]]
    """write(records, out, **{"data_source": ...} if `data_source` is set) -> rows of each split."""
    config: str | None = None
    """Configuration of `hub`."""
    only_split: str | None = None
    """Split that all records belong to."""
    data_source: str | None = None
    """Default of --data-source; None if the name is fixed."""


def _rows(to_row: Callable[..., Row], what: str) -> Callable[..., dict[str, int]]:
    return partial(write_rows, to_row=to_row, what=what)


def _problems(to_answer: Callable[[str], str], what: str, split: str) -> Callable[..., dict[str, int]]:
    return partial(write_problems, to_answer=to_answer, what=what, split=split)


DATASETS = {
    "gsm8k": Dataset(
        "grade-school word problems", "openai/gsm8k", _rows(dataset_rows.gsm8k_row, "a GSM8K problem"), "main"
    ),
    "math": Dataset(
        "Hendrycks MATH", "DigitalLearningGmbH/MATH-lighteval", _rows(dataset_rows.math_row, "a MATH problem")
    ),
    "dapo-math": Dataset(
        "the training set of DAPO",
        "BytedTsinghua-SIA/DAPO-Math-17k",
        partial(_problems(str, "a DAPO-Math problem", split="train"), data_source="math_dapo"),
        only_split="train",
    ),
    "aime": Dataset(
        "problems of a mathematics competition",
        "HuggingFaceH4/aime_2024",
        _problems(dataset_rows.aime_answer, "an AIME problem", split="test"),
        only_split="test",
        data_source="aime",
    ),
    "hh-rlhf": Dataset(
        "pairs of responses with a preference",
        "Anthropic/hh-rlhf",
        _rows(dataset_rows.hh_rlhf_row, "a pair of transcripts"),
    ),
    "geo3k": Dataset(
        "geometry problems with figures",
        "hiyouga/geometry3k",
        _rows(dataset_rows.geo3k_row, "a geometry problem with images"),
    ),
    "code": Dataset(
        "programming problems with tests",
        "deepmind/code_contests",
        _rows(dataset_rows.code_row, "a problem with tests"),
        data_source="code",
    ),
}


def main(argv: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        num_rows = _prepare(arguments)
    except ValueError as error:
        parser.error(str(error))
    for split, count in num_rows.items():
        print(f"{arguments.out}/{split}.parquet: {count} rows")


def build_parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    names = parser.add_subparsers(dest="dataset", required=True)
    for name, known in DATASETS.items():
        one = names.add_parser(name, help=known.help)
        origin = one.add_mutually_exclusive_group(required=True)
        origin.add_argument("--source", metavar="PATH", help="local files; see `lockstep data --help`")
        hub_help = f"download instead: {known.hub}, or ID"
        origin.add_argument("--from-hub", metavar="ID", nargs="?", const=known.hub, help=hub_help)
        if known.data_source:
            one.add_argument(
                "--data-source", default=known.data_source, help="column data_source (%(default)s)"
            )
    countdown = names.add_parser("countdown", help="reach a number with others by arithmetic; generated")
    countdown.add_argument("--num-train", type=int, default=16384, help="training problems (%(default)s)")
    countdown.add_argument("--num-test", type=int, default=512, help="test problems (%(default)s)")
    countdown.add_argument("--seed", type=int, default=0, help="seed of the problems (%(default)s)")
    for one in names.choices.values():
        one.add_argument("--out", required=True, metavar="DIR", help="directory for the parquet files")
    return parser


def _prepare(arguments: argparse.Namespace) -> dict[str, int]:
    if arguments.dataset == "countdown":
        return write_countdown(
            arguments.out, num_train=arguments.num_train, num_test=arguments.num_test, seed=arguments.seed
        )
    known = DATASETS[arguments.dataset]
    if arguments.from_hub:
        config = known.config if arguments.from_hub == known.hub else None
        records = from_hub(arguments.from_hub, config, only_split=known.only_split)
    elif arguments.dataset == "gsm8k":
        return prepare_gsm8k(arguments.source, arguments.out)
    else:
        records = find_records(arguments.source, only_split=known.only_split)
    options = {"data_source": arguments.data_source} if known.data_source else {}
    return known.write(records, arguments.out, **options)


if __name__ == "__main__":
    main()
