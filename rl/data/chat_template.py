"""The chat template of a tokenizer, and the conversion of messages to the form that the template takes."""

import functools
import json
import re
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from rl.data.reading import is_within
from rl.data.special_tokens import hide, show, special_ids

QUESTION: dict[str, Any] = {"role": "user", "content": "question"}
ARGUMENTS = {"key": 'a "word" <b>', "number": 3, "flag": True, "several": [1, "a"]}
TYPES = {"key": "string", "number": "integer", "flag": "boolean", "several": "array"}
CALL: dict[str, Any] = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "lookup", "arguments": ARGUMENTS},
}
NAMED_CALL = {**CALL, "id": "functions.lookup:0"}
"""A tool call with an id that contains the function's name, as the template of Kimi requires."""
REPLY: dict[str, Any] = {"role": "tool", "tool_call_id": "call00000", "name": "lookup", "content": "b"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look a key up.",
        "parameters": {
            "type": "object",
            "properties": {key: {"type": kind, "description": key} for key, kind in TYPES.items()},
            "required": ["key"],
        },
    },
}
"""Example messages, with which templates are tried out."""
UNRENDERED = ("<|python_tag|>",)
"""Special tokens that a template contains, but writes only around calls of built-in tools."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "thought")
"""Keys under which a message may have its reasoning. Reading data moves the reasoning to the first of them;
a template gets it under the key that the template renders."""
MAX_LEVELS = 50
"""Maximum nesting of the arguments of a call."""

Spans = list[tuple[int, int]]
"""Parts of a text. Each part is the position of its first character and the position after its last one."""


def set_variables(tokenizer: PreTrainedTokenizerBase, variables: dict[str, Any]) -> None:
    """Set variables at the beginning of a tokenizer's chat template, so that every rendering has them.

    variables: `data.template_kwargs`, values by name.

    Raises ValueError if the template does not read one of the variables, or if there is no template.
    """
    if not variables:
        return
    templates = tokenizer.chat_template
    named = templates if isinstance(templates, dict) else {"": templates or ""}
    for name, value in variables.items():
        if not any(re.search(rf"\b{re.escape(name)}\b", text) for text in named.values()):
            raise ValueError(
                f"data.template_kwargs has {name}={value}, but the chat template of {tokenizer.name_or_path} "
                "does not read it; correct its name, or leave it out."
            )
    # The `repr` of a value from YAML is an expression that Jinja reads. The added newlines do not reach the
    # text, because transformers renders with trim_blocks, which drops the newline after a block.
    first = "".join(f"{{% set {name} = {value!r} %}}\n" for name, value in variables.items())
    changed = {name: first + text for name, text in named.items()}
    tokenizer.chat_template = changed if isinstance(templates, dict) else changed[""]


class ChatTemplate:
    """Renders chats with the template of a tokenizer.

    If the messages contain special tokens, the rendered text has them marked as plain text. `encode` of
    `rl.data.special_tokens` tokenizes such a text, and `show` returns it without the marks.

    Args:
        kwargs: further arguments of the template, such as enable_thinking.
        keeps_marks: whether special tokens around reasoning and calls stay special if the content of an
            assistant message contains them. The policy's own turns contain them.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, kwargs: dict | None = None, *, keeps_marks: bool = True
    ):
        self.tokenizer, self.kwargs, self._keeps_marks = tokenizer, kwargs or {}, keeps_marks
        self._roles: dict[str, bool] = {}
        self.text = "" if tokenizer.chat_template is None else tokenizer.get_chat_template(tools=[TOOL])
        """Source of the template; empty if the tokenizer has no template."""
        self.marks_turns = re.search(r"\{%-?\s*generation\s*-?%\}", self.text) is not None
        """Whether the template marks, with {% generation %}, the text that the assistant generates."""
        self.call_form: tuple[str | None, bool] | None = None
        """How a message with calls must look: the value of an empty content ("" or None), and whether the
        arguments of a call are text. None: the template does not render calls."""
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
        """Render messages. Raises ValueError if the template rejects them."""
        options = self.kwargs if kwargs is None else kwargs
        hidden = self._hidden(messages), hide(list(tools), self.tokenizer)
        return self._apply(*hidden, add_generation_prompt=generation_prompt, **options)[0]

    def marked(self, messages: Sequence[dict], tools: Sequence[dict] = ()) -> Spans:
        """Return the parts of the rendered text that the template marks as generated by the assistant."""
        hidden = self._hidden(messages), hide(list(tools), self.tokenizer)
        return self._apply(*hidden, return_assistant_tokens_mask=True, **self.kwargs)[1]

    def _apply(self, messages: list[dict], tools: list[dict], **options: Any) -> tuple[str, Spans]:
        """Render the messages as they are. Return the text, and the parts that the template marks as
        generated.

        An empty list of tools is passed as None, because templates treat [] as tools. Raises ValueError if
        the template rejects the messages.
        """
        tokenizer = self.tokenizer
        try:
            # apply_chat_template calls this function, too, but returns positions of tokens, not of
            # characters.
            found: Any = render_jinja_template(  # Any, because transformers annotates it as one text
                [messages],
                tools=list[Any](tools) or None,
                chat_template=tokenizer.get_chat_template(tools=tools or None),
                **{**tokenizer.special_tokens_map, **options},
            )
        except (jinja2.TemplateError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"the chat template of {tokenizer.name_or_path} rejects the messages: {error}"
            ) from error
        texts, spans = found
        return texts[0], spans[0] if spans else []

    def show(self, text: str) -> str:
        """Return a rendered text without the marks, as the model reads it."""
        return show(text, self.tokenizer)

    def _hidden(self, messages: Sequence[dict]) -> list[dict]:
        """Return messages in the template's form, with special tokens marked as text.

        With `keeps_marks`, the tokens around reasoning and calls stay special in the assistant's content.
        """
        adapted = [self.adapt(message) for message in messages]
        hidden = hide(adapted, self.tokenizer)
        for changed, message in zip(hidden, adapted):
            content = message.get("content")
            if self._keeps_marks and message.get("role") == "assistant" and changed.get("content") != content:
                changed["content"] = hide(content, self.tokenizer, self.turn_marks[1])
        return hidden

    # What the template does with examples -----------------------------------------------------------------

    def _try(self, messages: Sequence[dict], tools: Sequence[dict] = (), **options: Any) -> str:
        """Return the rendered messages; "" if the template rejects them."""
        adapted = [self._with_calls(message) for message in messages]
        try:
            return self._apply(adapted, list(tools), **{**self.kwargs, **options})[0]
        except ValueError:
            return ""

    def _find_call_form(self) -> tuple[str | None, bool] | None:
        forms = [(empty, as_text) for as_text in (False, True) for empty in ("", None)]
        for form, call in [(form, call) for call in (CALL, NAMED_CALL) for form in forms]:
            self.call_form = form
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            if CALL["function"]["name"] in self._try([QUESTION, turn], add_generation_prompt=True):
                return form
        return None

    @functools.cached_property
    def reasoning_key(self) -> str | None:
        """First key of REASONING_KEYS under which the template renders reasoning, in a turn with or without
        calls.

        None: the template renders none of the keys.
        """
        mark, calls = "~reasoning~", {"tool_calls": [CALL]}
        for key in REASONING_KEYS if self.text else ():
            turn: dict[str, Any] = {"role": "assistant", "content": "answer", key: mark}
            turns = [turn, {**turn, **calls}, {**turn, **calls, "content": ""}]
            if any(mark in self._try([QUESTION, turn]) for turn in turns):
                return key
        return None

    @functools.cached_property
    def shows_tools(self) -> bool:
        """Whether the template renders the schemas of tools."""
        name = "strange_tool"
        schema = {**TOOL, "function": {**TOOL["function"], "name": name}}
        return name in self._try([QUESTION], [schema])

    def knows_role(self, role: str) -> bool:
        """Return whether the template renders messages of this role, and not just as it renders any unknown
        role."""
        if role not in self._roles:
            mark, strange = "~content~", "strange~role"

            def render(role: str, is_first: bool) -> str:
                message = {"role": role, "content": mark}
                return self._try([message, QUESTION] if is_first else [QUESTION, message, QUESTION])

            self._roles[role] = any(
                mark in (text := render(role, is_first))
                and text != render(strange, is_first).replace(strange, role)
                for is_first in (True, False)
            )
        return self._roles[role]

    @functools.cached_property
    def clock(self) -> str:
        """The time that the template writes into each prompt: "the time of day", "today's date", or "" for
        none."""

        def rendered(time: datetime) -> list[str]:
            options = {"strftime_now": time.strftime}
            return [self._try([QUESTION], tools, **options) for tools in ((), [TOOL])]

        if "strftime_now" not in self.text:
            return ""
        morning = rendered(datetime(2001, 1, 1))
        if rendered(datetime(2001, 1, 1, 13, 59, 59)) != morning:
            return "the time of day"
        return "today's date" if rendered(datetime(2012, 12, 30)) != morning else ""

    @functools.cached_property
    def turn_marks(self) -> tuple[frozenset[str], frozenset[str]]:
        """Two sets of special tokens: the tokens that the template writes in turns of the assistant, and its
        subset, the tokens that the template writes in no other turn.

        Examples are <think> and </think>. For gpt-oss, <|start|> is one, too: it stands between two channels
        of a turn.
        """
        tokenizer = self.tokenizer
        special = set(tokenizer.convert_ids_to_tokens(sorted(special_ids(tokenizer))))
        if not self.text:
            return frozenset(), frozenset()

        def tokens(text: str) -> set[str]:
            return {token for token in special if token in text}

        user, prompt = (self._try([QUESTION], [TOOL], add_generation_prompt=own) for own in (False, True))
        opening = prompt.removeprefix(user) if prompt.startswith(user) else ""
        roles = tokens(self._try([QUESTION])) | {token for token in special if opening.startswith(token)}
        found = tokens(opening) - roles
        answer: dict[str, Any] = {"role": "assistant", "content": "answer"}
        thought = answer | {self.reasoning_key or REASONING_KEYS[0]: "reason"}
        calls = [{**thought, "content": "", "tool_calls": [call]} for call in (CALL, NAMED_CALL)]
        for turn in (answer, thought, *calls):
            text = self._try([QUESTION, turn], [TOOL])
            own = tokens(text.removeprefix(prompt).removeprefix(user))
            found |= own if text.startswith(prompt) else own - roles
        found |= {mark for mark in UNRENDERED if mark in self.text} & special
        found |= {mark.replace("/", "", 1) for mark in found} & special
        found -= {tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token}
        return frozenset(found), frozenset(found - roles)

    # Messages in the template's form ----------------------------------------------------------------------

    def adapt(self, message: dict) -> dict:
        """Return the message in the form that the template takes."""
        message = {key: value for key, value in message.items() if key != "weight"}
        if message.get(REASONING_KEYS[0]) and self.reasoning_key is not None:
            message[self.reasoning_key] = message.pop(REASONING_KEYS[0])
        return self._with_calls(message)

    def _with_calls(self, message: dict) -> dict:
        """Return the message with its calls in the form that the template takes."""
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


