import json
import logging
import socket

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers.processors import TemplateProcessing

from rl.data.prompts import load_prompts, load_tokenizer
from tests.chat_templates import tokenizer_of
from tests.timing import assert_linear

ADDITION = {
    "data_source": "addition",
    "prompt": [{"role": "user", "content": "37+58="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "95"},
    "extra_info": {"split": "train", "index": 7},
}


USER = {"role": "user", "content": "a"}


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load_files(files, tokenizer, **options):
    options = {"prompt_key": "prompt", "max_prompt_tokens": 64, "overlong": "error", **options}
    return load_prompts(files, tokenizer, **options)


@pytest.fixture
def load(tmp_path, tokenizer):
    """Load rows, or prompts, from a file that is called a.jsonl."""

    def load(*rows, **options):
        rows = [row if isinstance(row, dict) else {"prompt": row} for row in rows]
        return load_files([write_jsonl(tmp_path / "a.jsonl", rows)], tokenizer, **options)

    return load


FORMS = [(write_parquet, "a.parquet"), (write_jsonl, "a.jsonl")]


@pytest.mark.parametrize("write, name", FORMS)
def test_messages_are_rendered_and_tokenized(tmp_path, tokenizer, write, name):
    (prompt,) = load_files([write(tmp_path / name, [ADDITION])], tokenizer)
    assert prompt.text == "<user>37+58=<assistant>"
    assert prompt.token_ids.dtype == np.int32
    assert tokenizer.convert_ids_to_tokens(prompt.token_ids.tolist()) == ["<user>", *"37+58=", "<assistant>"]
    assert (prompt.index, prompt.data_source, prompt.ground_truth) == (0, "addition", "95")
    assert prompt.extra_info == {"split": "train", "index": 7} and prompt.response_ids is None


def test_a_string_prompt_is_taken_as_it_is_with_one_bos(load, tokenizer):
    (prompt,) = load("1 + 1 =")
    assert prompt.text == tokenizer.decode(prompt.token_ids) == "1 + 1 =" and prompt.messages is None
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 2)]
    )
    prompts = load("1+1=", "<bos>1+1=", [{"role": "user", "content": "1"}])
    tokens = [tokenizer.convert_ids_to_tokens(prompt.token_ids.tolist()) for prompt in prompts]
    assert tokens == [["<bos>", *"1+1="], ["<bos>", *"1+1="], ["<user>", "1", "<assistant>"]]


def test_files_are_concatenated_in_order_up_to_max_prompts(tmp_path, tokenizer):
    first = write_parquet(tmp_path / "first.parquet", [{"prompt": "a"}, {"prompt": "b"}])
    second = write_jsonl(tmp_path / "second.jsonl", [{"prompt": "c"}, {"prompt": "x" * 20}])
    options = dict(max_prompt_tokens=10, overlong="drop")
    prompts = load_files([str(second), first, second], tokenizer, **options)
    found = [(p.index, p.text, p.data_source, p.source) for p in prompts]
    assert found == [(0, "c", "second", 0), (2, "a", "first", 1), (3, "b", "first", 1), (4, "c", "second", 2)]
    for most, texts in ((3, "abc"), (99, "abc" + "x" * 20)):
        found = load_files([first, second], tokenizer, max_prompts=most)
        assert "".join(p.text for p in found) == texts


def test_absent_values_are_none_or_empty_and_types_are_kept(load):
    absent = {"reward_model": None, "extra_info": None}
    rows = [{"prompt": "a"}, {"prompt": "b", **absent}, {"prompt": "c", "reward_model": {"style": "model"}}]
    assert [(prompt.ground_truth, prompt.extra_info) for prompt in load(*rows)] == [(None, {})] * 3
    truths = ["2024-01-01T00:00:00Z", 5, ["a", "b"], {"x": 1.5}]
    rows = [{"prompt": "a", "reward_model": {"ground_truth": truth}} for truth in truths]
    assert [prompt.ground_truth for prompt in load(*rows)] == truths


def test_a_string_can_be_the_message_of_a_user(load):
    chat = [{"role": "user", "content": "1+1="}]
    system = {"role": "system", "content": "Add."}
    (said, plain, whole) = (
        load(*rows, string_prompts="user")
        for rows in (["1+1="], [chat], [{"prompt": "1+1=", "system": "Add."}])
    )
    assert said[0].messages == plain[0].messages == chat
    assert said[0].token_ids.tolist() == plain[0].token_ids.tolist() != load("1+1=")[0].token_ids.tolist()
    assert whole[0].messages == [system, *chat]
    with pytest.raises(ValueError, match="a.jsonl, row 1: column 'prompt' is empty"):
        load(" ", string_prompts="user")
    rendered = load(chat)[0].text
    with pytest.raises(ValueError, match="the chat template has rendered it already"):
        load(rendered, string_prompts="user")


