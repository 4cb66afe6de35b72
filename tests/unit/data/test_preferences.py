import json
import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl.data.preferences import load_preferences
from rl.data.prompts import load_tokenizer
from tools.make_toy import build_tokenizer

USER = {"role": "user", "content": "1+1="}
GOOD = {"role": "assistant", "content": "2"}
BAD = {"role": "assistant", "content": "three"}


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    return load_tokenizer(tokenizer_dir)


@pytest.fixture
def load(tmp_path, tokenizer):
    def load(*rows, tokenizer=tokenizer, **options):
        file = tmp_path / "pairs.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_preferences([file], tokenizer, **{**DEFAULTS, **options})

    return load


DEFAULTS = {
    "prompt_key": "prompt",
    "chosen_key": "chosen",
    "rejected_key": "rejected",
    "max_prompt_tokens": 64,
    "max_response_tokens": 16,
    "overlong": "error",
}


# ---- the forms of a pair ----


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": "2", "rejected": "three"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "1+1=", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "<user>1+1=<assistant>", "chosen": "2", "rejected": "three"},
        {"prompt": "<user>1+1=<assistant>", "chosen": [GOOD], "rejected": "three"},
    ],
    ids=["strings", "messages", "conversations", "string-and-conversations", "text", "text-and-message"],
)
def test_all_forms_of_a_pair_give_the_same_tokens(load, tokenizer, row):
    (pair,) = load({**row, "data_source": "sums"})
    assert pair.index == 0 and pair.data_source == "sums"
    assert pair.text == "<user>1+1=<assistant>"
    assert tokenizer.convert_ids_to_tokens(pair.prompt_ids.tolist()) == ["<user>", *"1+1=", "<assistant>"]
    assert tokenizer.convert_ids_to_tokens(pair.chosen_ids.tolist()) == ["2", "<eos>"]
    assert tokenizer.convert_ids_to_tokens(pair.rejected_ids.tolist()) == [*"three", "<eos>"]
    assert {ids.dtype for ids in (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids)} == {
        np.dtype(np.int32)
    }


def test_without_a_prompt_column_the_conversations_hold_it(load):
    chat = [{"role": "system", "content": "s"}, USER]
    (pair,) = load({"chosen": [*chat, GOOD], "rejected": [*chat, BAD]}, prompt_key="")
    assert pair.text == "<user>s<user>1+1=<assistant>" and pair.data_source == "pairs"


def test_several_turns_with_and_without_repetition(load):
    chat = [USER, GOOD, {"role": "user", "content": "2+2="}]
    repeated = {"prompt": "2+2=", "chosen": [*chat, BAD], "rejected": [*chat, GOOD]}
    plain, long = load({"prompt": chat, "chosen": [BAD], "rejected": [GOOD]}, repeated)
    assert plain.text == long.text == "<user>1+1=<assistant>2<eos><user>2+2=<assistant>"


def test_null_keys_are_ignored_in_repetitions(tmp_path, tokenizer):
    row = {"prompt": [USER], "chosen": [USER, {**GOOD, "name": "x"}], "rejected": [USER, BAD]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "pairs.parquet")
    (pair,) = load_preferences([tmp_path / "pairs.parquet"], tokenizer, **DEFAULTS)
    assert pair.text == "<user>1+1=<assistant>"


def test_other_columns_files_and_max_pairs(load):
    rows = [{"q": str(i), "yes": "a", "no": "b"} for i in range(5)]
    pairs = load(*rows, prompt_key="q", chosen_key="yes", rejected_key="no", max_pairs=3)
    assert [(pair.index, pair.text) for pair in pairs] == [(0, "0"), (1, "1"), (2, "2")]


# ---- what is wrong with a pair ----


