"""Tool calls are read in the same form as the model's own template writes them."""

import copy
import json

import numpy as np
import pytest

from rl.data.chat_template import TOOL
from rl.features.agents.chat import Chat
from rl.features.agents.endpoint import RefusedRequest, normalise
from rl.features.agents.tool_calls import FAMILIES, parse_calls
from tests.chat_templates import TOKENS, end_ids, tokenizer_of

BASE = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{%- for call in m.tool_calls or [] %}{% set f = call.function %}CALL{% endfor %}"
    "<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)
VALUE = "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}"
WRITTEN = {
    "xml": "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
    + VALUE
    + "\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "seed": "<seed:tool_call><function={{ f.name }}>{% for k, v in f.arguments.items() %}<parameter={{ k }}>"
    + VALUE
    + "</parameter>{% endfor %}</function></seed:tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="{{ f.name }}">\n{% for k, v in f.arguments.items() %}'
    '<parameter name="{{ k }}">' + VALUE + "</parameter>\n{% endfor %}</invoke>\n</minimax:tool_call>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
    "{{ f.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>",
    "harmony": "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "{{ f.arguments | tojson }}<|call|>",
    "python": "[{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson "
    "| replace('true', 'True') }}{{ ', ' if not loop.last }}{% endfor %})]",
    "hermes": '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>',
}


def tokenizer_with(written: str):
    tokenizer = copy.deepcopy(tokenizer_of("qwen3"))
    tokenizer.chat_template = BASE.replace("CALL", written)
    return tokenizer


def ids_of(tokenizer, text: str) -> np.ndarray:
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_calls_are_read_in_the_form_of_the_template(name):
    chat = Chat(tokenizer_with(WRITTEN[name]))
    assert chat.call_problem == "" and f"as in {name}" in chat.description


@pytest.mark.parametrize("uses_renderer", [False, True])
@pytest.mark.parametrize("family", sorted(TOKENS))
def test_calls_of_shipped_templates_are_read(family, uses_renderer):
    options = dict(end_token_ids=end_ids(family), uses_renderer=uses_renderer)
    assert Chat(tokenizer_of(family), **options).call_problem == ""


def test_a_form_that_no_parser_reads_is_refused():
    chat = Chat(tokenizer_with("CALL {{ f.name }} WITH {{ f.arguments | tojson }}"), on_rewrite="new_row")
    words = "writes a call of a tool as 'CALL lookup WITH .* so no call .* would reach a tool; use a template"
    with pytest.raises(ValueError, match=words):
        chat.check([TOOL])
    with pytest.raises(ValueError, match=words):  # of a tool that is known only at run time
        chat.open([{"role": "user", "content": "q"}], [TOOL])
    chat.check([])


def test_parameters_in_tags_have_the_types_of_the_schema():
    kinds = {
        "a": {"type": "string"},
        "b": {"type": ["integer", "null"]},
        "c": {"anyOf": [{"type": "boolean"}]},
        "f": {"allOf": [{"$ref": "#/$defs/Text"}, {"maxLength": 9}]},
        "g": {"$ref": "#/$defs/Loop"},
        "h": {"enum": ["1", "2"]},
    }
    named = {"Text": {"type": "string"}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "null"}]}}
    schema = {"$ref": "#/$defs/All", "$defs": named | {"All": {"type": "object", "properties": kinds}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    values = {"a": "12", "b": "None", "c": "True", "d": '{"e": 1}', "f": "12", "g": "null", "h": "1"}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    family = next(family for family in FAMILIES if family.name == "xml")
    text = f"I look.\n<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
    content, (call,) = parse_calls(family, text, [tool], 0)
    expected = {"a": "12", "b": None, "c": True, "d": {"e": 1}, "f": "12", "g": None, "h": "1"}
    assert (content, call.arguments) == ("I look.", expected)
    for broken in (f"<tool_call><function=f>{body}<parameter=g>", "<tool_call>f(1)"):
        (call,) = parse_calls(family, broken, [tool], 0)[1]
        assert isinstance(call.arguments, str)


FORMS = [
    '{"name": "lookup", "arguments": {"key": "a"}}',
    '{"name": "lookup", "parameters": {"key": "a"}}',
    json.dumps({"name": "lookup", "arguments": json.dumps({"key": "a"})}),
    '{"name": "lookup", "arguments": {"key": "</tool_call> <tool_call>"}}',
]


@pytest.mark.parametrize("uses_renderer", [False, True])
def test_calls_are_read_alike_with_and_without_renderers(uses_renderer):
    tokenizer = tokenizer_of("qwen3")
    chat = Chat(tokenizer, uses_renderer=uses_renderer)
    for form in FORMS:
        text = f"<tool_call>\n{form}\n</tool_call>"
        (call,) = chat.parse(
            ids_of(tokenizer, f"<think>\nb\n</think>\n\n{text}<|im_end|>"), [TOOL], 0
        ).tool_calls
        value = "</tool_call> <tool_call>" if "</" in form else "a"
        assert (call.name, call.arguments) == ("lookup", {"key": value})
        assert not chat.parse(ids_of(tokenizer, f"<think>\nb\n{text}<|im_end|>"), [TOOL], 0).tool_calls


def test_a_turn_of_channels_has_thinking_content_and_a_call():
    tokenizer = tokenizer_with(WRITTEN["harmony"])
    chat = Chat(tokenizer)
    thought = "<|channel|>analysis<|message|>think"
    call = '<|channel|>commentary to=functions.lookup <|constrain|>json<|message|>{"key": "a"}<|call|>'
    turn = chat.parse(ids_of(tokenizer, f"{thought}<|end|><|start|>assistant{call}"), [TOOL], 0)
    assert [(c.name, c.arguments) for c in turn.tool_calls] == [("lookup", {"key": "a"})]
    assert "think" in turn.message["content"] and "to=" not in turn.message["content"]
    assert not chat.parse(ids_of(tokenizer, f"{thought} {call[:12]}"), [TOOL], 0).tool_calls
    final = f"{thought}<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>"
    assert chat.parse(ids_of(tokenizer, final), [], 0).message["content"].endswith("</think>\n\nanswer")


def test_a_call_without_the_key_function_is_read_or_a_sentence():
    flat = {"id": "call00000", "name": "lookup", "arguments": '{"key": "a"}'}
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [flat]}]
    expected = {"name": "lookup", "arguments": {"key": "a"}}
    assert normalise(chat)[1]["tool_calls"][0]["function"] == expected
    assert Chat(tokenizer_of("qwen3")).normal(chat)[1]["tool_calls"][0]["function"] == expected
    chat[1]["tool_calls"] = [{"id": "call00000", "arguments": {}}]
    with pytest.raises(RefusedRequest, match="a call in tool_calls is .* it must be"):
        normalise(chat)
    with pytest.raises(ValueError, match="message 2 of 2 has the call .* it must be"):
        Chat(tokenizer_of("qwen3")).normal(chat)


def test_the_probe_has_all_kinds_of_values():
    kinds = {schema["type"] for schema in TOOL["function"]["parameters"]["properties"].values()}
    assert kinds == {"string", "integer", "boolean", "array"}
