"""Tool calls in the text of a sampled turn, in the forms in which families of models write them.

Parsing never raises. A call that cannot be read is a call whose arguments are text, and the environment
answers it with an error message.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl.agents.environment import ToolCall
from rl.data.chat_template import read_arguments, read_json


@dataclass(frozen=True)
class Family:
    """Format of the tool calls of a family of models."""

    name: str
    marks: tuple[str, ...]
    """Texts that occur in the chat templates of this family and of no family after it in FAMILIES."""
    parse: Callable[[str, Sequence[dict]], tuple[str, list[ToolCall]]]
    """Splits a turn into its content and its calls, given the tools' schemas. A call without an id has ""."""
    grammar: str = ""
    """The family's name in xgrammar's structural tags; empty: they have none of this form."""
    parallel: bool = True
    """Whether a turn may hold several calls."""


def parse_calls(
    family: Family, text: str, tools: Sequence[dict], turn: int
) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the content and the calls of the text of a turn.

    A call without an id is named by its turn and its position. These ids have nine letters and digits, which
    templates of Mistral require.
    """
    content, calls = family.parse(text, tools)
    named = (replace(call, id=call.id or f"call{turn:03d}{i:02d}") for i, call in enumerate(calls))
    return content.strip() if calls else content, tuple(named)


def as_message(call: ToolCall) -> dict:
    """Return the call as an entry of `tool_calls` in a message."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def family_of(template: str) -> Family:
    """Return the family whose form a chat template uses, or the last one, which needs no special tokens."""
    return next((f for f in FAMILIES if any(mark in template for mark in f.marks)), FAMILIES[-1])


# ---- forms -----------------------------------------------------------------------------------------------


def _from_json(text: str) -> ToolCall:
    """Read {"name": ..., "arguments" or "parameters": {...}}, with or without an id."""
    value = read_json(text)
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        return _from_object(value)
    name = re.search(r'"name"\s*:\s*"([^"\\]*)"', text)
    return ToolCall("", name[1] if name else "", text.strip())


def _from_object(value: dict) -> ToolCall:
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        return ToolCall("", value["name"], read_arguments(arguments))
    id = value.get("id")
    return ToolCall(
        id if isinstance(id, str) else "",
        value["name"],
        arguments if isinstance(arguments, dict) else json.dumps(arguments),
    )


def _blocks(text: str, begin: str, end: str) -> tuple[str, list[str]]:
    """Return the text outside of the blocks, and the text within each. The last block may lack its end."""
    outside, *pieces = text.split(begin)
    blocks = []
    for piece in pieces:
        block, _, after = piece.partition(end)
        blocks.append(block)
        outside += after
    return outside, blocks


def _parse_hermes(text: str, tools: Sequence[dict]) -> tuple[str, list[ToolCall]]:
    content, blocks = _blocks(text, "<tool_call>", "</tool_call>")
    return content, [_from_json(block) for block in blocks]


def _parse_glm(text: str, tools: Sequence[dict]) -> tuple[str, list[ToolCall]]:
    content, blocks = _blocks(text, "<tool_call>", "</tool_call>")
    return content, [_from_glm(block, tools) for block in blocks]


def _from_glm(block: str, tools: Sequence[dict]) -> ToolCall:
    """Read NAME and pairs of key and value, with values in JSON except strings."""
    pair = r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*"
    name, mark, rest = block.partition("<arg_key>")
    name, body = name.strip(), mark + rest
    if re.sub(pair, "", body, flags=re.DOTALL).strip():
        return ToolCall("", name, body)
    types = _types(name, tools)
    pairs = re.findall(pair, body, re.DOTALL)
    return ToolCall("", name, {k: v if types.get(k) == "string" else read_json(v, v) for k, v in pairs})


def _types(name: str, tools: Sequence[dict]) -> dict[str, Any]:
    for tool in tools:
        if tool["function"]["name"] == name:
            properties = tool["function"].get("parameters", {}).get("properties", {})
            return {key: schema.get("type") for key, schema in properties.items()}
    return {}


def _parse_mistral(text: str, tools: Sequence[dict]) -> tuple[str, list[ToolCall]]:
    content, *pieces = text.split("[TOOL_CALLS]")
    calls = []
    for piece in pieces:
        if not piece.lstrip().startswith("["):  # from version 11 on: NAME[ARGS]{...}
            head, _, body = piece.partition("[ARGS]")
            name, _, id = head.partition("[CALL_ID]")
            calls.append(ToolCall(id.strip(), name.strip(), read_arguments(body)))
            continue
        for value in read_json(piece, [None]):
            is_call = isinstance(value, dict) and isinstance(value.get("name"), str)
            calls.append(_from_object(value) if is_call else _from_json(piece))
    return content, calls


def _parse_llama(text: str, tools: Sequence[dict]) -> tuple[str, list[ToolCall]]:
    """Read a turn that is one JSON object. Llama's templates allow one call per turn; others are ignored."""
    body = text.removeprefix("<|python_tag|>").strip()
    if not re.match(r'\{\s*"(type|name|function)"', body):
        return text, []
    try:
        _, end = json.JSONDecoder().raw_decode(body)
    except (ValueError, RecursionError):
        end = len(body)
    return "", [_from_json(body[:end])]


def _parse_deepseek(text: str, tools: Sequence[dict]) -> tuple[str, list[ToolCall]]:
    content, _, calls = text.partition("<\uff5ctool\u2581calls\u2581begin\uff5c>")
    _, blocks = _blocks(
        calls, "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
    )
    return content, list(map(_from_deepseek, blocks))


def _from_deepseek(block: str) -> ToolCall:
    """Read TYPE sep NAME and a fenced JSON object (V3), or NAME sep and a JSON object (V3.1)."""
    head, _, tail = block.partition("<\uff5ctool\u2581sep\uff5c>")
    if fenced := re.fullmatch(r"([^\n]*)\n```json\n(.*?)(\n```\s*)?", tail, re.DOTALL):
        return ToolCall("", fenced[1].strip(), read_arguments(fenced[2]))
    return ToolCall("", head.strip(), read_arguments(tail))


FAMILIES = (
    Family("deepseek-v3", ("'```json'",), _parse_deepseek, "deepseek_r1"),
    Family("deepseek", ("<\uff5ctool\u2581calls\u2581begin\uff5c>",), _parse_deepseek, "deepseek_v3_1"),
    Family("mistral", ("[TOOL_CALLS]",), _parse_mistral),
    Family("glm", ("<arg_key>",), _parse_glm),
    Family("llama", ("<|python_tag|>", "ipython<|end_header_id|>"), _parse_llama, "llama", parallel=False),
    Family("hermes", ("<tool_call>",), _parse_hermes, "qwen_3"),
)
