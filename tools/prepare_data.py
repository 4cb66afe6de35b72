"""Turn data sets into the parquet files that training reads: one row per prompt, with verl's columns.

    python tools/prepare_data.py gsm8k     --source DIR --out DIR
    python tools/prepare_data.py math      --source DIR_OR_FILE --out DIR
    python tools/prepare_data.py dapo-math --source DIR_OR_FILE --out DIR
    python tools/prepare_data.py aime      --source DIR_OR_FILE --out DIR [--data-source aime_2025]
    python tools/prepare_data.py countdown --out DIR [--num-train 16384] [--num-test 512] [--seed 0]
    python tools/prepare_data.py hh-rlhf   --source DIR_OR_FILE --out DIR
    python tools/prepare_data.py code      --source DIR_OR_FILE --out DIR [--data-source apps]

Nothing is downloaded, except with `--from-hub [ID]` in place of --source, on a machine with internet.

    data set   what --source holds                                                     default of --from-hub
    gsm8k      {train,test}.jsonl of github.com/openai/grade-school-math               openai/gsm8k
    math       {train,test}/SUBJECT/N.json of Hendrycks MATH, or {train,test}.jsonl    DigitalLearningGmbH/MATH-lighteval
    dapo-math  parquet or JSONL of DAPO-Math-17k                                       BytedTsinghua-SIA/DAPO-Math-17k
    aime       parquet or JSONL with problem and answer                                HuggingFaceH4/aime_2024
    hh-rlhf    SUBSET/{train,test}.jsonl.gz of Anthropic/hh-rlhf                       Anthropic/hh-rlhf
    code       JSONL or parquet of APPS, TACO or CodeContests                          deepmind/code_contests

Files may be .parquet, .jsonl, .jsonl.gz or .json, in folders of any depth. The split of a file is the folder or the beginning
of the file name that is called train or test; all of dapo-math is train and all of aime is test. Output is
OUT/{train,test}.parquet:

    data_source    a name; validation reports by it
    prompt         messages: the problem, and the request for the form that the reward function reads
    ability        "math", "code" or "alignment"
    reward_model   {"style": "rule" or "model", "ground_truth": what the reward function is given}
    extra_info     {"split", "index", and what else belongs to the problem}

    data set   ground_truth                                   score with reward.function       extra_info beside split, index
    gsm8k      the number, without commas                     rl.rewards.gsm8k:score           answer (worked solution), question
    math       what the solution's last \\boxed holds          rl.rewards.math:score            answer, question, level, type
    dapo-math  the answer                                     rl.rewards.dapo:score            question
    aime       the answer, an integer without leading zeros   rl.rewards.dapo:score            question
    countdown  {"target": int, "numbers": [int]}              rl.rewards.countdown:score
    hh-rlhf    the chosen response                            a reward model
    code       JSON of {"inputs", "outputs"[, "fn_name"]}     rl.rewards.code:score            difficulty

hh-rlhf has the columns `chosen` and `rejected` too, for dpo and reward models. For sft on the worked solutions of gsm8k and math
set `data.response_key: extra_info.answer`. The 1.79 million rows of DAPO-Math-17k are 17 thousand problems, about a hundred
copies of each: every problem is written once, and not at all if its copies have different answers.
"""

import argparse
import gzip
import json
import logging
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

# Run as a script, python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import dataset_rows  # noqa: E402
from tools.dataset_rows import LeaveOut, Row  # noqa: E402

log = logging.getLogger(__name__)

Records = dict[str, Iterator[tuple[str, Any]]]
"""Split -> (where it stands, for messages; record as published)."""
SPLITS = ("train", "test")
ROWS_PER_GROUP = 1000
"""Rows per row group of a parquet file: a group of code problems must stay below the 2 GiB that Arrow reads at once."""


# ---- the data sets ----


