import json
import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl.data.chat_template import TOOL
from rl.data.preferences import load_labelled, load_preferences
from rl.data.prompts import load_tokenizer
from tests.chat_templates import tokenizer_of

USER = {"role": "user", "content": "1+1="}
GOOD = {"role": "assistant", "content": "2"}
BAD = {"role": "assistant", "content": "three"}


DEFAULTS = dict(prompt_key="prompt", chosen_key="chosen", rejected_key="rejected", overlong="error")
DEFAULTS |= dict(max_prompt_tokens=64, max_response_tokens=16)


@pytest.fixture
def load(tmp_path, tokenizer):
    def load(*rows, tokenizer=tokenizer, **options):
        file = tmp_path / "pairs.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load_preferences([file], tokenizer, **{**DEFAULTS, **options})

    return load


@pytest.mark.parametrize(
    "prompt, chosen, rejected",
    [
        ([USER], "2", "three"),
        ([USER], [GOOD], [BAD]),
        ([USER], [USER, GOOD], [USER, BAD]),
        ("1+1=", [USER, GOOD], [USER, BAD]),
        ("<user>1+1=<assistant>", "2", "three"),
        ("<user>1+1=<assistant>", [GOOD], "three"),
    ],
)
def test_all_forms_of_a_pair_give_the_same_tokens(load, tokenizer, prompt, chosen, rejected):
    (pair,) = load({"prompt": prompt, "chosen": chosen, "rejected": rejected, "data_source": "sums"})
    assert pair.index == 0 and pair.data_source == "sums" and pair.text == "<user>1+1=<assistant>"
    ids = pair.prompt_ids, pair.chosen_ids, pair.rejected_ids
    expected = [["<user>", *"1+1=", "<assistant>"], ["2", "<eos>"], [*"three", "<eos>"]]
    assert [tokenizer.convert_ids_to_tokens(part.tolist()) for part in ids] == expected
    assert {part.dtype for part in ids} == {np.dtype(np.int32)}


LABELLED = {key: value for key, value in DEFAULTS.items() if key not in ("chosen_key", "rejected_key")}
LABELLED |= dict(response_key="completion", label_key="label")


def labelled(tmp_path, tokenizer, *rows, **options):
    file = tmp_path / "labels.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_labelled([file], tokenizer, **{**LABELLED, **options})


def test_forms_of_a_labelled_response(tmp_path, tokenizer):
    forms = [([USER], "2"), ([USER], [GOOD]), ("1+1=", [USER, GOOD])]
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in forms]
    labels = [True, 0, 1]
    found = labelled(tmp_path, tokenizer, *(row | {"label": label} for row, label in zip(rows, labels)))
    assert [row.label for row in found] == [True, False, True] and [row.index for row in found] == [0, 1, 2]
    for row in found:
        ids = [tokenizer.convert_ids_to_tokens(part.tolist()) for part in (row.prompt_ids, row.response_ids)]
        assert ids == [["<user>", *"1+1=", "<assistant>"], ["2", "<eos>"]] and row.data_source == "labels"


def test_a_response_that_ends_with_the_end_token_gets_no_second(tmp_path, tokenizer):
    responses = ["2<eos>", "2<eos>\n", "2", "<eos>2", "2 "]
    rows = [{"prompt": "1+1=", "completion": response, "label": 1} for response in responses]
    found = labelled(tmp_path, tokenizer, *rows)
    ids = [tokenizer.convert_ids_to_tokens(row.response_ids.tolist()) for row in found]
    assert ids == [["2", "<eos>"]] * 3 + [[*"<eos>2", "<eos>"], ["2", ids[4][1], "<eos>"]]


@pytest.mark.parametrize("label", ["yes", 2, None])
def test_a_label_that_is_no_bool_is_named_with_its_row(tmp_path, tokenizer, label):
    rows = [{"prompt": [USER], "completion": "2", "label": value} for value in (True, label)]
    with pytest.raises(ValueError, match="labels.jsonl, row 2: column 'label' must be true or false"):
        labelled(tmp_path, tokenizer, *rows)


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
    tokenizer.chat_template += "{{ messages[-1].name }}"
    row = {"prompt": [USER], "chosen": [USER, {**GOOD, "name": "x"}], "rejected": [USER, BAD]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "pairs.parquet")
    (pair,) = load_preferences([tmp_path / "pairs.parquet"], tokenizer, **DEFAULTS)
    assert pair.text == "<user>1+1=<assistant>"


def test_other_columns_files_and_max_pairs(load):
    rows = [{"q": str(i), "yes": "a", "no": "b"} for i in range(5)]
    pairs = load(*rows, prompt_key="q", chosen_key="yes", rejected_key="no", max_pairs=3)
    assert [(pair.index, pair.text) for pair in pairs] == [(0, "0"), (1, "1"), (2, "2")]


