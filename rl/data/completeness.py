"""Comparison of messages with the text that the chat template made from them.

Templates silently leave out what they do not know, for example a role, a list of parts, tools, or content
beside tool calls. Two comparisons find this:

1. Once for each kind of chat: the chat is rendered with a unique word in place of each part, and each word
   must be in the text. Two chats are of the same kind if they have the same roles and their messages have
   the same parts. With unique words, a short content cannot be mistaken for another part of the text.
2. For each chat: its content and its reasoning must be in its text, apart from blanks. This is needed because
   some templates drop or change a content depending on what it says.

Templates of reasoning models by design drop the reasoning of turns before the last user message. This is
allowed if the template renders reasoning at all.
"""

import copy
import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from rl.data.chat_template import ChatTemplate
from rl.data.reading import describe

SWITCH = re.compile(r"/(no_?)?think")
"""Commands in a user's message that turn reasoning on or off. Some templates remove them."""
REMEDIES = {
    "content": "give the message a role that the template renders, or move its text to a message of the user",
    "content with </think>": "write the reasoning into reasoning_content instead",
    "content beside calls": "move it to a message of its own, or use a template that renders both",
    "reasoning_content": "write the reasoning into the content, between <think> and </think>",
    "call": "use a template with calls of tools, or write the call into the content",
    "tool": "use a template with tools, or describe the tools in a message and remove them here",
}


class ChatPart(NamedTuple):
    """A part of a chat that its text must contain."""

    kind: str
    """A key of REMEDIES."""
    owner: str
    """Name of the part in an error, for example "the content of message 2 of 3 (role user)"."""
    holder: dict
    """The dict that holds it under `key`."""
    key: str
    text: str


class Completeness:
    """Compares chats with the texts that one template made from them."""

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._known: set[tuple] = set()
        """Kinds of chats that the template is known to render completely."""

    def check(
        self,
        messages: Sequence[dict],
        tools: Sequence[dict],
        text: str,
        *,
        generation_prompt: bool,
        with_turns: bool = True,
    ) -> None:
        """Raise ValueError if the text lacks a tool or a part of the messages.

        generation_prompt: whether the text ends with the generation prompt. with_turns: whether messages of
            the assistant are compared, too.
        """
        only = None if with_turns else [i for i, m in enumerate(messages) if m["role"] != "assistant"]
        kind = (*map(_kind, messages), len(tools), generation_prompt, with_turns)
        if kind not in self._known:
            self._check_kind(*copy.deepcopy((messages, tools)), text, generation_prompt, only)
            self._known.add(kind)
        for part in self._parts(messages, (), only):
            if part.kind != "call":
                self._check_part(part, part.text, text)

    def check_turns(self, messages: Sequence[dict], numbers: Collection[int], text: str) -> None:
        """Raise ValueError if the text lacks a part of one of the messages with these indices."""
        for part in self._parts(messages, (), numbers):
            if part.kind != "call" or part.key == "name":
                self._check_part(part, part.text, text)

    def _check_kind(
        self,
        messages: Sequence[dict],
        tools: Sequence[dict],
        text: str,
        generation_prompt: bool,
        only: Collection[int] | None,
    ) -> None:
        """Raise ValueError if the template leaves out a part of this kind of chat.

        It changes messages and tools, so pass copies.
        """
        parts = [*self._parts(messages, tools, only)]
        words = [f"part{number}of" for number in range(len(parts))]
        for part, word in zip(parts, words):
            thinking, tag, _ = str(part.holder[part.key]).rpartition("</think>")
            part.holder[part.key] = thinking + tag + word
        try:
            text = self._template.render(messages, tools, generation_prompt=generation_prompt)
        except ValueError:  # it depends on the contents, so compare the contents themselves
            words = [part.text for part in parts]
        for part, word in zip(parts, words):
            self._check_part(part, word, text)

    def _check_part(self, part: ChatPart, word: str, text: str) -> None:
        """Raise ValueError if the text lacks `word`, which stands for the part or is the text of the part."""
        if word.strip() in text or _is_in(word, squeeze(self._template.show(text))):
            return
        shown = "" if part.kind in ("tool", "call") else f", {describe(part.text)}"
        raise ValueError(
            f"the chat template of {self._template.tokenizer.name_or_path} leaves out {part.owner}{shown}; "
            f"{self._remedy(part.kind)}"
        )

    def _remedy(self, kind: str) -> str:
        template = self._template
        works = {
            "reasoning_content": "</think>" not in template.text,  # a template with it may strip the tag
            "content with </think>": template.reasoning_key is not None,
        }
        return REMEDIES[kind] if works.get(kind, True) else "remove it, or use a template that renders it"

    def _parts(
        self, messages: Sequence[dict], tools: Sequence[dict], only: Collection[int] | None
    ) -> Iterator[ChatPart]:
        """Yield the parts that the text must contain.

        only: indices of messages whose parts the text must contain all. None: all messages, but without the
            reasoning that templates drop by design.
        """
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        for i in range(len(messages)) if only is None else only:
            message = messages[i]
            is_turn = message["role"] == "assistant"
            name = f"message {i + 1} of {len(messages)} (role {message['role']})"
            calls = message.get("tool_calls") or []
            may_drop = is_turn and i <= last and only is None
            for holder, key in texts_of(message):
                content = holder[key]
                if may_drop and "</think>" in self._template.text:
                    content = content.rpartition("</think>")[2]
                kind = "content beside calls" if calls else "content"
                kind = "content with </think>" if is_turn and "</think>" in content else kind
                if content.strip():
                    yield ChatPart(kind, f"the content of {name}", holder, key, content)
            key = "reasoning_content"
            if message.get(key, "").strip() and not (may_drop and self._template.reasoning_key):
                yield ChatPart(key, f"the {key} of {name}", message, key, message[key])
            for number, call in enumerate(calls, start=1):
                function, call_name = call["function"], f"tool call {number} of {name}"
                yield ChatPart("call", f"the {call_name}", function, "name", function["name"])
                for key, value in function["arguments"].items():
                    value = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                    owner = f"the argument {key!r} of {call_name}"
                    yield ChatPart("call", owner, function["arguments"], key, value)
        for tool in tools:
            function = tool.get("function", tool)
            yield ChatPart("tool", f"the tool {function['name']!r}", function, "name", function["name"])


def squeeze(text: str) -> str:
    """Return a text without blanks, for comparisons: templates strip and add blanks."""
    return "".join(text.split())


def texts_of(message: dict) -> list[tuple[dict, str]]:
    """Return the places of the texts of a message's content: pairs of a dict and the key in it. Images have
    none."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return [(message, "content")] if content else []
    return [(part, "text") for part in content if part.get("type") == "text"]


def _is_in(part: str, shown: str) -> bool:
    """Return whether a text without blanks contains a part, unchanged, as a JSON string, or without
    SWITCH."""
    if squeeze(part) in shown:
        return True
    if squeeze(json.dumps(part, ensure_ascii=False))[1:-1] in shown:
        return True
    return SWITCH.search(part) is not None and squeeze(SWITCH.sub("", part)) in SWITCH.sub("", shown)


def _kind(message: dict) -> tuple:
    """Return what may decide how templates render a message: everything but the wording of its texts."""
    content, calls = message.get("content"), message.get("tool_calls") or []
    return (
        *sorted(message),
        message["role"],
        type(content),
        tuple(bool(holder[key].strip()) for holder, key in texts_of(message)),
        "</think>" in str(content),
        tuple(bool(call["function"]["arguments"]) for call in calls),
    )