def test_a_file_with_columns_of_its_own_is_read_whole(load):
    row = {"question": "1+1=", "answer": {"final": "2"}, "level": 3, "tests": ["a"]}
    (prompt,) = load(row, prompt_key="question", ground_truth_key="answer.final")
    assert prompt.ground_truth == "2" and prompt.extra_info == {"level": 3, "tests": ["a"]}
    with pytest.raises(ValueError, match="no column 'truth'.*data.ground_truth_key"):
        load(row, prompt_key="question", ground_truth_key="truth")


def test_columns_for_environments_are_in_the_extra_info(load):
    from rl.features.agents.pool import to_row

    column, nested = {"a": {"k": 1}}, {"name": "x"}
    rows = [
        {
            **ADDITION,
            "tools_kwargs": column,
            "agent_name": None,
            "extra_info": {"interaction_kwargs": nested},
        },
        {**ADDITION, "agent_name": "tool_agent"},
    ]
    first, second = map(to_row, load(*rows))
    assert first["tools_kwargs"] == column and first["interaction_kwargs"] == nested
    assert first["agent_name"] is None and first["ground_truth"] == "95"
    assert second["agent_name"] == "tool_agent" and second["extra_info"]["index"] == 7


def test_messages_and_the_template_have_no_null_keys(tmp_path, tokenizer):
    name = "{% if m['name'] is defined %}({{ m['name'] }}){% endif %}"
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + m['content'] }}" + name + ";{% endfor %}"
    named, plain = {**USER, "name": "Ann"}, {"role": "tool", "content": "b"}
    rows = [{"prompt": [named, plain | {"name": None}]}]
    (prompt,) = load_files([write_parquet(tmp_path / "a.parquet", rows)], tokenizer)
    assert prompt.text == "usera(Ann);toolb;" and prompt.messages == [named, plain]


def test_a_conversation_ends_with_any_role_but_assistant(load):
    chat = [USER, {"role": "assistant", "content": "b"}]
    for last in ("user", "tool", "system"):
        whole = [*chat, {"role": last, "content": "c"}]
        (prompt,) = load(whole)
        assert prompt.text == "<user>a<assistant>b<eos><user>c<assistant>" and prompt.messages == whole
    message = "row 1: column 'prompt' must not end with a message of the assistant.*data.response_key"
    with pytest.raises(ValueError, match=message):
        load(chat)


def test_a_message_that_calls_tools_needs_no_content(load, tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content or m.tool_calls[0].function.name }};{% endfor %}"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "search"}]}
    assert load([USER, call, {"role": "tool", "content": "b"}])[0].text == "a;search;b;"


TARGETS = [
    ("", "95"),
    ("reward_model.ground_truth", "95"),
    ("answer", "ninety five"),
    ("extra_info.index", "7"),
]


def test_the_sft_target_is_tokenized_and_ends_with_eos(tmp_path, tokenizer):
    file = write_parquet(tmp_path / "a.parquet", [{**ADDITION, "answer": "ninety five"}])
    for response_key, target in TARGETS:
        (prompt,) = load_files([file], tokenizer, response_key=response_key)
        assert prompt.response_ids.dtype == np.int32
        assert tokenizer.decode(prompt.response_ids[:-1]) == target
        assert prompt.response_ids[-1] == tokenizer.eos_token_id
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="needs an eos_token"):
        load_files([file], tokenizer, response_key="")


def test_a_missing_sft_target_names_the_row_and_the_key(load):
    message = r"a.jsonl, row 2: answer must be the target text, not missing; .*data.response_key"
    with pytest.raises(ValueError, match=message):
        load({"prompt": "a", "answer": "b"}, "a", response_key="answer")


def test_a_target_of_messages_is_refused_with_the_remedy(load):
    answer = [{"role": "assistant", "content": "b"}]
    with pytest.raises(ValueError, match="row 1: answer must be the target text, .*; append .*messages_key"):
        load({"prompt": "a", "answer": answer}, response_key="answer")


LENGTHS_3_TO_12 = ["x" * (n - 1) + "=" for n in range(3, 13)]


def test_overlong_prompts_are_an_error_with_counts_and_remedies(load):
    with pytest.raises(ValueError) as raised:
        load(*LENGTHS_3_TO_12, max_prompt_tokens=10)
    message = str(raised.value)
    assert "2 of 10 prompts have more than data.max_prompt_tokens=10 tokens, the longest 12" in message
    assert all(word in message for word in ("data.overlong_prompts", "drop", "truncate_left"))
    with pytest.raises(ValueError, match="10 of 10 prompts .*would drop all"):
        load(*LENGTHS_3_TO_12, max_prompt_tokens=2, overlong="drop")


def test_overlong_drop_keeps_row_numbers(load, caplog):
    with caplog.at_level(logging.INFO):
        prompts = load(*LENGTHS_3_TO_12, max_prompt_tokens=5, overlong="drop", response_key="prompt")
    found = [(p.index, len(p.token_ids), len(p.response_ids)) for p in prompts]
    assert found == [(0, 3, 4), (1, 4, 5), (2, 5, 6)] and "7 of 10 prompts" in caplog.text


