"""Comparison of messages with the text that the chat template made of them.

Templates silently leave out parts that they do not know, such as a role, a list of parts, tools, or content
beside calls. Two comparisons find this:

1. Each kind of chat (roles, and which parts its messages have) is rendered once with a unique word in place
   of each part. Each word must be in the text. So a short content cannot be mistaken for another text.
2. Content and reasoning of each chat must be in its text, without
   blanks, because some templates drop or change certain contents.

Templates of reasoning models drop the reasoning of turns before the last message of the user by design. That
is allowed, if the template renders reasoning at all.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rl.data.chat_template import ChatTemplate
from rl.data.reading import describe

SWITCH = re.compile(r"/(no_?)?think")
"""Words that turn reasoning on or off in a user's message; some templates remove them."""
REMEDIES = {
    "content": "give the message a role that the template renders, or move its text to a message of the user",
    "content beside calls": "move it to a message of its own, or use a template that renders both",
    "reasoning": "remove it, or use a template that renders it",
    "call": "use a template with calls of tools",
    "tool": "use a template with tools, or describe the tools in a message and remove them here",
}


class Part(NamedTuple):
    """A part of a chat that its text must contain."""

    kind: str
    """A key of REMEDIES."""
    role: str
    """Role of the message; "" for a tool."""
    owner: str
    """Name of the part in an error."""
    text: str


class LeftOut(ValueError):
    """Raised if a text lacks a part of the messages."""

    def __init__(self, reason: str, role: str):
        super().__init__(reason)
        self.role = role
        """As in Part."""


class Completeness:
    """Compares chats with the texts that one template made of them."""

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._known: set[tuple] = set()
        """Kinds of chats in which the template renders all parts."""

    def check(
        self,
        messages: Sequence[dict],
        tools: Sequence[dict],
        text: str,
        *,
        generation_prompt: bool,
        with_turns: bool = True,
    ) -> None:
        """Raise LeftOut if the text lacks a part of the messages or a tool.

        generation_prompt: whether the text ends with the generation prompt. with_turns: whether messages of
            the assistant are compared, too.
        """
        kind = (*map(_kind, messages), len(tools), generation_prompt, with_turns)
        if kind not in self._known:
            stand_ins, schemas = stand_ins_of(messages, tools, with_turns=with_turns)
            try:
                shown = self._template.render(stand_ins, schemas, generation_prompt=generation_prompt)
            except ValueError:  # the template reads the contents, which are compared below
                stand_ins, schemas, shown = list(messages), list(tools), text
            shown = squeeze(self._template.show(shown))
            real = [*self._parts(messages, tools, with_calls=True, with_turns=with_turns)]
            words = self._parts(stand_ins, schemas, with_calls=True, with_turns=with_turns)
            for part, stand_in in zip(real, words, strict=True):
                if not _is_in(stand_in.text, shown):
                    raise self._lost(part)
            self._known.add(kind)
        shown = squeeze(self._template.show(text))
        for part in self._parts(messages, (), with_calls=False, with_turns=with_turns):
            if not _is_in(part.text, shown):
                raise self._lost(part)

    def _parts(
        self, messages: Sequence[dict], tools: Sequence[dict], *, with_calls: bool, with_turns: bool
    ) -> Iterator[Part]:
        """Yield the parts that the text must contain."""
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        for i, message in enumerate(messages):
            if message["role"] == "assistant" and not with_turns:
                continue
            name = f"message {i + 1} of {len(messages)} (role {message['role']})"
            calls = message.get("tool_calls") or []
            kind = "content beside calls" if calls else "content"
            reasons = self._template.reasoning_key is not None
            may_drop = message["role"] == "assistant" and i <= last and "</think>" in self._template.text
            for content in texts_of(message):
                content = content.rpartition("</think>")[2] if may_drop else content
                if content.strip():
                    yield Part(kind, message["role"], f"the content of {name}", content)
            if (reasoning := message.get("reasoning_content", "")).strip() and not (reasons and i <= last):
                yield Part("reasoning", message["role"], f"the reasoning_content of {name}", reasoning)
            for number, call in enumerate(calls if with_calls else [], start=1):
                function = call["function"]
                yield Part("call", message["role"], f"the tool call {number} of {name}", function["name"])
                for key, value in function["arguments"].items():
                    value = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                    yield Part(
                        "call",
                        message["role"],
                        f"the argument {key!r} of tool call {number} of {name}",
                        value,
                    )
        for tool in tools:
            tool_name = tool.get("function", tool)["name"]
            yield Part("tool", "", f"the tool {tool_name!r}", tool_name)

    def _lost(self, part: Part) -> LeftOut:
        shown = "" if part.kind in ("tool", "call") else f", {describe(part.text)}"
        reason = (
            f"the chat template of {self._template.tokenizer.name_or_path} leaves out {part.owner}{shown}; "
            f"{REMEDIES[part.kind]}"
        )
        return LeftOut(reason, part.role)


def squeeze(text: str) -> str:
    """Return a text without blanks, because templates strip and add blanks."""
    return "".join(text.split())


def texts_of(message: dict) -> list[str]:
    """Return the texts of a message's content. Images are no text."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part.get("type") == "text"]


def _is_in(part: str, shown: str) -> bool:
    """Return whether a squeezed text contains a part, unchanged or as a JSON string."""
    if squeeze(part) in shown:
        return True
    if squeeze(json.dumps(part, ensure_ascii=False))[1:-1] in shown:
        return True
    return SWITCH.search(part) is not None and squeeze(SWITCH.sub("", part)) in SWITCH.sub("", shown)


def _kind(message: dict) -> tuple:
    """Return all features of a message, except its texts, by which templates decide how to render it."""
    content, calls = message.get("content"), message.get("tool_calls") or []
    return (
        *sorted(message),
        message["role"],
        type(content),
        tuple(bool(text.strip()) for text in texts_of(message)),
        "</think>" in str(content),
        tuple(bool(call["function"]["arguments"]) for call in calls),
    )


def stand_ins_of(
    messages: Sequence[dict], tools: Sequence[dict], *, with_turns: bool
) -> tuple[list[dict], list[dict]]:
    """Return messages and tools with a unique word in place of each text, name and argument.

    with_turns: whether messages of the assistant are changed, too.
    """
    count = 0

    def word(text: Any = "text") -> str:
        nonlocal count
        count += 1
        return f"part{count}of" if str(text).strip() else ""

    def content(value: Any) -> Any:
        if isinstance(value, str):
            _, tag, _ = value.partition("</think>")
            return f"<think>\n{word()}\n</think>\n\n{word(value.rpartition(tag)[2])}" if tag else word(value)
        return [
            {**part, "text": word(part["text"])} if part.get("type") == "text" else part for part in value
        ]

    found = []
    for message in messages:
        stand_in = dict(message)
        if message["role"] == "assistant" and not with_turns:
            found.append(stand_in)
            continue
        if message.get("content"):
            stand_in["content"] = content(message["content"])
        if message.get("reasoning_content"):
            stand_in["reasoning_content"] = word(message["reasoning_content"])
        if message.get("tool_calls"):
            stand_in["tool_calls"] = [
                {
                    **call,
                    "function": {
                        "name": word(),
                        "arguments": {key: word() for key in call["function"]["arguments"]},
                    },
                }
                for call in message["tool_calls"]
            ]
        found.append(stand_in)
    schemas: list[dict] = []
    for tool in tools:
        named = {**tool.get("function", tool), "name": word()}
        schemas.append({**tool, "function": named} if "function" in tool else named)
    return found, schemas