def template_of(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """Return the template of a tokenizer. The template is tried on example chats once, at the first call."""
    return _template_of(tokenizer, json.dumps(tokenizer.chat_template))


@functools.lru_cache(maxsize=8)
def _template_of(tokenizer: PreTrainedTokenizerBase, source: str) -> ChatTemplate:
    return ChatTemplate(tokenizer)


def read_arguments(text: str) -> dict | str:
    """Return the JSON object that the text holds, or the text itself if it holds none."""
    value = read_json(text)
    return value if isinstance(value, dict) else text


def read_json(text: str, default: Any = None) -> Any:
    """Return the JSON value that the text holds, or `default` if it holds none.

    A value nested deeper than MAX_LEVELS counts as no value, because pickling or rendering it could exceed
    Python's recursion limit.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return default
    return value if is_within(value, MAX_LEVELS) else default


def kept_ids(
    tokenizer: PreTrainedTokenizerBase, names: Sequence[str], ends: Collection[int] = (), *, key: str = ""
) -> frozenset[int]:
    """Return the ids of the special tokens that stay in the text of a response.

    names: special tokens; "all"; or "auto" for the tokens that the chat template writes around reasoning,
        channels and calls, for example <think> and </think>.
    ends: ids that end a turn. They never stay, and neither do eos, bos and padding.
    key: config key of `names`, with which the error begins.

    Raises ValueError for a name that is not a special token.
    """
    auto = template_of(tokenizer).turn_marks[0]
    special = list(special_ids(tokenizer))
    known = dict(zip(tokenizer.convert_ids_to_tokens(special), special))
    chosen: set[str] = set()
    for name in names:
        if name not in ("auto", "all") and name not in known:
            raise ValueError(
                f"{key} has {name!r}, which is not a special token of {tokenizer.name_or_path}; use auto, "
                f"all or some of {', '.join(sorted(known)[:20])}."
            )
        chosen |= auto if name == "auto" else known.keys() if name == "all" else {name}
    never = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, *ends}
    return frozenset({known[token] for token in chosen} - never)
