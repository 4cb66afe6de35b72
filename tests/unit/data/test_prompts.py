import json
import logging
import socket

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl.data.prompts import load_prompts, load_tokenizer
from tests.timing import assert_linear
from tools.make_toy import build_tokenizer

ADDITION = {
    "data_source": "addition",
    "prompt": [{"role": "user", "content": "37+58="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "95"},
    "extra_info": {"split": "train", "index": 7},
}


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    return load_tokenizer(tokenizer_dir)


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(files, tokenizer, **options):
    options = {"prompt_key": "prompt", "max_prompt_tokens": 64, "overlong": "error", **options}
    return load_prompts(files, tokenizer, **options)


# ---- what a prompt holds ----


@pytest.mark.parametrize("write, name", [(write_parquet, "train.parquet"), (write_jsonl, "train.jsonl")])
def test_messages_are_rendered_with_the_generation_prompt_and_tokenized(tmp_path, tokenizer, write, name):
    (prompt,) = load([write(tmp_path / name, [ADDITION])], tokenizer)
    assert prompt.text == "<user>37+58=<assistant>"
    assert prompt.token_ids.dtype == np.int32
    assert tokenizer.convert_ids_to_tokens(prompt.token_ids.tolist()) == ["<user>", *"37+58=", "<assistant>"]
    assert prompt.index == 0
    assert prompt.data_source == "addition"
    assert prompt.ground_truth == "95"
    assert prompt.extra_info == {"split": "train", "index": 7}
    assert prompt.response_ids is None


def test_a_string_prompt_is_taken_as_it_is(tmp_path, tokenizer):
    (prompt,) = load([write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1 + 1 ="}])], tokenizer)
    assert prompt.text == "1 + 1 ="
    assert tokenizer.decode(prompt.token_ids) == "1 + 1 ="


def test_a_string_prompt_gets_the_tokenizers_bos_exactly_once(tmp_path, tokenizer_dir):
    from tokenizers.processors import TemplateProcessing

    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 2)]
    )
    rows = [{"prompt": "1+1="}, {"prompt": "<bos>1+1="}, {"prompt": [{"role": "user", "content": "1"}]}]
    tokens = [
        tokenizer.convert_ids_to_tokens(p.token_ids.tolist())
        for p in load([write_jsonl(tmp_path / "a.jsonl", rows)], tokenizer)
    ]
    assert tokens == [["<bos>", *"1+1="], ["<bos>", *"1+1="], ["<user>", "1", "<assistant>"]]


def test_files_are_concatenated_in_order(tmp_path, tokenizer):
    first = write_parquet(tmp_path / "first.parquet", [{"prompt": "a"}, {"prompt": "b"}])
    second = write_jsonl(tmp_path / "second.jsonl", [{"prompt": "c"}])
    prompts = load([str(second), first], tokenizer)
    assert [(p.index, p.text, p.data_source) for p in prompts] == [
        (0, "c", "second"),
        (1, "a", "first"),
        (2, "b", "first"),
    ]


def test_what_a_row_lacks_is_none_or_empty(tmp_path, tokenizer):
    rows = [
        {"prompt": "a"},
        {"prompt": "b", "reward_model": None, "extra_info": None},
        {"prompt": "c", "reward_model": {"style": "model"}},
    ]
    for prompt in load([write_jsonl(tmp_path / "a.jsonl", rows)], tokenizer):
        assert prompt.ground_truth is None
        assert prompt.extra_info == {}


def test_jsonl_values_keep_their_own_type_in_each_row(tmp_path, tokenizer):
    truths = ["2024-01-01T00:00:00Z", 5, ["a", "b"], {"x": 1.5}]
    rows = [{"prompt": "a", "reward_model": {"ground_truth": truth}} for truth in truths]
    assert [p.ground_truth for p in load([write_jsonl(tmp_path / "a.jsonl", rows)], tokenizer)] == truths


