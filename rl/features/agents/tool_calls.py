"""Reads tool calls from the text of a sampled turn. Each family of models writes them in a form of its own.

Parsing never raises an error. An unreadable call becomes a call whose arguments are a text, and the
environment answers it with an error message. For example, '{"name": "search", "arguments": {"query' becomes a
call of search with this text as its arguments. vLLM's parsers are not used: some of them need packages that
vLLM does not install, and most of them return an unreadable call as content.
"""

import ast
import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl.data.chat_template import read_arguments, read_json
from rl.features.agents.environment import ToolCall


@dataclass(frozen=True)
class Family:
    """Format of the tool calls of a family of models."""

    name: str
    parse: Callable[[str, Sequence[dict]], tuple[str, list[ToolCall]]]
    """Function that splits a turn into its content and its calls, given the tools' schemas. If a call has no
    id in the text, its `id` is ""."""
    grammar: str = ""
    """Name of the family in xgrammar's structural tags. Empty: xgrammar does not know this form."""
    parallel: bool = True
    """Whether a turn may hold several calls."""
    names_ids: bool = False
    """Whether the id of a call contains the name of the function."""
    split: Callable[[str], tuple[str | None, bool, str]] | None = None
    """Function that splits a turn into (its thinking, whether the thinking is open, the rest). None: `Chat`
    splits the turn by tags."""


def parse_calls(
    family: Family, text: str, tools: Sequence[dict], turn: int
) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the content and the calls of the text of a turn.

    A call without an id is named by its turn and its position. For example, call00201 is the second call of
    turn 2. Templates of Mistral require such ids of nine letters and digits.
    """
    content, calls = family.parse(text, tools)
    named = (replace(call, id=call.id or f"call{turn:03d}{i:02d}") for i, call in enumerate(calls))
    return content.strip() if calls else content, tuple(named)


def as_message(call: ToolCall) -> dict:
    """Return the call as an entry of `tool_calls` in a message."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def find_family(text: str, tools: Sequence[dict], call: dict) -> Family | None:
    """Return the family that can read the call in a turn which a chat template wrote; None if no family can.

    text: the turn. call: the entry of `tool_calls` that the template rendered.
    """
    return next((f for f in FAMILIES if is_call(parse_calls(f, text, tools, 0)[1], call)), None)


def is_call(found: Sequence[ToolCall], call: dict) -> bool:
    """Return whether one call was found, with the name and the arguments of an entry of `tool_calls`."""
    return [{"name": one.name, "arguments": one.arguments} for one in found] == [call["function"]]


# ---- forms -----------------------------------------------------------------------------------------------


def _from_json(text: str) -> ToolCall:
    return _from_value(read_json(text), text)


def _from_value(value: Any, text: str) -> ToolCall:
    """Read {"name": ..., "arguments" or "parameters": {...}}, with or without an id, from its JSON text."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        name = re.search(r'"name"\s*:\s*"([^"\\]*)"', text)
        return ToolCall("", name[1] if name else "", text.strip())
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = read_arguments(arguments)
    elif not isinstance(arguments, dict):
        arguments = {} if arguments is None else json.dumps(arguments)
    given = value.get("id")
    return ToolCall(given if isinstance(given, str) else "", value["name"], arguments)


def _blocks(text: str, begin: str, end: str) -> tuple[str, list[str]]:
    """Return the text outside of the blocks, and the text within each. The last block may lack its end.

    A block that begins with JSON may hold begin and end in its strings.
    """
    outside, mark, text = text.partition(begin)
    blocks = []
    while mark:
        stop = text.find(end, _json_end(text))
        stop = len(text) if stop < 0 else stop
        blocks.append(text[:stop])
        after, mark, text = text[stop + len(end) :].partition(begin)
        outside += after
    return outside, blocks


def _json_end(text: str) -> int:
    """Return the end of the JSON value at the beginning of a text, after blanks; 0 if there is none."""
    start = len(text) - len(text.lstrip())
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return 0


def _parse_hermes(text: str, tools: Sequence[dict]) -> tuple[str, list[ToolCall]]:
    content, blocks = _blocks(text, "<tool_call>", "</tool_call>")
    return content, list(map(_from_json, blocks))


def _parse_glm(text: str, tools: Sequence[dict]) -> tuple[str, list[ToolCall]]:
    content, blocks = _blocks(text, "<tool_call>", "</tool_call>")
    return content, [_from_glm(block, tools) for block in blocks]


def _from_glm(block: str, tools: Sequence[dict]) -> ToolCall:
    """Read a call of GLM: NAME, then pairs of key and value. Values are JSON, except strings."""
    pair = r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*"
    name, mark, rest = block.partition("<arg_key>")
    name, body = name.strip(), mark + rest
    if re.sub(pair, "", body, flags=re.DOTALL).strip():
        return ToolCall("", name, body)
    return ToolCall("", name, _typed(re.findall(pair, body, re.DOTALL), name, tools))


def _typed(pairs: Sequence[tuple[str, str]], name: str, tools: Sequence[dict]) -> dict[str, Any]:
    """Return arguments that were written as text. The tool's schema tells which arguments are strings."""
    whole: dict[str, Any] = next(
        (tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name), {}
    )
    properties = [schema.get("properties") for schema in _combined([whole], whole)]

    def read(key: str, value: str) -> Any:
        schemas = [each.get(key) for each in properties if isinstance(each, dict)]
        if any(map(_takes_text, _combined(schemas, whole))):
            return value
        return read_json(_OF_PYTHON.get(value, value), value)

    return {key: read(key, value) for key, value in pairs}