def test_responses_of_several_messages_are_trained_in_the_assistants_turns(load):
    """As TRL's and verl's tool data: calls, their output and an answer, rendered by the template."""
    tokenizer = tokenizer_of("qwen2.5")
    call = {"id": "call00000", "type": "function", "function": {"name": "lookup", "arguments": {"key": "a"}}}
    calls = {"role": "assistant", "content": "", "tool_calls": [call]}
    long = [calls, {"role": "tool", "content": "two"}, GOOD]
    forms = [
        {"prompt": [USER], "chosen": long, "rejected": [BAD]},
        {"prompt": [USER], "chosen": [USER, *long], "rejected": [USER, BAD]},
        {"prompt": "unused", "chosen": [USER, *long], "rejected": [USER, BAD]},
    ]
    options = dict(tokenizer=tokenizer, max_prompt_tokens=999, max_response_tokens=999)
    pairs = [load({**form, "tools": [TOOL]}, **options)[0] for form in forms[:2]]
    pairs += load({**forms[2], "tools": [TOOL]}, prompt_key="", **options)
    for pair in pairs:
        assert tokenizer.decode(pair.prompt_ids.tolist()) == pair.text
        assert tokenizer.decode(pair.rejected_ids.tolist()) == "three<|im_end|>" and pair.rejected_mask.all()
        trained = tokenizer.decode(pair.chosen_ids[pair.chosen_mask > 0].tolist())
        arguments = '<tool_call>\n{"name": "lookup", "arguments": {"key": "a"}}\n</tool_call><|im_end|>'
        assert trained == arguments + "2<|im_end|>"
        given = tokenizer.decode(pair.chosen_ids[pair.chosen_mask == 0].tolist())
        assert "two" in given and given.endswith("<|im_start|>assistant\n")


OTHER = {**USER, "content": "2+2="}
CALL = {"role": "assistant", "tool_calls": [{"name": "f"}]}
WRONG = [  # prompt, chosen, rejected, the error
    ([USER], [USER, GOOD], [OTHER, BAD], "differ between column 'chosen' and column"),
    ([USER], [USER, GOOD], "three", "differ between column 'chosen' and column 'rejected'"),
    ([USER], [GOOD, USER], "three", "'chosen' must end with a text message of the assistant"),
    ([USER], [CALL], "three", "'chosen' must end with a text message of the assistant"),
    ([USER], "2", [], "column 'rejected' must be a string or a list .* not list"),
    ([USER], None, "three", "column 'chosen' must be a string .* not missing"),
    ([USER], "2", 3, "column 'rejected' must be a string .* not int 3"),
    ([USER, GOOD], "2", "3", "must not end with a message of the assistant"),
    ([OTHER], [USER, GOOD], [USER, BAD], 'differ from the prompt .*set data.prompt_key=""'),
    ("2+2=", [USER, GOOD], [USER, BAD], "differ from the prompt in column 'prompt'"),
    (5, "2", "3", "column 'prompt' must be a string or a list"),
    ("", "2", "3", "the prompt in column 'prompt' is empty"),
]


@pytest.mark.parametrize("prompt, chosen, rejected, message", WRONG)
def test_an_invalid_pair_is_named_with_its_row(load, prompt, chosen, rejected, message):
    fine = {"prompt": [USER], "chosen": "2", "rejected": "three"}
    with pytest.raises(ValueError, match=f"pairs.jsonl, row 2: .*{message}"):
        load(fine, {"prompt": prompt, "chosen": chosen, "rejected": rejected})


def test_a_missing_column_or_prompt_names_the_key_of_the_config(load):
    for key in ("prompt", "chosen", "rejected"):
        message = f"no column 'x', only prompt, chosen, rejected; .*data.{key}_key"
        with pytest.raises(ValueError, match=message):
            load({"prompt": "a", "chosen": "b", "rejected": "c"}, **{f"{key}_key": "x"})
    with pytest.raises(ValueError, match="row 1: there is no prompt: .*data.prompt_key"):
        load({"chosen": "a", "rejected": "b"}, prompt_key="")


def test_a_tokenizer_without_eos_is_refused(load, tokenizer_dir):
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="needs an eos_token"):
        load({"prompt": "a", "chosen": "b", "rejected": "c"}, tokenizer=tokenizer)


# ---- lengths ----

LONG = ["aaaa b c", "a bbbb c", "a b 12345", "aaa bbb ccc"]
LONG = [dict(zip(("prompt", "chosen", "rejected"), row.split())) for row in LONG]


def test_overlong_pairs_name_what_is_too_long(load):
    for options, message in (
        ({"max_prompt_tokens": 3}, "1 of 4 prompts .* data.max_prompt_tokens=3 tokens, the longest 4"),
        ({"max_response_tokens": 5}, "1 of 4 rejected .* rollout.max_response_tokens=5 tokens.*first tokens"),
        ({"max_response_tokens": 0}, "rollout.max_response_tokens=0"),
        ({"overlong": "cut"}, "data.overlong_prompts='cut'"),
    ):
        with pytest.raises(ValueError, match=message):
            load(*LONG, **options)


def test_drop_leaves_out_every_pair_with_a_part_too_long(load, caplog):
    options = dict(max_prompt_tokens=3, max_response_tokens=4, overlong="drop")
    with caplog.at_level(logging.INFO):
        pairs = load(*LONG, **options)
    assert [pair.index for pair in pairs] == [3]
    for noun in ("prompts", "chosen responses", "rejected responses"):
        assert f"1 of 4 {noun} have more" in caplog.text
    with pytest.raises(ValueError, match="each of the 2 rows .* would drop all"):
        load(LONG[0], LONG[1], **options)


def test_truncation_keeps_prompt_end_and_response_start(load, tokenizer):
    row = {"prompt": "01234", "chosen": "abcde", "rejected": "abc"}
    (pair,) = load(row, max_prompt_tokens=3, max_response_tokens=4, overlong="truncate_left")
    ids = pair.prompt_ids, pair.chosen_ids, pair.rejected_ids
    expected = [[*"234"], [*"abcd"], [*"abc", "<eos>"]]  # a response that is cut off has no <eos>
    assert [tokenizer.convert_ids_to_tokens(part.tolist()) for part in ids] == expected
    assert pair.text == "01234"