def prepare_gsm8k(source: str | Path, out: str | Path) -> dict[str, int]:
    """Write `out`/{train,test}.parquet from `source`/{train,test}.jsonl; returns the rows of each.

    Raises ValueError if a file is missing or a line is not a GSM8K problem; nothing is written then.
    """
    source = Path(source)
    paths = {split: source / f"{split}.jsonl" for split in SPLITS}
    missing = [path.name for path in paths.values() if not path.is_file()]
    if missing:
        raise ValueError(
            f"{source} lacks {' and '.join(missing)}: --source must hold train.jsonl and test.jsonl of GSM8K "
            "(https://github.com/openai/grade-school-math, folder grade_school_math/data)."
        )
    return write_gsm8k({split: read_file(path) for split, path in paths.items()}, out)


def write_gsm8k(records: Records, out: str | Path) -> dict[str, int]:
    def to_row(record: Any, *, split: str, index: int) -> Row:
        return dataset_rows.gsm8k_row(record["question"], record["answer"], split=split, index=index)

    return write_splits(
        {split: build_rows(found, to_row, split, "a GSM8K problem") for split, found in records.items()}, out
    )


def write_math(records: Records, out: str | Path) -> dict[str, int]:
    """Raises ValueError for a record that is no problem of MATH, as the others for theirs; nothing is written then."""
    return write_splits(
        {
            split: build_rows(found, dataset_rows.math_row, split, "a MATH problem")
            for split, found in records.items()
        },
        out,
    )


def write_dapo_math(records: Records, out: str | Path) -> dict[str, int]:
    problems = distinct_problems(merge(records), lambda answer: answer, "a DAPO-Math problem")
    rows = [
        dataset_rows.dapo_row(*problem, split="train", index=index) for index, problem in enumerate(problems)
    ]
    return write_splits({"train": rows}, out)


def write_aime(records: Records, out: str | Path, *, data_source: str = "aime") -> dict[str, int]:
    problems = distinct_problems(merge(records), dataset_rows.aime_answer, "an AIME problem")
    rows = [
        dataset_rows.dapo_row(*problem, split="test", index=index, data_source=data_source)
        for index, problem in enumerate(problems)
    ]
    return write_splits({"test": rows}, out)


def write_hh_rlhf(records: Records, out: str | Path) -> dict[str, int]:
    to_row = dataset_rows.hh_rlhf_row
    return write_splits(
        {
            split: build_rows(found, to_row, split, "a pair of transcripts")
            for split, found in records.items()
        },
        out,
    )


def write_code(records: Records, out: str | Path, *, data_source: str = "code") -> dict[str, int]:
    def to_row(record: Any, *, split: str, index: int) -> Row:
        return dataset_rows.code_row(record, split=split, index=index, data_source=data_source)

    rows = {
        split: build_rows(found, to_row, split, "a problem with tests") for split, found in records.items()
    }
    return write_splits(rows, out)


def write_countdown(out: str | Path, *, num_train: int, num_test: int, seed: int) -> dict[str, int]:
    """Write problems made from `seed`; no test problem is a training problem. Same arguments, same files."""
    if num_train < 1 or num_test < 1 or seed < 0:
        raise ValueError(
            f"--num-train {num_train} and --num-test {num_test} must be 1 or more and --seed {seed} 0 or more."
        )
    problems = dataset_rows.countdown_problems(seed=seed)
    rows = {
        # The test problems first, so that they stay the same when more training problems are asked for.
        split: [
            dataset_rows.countdown_row(*problem, split=split, index=index)
            for index, problem in enumerate(islice(problems, number))
        ]
        for split, number in (("test", num_test), ("train", num_train))
    }
    return write_splits(rows, out)


# ---- records to rows to files ----


def build_rows(
    found: Iterator[tuple[str, Any]], to_row: Callable[..., Row], split: str, what: str
) -> list[Row]:
    """A row for each record, `index` counted over those that are kept; what is left out is logged, with the reason."""
    rows: list[Row] = []
    left_out: Counter[str] = Counter()
    for place, record in found:
        try:
            rows.append(to_row(record, split=split, index=len(rows)))
        except LeaveOut as reason:
            left_out[str(reason)] += 1
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{place} is not {what}: {error}") from error
    report_left_out(left_out, split)
    return rows


