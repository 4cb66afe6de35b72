"""Tokens of a chat that have a loss, over the templates of model families."""

import copy
import json
import logging
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl.config.schema import Data
from rl.data.chat_template import TOOL
from rl.data.chats import load_chats
from rl.data.responses_again import check_responses
from tests.chat_templates import end_ids, template, tokenizer_of

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_HEADER = "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}"
LLAMA_BODY = "message['content'] | trim + '<|eot_id|>' }}"
DEEPSEEK_END = " + '<\uff5cend\u2581of\u2581sentence\uff5c>'}}"
MARKS = {
    # family: pieces of its template, and what marks the assistant's turns there
    "qwen2.5": [
        (' or (message.role == "assistant" and not message.tool_calls)', ""),
        (
            "{{- '<|im_start|>' + message.role }}\n        {%- if message.content %}\n"
            "            {{- '\\n' + message.content }}\n        {%- endif %}",
            "{{- '<|im_start|>assistant\\n' }}{%- generation %}{{- message.content }}",
        ),
        (
            '{{- \'\\n<tool_call>\\n{"name": "\' }}',
            "{{- '\\n' if message.content or not loop.first else '' }}{{- '<tool_call>\\n{\"name\": \"' }}",
        ),
        (
            "{%- endfor %}\n        {{- '<|im_end|>\\n' }}",
            "{%- endfor %}{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}",
        ),
    ],
    "llama3.1": [
        (
            "'<|end_header_id|>\\n\\n'+ " + LLAMA_BODY,
            "'<|end_header_id|>\\n\\n' }}{%- if message.role == 'assistant' %}{%- generation %}{{- "
            + LLAMA_BODY
            + "{%- endgeneration %}{%- else %}{{- "
            + LLAMA_BODY
            + "{%- endif %}",
        ),
        (LLAMA_HEADER, ""),
        (
            "{%- set tool_call = message.tool_calls[0].function %}",
            "{%- set tool_call = message.tool_calls[0].function %}" + LLAMA_HEADER + "{%- generation %}",
        ),
        (
            '{{- "<|eot_id|>" }}\n        {%- endif %}\n    {%- elif',
            '{{- "<|eot_id|>" }}{%- endif %}{%- endgeneration %}{%- elif',
        ),
    ],
    "deepseek-v3.1": [
        ("{{" + part + DEEPSEEK_END, "{% generation %}{{" + part + DEEPSEEK_END + "{% endgeneration %}")
        for part in ("content", "message['content']")
    ],
    "deepseek-v3": [
        (
            "{{'<\uff5cAssistant\uff5c>' + content" + DEEPSEEK_END,
            "{{'<\uff5cAssistant\uff5c>'}}{% generation %}{{content" + DEEPSEEK_END + "{% endgeneration %}",
        )
    ],
}
SYSTEM, USER = {"role": "system", "content": "rules"}, {"role": "user", "content": "question"}
CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00000", "type": "function", "function": {"name": "lookup", "arguments": {"key": "a"}}}
    ],
}
REPLY = {"role": "tool", "tool_call_id": "call00000", "name": "lookup", "content": "b"}
ANSWER = {"role": "assistant", "content": "The answer: \u00e9t\u00e9 \U0001f600 42.\n"}
THOUGHT = {**ANSWER, "reasoning_content": "reason"}
PLAIN = [SYSTEM, USER, ANSWER, {**USER, "content": "\nagain"}, {**ANSWER, "content": "twice  answer"}]
WITH_TOOLS = [SYSTEM, USER, CALLING, REPLY, ANSWER, USER, ANSWER]


def with_template(family: str, text: str):
    tokenizer = copy.deepcopy(tokenizer_of(family))
    tokenizer.chat_template = text
    return tokenizer


def marked(family: str):
    """Return the family's tokenizer with a template that marks the assistant's turns."""
    text = template(family)
    for old, new in MARKS[family]:
        assert old in text, old
        text = text.replace(old, new)
    return with_template(family, text)


def load(tmp_path, tokenizer, *rows, ends=(), write=None, **options):
    file = tmp_path / ("chats.jsonl" if write is None else "chats.parquet")
    if write is None:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        write(file, rows)
    options = {"messages_key": "messages", "train_on": "assistant", "max_tokens": 4096, **options}
    found = load_chats([file], tokenizer, end_token_ids=ends, **{"overlong": "error", **options})
    keys = dict(train_on=options["train_on"], max_prompt_tokens=options["max_tokens"])
    data = Data(messages_key="messages", overlong_prompts=options.get("overlong", "error"), **keys)
    check_responses(found, tokenizer, data, ends)
    return found


