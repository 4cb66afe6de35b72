import json
import sys

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl.data.prompts import load_prompts
from rl.data.reading import read_rows

ROWS = [
    {"prompt": [{"role": "user", "content": c}], "reward_model": {"ground_truth": str(i + 1)}, "other": i}
    for i, c in enumerate("abc")
]
WAY_OUT = {"prompt": "name the column with the prompt in data.prompt_key"}


def write_parquet(path):
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


def write_jsonl(path):
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def write_directory(path):
    datasets.Dataset.from_list(ROWS).save_to_disk(path)
    return path


def write_arrow(path):
    (file,) = write_directory(path.with_suffix(".dir")).glob("*.arrow")
    return file.rename(path)


FORMS = [write_parquet, write_jsonl, write_arrow, write_directory]
FORMS = list(zip(FORMS, ["a.parquet", "a.jsonl", "a.arrow", "a.b"]))


@pytest.mark.parametrize("write, name", FORMS)
def test_all_formats_give_the_same_rows(tmp_path, write, name):
    file = write(tmp_path / name)
    rows = read_rows([file], required=WAY_OUT, optional=["reward_model", "absent"])
    assert [row.values for row in rows] == [
        {key: row[key] for key in ("prompt", "reward_model")} for row in ROWS
    ]
    assert [(row.number, row.source, row.path) for row in rows] == [(1, 0, file), (2, 0, file), (3, 0, file)]
    assert rows[2].place == f"{file}, row 3"


@pytest.mark.parametrize("write, name", FORMS)
def test_prompts_are_the_same_from_all_forms(tmp_path, tokenizer, write, name):
    options = {"prompt_key": "prompt", "max_prompt_tokens": 9, "overlong": "error", "max_prompts": 2}
    prompts = load_prompts([write(tmp_path / name)], tokenizer, **options)
    found = [(p.text, p.ground_truth) for p in prompts]
    assert found == [("<user>a<assistant>", "1"), ("<user>b<assistant>", "2")]
    assert prompts[0].data_source == ("a.b" if name == "a.b" else "a")


def test_files_of_all_forms_are_read_in_order_with_their_number(tmp_path):
    files = [write(tmp_path / name) for write, name in FORMS]
    rows = read_rows(files, required=WAY_OUT, max_rows=11)
    assert [row.source for row in rows] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    assert [row.number for row in rows] == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2]


def test_a_saved_selection_keeps_its_rows_and_order(tmp_path):
    datasets.Dataset.from_list(ROWS).select([2, 0]).save_to_disk(tmp_path / "picked")
    assert [row.values["other"] for row in read_rows([tmp_path / "picked"], required={"other": ""})] == [2, 0]


def test_a_saved_tensor_format_does_not_reach_the_rows(tmp_path):
    data = datasets.Dataset.from_list([{"prompt": "a", "n": [1, 2]}])
    data.with_format("numpy").save_to_disk(tmp_path / "a")
    (row,) = read_rows([tmp_path / "a"], required=WAY_OUT, optional=["n"])
    assert row.values == {"prompt": "a", "n": [1, 2]} and not isinstance(row.values["n"], np.ndarray)


def test_several_arrow_files_of_one_directory_are_read_in_order(tmp_path):
    many = datasets.Dataset.from_list([{"prompt": str(i)} for i in range(2500)])
    many.save_to_disk(tmp_path / "many", num_shards=3)
    rows = read_rows([tmp_path / "many"], required=WAY_OUT)
    assert [row.values["prompt"] for row in rows] == [str(i) for i in range(2500)]
    assert rows[-1].number == 2500


@pytest.mark.parametrize("write, name", FORMS)
def test_a_missing_column_is_reported_with_a_remedy(tmp_path, write, name):
    message = rf"{name}.* no column 'question', only prompt, .*: name it in data.x"
    with pytest.raises(ValueError, match=message):
        read_rows([write(tmp_path / name)], required={"prompt": "no", "question": "name it in data.x"})


def test_a_dataset_dict_names_its_splits(tmp_path):
    split = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "both")
    message = r"both is a DatasetDict with the splits train, test: .*both/train\."
    with pytest.raises(ValueError, match=message):
        read_rows([tmp_path / "both"], required=WAY_OUT)
    assert len(read_rows([tmp_path / "both/test"], required=WAY_OUT)) == 3


def test_other_directories_and_broken_arrow_data_are_refused(tmp_path):
    with pytest.raises(ValueError, match="is a directory without state.json"):
        read_rows([tmp_path], required=WAY_OUT)
    (tmp_path / "a.arrow").write_text("this is no Arrow file")
    with pytest.raises(ValueError, match="a.arrow cannot be read as Arrow"):
        read_rows([tmp_path / "a.arrow"], required=WAY_OUT)
    for broken in ("data-00000-of-00001.arrow", "state.json"):
        directory = write_directory(tmp_path / f"without_{broken}")
        (directory / broken).write_text("")
        with pytest.raises(ValueError, match=f"without_{broken} cannot be read as Arrow"):
            read_rows([directory], required=WAY_OUT)
    datasets.Dataset.from_dict({"prompt": []}).save_to_disk(tmp_path / "empty")
    with pytest.raises(ValueError, match="empty is empty: it has no rows"):
        read_rows([tmp_path / "empty"], required=WAY_OUT)


def test_parquet_and_jsonl_do_not_need_the_datasets_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # its import would raise
    assert len(read_rows([write_parquet(tmp_path / "a.parquet")], required=WAY_OUT)) == 3
    assert len(read_rows([write_jsonl(tmp_path / "a.jsonl")], required=WAY_OUT)) == 3


def test_nothing_is_written_beside_the_data(tmp_path):
    before = {path: path.stat().st_mtime_ns for path in write_directory(tmp_path / "a").rglob("*")}
    read_rows([tmp_path / "a"], required=WAY_OUT)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")} == before