def distinct_problems(
    found: Iterator[tuple[str, Any]], to_answer: Callable[[str], str], what: str
) -> list[tuple[str, str]]:
    """(problem, answer) of each different problem, in the order in which they first come; those with two answers are left out."""
    answers: dict[str, set[str]] = {}
    num_records = 0
    for place, record in found:
        num_records += 1
        try:
            problem, answer = dataset_rows.competition_problem(record)
            answers.setdefault(problem, set()).add(to_answer(answer))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{place} is not {what}: {error}") from error
    kept = [(problem, *given) for problem, given in answers.items() if len(given) == 1]
    if num_records != len(answers):
        log.info("%d rows are %d different problems", num_records, len(answers))
    report_left_out(Counter({"its copies have different answers": len(answers) - len(kept)}), "problems")
    return kept


def report_left_out(left_out: Counter[str], where: str) -> None:
    for reason, count in left_out.items():
        if count:
            log.info("%s: left out %d: %s", where, count, reason)


def write_splits(rows: dict[str, list[Row]], out: str | Path) -> dict[str, int]:
    """Write `out`/SPLIT.parquet of each split; returns the rows of each. Raises ValueError if one would be empty."""
    for split, found in rows.items():
        if not found:
            raise ValueError(f"the split {split} is empty: there is no row to write.")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    for split, found in rows.items():
        chunks = [found[start : start + ROWS_PER_GROUP] for start in range(0, len(found), ROWS_PER_GROUP)]
        # In pieces: one array of all the tests of a code data set would pass Arrow's 2 GiB.
        table = pa.concat_tables(
            [pa.Table.from_pylist(chunk) for chunk in chunks], promote_options="permissive"
        )
        pq.write_table(table, out / f"{split}.parquet", row_group_size=ROWS_PER_GROUP)
    return {split: len(rows[split]) for split in SPLITS if split in rows}


# ---- where records come from ----


def find_records(source: str | Path, *, only_split: str | None = None) -> Records:
    """The records of a file or of all files in a folder, by split; `only_split`: all files belong to it.

    Raises ValueError if there is nothing to read.
    """
    source = Path(source)
    if not source.exists():
        raise ValueError(f"--source {source} does not exist (working directory {Path.cwd()}).")
    files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    by_split: dict[str, list[Path]] = {}
    for path in files:
        parts = path.relative_to(source).parts if source.is_dir() else (path.name,)
        split = only_split or _split_of(parts)
        if split and path.name.endswith(_SUFFIXES):
            by_split.setdefault(split, []).append(path)
    if not by_split:
        named = "" if only_split else " that are called train or test, or lie in a folder of that name"
        raise ValueError(f"--source {source} holds no files{named}: it must be {', '.join(_SUFFIXES)}.")
    return {
        split: (record for path in by_split[split] for record in read_file(path))
        for split in sorted(by_split)
    }