@pytest.mark.parametrize(
    "row, message",
    [
        (
            {"chosen": [USER, GOOD], "rejected": [{**USER, "content": "2+2="}, BAD]},
            "differ between column 'chosen' and column",
        ),
        (
            {"chosen": [USER, GOOD], "rejected": "three"},
            "differ between column 'chosen' and column 'rejected'",
        ),
        (
            {"chosen": [GOOD, USER], "rejected": "three"},
            "'chosen' must end with a text message of the assistant",
        ),
        ({"chosen": "2", "rejected": []}, "column 'rejected' must be a string or messages .* not list"),
        ({"chosen": None, "rejected": "three"}, "column 'chosen' must be a string .* not missing"),
        ({"chosen": "2", "rejected": 3}, "column 'rejected' must be a string .* not int 3"),
        (
            {"chosen": [{"role": "assistant", "tool_calls": [{"name": "f"}]}], "rejected": "three"},
            "'chosen' must end with a text message of the assistant",
        ),
        (
            {"prompt": [USER, GOOD], "chosen": "2", "rejected": "3"},
            "must not end with a message of the assistant",
        ),
        (
            {"prompt": [{**USER, "content": "2+2="}], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "differ from the prompt in column 'prompt'.*set data.prompt_key=\"\"",
        ),
        (
            {"prompt": "2+2=", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "differ from the prompt in column 'prompt'",
        ),
        ({"prompt": 5, "chosen": "2", "rejected": "3"}, "column 'prompt' must be a string or a list"),
        ({"prompt": "", "chosen": "2", "rejected": "3"}, "the prompt in column 'prompt' is empty"),
    ],
)
def test_a_pair_that_makes_no_sense_is_named_with_its_row(load, row, message):
    fine = {"prompt": [USER], "chosen": "2", "rejected": "three"}
    with pytest.raises(ValueError, match=f"pairs.jsonl, row 2: .*{message}"):
        load(fine, {"prompt": [USER], **row})


@pytest.mark.parametrize("key", ["prompt", "chosen", "rejected"])
def test_a_missing_column_names_the_key_of_the_config(load, key):
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(ValueError, match=f"no column 'x', only prompt, chosen, rejected: .*data.{key}_key"):
        load(row, **{f"{key}_key": "x"})


def test_no_prompt_anywhere_is_refused(load):
    with pytest.raises(ValueError, match="row 1: there is no prompt: .*data.prompt_key"):
        load({"chosen": "a", "rejected": "b"}, prompt_key="")


def test_a_tokenizer_without_eos_is_refused(load, tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="needs an eos_token"):
        load({"prompt": "a", "chosen": "b", "rejected": "c"}, tokenizer=tokenizer)


# ---- lengths ----

LONG = [
    {"prompt": "aaaa", "chosen": "b", "rejected": "c"},
    {"prompt": "a", "chosen": "bbbb", "rejected": "c"},
    {"prompt": "a", "chosen": "b", "rejected": "12345"},
    {"prompt": "aaa", "chosen": "bbb", "rejected": "ccc"},
]


def test_overlong_pairs_under_error_name_what_is_too_long(load):
    with pytest.raises(
        ValueError, match="1 of 4 prompts have more than data.max_prompt_tokens=3 tokens, the longest 4"
    ):
        load(*LONG, max_prompt_tokens=3)
    with pytest.raises(
        ValueError,
        match="1 of 4 rejected responses have more than rollout.max_response_tokens=5 tokens.*first tokens",
    ):
        load(*LONG, max_response_tokens=5)


def test_drop_leaves_out_every_pair_of_which_a_part_is_too_long(load, caplog):
    with caplog.at_level(logging.INFO):
        pairs = load(*LONG, max_prompt_tokens=3, max_response_tokens=4, overlong="drop")
    assert [pair.index for pair in pairs] == [3]
    for noun in ("prompts", "chosen responses", "rejected responses"):
        assert f"1 of 4 {noun} have more" in caplog.text


def test_drop_that_leaves_no_pair_is_an_error(load):
    with pytest.raises(ValueError, match="each of the 2 pairs .* would drop all"):
        load(LONG[0], LONG[1], max_prompt_tokens=3, max_response_tokens=4, overlong="drop")


def test_truncation_keeps_prompt_end_and_response_start(load, tokenizer):
    row = {"prompt": "01234", "chosen": "abcde", "rejected": "abc"}
    (pair,) = load(row, max_prompt_tokens=3, max_response_tokens=4, overlong="truncate_left")
    assert tokenizer.convert_ids_to_tokens(pair.prompt_ids.tolist()) == ["2", "3", "4"]
    assert tokenizer.convert_ids_to_tokens(pair.chosen_ids.tolist()) == [
        "a",
        "b",
        "c",
        "d",
    ]  # cut off: no <eos>
    assert tokenizer.convert_ids_to_tokens(pair.rejected_ids.tolist()) == ["a", "b", "c", "<eos>"]
    assert pair.text == "01234"


def test_limits_and_choices_are_checked(load):
    with pytest.raises(ValueError, match="rollout.max_response_tokens=0"):
        load(*LONG, max_response_tokens=0)
    with pytest.raises(ValueError, match="data.overlong_prompts='cut'"):
        load(*LONG, overlong="cut")
