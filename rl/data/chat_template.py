"""The chat template of a tokenizer, and messages in the form that it takes."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

QUESTION = {"role": "user", "content": "question"}
CALL = {"id": "call00000", "type": "function", "function": {"name": "lookup", "arguments": {"key": "a"}}}
REPLY = {"role": "tool", "tool_call_id": "call00000", "name": "lookup", "content": "b"}
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look a key up.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "The key."}},
            "required": ["key"],
        },
    },
}
"""Parts of conversations with which templates are tried."""
MAX_LEVELS = 50
"""Deepest nesting of a call's arguments."""

Spans = list[tuple[int, int]]
"""Parts of a text: positions of the first character and of the one after the last."""


def set_variables(tokenizer: PreTrainedTokenizerBase, variables: dict[str, Any], *, key: str) -> None:
    """Set variables at the beginning of a tokenizer's chat template, for every rendering with it.

    variables: values in YAML by name. key: that of the config. Raises ValueError if the template does not
    read one of them, or if there is none.
    """
    if not variables:
        return
    templates = tokenizer.chat_template
    named = templates if isinstance(templates, dict) else {"": templates or ""}
    for name, value in variables.items():
        if not any(re.search(rf"\b{re.escape(name)}\b", text) for text in named.values()):
            raise ValueError(
                f"{key} has {name}={value}, but the chat template of {tokenizer.name_or_path} does not read "
                "it; correct its name, or leave it out."
            )
    # `repr` of a value from YAML is an expression of Jinja. transformers renders with trim_blocks, which
    # drops the newline after the block.
    first = "".join(f"{{% set {name} = {value!r} %}}\n" for name, value in variables.items())
    changed = {name: first + text for name, text in named.items()}
    tokenizer.chat_template = changed if isinstance(templates, dict) else changed[""]


class ChatTemplate:
    """Renders chats with the template of a tokenizer.

    Args:
        kwargs: further arguments of the template, such as enable_thinking.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kwargs: dict | None = None):
        self.tokenizer, self.kwargs = tokenizer, kwargs or {}
        self.text = "" if tokenizer.chat_template is None else tokenizer.get_chat_template(tools=[TOOL])
        """The template's source; empty: the tokenizer has none."""
        self.marks_turns = re.search(r"\{%-?\s*generation\s*-?%\}", self.text) is not None
        """Whether the template marks what the assistant generates."""
        self.call_form: tuple[str | None, bool] | None = None
        """Empty content of a message with calls, and whether arguments are text; None: without tool calls."""
        if self.text:
            self.call_form = self._find_call_form()

    def render(
        self,
        messages: Sequence[dict],
        tools: Sequence[dict] = (),
        kwargs: dict | None = None,
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Render messages. No tools are None: templates treat [] as tools.

        Raises ValueError if the template rejects the messages.
        """
        with self._refusals():
            return self.tokenizer.apply_chat_template(
                [self._adapt(message) for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **(self.kwargs if kwargs is None else kwargs),
            )

    def render_marked(self, messages: Sequence[dict], tools: Sequence[dict] = ()) -> tuple[str, Spans]:
        """Return the rendered messages, and the parts that the template marks as generated.

        Raises ValueError if the template rejects the messages.
        """
        tokenizer = self.tokenizer
        with self._refusals():
            # What apply_chat_template calls, which returns the parts in tokens instead of characters.
            texts, spans = render_jinja_template(
                [[self._adapt(message) for message in messages]],
                tools=list(tools) or None,
                chat_template=tokenizer.get_chat_template(tools=list(tools) or None),
                return_assistant_tokens_mask=True,
                **{**tokenizer.special_tokens_map, **self.kwargs},
            )
        return texts[0], spans[0]

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except (jinja2.TemplateError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"the chat template of {self.tokenizer.name_or_path} rejects the messages: {error}"
            ) from error

    def _adapt(self, message: dict) -> dict:
        """Return the message in the form that the template takes."""
        message = dict(message)
        calls = message.pop("tool_calls", None)
        if not calls or self.call_form is None:
            return message
        empty, as_text = self.call_form

        def convert(arguments: dict | str) -> dict | str:
            if as_text:
                return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            arguments = read_arguments(arguments) if isinstance(arguments, str) else arguments
            return arguments if isinstance(arguments, dict) else {"arguments": arguments}

        return {
            **message,
            "content": message.get("content") or empty,
            "tool_calls": [
                {**c, "function": {**c["function"], "arguments": convert(c["function"].get("arguments", {}))}}
                for c in calls
            ],
        }

    def _find_call_form(self) -> tuple[str | None, bool] | None:
        turn = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        for form in (("", False), (None, False), ("", True), (None, True)):
            self.call_form = form
            try:
                text = self.render([QUESTION, turn])
            except ValueError:
                continue
            if CALL["function"]["name"] in text:
                return form
        return None


def read_arguments(text: str) -> dict | str:
    """Return the JSON object that the text holds, or the text if it holds none."""
    value = read_json(text)
    return value if isinstance(value, dict) else text


def read_json(text: str, default: Any = None) -> Any:
    """Return the JSON value that the text holds, or `default` if it holds none.

    A value nested deeper than MAX_LEVELS is none: pickling or rendering it could exceed Python's limit of
    recursion.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return default
    return value if _is_within(value, MAX_LEVELS) else default


def _is_within(value: Any, levels: int) -> bool:
    if not isinstance(value, (dict, list)):
        return True
    children = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_within(child, levels - 1) for child in children)