def trained_text(tokenizer, sample) -> list[str]:
    """Return the text of each run of tokens with a loss."""
    mask = np.concatenate([[0], sample.response_mask, [0]])
    starts, ends = np.flatnonzero(np.diff(mask) == 1), np.flatnonzero(np.diff(mask) == -1)
    return [tokenizer.decode(sample.response_ids[a:b].tolist()) for a, b in zip(starts, ends)]


CASES = {
    "chatml": (with_template("qwen2.5", CHATML), with_template("qwen2.5", CHATML_MARKED), [PLAIN]),
    "qwen2.5": (tokenizer_of("qwen2.5"), marked("qwen2.5"), [PLAIN, WITH_TOOLS]),
    "llama3.1": (tokenizer_of("llama3.1"), marked("llama3.1"), [PLAIN, WITH_TOOLS]),
    "deepseek-v3.1": (tokenizer_of("deepseek-v3.1"), marked("deepseek-v3.1"), [PLAIN]),
}


@pytest.mark.parametrize("family", CASES)
def test_the_mask_is_that_of_a_template_with_marks(tmp_path, family):
    plain, with_marks, chats = CASES[family]
    rows = [{"messages": chat, "tools": [TOOL] if chat is WITH_TOOLS else None} for chat in chats]
    for tokenizer in (plain, with_marks):
        for row, sample in zip(rows, load(tmp_path, tokenizer, *rows), strict=True):
            expected = with_marks.apply_chat_template(
                row["messages"], tools=row["tools"], return_dict=True, return_assistant_tokens_mask=True
            )
            ids, mask = np.array(expected["input_ids"]), np.array(expected["assistant_masks"])
            own = np.concatenate([np.zeros(len(sample.token_ids)), sample.response_mask])
            assert np.array_equal(np.concatenate([sample.token_ids, sample.response_ids]), ids[: len(own)])
            assert np.array_equal(own, mask[: len(own)]) and not mask[len(own) :].any()
            num_turns = sum(message["role"] == "assistant" for message in row["messages"])
            assert len(trained_text(tokenizer, sample)) == num_turns
            last = load(tmp_path, tokenizer, row, train_on="last")[0]
            assert trained_text(tokenizer, last) == trained_text(tokenizer, sample)[-1:]


def test_reasoning_that_a_template_drops_is_refused(tmp_path):
    row = {"messages": [USER, THOUGHT, USER, THOUGHT]}
    with pytest.raises(ValueError, match="chats.jsonl, row 1: .* message 2 of 4 .*data.train_on=last"):
        load(tmp_path, tokenizer_of("qwen3"), row)
    (sample,) = load(tmp_path, tokenizer_of("qwen3"), row, train_on="last")
    [turn] = trained_text(tokenizer_of("qwen3"), sample)
    assert turn.startswith("<think>\nreason\n</think>\n\nThe answer") and turn.endswith("<|im_end|>")
    chat = [USER, {**CALLING, "reasoning_content": "first"}, REPLY, THOUGHT]  # one query, so it drops nothing
    (sample,) = load(tmp_path, tokenizer_of("qwen3"), {"messages": chat, "tools": json.dumps([TOOL])})
    turns = trained_text(tokenizer_of("qwen3"), sample)
    assert [turn[:20].split("\n")[1] for turn in turns] == ["first", "reason"]

    thought = {"messages": [USER, {**ANSWER, "content": "<think>\nreason\n</think>\n\nanswer"}]}
    with pytest.raises(ValueError, match="not as a continuation of its generation prompt.*<think>"):
        load(tmp_path, tokenizer_of("deepseek-v3"), {"messages": PLAIN})
    for tokenizer in (tokenizer_of("deepseek-v3"), marked("deepseek-v3")):
        with pytest.raises(ValueError, match="leaves out the content of message 2.*<think>.*; remove it"):
            load(tmp_path, tokenizer, thought)
    (sample,) = load(tmp_path, marked("deepseek-v3"), {"messages": PLAIN})
    assert len(trained_text(tokenizer_of("deepseek-v3"), sample)) == 2
    with pytest.raises(ValueError, match="leaves out the reasoning_content"):
        load(tmp_path, tokenizer_of("qwen2.5"), {"messages": [USER, THOUGHT]})