def test_truncate_left_keeps_the_last_tokens_and_the_whole_text(load, tokenizer):
    prompts = load(*LENGTHS_3_TO_12, max_prompt_tokens=5, overlong="truncate_left")
    assert [len(p.token_ids) for p in prompts] == [3, 4] + 8 * [5]
    assert tokenizer.decode(prompts[-1].token_ids) == "xxxx=" and prompts[-1].text == "x" * 11 + "="
    for overlong in ("error", "drop", "truncate_left"):
        prompts = load(*LENGTHS_3_TO_12, max_prompt_tokens=12, overlong=overlong)
        assert [len(p.token_ids) for p in prompts] == list(range(3, 13))


def test_a_missing_file_is_named_before_any_other_is_read(tmp_path, tokenizer):
    (tmp_path / "broken.jsonl").write_text("{")
    with pytest.raises(ValueError, match="nowhere.parquet does not exist"):
        load_files([tmp_path / "broken.jsonl", tmp_path / "nowhere.parquet"], tokenizer)


@pytest.mark.parametrize("write, name", FORMS)
def test_a_missing_prompt_column_is_reported(tmp_path, tokenizer, write, name):
    file = write(tmp_path / name, [{"question": "a", "answer": "b"}])
    message = rf"{name}.* no column 'prompt', only question, answer; .*data.prompt_key, which data.train and"
    with pytest.raises(ValueError, match=message):
        load_files([file], tokenizer)
    assert load_files([file], tokenizer, prompt_key="question")[0].text == "a"


def test_files_that_cannot_be_read_are_named(tmp_path, tokenizer):
    whole = write_parquet(tmp_path / "whole.parquet", [ADDITION] * 1000).read_bytes()
    empty = write_parquet(tmp_path / "empty.parquet", [{"prompt": "a"}])
    pq.write_table(pq.read_table(empty).slice(0, 0), empty)
    for name, content, message in (
        ("a.csv", b"prompt\na\n", "must be .parquet, .jsonl"),
        ("a.parquet", b"this is no parquet file", "a.parquet cannot be read as parquet"),
        ("b.parquet", whole[:-100], "b.parquet cannot be read as parquet"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "a.jsonl, row 2: not JSON"),
        ("b.jsonl", b'["a"]\n', "b.jsonl, row 1: must be a JSON object"),
        ("c.jsonl", b'{"prompt": "\xff"}\n', "c.jsonl, row 1: not UTF-8"),
        ("d.jsonl", b"\n", "d.jsonl has no rows"),
        ("c.parquet", empty.read_bytes(), "c.parquet has no rows"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_files([tmp_path / name], tokenizer)
    with pytest.raises(ValueError, match="data.train is empty"):
        load_files([], tokenizer)


def test_a_prompt_that_is_neither_text_nor_messages_is_refused(load):
    for prompt in (None, 5, [], ["a"], USER):
        with pytest.raises(ValueError, match="a.jsonl, row 2: column 'prompt' must be a string or a list"):
            load(ADDITION, {"prompt": prompt})
    with pytest.raises(ValueError, match="row 1: the prompt in column 'prompt' is empty"):
        load("")


def test_messages_need_a_chat_template_that_takes_them(load, tokenizer):
    tokenizer.chat_template = None
    message = "row 1: column 'prompt' holds messages, but the tokenizer of .* has no chat template"
    with pytest.raises(ValueError, match=message):
        load(ADDITION)
    assert len(load("a")) == 1
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    message = "row 1: the chat template of .* rejects .*: System role not supported"
    with pytest.raises(ValueError, match=message):
        load(ADDITION)


def test_loading_a_tokenizer_opens_no_connection(tokenizer_dir, monkeypatch):
    def refuse(*arguments):
        raise AssertionError(f"tried to connect: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert len(load_tokenizer(tokenizer_dir)) == 102


def test_a_class_that_changes_the_file_of_a_tokenizer_is_not_used(tmp_path, caplog):
    """transformers #45488: LlamaTokenizer over the file of a byte-level tokenizer drops every space."""
    tokenizer_of("llama3.1").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {
        "tokenizer_class": "LlamaTokenizerFast"
    }
    config.pop("backend", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = load_tokenizer(tmp_path)
    text = "What is 2 + 2?\nAnswer at once."
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert "changes tokenizer.json" in caplog.text


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'Qwen/Qwen3-8B' is not a directory: download"):
        load_tokenizer("Qwen/Qwen3-8B")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="holds no usable tokenizer .* only model.safetensors"):
        load_tokenizer(tmp_path)


def test_time_to_load_grows_linearly_up_to_the_size_of_gsm8k(tmp_path, tokenizer):
    question = "Natalia sold 48 clips to her friends in April, and then half as many in May. " * 3
    row = {**ADDITION, "prompt": [{"role": "user", "content": question + " How many in all?" * 4}]}

    def file_of(size):
        return write_parquet(tmp_path / f"{size}.parquet", [row] * size)

    assert_linear(lambda file: load_files([file], tokenizer, max_prompt_tokens=1024), file_of, 7473)