def test_keys_that_parquet_fills_up_with_null_do_not_reach_the_template(tmp_path, tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}{% if m['name'] is defined %}({{ m['name'] }}){% endif %};{% endfor %}"
    rows = [
        {
            "prompt": [
                {"role": "user", "content": "a", "name": "Ann"},
                {"role": "tool", "content": "b", "name": None},
            ]
        }
    ]
    assert load([write_parquet(tmp_path / "a.parquet", rows)], tokenizer)[0].text == "user(Ann);tool;"


def test_max_prompts_reads_the_first_rows_across_files(tmp_path, tokenizer):
    first = write_parquet(tmp_path / "a.parquet", [{"prompt": "a"}, {"prompt": "b"}])
    second = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "c"}, {"prompt": "d"}])
    assert [p.text for p in load([first, second], tokenizer, max_prompts=3)] == ["a", "b", "c"]
    assert len(load([first, second], tokenizer, max_prompts=99)) == 4


# ---- conversations and sources ----


def test_the_messages_are_kept_without_the_keys_that_parquet_fills_up(tmp_path, tokenizer):
    rows = [
        {"prompt": [{"role": "user", "content": "a", "name": "Ann"}]},
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]},
    ]
    first, second = load([write_parquet(tmp_path / "a.parquet", rows)], tokenizer)
    assert first.messages == [{"role": "user", "content": "a", "name": "Ann"}]
    assert second.messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]
    (string,) = load([write_jsonl(tmp_path / "b.jsonl", [{"prompt": "c"}])], tokenizer)
    assert string.messages is None


@pytest.mark.parametrize("last", ["user", "tool", "system"])
def test_a_conversation_may_end_with_whatever_the_assistant_answers_to(tmp_path, tokenizer, last):
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": last, "content": "c"},
    ]
    (prompt,) = load([write_jsonl(tmp_path / "a.jsonl", [{"prompt": chat}])], tokenizer)
    assert prompt.text == "<user>a<assistant>b<eos><user>c<assistant>"
    assert prompt.messages == chat


def test_a_conversation_that_ends_with_the_assistant_is_refused_with_a_way_out(tmp_path, tokenizer):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(
        ValueError, match="row 1: column 'prompt' ends with a message of the assistant.*data.response_key"
    ):
        load([write_jsonl(tmp_path / "a.jsonl", [{"prompt": chat}])], tokenizer)


def test_a_message_that_calls_tools_needs_no_content(tmp_path, tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content or m.tool_calls[0].name }};{% endfor %}"
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "search"}]}
    chat = [{"role": "user", "content": "a"}, call, {"role": "tool", "content": "b"}]
    assert load([write_jsonl(tmp_path / "a.jsonl", [{"prompt": chat}])], tokenizer)[0].text == "a;search;b;"


def test_each_prompt_knows_the_file_it_came_from(tmp_path, tokenizer):
    files = [
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": name}, {"prompt": "x" * 20}]) for name in "ab"
    ]
    prompts = load([*files, files[0]], tokenizer, max_prompt_tokens=10, overlong="drop")
    assert [(p.source, p.index, p.text) for p in prompts] == [(0, 0, "a"), (1, 2, "b"), (2, 4, "a")]


# ---- sft ----


@pytest.mark.parametrize(
    "response_key, target",
    [("", "95"), ("reward_model.ground_truth", "95"), ("answer", "ninety five"), ("extra_info.index", "7")],
)
def test_the_sft_target_is_tokenized_and_ends_with_eos(tmp_path, tokenizer, response_key, target):
    file = write_parquet(tmp_path / "a.parquet", [{**ADDITION, "answer": "ninety five"}])
    (prompt,) = load([file], tokenizer, response_key=response_key)
    assert prompt.response_ids.dtype == np.int32
    assert tokenizer.decode(prompt.response_ids[:-1]) == target
    assert prompt.response_ids[-1] == tokenizer.eos_token_id


def test_a_missing_sft_target_names_the_row_and_the_key(tmp_path, tokenizer):
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "answer": "b"}, {"prompt": "a"}])
    with pytest.raises(
        ValueError,
        match=r"a.jsonl, row 2: answer must be the text to learn, it is missing: .*data.response_key",
    ):
        load([file], tokenizer, response_key="answer")