_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Value as written by templates that do not write JSON -> the same value in JSON."""


def _combined(schemas: list, whole: Any) -> list[dict]:
    """Return the schemas together with all schemas that they contain (for example, in anyOf) or name by $ref.

    whole: the schema in which a $ref is looked up.
    """
    found: list[dict] = []
    left = [*schemas]
    while left:
        schema = left.pop()
        if isinstance(schema, dict) and not any(schema is known for known in found):
            found.append(schema)
            left += [one for key in ("allOf", "anyOf", "oneOf") for one in _listed(schema.get(key))]
            target = whole
            for name in str(schema.get("$ref", "#/")).split("/")[1:]:
                target = target.get(name) if isinstance(target, dict) else None
            left.append(target)
    return found


def _takes_text(schema: dict) -> bool:
    """Return whether a schema has strings as its type, or only strings as its values."""
    return "string" in _listed(schema.get("type")) or set(map(type, _listed(schema.get("enum")))) == {str}


def _listed(value: Any) -> list:
    return value if isinstance(value, list) else [value]


_FUNCTION = re.compile(
    r'<(?:function=|invoke name=)"?([^">\n]*)"?>(.*?)(?:</(?:function|invoke)>|\Z)', re.DOTALL
)
_PARAMETER = re.compile(r'<parameter(?:=| name=)"?([^">\n]*)"?>\n?(.*?)\n?</parameter>', re.DOTALL)


def _parse_xml(text: str, tools: Sequence[dict], *, begin: str) -> tuple[str, list[ToolCall]]:
    """Read functions whose parameters are tags. Qwen3-Coder, Qwen3.5, Seed-OSS and MiniMax write this
    form."""
    content, mark, body = text.partition(begin)
    calls = []
    for name, inner in _FUNCTION.findall(body):
        rest, pairs = _PARAMETER.sub("", inner), _PARAMETER.findall(inner)
        calls.append(ToolCall("", name, inner.strip() if rest.strip() else _typed(pairs, name, tools)))
    return content, calls if calls or not mark else [ToolCall("", "", body.strip())]


def _parse_list(text: str, tools: Sequence[dict]) -> tuple[str, list[ToolCall]]:
    """Read calls in Python syntax, for example [f(a=1), g()], alone or within the tags of LFM2 or Olmo 3."""
    tags = r"<\|tool_call_(?:start|end)\|>|</?function_calls>"
    before, *pieces = re.split(tags, text)
    content, body = (before, pieces[0]) if pieces else ("", before)
    try:
        found = ast.parse(body.strip(), mode="eval").body if pieces or body.lstrip().startswith("[") else None
        nodes = found.elts if isinstance(found, ast.List) else [found]
        calls = []
        for node in nodes:
            if not isinstance(node, ast.Call) or node.args:
                raise ValueError("no call")
            arguments = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
            calls.append(ToolCall("", ast.unparse(node.func), read_json(json.dumps(arguments))))
        return content, calls
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return (content, [ToolCall("", "", body.strip())]) if pieces else (text, [])


def _parse_kimi(text: str, tools: Sequence[dict]) -> tuple[str, list[ToolCall]]:
    content, _, calls = text.partition("<|tool_calls_section_begin|>")
    found = []
    for block in _blocks(calls, "<|tool_call_begin|>", "<|tool_call_end|>")[1]:
        id, _, body = block.partition("<|tool_call_argument_begin|>")
        name = re.sub(r":\d+$", "", id.strip().removeprefix("functions."))
        found.append(ToolCall(id.strip(), name, read_arguments(body.strip())))
    return content, found


def split_channels(text: str) -> tuple[str | None, bool, str]:
    """Split a turn of gpt-oss: return its analysis (or None), whether the analysis is open, and the
    messages."""
    messages = text.split("<|start|>")
    if "<|message|>" not in text:
        return None, False, text
    thoughts = [m for m in messages if re.search(r"<\|channel\|>analysis", m) and "to=" not in _head(m)]
    is_open = messages[-1] in thoughts and "<|end|>" not in messages[-1]
    rest = [m for m in messages if m not in thoughts]
    return "\n".join(map(_body, thoughts)) if thoughts else None, is_open, "<|start|>".join(rest)


def _head(message: str) -> str:
    return message.partition("<|message|>")[0]


def _body(message: str) -> str:
    return re.split(r"<\|(?:end|return|call)\|>", message.partition("<|message|>")[2])[0]


def _parse_harmony(text: str, tools: Sequence[dict]) -> tuple[str, list[ToolCall]]:
    contents, calls = [], []
    for message in text.split("<|start|>"):
        if to := re.search(r"to=(?:functions\.)?([^\s<]+)", _head(message)):
            calls.append(ToolCall("", to[1], read_arguments(_body(message))))
        else:
            contents.append(_body(message) if "<|message|>" in message else message)
    return "".join(contents), calls


def _parse_mistral(text: str, tools: Sequence[dict]) -> tuple[str, list[ToolCall]]:
    content, *pieces = text.split("[TOOL_CALLS]")
    calls = []
    for piece in pieces:
        if not piece.lstrip().startswith("["):  # from version 11 on: NAME[ARGS]{...}
            head, _, body = piece.partition("[ARGS]")
            name, _, id = head.partition("[CALL_ID]")
            calls.append(ToolCall(id.strip(), name.strip(), read_arguments(body)))
            continue
        calls += [_from_value(value, piece) for value in read_json(piece, [None])]
    return content, calls


def _parse_llama(text: str, tools: Sequence[dict]) -> tuple[str, list[ToolCall]]:
    """Read a turn that is one JSON object. Llama's templates allow one call per turn, so further calls are
    ignored."""
    body = text.removeprefix("<|python_tag|>").strip()
    if not re.match(r'\{\s*"(type|name|function)"', body):
        return text, []
    return "", [_from_json(body[: _json_end(body) or len(body)])]


def _parse_deepseek(text: str, tools: Sequence[dict]) -> tuple[str, list[ToolCall]]:
    content, _, calls = text.partition("<\uff5ctool\u2581calls\u2581begin\uff5c>")
    _, blocks = _blocks(
        calls, "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
    )
    return content, list(map(_from_deepseek, blocks))


def _parse_fenced(text: str, tools: Sequence[dict]) -> tuple[str, list[ToolCall]]:
    """Read the calls of DeepSeek-V3, the only family that writes its calls in fences."""
    return _parse_deepseek(text, tools) if "```json" in text else (text, [])


def _from_deepseek(block: str) -> ToolCall:
    """Read TYPE sep NAME and a fenced JSON object (V3), or NAME sep and a JSON object (V3.1)."""
    head, _, tail = block.partition("<\uff5ctool\u2581sep\uff5c>")
    if fenced := re.fullmatch(r"([^\n]*)\n```json\n(.*?)(\n```\s*)?", tail, re.DOTALL):
        return ToolCall("", fenced[1].strip(), read_arguments(fenced[2]))
    return ToolCall("", head.strip(), read_arguments(tail))


HERMES = Family("hermes", _parse_hermes, "qwen_3")
FAMILIES = (
    HERMES,
    Family("xml", functools.partial(_parse_xml, begin="<tool_call>"), "qwen_3_5"),
    Family("minimax", functools.partial(_parse_xml, begin="<minimax:tool_call>"), "minimax"),
    Family("seed", functools.partial(_parse_xml, begin="<seed:tool_call>")),
    Family("glm", _parse_glm),
    Family("mistral", _parse_mistral),
    Family("deepseek-v3", _parse_fenced, "deepseek_r1"),
    Family("deepseek", _parse_deepseek, "deepseek_v3_1"),
    Family("kimi", _parse_kimi, "kimi", names_ids=True),
    Family("harmony", _parse_harmony, "harmony", parallel=False, split=split_channels),
    Family("llama", _parse_llama, "llama", parallel=False),
    Family("python", _parse_list),
)
"""Families in the order in which they are tried. HERMES also reads the turns of templates that write no
calls."""
