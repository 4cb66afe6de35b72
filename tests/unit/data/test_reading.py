import json
import sys

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl.data.prompts import load_prompts
from rl.data.reading import check_data_files, read_rows
from rl.models.json_files import POINTER

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


def write_array(path):
    path.write_text(json.dumps(ROWS, indent=1))
    return path


def write_lines_with_bom(path):
    path.write_bytes(b"\xef\xbb\xbf" + write_jsonl(path).read_bytes())
    return path


def write_json_columns(path):
    """As datasets 5 writes messages and values with unlike keys."""
    json_of = datasets.Features(prompt=datasets.List(datasets.Json()), reward_model=datasets.Json())
    datasets.Dataset.from_list(ROWS).select_columns(list(json_of)).cast(json_of).to_parquet(str(path))
    return path


def write_texts(path):
    """As a CSV file or a database gives columns with objects."""
    rows = [{key: json.dumps(value) for key, value in row.items()} for row in ROWS]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_map(path):
    values = {"prompt": [row["prompt"] for row in ROWS]}
    maps = [list(row["reward_model"].items()) for row in ROWS]
    values["reward_model"] = pa.array(maps, pa.map_(pa.string(), pa.string()))
    pq.write_table(pa.table(values), path)
    return path


def write_directory(path):
    datasets.Dataset.from_list(ROWS).save_to_disk(path)
    return path


def write_arrow(path):
    (file,) = write_directory(path.with_suffix(".dir")).glob("*.arrow")
    return file.rename(path)


FORMS = [write_parquet, write_jsonl, write_arrow, write_directory]
FORMS = list(zip(FORMS, ["a.parquet", "a.jsonl", "a.arrow", "a.b"]))
OTHERS = [
    (write_array, "a.json"),
    (write_array, "a.jsonl"),
    (write_jsonl, "a.json"),
    (write_lines_with_bom, "a.jsonl"),
    (write_json_columns, "a.parquet"),
    (write_texts, "a.parquet"),
    (write_map, "a.parquet"),
    (write_directory, "a.jsonl"),
]


@pytest.mark.parametrize("write, name", [*FORMS, *OTHERS])
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
    message = rf"{name}.* no column 'question', only prompt, .*; name it in data.x"
    with pytest.raises(ValueError, match=message):
        read_rows([write(tmp_path / name)], required={"prompt": "no", "question": "name it in data.x"})


def test_a_dataset_dict_names_its_splits(tmp_path):
    split = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "both")
    message = r"both is a DatasetDict with the splits train, test; .*both/train\."
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
    with pytest.raises(ValueError, match="empty has no rows; correct the path"):
        read_rows([tmp_path / "empty"], required=WAY_OUT)


def test_parquet_and_jsonl_do_not_need_the_datasets_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # its import would raise
    assert len(read_rows([write_parquet(tmp_path / "a.parquet")], required=WAY_OUT)) == 3
    assert len(read_rows([write_jsonl(tmp_path / "a.jsonl")], required=WAY_OUT)) == 3


def test_nothing_is_written_beside_the_data(tmp_path):
    before = {path: path.stat().st_mtime_ns for path in write_directory(tmp_path / "a").rglob("*")}
    read_rows([tmp_path / "a"], required=WAY_OUT)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "a").rglob("*")} == before


BAD_LINES = [
    ('{"prompt": "a\\ud83d"}', r"row 2: '\\ud83d' is half of a character .*remove it"),
    ('{"prompt": ' + "[" * 5000 + "]" * 5000 + "}", "row 2: nested in more than 100 levels; store"),
    ('{"prompt": ' + "[" * 200 + "]" * 200 + "}", "row 2: nested in more than 100 levels; store"),
    ('{"prompt": 1' + "0" * 5000 + "}", "row 2: not JSON .*4300"),
    ('{"prompt": "a", "prompt": "b"}', "row 2: not JSON .*the key 'prompt' twice; rename one"),
    ("{\"prompt\": \"[{'role': 'user'}]\"}", "row 2: messages in column 'prompt': not JSON, .*store them as"),
    ('{"prompt": "a", "reward_model": "42"}', "row 2: column 'reward_model' must be an object .*not int 42"),
    ('{"prompt": "a", "extra_info": [1]}', "row 2: column 'extra_info' must be an object .*not list"),
    ('{"prompt": "a", "extra_info": "x"}', "row 2: column 'extra_info': not JSON"),
    ('["a"]', "row 2: must be a JSON object, not list"),
    ("{", r"row 2: not JSON \(a file has one object per line, or is one array"),
]


@pytest.mark.parametrize("line, message", BAD_LINES)
def test_a_bad_line_is_one_sentence_with_file_and_row(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n' + line)
    with pytest.raises(ValueError, match=f"a.jsonl, {message}") as found:
        read_rows([tmp_path / "a.jsonl"], required=WAY_OUT, optional=["reward_model", "extra_info"])
    assert "\n" not in str(found.value) and len(str(found.value)) < 400


def test_text_that_is_not_utf8_names_its_row(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe4"}\n')
    with pytest.raises(ValueError, match="a.jsonl, row 2: not UTF-8 .*convert the file"):
        read_rows([tmp_path / "a.jsonl"], required=WAY_OUT)


def test_a_nested_key_of_a_columns_name_is_no_second_column(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "x": {"prompt": "b"}}\n')
    assert read_rows([tmp_path / "a.jsonl"], required=WAY_OUT)[0].values == {"prompt": "a"}


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_two_columns_of_one_name_are_refused(tmp_path, name):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    if name == "a.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        with pa.ipc.new_stream(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(ValueError, match=f"{name}.*'?prompt'?"):
        read_rows([tmp_path / name], required=WAY_OUT)


def test_parquet_with_invalid_text_names_its_file(tmp_path):
    broken = pa.array([b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"prompt": broken}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet cannot be read as parquet: .*utf-8"):
        read_rows([tmp_path / "a.parquet"], required=WAY_OUT)


def test_saved_images_are_read_as_their_files(tmp_path):
    image = datasets.Features(prompt=datasets.Value("string"), images=datasets.List(datasets.Image()))
    rows = {"prompt": ["a"], "images": [[{"bytes": b"PNG", "path": None}]]}
    datasets.Dataset.from_dict(rows, features=image).save_to_disk(tmp_path / "a")
    (row,) = read_rows([tmp_path / "a"], required=WAY_OUT, optional=["images"])
    assert row.values["images"] == [{"bytes": b"PNG", "path": None}]


def test_a_missing_file_is_named_with_its_key_and_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"^data.val=.*none.parquet does not exist .*correct the path\.$"):
        check_data_files([tmp_path / "none.parquet"], key="data.val")
    (tmp_path / "train.parquet").touch()
    with pytest.raises(ValueError, match=r"; did you mean .*/train.parquet\? If not, correct"):
        check_data_files([tmp_path / "trian.parquet"], key="data.train")
    with pytest.raises(ValueError, match=r"data.train=openai/gsm8k .*hf download openai/gsm8k --repo-type"):
        check_data_files(["openai/gsm8k"], key="data.train")
    with pytest.raises(ValueError, match=r"^data.train=https://a.b/c.jsonl is a URL.*; download it"):
        check_data_files(["https://a.b/c.jsonl"], key="data.train")
    (tmp_path / "a.parquet").write_bytes(POINTER + b"v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ValueError, match=r"a.parquet is a Git LFS pointer .*git lfs pull"):
        read_rows([tmp_path / "a.parquet"], required=WAY_OUT)