def _split_of(parts: tuple[str, ...]) -> str | None:
    """train or test, as the innermost folder or the beginning of the file name says."""
    *folders, name = parts
    named = [split for split in SPLITS if name.startswith(split)] or [
        f for f in reversed(folders) if f in SPLITS
    ]
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
    number = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROWS_PER_GROUP):
            for record in batch.to_pylist():
                number += 1
                yield f"{path}, row {number},", record


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    """The lines of a .jsonl or .jsonl.gz file that are not empty, or the object or the list of objects of a .json file."""
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
    """The records of a data set on the Hugging Face hub, by split; `only_split`: all of them belong to it.

    Raises ValueError if it cannot be loaded, as on a machine without internet, or has no split train or test.
    """
    import datasets  # here, because its import takes seconds and only this needs it

    try:
        loaded = datasets.load_dataset(dataset_id, config)
    except Exception as error:  # whatever the hub, the network or the library raises
        reason = (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(".")
        raise ValueError(
            f"{dataset_id} cannot be loaded from the Hugging Face hub ({reason}): on a machine without internet download it "
            "elsewhere and name its files with --source."
        ) from error

    def places(name: str) -> Iterator[tuple[str, Any]]:
        return (
            (f"{dataset_id}, split {name}, row {number},", row)
            for number, row in enumerate(loaded[name], start=1)
        )

    if only_split:
        return {only_split: (record for name in loaded for record in places(name))}
    found = {split: places(split) for split in SPLITS if split in loaded}
    if not found:
        raise ValueError(
            f"{dataset_id} has neither a split train nor a split test, only {', '.join(loaded)}."
        )
    return found


def merge(records: Records) -> Iterator[tuple[str, Any]]:
    return (record for found in records.values() for record in found)


# ---- the command line ----

DATASETS: dict[str, dict[str, Any]] = {
    "gsm8k": {
        "write": write_gsm8k,
        "hub": "openai/gsm8k",
        "config": "main",
        "help": "grade-school word problems",
    },
    "math": {"write": write_math, "hub": "DigitalLearningGmbH/MATH-lighteval", "help": "Hendrycks MATH"},
    "dapo-math": {
        "write": write_dapo_math,
        "hub": "BytedTsinghua-SIA/DAPO-Math-17k",
        "only_split": "train",
        "help": "the training set of DAPO",
    },
    "aime": {
        "write": write_aime,
        "hub": "HuggingFaceH4/aime_2024",
        "only_split": "test",
        "data_source": "aime",
        "help": "an olympiad's problems",
    },
    "hh-rlhf": {
        "write": write_hh_rlhf,
        "hub": "Anthropic/hh-rlhf",
        "help": "pairs of responses with a preference",
    },
    "code": {
        "write": write_code,
        "hub": "deepmind/code_contests",
        "data_source": "code",
        "help": "programming problems with tests",
    },
}
"""For each data set: what writes it, its id and configuration on the hub, and the one split that all of it belongs to."""


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = parser.add_subparsers(dest="dataset", required=True)
    for name, known in DATASETS.items():
        one = names.add_parser(name, help=known["help"])
        origin = one.add_mutually_exclusive_group(required=True)
        origin.add_argument(
            "--source", metavar="PATH", help="local files; see the top of tools/prepare_data.py"
        )
        origin.add_argument(
            "--from-hub",
            metavar="ID",
            nargs="?",
            const=known["hub"],
            help=f"download instead: {known['hub']}, or ID",
        )
        if "data_source" in known:
            one.add_argument(
                "--data-source", default=known["data_source"], help="column data_source (%(default)s)"
            )
    countdown = names.add_parser("countdown", help="reach a number with others by arithmetic; made here")
    countdown.add_argument("--num-train", type=int, default=16384, help="training problems (%(default)s)")
    countdown.add_argument("--num-test", type=int, default=512, help="test problems (%(default)s)")
    countdown.add_argument("--seed", type=int, default=0, help="another seed, other problems (%(default)s)")
    for one in names.choices.values():
        one.add_argument(
            "--out", required=True, metavar="DIR", help="directory to write the parquet files to"
        )
    return parser


def _prepare(arguments: argparse.Namespace) -> dict[str, int]:
    if arguments.dataset == "countdown":
        return write_countdown(
            arguments.out, num_train=arguments.num_train, num_test=arguments.num_test, seed=arguments.seed
        )
    known = DATASETS[arguments.dataset]
    only_split = known.get("only_split")
    if arguments.from_hub:
        config = known.get("config") if arguments.from_hub == known["hub"] else None
        records = from_hub(arguments.from_hub, config, only_split=only_split)
    elif arguments.dataset == "gsm8k":
        return prepare_gsm8k(arguments.source, arguments.out)
    else:
        records = find_records(arguments.source, only_split=only_split)
    options = {"data_source": arguments.data_source} if "data_source" in known else {}
    return known["write"](records, arguments.out, **options)


if __name__ == "__main__":
    main()
