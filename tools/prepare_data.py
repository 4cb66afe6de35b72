"""Turn data sets into the parquet files that training reads: one row per prompt, with verl's columns.

    python tools/prepare_data.py gsm8k --source DIR --out DIR

gsm8k: SOURCE/{train,test}.jsonl of https://github.com/openai/grade-school-math (keys question, answer) become
OUT/{train,test}.parquet:

    data_source    "openai/gsm8k"
    prompt         [{"role": "user", "content": the question and the request to end with #### and the number}]
    ability        "math"
    reward_model   {"style": "rule", "ground_truth": the number, without commas}
    extra_info     {"split", "index", "answer": the worked solution, "question"}

Nothing is downloaded. Score with `reward.function: rl.rewards.gsm8k:score`; for sft on the worked solutions set
`data.response_key: extra_info.answer`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def gsm8k_row(question: str, answer: str, *, split: str, index: int) -> dict[str, Any]:
    """One row of the parquet file. Raises ValueError if `answer` does not end in `#### number`."""
    _, separator, number = answer.rpartition("####")
    if not separator or not number.strip():
        raise ValueError(f"the answer does not end in '#### number': {answer[-60:]!r}")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {GSM8K_INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": number.strip().replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def prepare_gsm8k(source: str | Path, out: str | Path) -> dict[str, int]:
    """Write `out`/{train,test}.parquet from `source`/{train,test}.jsonl; returns the rows of each.

    Raises ValueError if a file is missing or a line is not a GSM8K problem; nothing is written then.
    """
    source, out = Path(source), Path(out)
    paths = {split: source / f"{split}.jsonl" for split in ("train", "test")}
    missing = [path.name for path in paths.values() if not path.is_file()]
    if missing:
        raise ValueError(
            f"{source} lacks {' and '.join(missing)}: --source must hold train.jsonl and test.jsonl of GSM8K "
            "(https://github.com/openai/grade-school-math, folder grade_school_math/data)."
        )
    rows = {split: _read_gsm8k(path, split) for split, path in paths.items()}
    out.mkdir(parents=True, exist_ok=True)
    for split in paths:
        pq.write_table(pa.Table.from_pylist(rows[split]), out / f"{split}.parquet")
    return {split: len(rows[split]) for split in paths}


def _read_gsm8k(path: Path, split: str) -> list[dict[str, Any]]:
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                problem = json.loads(line)
                rows.append(gsm8k_row(problem["question"], problem["answer"], split=split, index=len(rows)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}, is not a GSM8K problem: {error}") from error
    if not rows:
        raise ValueError(f"{path} is empty.")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    datasets = parser.add_subparsers(dest="dataset", required=True)
    gsm8k = datasets.add_parser("gsm8k", help="grade-school math word problems")
    gsm8k.add_argument("--source", required=True, help="directory with train.jsonl and test.jsonl")
    gsm8k.add_argument("--out", required=True, help="directory to write train.parquet and test.parquet to")
    gsm8k.set_defaults(prepare=prepare_gsm8k)
    arguments = parser.parse_args()
    try:
        num_rows = arguments.prepare(arguments.source, arguments.out)
    except ValueError as error:
        parser.error(str(error))
    for split, count in num_rows.items():
        print(f"{arguments.out}/{split}.parquet: {count} rows")


if __name__ == "__main__":
    main()
