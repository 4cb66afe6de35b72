"""Everything that a message may hold arrives in the text of every family's template, or is refused."""

import copy
import json
import logging
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl.data.chat_template import TOOL
from rl.data.chats import load_chats
from rl.data.preferences import load_preferences
from rl.data.prompts import load_prompts
from tests.chat_templates import TOKENS, end_ids, tokenizer_of

USER, SYSTEM = {"role": "user", "content": "alpha one"}, {"role": "system", "content": "sigma"}
ANSWER = {"role": "assistant", "content": "beta two"}
ASKED = {"role": "user", "content": "gamma"}
ARGUMENTS = {"key": "delta", "number": 5}


def calling(arguments=ARGUMENTS):
    call = {"id": "call00000", "type": "function", "function": {"name": "lookup", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


RESULT = {"role": "tool", "tool_call_id": "call00000", "name": "lookup", "content": "epsilon"}
PARTS = [{"type": "text", "text": "alpha "}, {"type": "text", "text": "one"}]
OLDER = {
    "role": "assistant",
    "content": None,
    "function_call": {"name": "lookup", "arguments": json.dumps(ARGUMENTS)},
}
CALLS = [USER, calling(), RESULT]
FORMS = {
    # name: (messages in another form, the same ones in the form of templates)
    "parts of text": ([{**USER, "content": PARTS}], [USER]),
    "parts that are texts": ([{**USER, "content": ["alpha ", "one"]}], [USER]),
    "parts of Gemini": ([{"role": "user", "parts": [{"text": "alpha one"}]}], [USER]),
    "parts for an assistant": (
        [USER, {**ANSWER, "content": [{"type": "output_text", "text": "beta two"}]}, ASKED],
        [USER, ANSWER, ASKED],
    ),
    "parts from a tool": ([*CALLS[:2], {**RESULT, "content": [{"type": "text", "text": "epsilon"}]}], CALLS),
    "an object from a tool": (
        [*CALLS[:2], {**RESULT, "content": {"x": "epsilon"}}],
        [*CALLS[:2], {**RESULT, "content": '{"x": "epsilon"}'}],
    ),
    "ShareGPT": (
        [
            {"from": "human", "value": "alpha one"},
            {"from": "gpt", "value": "beta two"},
            {"from": "human", "value": "gamma"},
        ],
        [USER, ANSWER, ASKED],
    ),
    "ShareGPT with calls": (
        [
            {"from": "human", "value": "alpha one"},
            {"from": "function_call", "value": json.dumps({"name": "lookup", "arguments": ARGUMENTS})},
            {"from": "observation", "value": "epsilon"},
        ],
        [*CALLS[:2], {k: RESULT[k] for k in RESULT if k != "name"}],
    ),
    "capitals": ([{**SYSTEM, "role": "System"}, {**USER, "role": "User"}], [SYSTEM, USER]),
    "other assistants": (
        [USER, {**ANSWER, "role": "Bot"}, ASKED, {**ANSWER, "role": "model"}, ASKED],
        [USER, ANSWER, ASKED, ANSWER, ASKED],
    ),
    "developer": ([{**SYSTEM, "role": "developer"}, USER], [SYSTEM, USER]),
    "functions": ([USER, OLDER, {"role": "function", "name": "lookup", "content": "epsilon"}], CALLS),
    "arguments as text": ([USER, calling(json.dumps(ARGUMENTS)), RESULT], CALLS),
    "flat calls": (
        [
            USER,
            {
                **ANSWER,
                "content": None,
                "tool_calls": [{"id": "call00000", "name": "lookup", "parameters": ARGUMENTS}],
            },
            RESULT,
        ],
        CALLS,
    ),
    "calls as text": (
        [USER, {**ANSWER, "content": "", "tool_calls": json.dumps(calling()["tool_calls"])}, RESULT],
        CALLS,
    ),
    "reasoning": (
        [USER, {**calling(), "reasoning": "zeta"}, RESULT],
        [USER, {**calling(), "reasoning_content": "zeta"}, RESULT],
    ),
    "thinking": (
        [USER, {**calling(), "thinking": "zeta"}, RESULT],
        [USER, {**calling(), "reasoning_content": "zeta"}, RESULT],
    ),
    "empty keys": ([{**USER, "name": "", "refusal": None, "tool_calls": []}], [USER]),
}
WORDS = re.compile("alpha one|beta two|gamma|delta|epsilon|sigma|zeta|lookup")
WITHOUT_TOOLS = ("deepseek-v3", "deepseek-v3.1")
WITH_REASONING = ("qwen3", "glm4.5")


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(reader, tokenizer, file, *, ends=(), **options):
    """Return the tokens that the policy reads and learns, by row."""
    options = dict(tokenizer=tokenizer, overlong="error", **options)
    if reader == "prompts":
        return [
            p.token_ids
            for p in load_prompts([file], prompt_key="messages", max_prompt_tokens=1500, **options)
        ]
    if reader == "chats":
        options = (
            dict(messages_key="messages", train_on="last", max_tokens=1500, end_token_ids=ends) | options
        )
        return [[*c.token_ids, *c.response_ids] for c in load_chats([file], **options)]
    limits = dict(max_prompt_tokens=1500, max_response_tokens=999, end_token_ids=ends)
    keys = dict(prompt_key="", chosen_key="messages", rejected_key="rejected")
    return [[*p.prompt_ids, *p.chosen_ids] for p in load_preferences([file], **keys, **limits, **options)]


def outcomes(tmp_path, family, messages, tools=()):
    """Return, for each reader, the text of the tokens or the error."""
    tokenizer, found = tokenizer_of(family), {}
    for reader in ("prompts", "chats", "pairs"):
        chat = messages if reader == "prompts" else [*messages, ANSWER]
        row = {"messages": chat, "rejected": [*messages, {**ANSWER, "content": "?"}], "tools": list(tools)}
        file = write_jsonl(tmp_path / "rows.jsonl", [row])
        try:
            found[reader] = tokenizer.decode(read(reader, tokenizer, file, ends=end_ids(family))[0])
        except ValueError as error:
            found[reader] = str(error)
    return found


def may_be_refused(family, plain, reader):
    """Return whether the family's template has no place for a part of the chat."""
    if any("reasoning_content" in message for message in plain):
        return family not in WITH_REASONING
    # The one opens a thinking tag that it never renders, the other puts the system message into the last
    # turn of the user.
    return reader != "prompts" and (family == "deepseek-v3" or (family == "mistral" and SYSTEM in plain))


@pytest.mark.parametrize("family", TOKENS)
def test_every_form_of_messages_arrives_or_is_refused(tmp_path, family):
    for form, (other, plain) in FORMS.items():
        tools = [TOOL] if any("tool_calls" in m for m in plain) and family not in WITHOUT_TOOLS else []
        expected = outcomes(tmp_path, family, plain, tools)
        assert outcomes(tmp_path, family, other, tools) == expected, form
        words = set(WORDS.findall(json.dumps(plain)))
        for reader, text in expected.items():
            if "rows.jsonl" in text:
                assert may_be_refused(family, plain, reader) and "row 1: the chat template of" in text, text
            else:
                assert words <= set(WORDS.findall(text)), (form, reader, text)
    for reader, text in outcomes(tmp_path, family, [USER], [TOOL]).items():
        if family not in WITHOUT_TOOLS:
            assert "lookup" in text, text
        elif reader != "chats" or family != "deepseek-v3":
            assert "row 1: the chat template of" in text and "leaves out the tool 'lookup'" in text, text


REFUSED = [
    ([{**USER, "role": "critic"}], "message 1 of 1 has role 'critic', which is not a known role"),
    ([{**USER, "toxic": False}], "nothing reads these keys of messages: 'toxic' of role user"),
    ([USER, {**ANSWER, "weight": 1}, USER], "'weight' of role assistant.*only in chats that are trained"),
    ([USER, calling('{"key": '), RESULT], "message 2 of 3 calls lookup with the arguments str"),
    ([USER, {**ANSWER, "tool_calls": [{"id": "1"}]}, USER], "message 2 of 3 has the call dict"),
    ([{**USER, "content": [{"type": "image"}]}], "has a part of type 'image', .*set data.image_key"),
    ([{**USER, "content": {"a": 1}}], "has the content dict .*must be a text"),
    ([USER, {**ANSWER, "reasoning": "a", "thinking": "b"}, USER], "has both"),
]


@pytest.mark.parametrize(("messages", "reason"), REFUSED)
def test_what_cannot_be_read_is_a_sentence_with_its_row(tmp_path, messages, reason):
    file = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [USER]}, {"messages": messages}])
    with pytest.raises(ValueError, match=f"rows.jsonl, row 2: .*{reason}"):
        read("prompts", tokenizer_of("qwen3"), file)