def test_parts_without_a_place_in_the_template_are_refused(tmp_path):
    chatml = with_template("qwen2.5", CHATML)
    for row, message in (
        ({"messages": [USER, CALLING]}, "leaves out the tool call 1"),
        ({"messages": [USER, ANSWER], "tools": [TOOL]}, "leaves out the tool 'lookup'"),
        ({"messages": [USER]}, "no message is the assistant's"),
        ({"messages": [ANSWER]}, "begins with the assistant"),
        ({"messages": "text"}, "must be a list of {role, content} messages"),
        ({"messages": [USER, ANSWER], "tools": "lookup"}, "column 'tools' must be a list"),
        (
            {"messages": [USER, {**CALLING, "content": "say"}], "tools": [TOOL]},
            "the content of message 2 of 2 (role assistant), str 'say'",
        ),
    ):
        tokenizer = tokenizer_of("llama3.1") if "say" in message else chatml
        with pytest.raises(ValueError, match=f"chats.jsonl, row 1: .*{re.escape(message)}"):
            load(tmp_path, tokenizer, row)


def test_the_next_header_ends_a_turn_without_end_token(tmp_path):
    """GLM's turns end with the header of what follows; models are to generate it."""
    tokenizer = tokenizer_of("glm4.5")
    row = {"messages": WITH_TOOLS, "tools": [json.dumps(TOOL)]}
    (sample,) = load(tmp_path, tokenizer, row, ends=end_ids("glm4.5"))
    turns = trained_text(tokenizer, sample)
    assert [re.findall(r"<\|\w+\|>$", turn) for turn in turns] == [
        ["<|observation|>"],
        ["<|user|>"],
        ["<|user|>"],
    ]
    assert turns[1].startswith("\n<think></think>\nThe answer") and "<|assistant|>" not in "".join(turns)


def test_turns_with_reasoning_end_like_those_without(tmp_path):
    """A reply would make GLM drop the reasoning of the turn, so the turn's end was not found."""
    tokenizer = tokenizer_of("glm4.5")
    inline = {**ANSWER, "content": "<think>reason</think>\nanswer"}
    rows = [{"messages": [USER, turn]} for turn in (ANSWER, THOUGHT, inline)]
    rows.append({"messages": [USER, {**CALLING, "reasoning_content": "reason"}], "tools": [TOOL]})
    found = load(tmp_path, tokenizer, *rows, ends=end_ids("glm4.5"))
    ends = [trained_text(tokenizer, sample)[-1].rpartition("<|")[2] for sample in found]
    assert ends == ["user|>", "user|>", "user|>", "observation|>"]


def test_marks_that_leave_out_the_end_token_include_it(tmp_path):
    short = CHATML_MARKED.replace(
        "+ '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}<|im_end|>", 1
    )
    assert short != CHATML_MARKED
    found = [
        load(tmp_path, with_template("qwen2.5", t), {"messages": PLAIN})[0] for t in (short, CHATML_MARKED)
    ]
    assert np.array_equal(found[0].response_ids, found[1].response_ids)
    assert np.array_equal(found[0].response_mask, found[1].response_mask)


NO_END = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\n' }}{% endfor %}" + (
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
OPEN = [
    ("glm4.5", template("glm4.5"), "if <|user|>, which follows, ends a turn, add its id to eos_token_id"),
    ("qwen2.5", CHATML.replace("im_end", "endoftext"), "if <|endoftext|> ends a turn, add its id"),
    ("qwen2.5", NO_END, "the chat template writes no end: write {{ eos_token }} after the content"),
]


@pytest.mark.parametrize(("family", "text", "remedy"), OPEN)
def test_the_warning_of_open_turns_has_the_remedy_of_the_case(tmp_path, caplog, family, text, remedy):
    load(tmp_path, with_template(family, text), {"messages": [USER, ANSWER]})
    assert "1 of 1 trained turns do not end" in caplog.text and remedy in caplog.text


INLINE = {**ANSWER, "content": "<think>\nreason\n</think>\n\nanswer"}
KEYED = CHATML.replace("m.content +", "(m.reasoning_content or '') + m.content.split('</think>')[-1] +")
REASONS = [
    (
        "qwen2.5",
        template("qwen2.5"),
        [USER, THOUGHT],
        "reasoning_content .*write the reasoning into the content",
    ),
    (
        "qwen2.5",
        KEYED,
        [USER, INLINE],
        "the content of message 2.*; write the reasoning into reasoning_content inst",
    ),
    (
        "mistral",
        template("mistral"),
        [SYSTEM, USER, ANSWER],
        "leaves out the content of message 1 of 3 .*system",
    ),
    (
        "qwen3",
        template("qwen3").replace("tool_calls", "no_calls"),
        [USER, CALLING, REPLY, ANSWER],
        "leaves out the tool call 1 of message 2 .*; use a template with calls of tools, or write the call",
    ),
    ("qwen3", template("qwen3"), [USER, THOUGHT, USER, THOUGHT], "message 2 of 4.*; set data.train_on=last"),
    ("qwen3", template("qwen3"), [USER, THOUGHT, USER], "message 2 of 3.*; remove the messages after it"),
]