def test_sft_without_an_eos_token_is_refused(tmp_path, tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no eos_token"):
        load([write_jsonl(tmp_path / "a.jsonl", [ADDITION])], tokenizer, response_key="")


# ---- overlong prompts ----


@pytest.fixture
def lengths_3_to_12(tmp_path):
    return write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x" * (n - 1) + "="} for n in range(3, 13)])


def test_overlong_prompts_under_error_name_the_count_the_longest_the_limit_and_the_choices(
    lengths_3_to_12, tokenizer
):
    with pytest.raises(ValueError) as raised:
        load([lengths_3_to_12], tokenizer, max_prompt_tokens=10)
    message = str(raised.value)
    assert "2 of 10 prompts have more than data.max_prompt_tokens = 10 tokens, the longest 12" in message
    assert all(word in message for word in ("data.overlong_prompts", "error", "drop", "truncate_left"))


def test_drop_leaves_overlong_prompts_out_and_keeps_the_row_numbers_of_the_others(
    lengths_3_to_12, tokenizer, caplog
):
    with caplog.at_level(logging.INFO):
        prompts = load(
            [lengths_3_to_12], tokenizer, max_prompt_tokens=5, overlong="drop", response_key="prompt"
        )
    assert [(p.index, len(p.token_ids)) for p in prompts] == [(0, 3), (1, 4), (2, 5)]
    assert [len(p.response_ids) for p in prompts] == [4, 5, 6]
    assert "7 of 10 prompts" in caplog.text


def test_truncate_left_keeps_the_last_tokens_and_the_whole_text(lengths_3_to_12, tokenizer):
    prompts = load([lengths_3_to_12], tokenizer, max_prompt_tokens=5, overlong="truncate_left")
    assert [len(p.token_ids) for p in prompts] == [3, 4] + 8 * [5]
    assert tokenizer.decode(prompts[-1].token_ids) == "xxxx="
    assert prompts[-1].text == "x" * 11 + "="


def test_a_limit_that_every_prompt_meets_changes_nothing(lengths_3_to_12, tokenizer):
    for overlong in ("error", "drop", "truncate_left"):
        prompts = load([lengths_3_to_12], tokenizer, max_prompt_tokens=12, overlong=overlong)
        assert [len(p.token_ids) for p in prompts] == list(range(3, 13))


def test_drop_that_leaves_nothing_is_an_error(lengths_3_to_12, tokenizer):
    with pytest.raises(ValueError, match="10 of 10 prompts .*would leave nothing"):
        load([lengths_3_to_12], tokenizer, max_prompt_tokens=2, overlong="drop")


# ---- what is wrong with the data ----


def test_a_missing_file_is_named_before_any_other_is_read(tmp_path, tokenizer):
    broken = tmp_path / "broken.jsonl"
    broken.write_text("{")
    with pytest.raises(ValueError, match="nowhere.parquet does not exist"):
        load([broken, tmp_path / "nowhere.parquet"], tokenizer)


def test_a_file_of_another_kind_is_refused(tmp_path, tokenizer):
    (tmp_path / "a.csv").write_text("prompt\na\n")
    with pytest.raises(ValueError, match="must be .parquet or .jsonl"):
        load([tmp_path / "a.csv"], tokenizer)


@pytest.mark.parametrize("write, name", [(write_parquet, "a.parquet"), (write_jsonl, "a.jsonl")])
def test_a_missing_prompt_column_names_the_columns_found_and_the_key(tmp_path, tokenizer, write, name):
    file = write(tmp_path / name, [{"question": "a", "answer": "b"}])
    with pytest.raises(
        ValueError, match=rf"{name}.* no column 'prompt', only question, answer: .*data.prompt_key"
    ):
        load([file], tokenizer)
    assert load([file], tokenizer, prompt_key="question")[0].text == "a"


def test_files_that_cannot_be_read_are_named(tmp_path, tokenizer):
    (tmp_path / "a.parquet").write_text("this is no parquet file")
    with pytest.raises(ValueError, match="a.parquet cannot be read as parquet"):
        load([tmp_path / "a.parquet"], tokenizer)
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(ValueError, match="a.jsonl, row 2: not JSON"):
        load([tmp_path / "a.jsonl"], tokenizer)
    (tmp_path / "b.jsonl").write_text('["a"]\n')
    with pytest.raises(ValueError, match="b.jsonl, row 1: must be a JSON object"):
        load([tmp_path / "b.jsonl"], tokenizer)
    (tmp_path / "c.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match="c.jsonl cannot be read as JSONL"):
        load([tmp_path / "c.jsonl"], tokenizer)


def test_a_truncated_parquet_file_is_named(tmp_path, tokenizer):
    file = write_parquet(tmp_path / "a.parquet", [ADDITION] * 1000)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="a.parquet cannot be read as parquet"):
        load([file], tokenizer)


def test_empty_data_is_refused(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="a.jsonl is empty"):
        load([tmp_path / "a.jsonl"], tokenizer)
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet is empty"):
        load([tmp_path / "a.parquet"], tokenizer)
    with pytest.raises(ValueError, match="no data files"):
        load([], tokenizer)


@pytest.mark.parametrize("prompt", [None, 5, [], ["a"], [{"role": "user"}], {"role": "user", "content": "a"}])
def test_a_prompt_that_is_neither_text_nor_messages_is_refused(tmp_path, tokenizer, prompt):
    file = write_jsonl(tmp_path / "a.jsonl", [ADDITION, {"prompt": prompt}])
    with pytest.raises(ValueError, match="a.jsonl, row 2: column 'prompt' must be a string or a list"):
        load([file], tokenizer)


def test_a_prompt_without_tokens_is_refused(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="row 1: the prompt in column 'prompt' is empty"):
        load([write_jsonl(tmp_path / "a.jsonl", [{"prompt": ""}])], tokenizer)


def test_messages_need_a_chat_template_and_strings_do_not(tmp_path, tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.chat_template = None
    with pytest.raises(
        ValueError,
        match="row 1: column 'prompt' holds messages, but the tokenizer of .* has no chat template",
    ):
        load([write_jsonl(tmp_path / "a.jsonl", [ADDITION])], tokenizer)
    assert len(load([write_jsonl(tmp_path / "b.jsonl", [{"prompt": "a"}])], tokenizer)) == 1


def test_messages_that_the_template_rejects_are_named(tmp_path, tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(
        ValueError, match="row 1: the chat template of .* rejects .*: System role not supported"
    ):
        load([write_jsonl(tmp_path / "a.jsonl", [ADDITION])], tokenizer)


# ---- the tokenizer ----


def test_loading_a_tokenizer_opens_no_connection(tokenizer_dir, monkeypatch):
    def refuse(*arguments):
        raise AssertionError(f"tried to connect: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert len(load_tokenizer(tokenizer_dir)) == 102


def test_a_hub_name_in_place_of_a_directory_is_refused():
    with pytest.raises(ValueError, match="'Qwen/Qwen3-8B' is not a directory: download"):
        load_tokenizer("Qwen/Qwen3-8B")


def test_a_directory_without_a_tokenizer_says_what_it_has(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="no usable tokenizer .* has model.safetensors"):
        load_tokenizer(tmp_path)


# ---- speed ----


def test_time_to_load_grows_linearly_up_to_the_size_of_gsm8k(tmp_path, tokenizer):
    question = (
        "Natalia sold 48 clips to her friends in April, and then half as many in May. " * 3
        + " How many in all?" * 4
    )
    row = {**ADDITION, "prompt": [{"role": "user", "content": question}]}

    def file_of(size):
        return write_parquet(tmp_path / f"{size}.parquet", [row] * size)

    assert_linear(lambda file: load([file], tokenizer, max_prompt_tokens=1024), file_of, 7473)