def rl_prompt(tmp_path, row):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    options = dict(prompt_key="prompt", max_prompt_tokens=500, overlong="error")
    return load_prompts([path], tokenizer_of("qwen2.5"), **options)[0].text


def test_a_system_message_in_a_column_of_its_own_is_not_lost(tmp_path):
    """LLaMA-Factory's ShareGPT and Orca's pairs hold it beside the messages."""
    expected = rl_prompt(tmp_path, {"prompt": [SYSTEM, USER]})
    for name in ("system", "system_prompt"):
        assert rl_prompt(tmp_path, {"prompt": [USER], name: "sigma"}) == expected
        assert rl_prompt(tmp_path, {"prompt": [SYSTEM, USER], name: ""}) == expected
        for row in (
            {"prompt": [SYSTEM, USER], name: "x"},
            {"prompt": "text", name: "x"},
            {"prompt": [USER], name: 3},
        ):
            with pytest.raises(ValueError, match=rf"rows.jsonl, row 1: .*the column '{name}'"):
                rl_prompt(tmp_path, row)
    with pytest.raises(ValueError, match="set data.template_kwargs"):
        rl_prompt(tmp_path, {"prompt": [USER], "chat_template_kwargs": {"enable_thinking": False}})


def test_columns_with_a_part_of_the_prompt_are_refused(tmp_path):
    """Alpaca's input and Dolly's context were left out of prompts, and the tools of an older form."""
    for name, remedy in (("functions", "rename it to tools"), ("documents", "write them into a message")):
        with pytest.raises(ValueError, match=rf"row 1: .*the column '{name}'.*; {remedy}"):
            rl_prompt(tmp_path, {"prompt": [USER], name: [{"name": "delta"}]})
        assert rl_prompt(tmp_path, {"prompt": [USER], name: []}) == rl_prompt(tmp_path, {"prompt": [USER]})
    for name in ("input", "context"):
        (path := tmp_path / "alpaca.jsonl").write_text(json.dumps({"instruction": "alpha", name: "beta"}))
        options = dict(max_prompt_tokens=99, overlong="error")
        with pytest.raises(ValueError, match=f"row 1: column 'instruction': .* in the column '{name}'"):
            load_prompts([path], tokenizer_of("qwen3"), prompt_key="instruction", **options)