@pytest.mark.parametrize(("family", "text", "chat", "reason"), REASONS)
def test_refusals_name_the_reason_and_only_remedies_that_work(tmp_path, family, text, chat, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        load(tmp_path, with_template(family, text), {"messages": chat})
    assert "train_on" in reason or "train_on" not in str(caught.value)


def test_turns_that_the_model_cannot_end_are_a_warning(tmp_path, caplog):
    tokenizer = with_template("qwen2.5", CHATML)
    with caplog.at_level(logging.INFO):
        load(tmp_path, tokenizer, {"messages": PLAIN})
    assert (
        "warning" not in caplog.text
        and "of which" in caplog.text
        and "[[twice  answer<|im_end|>]]" in caplog.text
    )
    tokenizer.eos_token = "<|endoftext|>"  # as in base models
    load(tmp_path, tokenizer, {"messages": PLAIN})
    assert (
        "2 of 2 trained turns do not end with a token at which generation stops (<|endoftext|>)"
        in caplog.text
    )
    assert trained_text(tokenizer, load(tmp_path, tokenizer, {"messages": PLAIN})[0])[1].endswith(
        "<|im_end|>"
    )


def test_arguments_of_calls_have_the_form_of_the_template(tmp_path):
    """Texts are not encoded twice, and keys that parquet adds are not rendered."""
    other = copy.deepcopy(CALLING)
    other["tool_calls"][0]["function"]["arguments"] = {"limit": 3}
    as_text = copy.deepcopy(CALLING)
    as_text["tool_calls"][0]["function"]["arguments"] = '{"key": "a"}'
    rows = [{"messages": [USER, calling, REPLY, ANSWER]} for calling in (CALLING, other, as_text)]
    tokenizer = tokenizer_of("qwen2.5")
    expected, limited, text = load(tmp_path, tokenizer, *rows)
    assert '{"name": "lookup", "arguments": {"key": "a"}}' in trained_text(tokenizer, expected)[0]
    assert np.array_equal(text.response_ids, expected.response_ids)
    found = load(
        tmp_path, tokenizer, *rows[:2], write=lambda f, r: pq.write_table(pa.Table.from_pylist(r), f)
    )
    for sample, same in zip(found, (expected, limited), strict=True):
        assert np.array_equal(sample.response_ids, same.response_ids)


def test_all_tokens_but_the_first_are_trained_on_request(tmp_path):
    tokenizer = tokenizer_of("qwen2.5")
    (sample,) = load(tmp_path, tokenizer, {"messages": PLAIN}, train_on="all")
    whole = tokenizer.apply_chat_template(PLAIN, return_dict=True)["input_ids"]
    assert [*sample.token_ids, *sample.response_ids] == whole and len(sample.token_ids) == 1
    assert sample.response_mask.all()


def test_overlong_chats_are_refused_dropped_or_keep_their_beginning(tmp_path, caplog):
    tokenizer = tokenizer_of("qwen2.5")
    short, long = {"messages": PLAIN[:3]}, {"messages": PLAIN}
    sizes = [len(s.token_ids) + len(s.response_ids) for s in load(tmp_path, tokenizer, short, long)]
    limit = dict(max_tokens=sizes[0] + 4)
    with pytest.raises(ValueError, match=r"1 of 2 chats .* =truncate_right, which keeps their first tokens"):
        load(tmp_path, tokenizer, short, long, **limit)
    assert [s.index for s in load(tmp_path, tokenizer, short, long, overlong="drop", **limit)] == [0]
    first, cut = load(tmp_path, tokenizer, short, long, overlong="truncate_right", **limit)
    assert np.array_equal(cut.response_ids, first.response_ids)  # what follows has no loss
    header = dict(max_tokens=len(first.token_ids))
    with pytest.raises(ValueError, match="no chat has a token to train"):
        load(tmp_path, tokenizer, short, overlong="truncate_right", **header)
    with caplog.at_level(logging.INFO):
        later = {"messages": [SYSTEM, {**USER, "content": "question " * 50}, ANSWER]}
        assert len(load(tmp_path, tokenizer, short, later, overlong="truncate_right", **limit)) == 1
    assert "1 chats have no token to train" in caplog.text
