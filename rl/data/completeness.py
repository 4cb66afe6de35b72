"""Comparison of messages with the text that the chat template made of them.

Templates silently leave out parts that they do not know: for example a role, a list of parts, tools, or
content beside calls. Two comparisons find this:

1. Each kind of chat (roles, and which parts its messages have) is rendered once with a unique word in place
   of each part. Each word must be in the text, so a short content is not mistaken for another one.
2. Content and reasoning of each chat must be in its text, blanks aside, because some templates drop or change
   a content for what it says.

Templates of reasoning models drop the reasoning of turns before the last message of the user by design. That
is allowed, if the template renders reasoning at all.
"""

import copy
import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from rl.data.chat_template import ChatTemplate
from rl.data.reading import describe

SWITCH = re.compile(r"/(no_?)?think")
"""Words that turn reasoning on or off in a user's message; some templates remove them."""
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
    """Its name in an error."""
    holder: dict
    """The dict that holds it, by `key`."""
    key: str
    text: str


class Completeness:
    """Compares chats with the texts that one template made of them."""

    def __init__(self, template: ChatTemplate):
        self._template = template
        self._known: set[tuple] = set()
        """Kinds of chats that the template renders completely."""

    def check(
        self,
        messages: Sequence[dict],
        tools: Sequence[dict],
        text: str,
        *,
        generation_prompt: bool,
        with_turns: bool = True,
    ) -> None:
        """Raise ValueError if the text lacks a part of the messages or a tool.

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
        """Raise ValueError if the text lacks a part of one of the messages with these numbers."""
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
        """Raise ValueError if the template leaves out a part of such a chat. Changes messages and tools."""
        parts = [*self._parts(messages, tools, only)]
        words = [f"part{number}of" for number in range(len(parts))]
        for part, word in zip(parts, words):
            thinking, tag, _ = str(part.holder[part.key]).rpartition("</think>")
            part.holder[part.key] = thinking + tag + word
        try:
            text = self._template.render(messages, tools, generation_prompt=generation_prompt)
        except ValueError:  # it reads the contents; they are compared themselves
            words = [part.text for part in parts]
        for part, word in zip(parts, words):
            self._check_part(part, word, text)

    def _check_part(self, part: ChatPart, word: str, text: str) -> None:
        """Raise ValueError if a text lacks a word that stands for a part, or is its text."""
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
            "reasoning_content": "</think>" not in template.text,  # otherwise it may strip such a content
            "content with </think>": template.reasoning_key is not None,
        }
        return REMEDIES[kind] if works.get(kind, True) else "remove it, or use a template that renders it"

    def _parts(
        self, messages: Sequence[dict], tools: Sequence[dict], only: Collection[int] | None
    ) -> Iterator[ChatPart]:
        """Yield the parts that the text must contain.

        only: numbers of messages that it must contain whole; None: all messages, without what templates drop
            by design.
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
    """Return a text without blanks, because templates strip and add blanks."""
    return "".join(text.split())


def texts_of(message: dict) -> list[tuple[dict, str]]:
    """Return the dicts and keys that hold the texts of a message's content. Images are no text."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return [(message, "content")] if content else []
    return [(part, "text") for part in content if part.get("type") == "text"]


def _is_in(part: str, shown: str) -> bool:
    """Return whether a squeezed text contains a part, unchanged or as a JSON string."""
    if squeeze(part) in shown:
        return True
    if squeeze(json.dumps(part, ensure_ascii=False))[1:-1] in shown:
        return True
    return SWITCH.search(part) is not None and squeeze(SWITCH.sub("", part)) in SWITCH.sub("", shown)


def _kind(message: dict) -> tuple:
    """Return the features that decide how templates render a message: all but its texts."""
    content, calls = message.get("content"), message.get("tool_calls") or []
    return (
        *sorted(message),
        message["role"],
        type(content),
        tuple(bool(holder[key].strip()) for holder, key in texts_of(message)),
        "</think>" in str(content),
        tuple(bool(call["function"]["arguments"]) for call in calls),
    )