def test_messages_as_json_text_are_found_whatever_their_first_key(tmp_path):
    """Such a text became the prompt itself, brackets included."""
    assert rl_prompt(tmp_path, {"prompt": json.dumps([{"name": None, **USER}])}) == rl_prompt(
        tmp_path, {"prompt": [USER]}
    )
    for value in ([{"id": 3, **USER}], USER, {"messages": [USER]}, {"conversations": [USER]}):
        with pytest.raises(ValueError, match="rows.jsonl, row 1: "):
            rl_prompt(tmp_path, {"prompt": json.dumps(value)})
    for text in ('[{"id": 1, "from": "Paris"}] Which train?', '{"role": "nurse"}', "{'a': 1}"):
        assert rl_prompt(tmp_path, {"prompt": text}) == text


def test_images_that_no_key_reads_are_refused(tmp_path):
    row = {"prompt": [{"role": "user", "content": "<image>alpha"}], "images": ["a.png"]}
    with pytest.raises(ValueError, match="column 'images', which the run does not read; set data.image_key"):
        rl_prompt(tmp_path, row)
    assert "alpha" in rl_prompt(tmp_path, row | {"images": []})


def test_parallel_calls_of_separate_messages_are_one_turn(tmp_path):
    """ms-swift writes one message of role tool_call per call; two turns would end after the first call."""
    calls = [{"name": name, "arguments": ARGUMENTS} for name in ("first", "second")]
    apart = [{"role": "tool_call", "content": json.dumps(call)} for call in calls]
    whole = {"role": "assistant", "tool_calls": [{"type": "function", "function": call} for call in calls]}
    results = [{"role": "tool_response", "content": text} for text in ("epsilon", "zeta")]
    rows = [[USER, *asked, *results] for asked in (apart, [whole])]
    assert rl_prompt(tmp_path, {"prompt": rows[0]}) == rl_prompt(tmp_path, {"prompt": rows[1]})


