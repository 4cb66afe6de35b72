import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tools.prepare_data import prepare_gsm8k

REPOSITORY = Path(__file__).resolve().parents[2]
GSM8K = REPOSITORY.parent / "shared/data/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def write_source(path, *, train, test):
    path.mkdir(exist_ok=True)
    for split, problems in {"train": train, "test": test}.items():
        lines = [json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in problems]
        (path / f"{split}.jsonl").write_text("".join(lines))
    return path


def test_a_problem_becomes_a_row_with_the_columns_of_verl(tmp_path):
    source = write_source(
        tmp_path / "source",
        train=[("Q0?", "A\n#### 7"), ("How much?", "It is <<1000*2=2000>>2,000.\n#### 2,000")],
        test=[("Q?", "#### -3")],
    )
    assert prepare_gsm8k(source, tmp_path / "new/out") == {"train": 2, "test": 1}
    rows = pq.read_table(tmp_path / "new/out/train.parquet").to_pylist()
    assert rows[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"How much? {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2000"},
        "extra_info": {
            "split": "train",
            "index": 1,
            "answer": "It is <<1000*2=2000>>2,000.\n#### 2,000",
            "question": "How much?",
        },
    }
    (row,) = pq.read_table(tmp_path / "new/out/test.parquet").to_pylist()
    assert row["reward_model"]["ground_truth"] == "-3"
    assert (row["extra_info"]["split"], row["extra_info"]["index"]) == ("test", 0)


def test_a_source_without_the_files_is_refused_with_their_names(tmp_path):
    with pytest.raises(ValueError, match="lacks train.jsonl and test.jsonl: --source must hold"):
        prepare_gsm8k(tmp_path, tmp_path / "out")
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(ValueError, match="lacks test.jsonl"):
        prepare_gsm8k(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"question": "a"}',
        '["a"]',
        '{"question": "a", "answer": "no number"}',
        '{"question": "a", "answer": "####"}',
        '{"question": "a", "answer": 5}',
    ],
)
def test_a_line_that_is_no_problem_is_named_and_nothing_is_written(tmp_path, line):
    source = write_source(tmp_path, train=[("a", "#### 1")], test=[("a", "#### 1")])
    (source / "test.jsonl").write_text('{"question": "a", "answer": "#### 1"}\n' + line + "\n")
    with pytest.raises(ValueError, match="test.jsonl, line 2, is not a GSM8K problem"):
        prepare_gsm8k(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_it_runs_from_the_command_line_and_reports_errors_without_a_traceback(tmp_path):
    write_source(tmp_path / "source", train=[("a", "#### 1")], test=[("a", "#### 1")])

    def run(source):
        command = [
            sys.executable,
            "tools/prepare_data.py",
            "gsm8k",
            "--source",
            str(source),
            "--out",
            str(tmp_path / "out"),
        ]
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)

    done = run(tmp_path / "source")
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/out/train.parquet: 1 rows" in done.stdout
    done = run(tmp_path / "nowhere")
    assert done.returncode == 2
    assert "lacks train.jsonl" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"needs GSM8K at {GSM8K}")
def test_the_real_data_set_gives_all_its_rows_with_whole_numbers(tmp_path):
    assert prepare_gsm8k(GSM8K, tmp_path) == {"train": 7473, "test": 1319}
    for split in ("train", "test"):
        for row in pq.read_table(tmp_path / f"{split}.parquet").to_pylist():
            number = row["reward_model"]["ground_truth"]
            assert number == str(int(number)), row
