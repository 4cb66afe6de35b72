"""Random conversations in the forms of public data sets, with a mark in every part."""

import json
import random
from dataclasses import dataclass, field
from typing import Any

ROLES = {
    "user": ("user", "user", "user", "human", "User", "USER", " user", "prompter", "customer"),
    "assistant": ("assistant", "assistant", "assistant", "gpt", "Assistant", "bot", "model", "ai", "chatbot"),
    "system": ("system", "system", "developer", "System", "context"),
    "tool": ("tool", "tool", "function", "ipython", "observation", "tool_response", "environment"),
}
"""Role -> names in data sets; names of other projects, for example "prompter", may be mapped or refused."""
REASONING = ("reasoning_content", "reasoning", "thinking", "thought", "rationale")
PLAIN = {"user", "assistant", "system"}


@dataclass
class Marks:
    """Words that occur once in a conversation and must arrive in the rendered text."""

    rng: random.Random
    words: list[str] = field(default_factory=list)

    def new(self, noun: str) -> str:
        word = f"{noun}{self.rng.randrange(10**6):06d}"
        self.words.append(word)
        return word


@dataclass
class Conversation:
    messages: Any
    """Messages, or the JSON text of them."""
    tools: Any
    marks: list[str]
    is_plain: bool
    """Whether every part has the form of OpenAI's chat completions, with plain text alone, and the assistant
    has one turn at most; templates that rewrite earlier turns are refused."""
    deviations: list[str]


def conversation(rng: random.Random, *, ends: str, num_deviations: int, calls: bool) -> Conversation:
    """Return a conversation that ends with a message of the role `ends`."""
    marks = Marks(rng)
    turns = ["system"] if rng.random() < 0.4 else []
    for _ in range(rng.randrange(0 if ends == "user" and not calls else 1, 3)):
        turns += ["user", "assistant"]
    if ends == "user":
        turns.append("user")
    messages: list[dict] = [
        {"role": role, "content": f"{marks.new(role)} is the {role}'s word."} for role in turns
    ]
    tools: Any = None
    done: list[str] = []
    if calls:
        tools = _add_calls(messages, marks)
        done.append("calls")
    chosen = rng.sample(list(DEVIATIONS), num_deviations)
    for name in chosen:
        DEVIATIONS[name](rng, messages, marks)
    done += chosen
    whole: Any = messages
    if num_deviations and rng.random() < 0.08:
        whole = json.dumps(messages)
        done.append("messages as JSON text")
    if tools is not None and rng.random() < 0.3:
        tools = json.dumps(tools)
        done.append("tools as JSON text")
    held = json.dumps([messages, tools])
    words = [word for word in marks.words if word in held]  # a deviation may have replaced a part
    return Conversation(whole, tools, words, not done and turns.count("assistant") <= 1, done)


def _add_calls(messages: list[dict], marks: Marks) -> list[dict]:
    """Insert a call of a tool and its result before the first answer; return the schemas of the tools."""
    name = marks.new("tool")
    place = next(n for n, m in enumerate(messages) if m["role"] == "assistant")
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": name, "arguments": {"city": marks.new("argument")}},
    }
    messages[place:place] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "name": name, "content": marks.new("result")},
    ]
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "description": marks.new("schema")}},
    }
    return [{"type": "function", "function": {"name": name, "description": "It.", "parameters": parameters}}]


def _any(rng: random.Random, messages: list[dict], role: str | None = None) -> dict:
    messages = [message for message in messages if isinstance(message, dict)] or [{}]
    return rng.choice([m for m in messages if role in (None, m.get("role"))] or messages)


def _parts(rng, messages, marks):
    message = _any(rng, messages)
    texts = [str(message.get("content")), marks.new("part")]
    form = rng.randrange(5)
    message["content"] = [
        {"type": "text", "text": text} if form < 3 else text if form == 3 else {"text": text}
        for text in texts
    ]


def _role(rng, messages, marks):
    message = _any(rng, messages)
    message["role"] = rng.choice(ROLES.get(message.get("role", ""), ("user", None, 3)))


def _sharegpt(rng, messages, marks):
    names = {"user": "human", "assistant": "gpt", "system": "system", "tool": "observation"}
    for message in messages:
        if not isinstance(message, dict):
            continue
        message["from"] = names.get(message.pop("role", "user"), "human")
        message["value"] = message.pop("content", "")


def _reasoning(rng, messages, marks):
    _any(rng, messages[-1:])[rng.choice(REASONING)] = marks.new("reason")


def _weights(rng, messages, marks):
    key = rng.choice(("weight", "train", "loss", "trainable", "mask"))
    for message in filter(lambda message: isinstance(message, dict), messages):
        message[key] = rng.choice((0, 1, True, False, None, 0.5, "yes"))


def _extra(rng, messages, marks):
    key = rng.choice(("name", "audio", "images", "metadata", "id", "refusal", "prefix", "citations", "x"))
    _any(rng, messages)[key] = (
        marks.new("extra") if rng.random() < 0.2 else rng.choice(({"a": 1}, [], None, 3))
    )


def _content(rng, messages, marks):
    _any(rng, messages)["content"] = rng.choice(
        (
            None,
            7,
            1.5,
            True,
            {},
            {"text": "x"},
            [],
            [None],
            [{"type": "image"}],
            [{"type": "refusal", "refusal": "n"}],
        )
    )


def _call_form(rng, messages, marks):
    message = _any(rng, messages, "assistant")
    arguments: Any = {"city": marks.new("argument")}
    form = rng.randrange(9)
    function = {"name": "lookup", "arguments": arguments}
    if form == 0:
        function["arguments"] = json.dumps(arguments)
    elif form == 1:
        function["arguments"] = "not json " + marks.new("text")
    elif form == 2:
        function = {"name": "lookup", "parameters": arguments}
    elif form == 3:
        message["function_call"] = function
        return
    elif form == 4:
        message["tool_calls"] = [function]
        return
    elif form == 5:
        message["tool_calls"] = {"function": function}
        return
    elif form == 6:
        message["tool_calls"] = json.dumps([{"function": function}])
        return
    elif form == 7:
        function = {"name": None, "arguments": None}
    message["tool_calls"] = [{"id": "call00002", "type": "function", "function": function}]


def _characters(rng, messages, marks):
    message = _any(rng, messages)
    odd = rng.choice(
        ("\ud800", "\x00", "\ufeff", "\u2028", "  \n", "\u202e", "<|im_end|>", "<think>", "{{ 7 * 7 }}", "\r")
    )
    message["content"] = f"{message.get('content')}{odd}{marks.new('after')}"


def _order(rng, messages, marks):
    form = rng.randrange(4)
    if form == 0:
        rng.shuffle(messages)
    elif form == 1:
        messages.insert(rng.randrange(len(messages)), {"role": "system", "content": marks.new("late")})
    elif form == 2:
        messages[:] = []
        marks.words.clear()
    else:
        messages.append(rng.choice((None, "text", 3, [], {})))


DEVIATIONS = {
    "text parts": _parts,
    "a role's name": _role,
    "ShareGPT's keys": _sharegpt,
    "reasoning": _reasoning,
    "weights": _weights,
    "a further key": _extra,
    "content of a type": _content,
    "a call's form": _call_form,
    "characters": _characters,
    "order": _order,
}