def test_what_was_changed_is_one_line_of_the_log(tmp_path, caplog):
    rows = [{"messages": [{"from": "human", "value": str(i)}]} for i in range(5)]
    with caplog.at_level(logging.INFO):
        read("prompts", tokenizer_of("qwen3"), write_jsonl(tmp_path / "rows.jsonl", rows))
    (line,) = [record.getMessage() for record in caplog.records]
    assert "rows.jsonl" in line and "key from -> role (5)" in line and "role human -> user (5)" in line


def test_reasoning_that_is_dropped_by_design_is_no_loss(tmp_path):
    thought = {**ANSWER, "reasoning_content": "zeta"}
    file = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [USER, thought, ASKED]}])
    (ids,) = read("prompts", tokenizer_of("qwen3"), file)
    assert "beta two" in tokenizer_of("qwen3").decode(ids)


def test_a_template_that_drops_a_content_for_what_it_says_is_found(tmp_path):
    tokenizer = copy.deepcopy(tokenizer_of("qwen2.5"))
    tokenizer.chat_template = "{% for m in messages %}{{ m.content.split('|')[0] }}{% endfor %}"
    file = write_jsonl(
        tmp_path / "rows.jsonl", [{"messages": [USER]}, {"messages": [{**USER, "content": "a|b"}]}]
    )
    with pytest.raises(ValueError, match="row 2: .* leaves out the content of message 1 of 1"):
        read("prompts", tokenizer, file)


def test_turns_with_weight_0_have_no_loss(tmp_path):
    tokenizer = tokenizer_of("qwen2.5")
    for key, value in (("weight", 0), ("train", False), ("loss", 0.0)):
        chat = [USER, {**ANSWER, key: value}, {**ASKED, key: value}, {**ANSWER, "content": "zeta", key: 1}]
        file = write_jsonl(tmp_path / "rows.jsonl", [{"messages": chat}])
        options = dict(messages_key="messages", max_tokens=999, end_token_ids=(), overlong="error")
        (sample,) = load_chats([file], tokenizer, train_on="assistant", **options)
        assert tokenizer.decode(sample.response_ids) == "zeta<|im_end|>"
        assert "beta two" in tokenizer.decode(sample.token_ids)
        with pytest.raises(ValueError, match="row 1: a turn has weight 0, but data.train_on=all"):
            load_chats([file], tokenizer, train_on="all", **options)
    for message, reason in (
        ({**ANSWER, "weight": 0.5}, "weight=0.5"),
        ({**ANSWER, "weight": 0}, "all turns"),
    ):
        write_jsonl(file, [{"messages": [USER, message]}])
        with pytest.raises(ValueError, match=f"row 1: .*{reason}"):
            load_chats([file], tokenizer, train_on="assistant", **options)


def test_keys_that_parquet_adds_are_no_keys(tmp_path):
    rows = [{"messages": [USER, calling(), RESULT]}, {"messages": [{**USER, "content": "alpha one"}]}]
    found = read("prompts", tokenizer_of("qwen3"), write_jsonl(tmp_path / "rows.jsonl", rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for ids, same in zip(
        read("prompts", tokenizer_of("qwen3"), tmp_path / "rows.parquet"), found, strict=True
    ):
        assert ids.tolist() == same.tolist()
