"""Converts the messages of data files to one form, whichever library wrote them, and renders them.

The form is OpenAI's. `role` is system, user, assistant or tool. `content` is a text, or a list of parts if
there are images. `tool_calls` are {type: function, function: {name, arguments}}, with the arguments as an
object. Reasoning is in `reasoning_content`. Other known names are converted: for example, `from: human`
becomes `role: user`. One line of the log lists the conversions. A message that could only be converted by a
guess is refused. Each rendered chat is compared with its messages (`rl.data.completeness`). A key of messages
that changes no rendering is refused.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from rl.data.chat_template import REASONING_KEYS, ChatTemplate, read_json
from rl.data.completeness import Completeness
from rl.data.reading import FileRow, describe
from rl.data.special_tokens import first_special

log = logging.getLogger(__name__)

Messages = list[dict[str, Any]]
"""A chat: {role, content} and other keys that the chat template uses (name, tool_calls, ...)."""
ROLES = ("system", "user", "assistant", "tool")
ALIASES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "chatbot", "ai", "model"), "assistant"),
    "developer": "system",
    **dict.fromkeys(
        ("function", "observation", "ipython", "environment")
        + ("tool_response", "tool_result", "tool_results", "function_response"),
        "tool",
    ),
    **dict.fromkeys(CALL_ROLES := ("function_call", "tool_call"), "assistant"),
}
"""Role in data sets -> role of templates. A message with a role of CALL_ROLES has the JSON of a call as
content."""
KEYS = {"from": "role", "value": "content", "text": "content", "parts": "content"}
KEYS |= dict.fromkeys(REASONING_KEYS, REASONING_KEYS[0])
"""Key in data sets -> key of templates."""
WEIGHTS = ("weight", "train", "training", "loss")
"""Keys that say whether a turn of the assistant has a loss, with 1 or 0. If a message has several of them,
they must agree."""
SYSTEM_COLUMNS = ("system", "system_prompt")
MEDIA_COLUMNS = ("images", "image", "videos", "audios")
UNREAD_COLUMNS = dict.fromkeys(MEDIA_COLUMNS, "set data.image_key for images in prompts")
UNREAD_COLUMNS["chat_template_kwargs"] = "set data.template_kwargs for all rows"
UNREAD_COLUMNS["functions"] = "rename it to tools if it holds the schemas of tools"
UNREAD_COLUMNS["documents"] = "write them into a message"
COLUMNS = ("tools", *SYSTEM_COLUMNS, *UNREAD_COLUMNS)
"""Columns beside the messages that belong to the policy's input, for example one with the system message."""
INPUTS = ("input", "context")
"""Columns with the second part of a prompt whose first part is in a column `instruction` (Alpaca, Dolly)."""
TEXT_PARTS = ("text", "input_text", "output_text")
READ = {"role", "content", "tool_calls", REASONING_KEYS[0]}
"""Keys of a message whose values are compared with the rendered text."""
OF_TOOLS = {"name", "tool_call_id"}
"""Keys of a tool's message that repeat a field of the call."""
TRIALS = 32
"""Maximum number of chats that are rendered without a key to find out whether the template reads the key."""


class MessageReader:
    """Reads and renders the messages of one data set.

    Args:
        reads_weights: whether a message with weight 0 has no loss.
        reads_images: whether messages may have parts that are images.
        reads_strings: whether a string is the message of a user.
    """

    def __init__(
        self,
        template: ChatTemplate,
        *,
        reads_weights: bool = False,
        reads_images: bool = False,
        reads_strings: bool = False,
    ):
        self.tokenizer, self.template = template.tokenizer, template
        self._reads_weights, self._reads_images = reads_weights, reads_images
        self._reads_strings = reads_strings
        self.completeness = Completeness(template)
        if template.clock:
            text = (
                f"the chat template of {self.tokenizer.name_or_path} writes {template.clock} into each "
                "prompt, so a run that continues later has other prompts; fix the time in "
                "chat_template.jinja, or in a variable that it reads, such as "
                "data.template_kwargs={date_string: ...}"
            )
            if template.clock == "the time of day":
                raise ValueError(f"{text}.")
            log.warning(text)
        self._changed: Counter[str] = Counter()
        self._trials: Counter[tuple[str, str]] = Counter()
        self._unread: dict[tuple[str, str], str] = {}
        """(role, key) of messages, if no rendering so far has changed with the key -> the first place where
        it occurs."""

    def read(self, row: FileRow, column: str, *, is_text: bool = True) -> Messages | str:
        """Return the messages in a column, in the form of templates and without empty keys, or the column's
        text.

        is_text: whether the column may hold a text.

        Raises ValueError, with the place of the row, for other values.
        """
        value = row.values[column]
        if self._reads_strings and isinstance(value, str):
            value = self._of_user(value, f"{row.place}: column {column!r}")
        is_chat = isinstance(value, list) and value and all(isinstance(each, dict) for each in value)
        try:
            messages = self.normal(value, lambda item: without_nulls(item, row)) if is_chat else None
            messages = self._with_columns(messages, row)
            if rest := [name for name in INPUTS if column == "instruction" and row.values.get(name)]:
                raise ValueError(
                    f"the row has the rest of the prompt in the column {rest[0]!r}, which the run does not "
                    "read; write both into one column, and name it in data.prompt_key"
                )
        except ValueError as error:
            raise ValueError(f"{row.place}: column {column!r}: {error}.") from error
        if messages is None and not (is_text and isinstance(value, str)):
            kinds = f"{'a string or ' if is_text else ''}a list of {{role, content}} messages"
            raise ValueError(f"{row.place}: column {column!r} must be {kinds}, not {describe(value)}.")
        return value if messages is None else messages

    def _of_user(self, text: str, place: str) -> Messages:
        """Return a text as the message of a user. Raises ValueError if it cannot be one."""
        if not text.strip():
            raise ValueError(f"{place} is empty; write a prompt, or leave out the row.")
        if token := first_special(text, self.tokenizer):
            raise ValueError(
                f"{place} begins with {token}, so the chat template has rendered it already; leave out "
                "data.string_prompts=user."
            )
        return [{"role": "user", "content": text}]

    def _with_columns(self, messages: Messages | None, row: FileRow) -> Messages | None:
        """Return the messages, preceded by the system message if it has its own column.

        messages: None if the column holds a text.

        Raises ValueError for columns that belong to the policy's input but that the run does not read.
        """
        for name, remedy in UNREAD_COLUMNS.items():
            if row.values.get(name) and not (self._reads_images and name in MEDIA_COLUMNS):
                raise ValueError(
                    f"the row has the column {name!r}, which the run does not read; {remedy}, or remove the "
                    "column"
                )
        column = next((name for name in SYSTEM_COLUMNS if row.values.get(name)), None)
        if column is None or messages is not None and messages[0]["role"] == "assistant":  # a response
            return messages
        text = row.values[column]
        if messages is None or not isinstance(text, str) or messages[0]["role"] == "system":
            raise ValueError(
                f"the column {column!r}, {describe(text)}, cannot be the first message of this chat; write "
                "the system's message into the messages, and remove the column"
            )
        self._changed[f"column {column} -> message of role system"] += 1
        return [{"role": "system", "content": text}, *messages]

    def normal(self, messages: Messages, clean: Callable[[Any], Any] = lambda value: value) -> Messages:
        """Return messages in the form of templates. clean: function that removes keys that a file format
        added."""
        found: Messages = []
        open_ids: list[str] = []
        count = 0
        for number, message in enumerate(messages, start=1):
            try:
                normal = self._normal({key: clean(item) for key, item in message.items() if item is not None})
            except ValueError as error:
                raise ValueError(f"message {number} of {len(messages)} {error}") from error
            for call in normal.get("tool_calls", []):
                if "id" not in call and "tool_calls" not in message:  # OpenAI's older form has no ids
                    call["id"] = f"call{count:05d}"
                    count += 1
                    open_ids.append(call["id"])
            if normal["role"] == "tool" and open_ids:
                normal.setdefault("tool_call_id", open_ids.pop(0))
            is_call = message.get("role", message.get("from")) in CALL_ROLES
            if is_call and found and found[-1].get("tool_calls") and normal.keys() == found[-1].keys():
                found[-1]["tool_calls"] += normal["tool_calls"]  # parallel calls belong to one turn
            else:
                found.append(normal)
        return found

    def render(self, messages: Messages, tools: list[dict], row: FileRow, *, column: str) -> str:
        """Render a chat with the generation prompt.

        Raises ValueError if there is no template, or if the template rejects the messages or leaves out a
        part.
        """
        name = self.tokenizer.name_or_path
        if not self.template.text:
            wanted, remedy = f"column {column!r} holds messages", "prepare the prompts as strings"
            if self._reads_strings:
                wanted, remedy = "data.string_prompts=user needs a chat template", "leave it out"
            raise ValueError(
                f"{row.place}: {wanted}, but the tokenizer of {name} has no chat template; use an instruct "
                f"model, or {remedy}."
            )
        try:
            text = self.template.render(messages, tools)
            self.compare(messages, tools, text, row, generation_prompt=True)
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}.") from error
        return text

    def compare(
        self, messages: Messages, tools: list[dict], text: str, row: FileRow, *, generation_prompt: bool
    ) -> None:
        """Raise ValueError if the rendered text lacks a tool or a part of the messages.

        Also record keys that the template does not read, for `finish`.
        """

        def rendered(chat: Messages) -> str:
            return self.template.render(chat, tools, generation_prompt=generation_prompt)

        self.completeness.check(messages, tools, text, generation_prompt=generation_prompt)
        read = READ | {"weight"} if self._reads_weights else READ
        for number, message in enumerate(messages):
            for key in message.keys() - read - (OF_TOOLS if message["role"] == "tool" else set()):
                name = message["role"], key
                if self._trials[name] and name not in self._unread or self._trials[name] >= TRIALS:
                    continue
                self._trials[name] += 1
                self._unread.setdefault(name, row.place)
                rest = {k: value for k, value in message.items() if k != key}
                without = [*messages[:number], rest, *messages[number + 1 :]]
                if rendered(without) != rendered(messages):
                    del self._unread[name]

    def finish(self, source: str) -> None:
        """Log how the messages were converted. Raises ValueError if nothing reads a key of the messages.

        source: name of the data set.
        """
        if self._changed:
            changes = ", ".join(f"{what} ({count})" for what, count in self._changed.most_common())
            log.info("messages of %s were converted for the chat template: %s", source, changes)
        if self._unread:
            keys = ", ".join(f"{key!r} of role {role}" for role, key in sorted(self._unread))
            weights = [key for _, key in self._unread if key in WEIGHTS]
            why = "weights of turns count only in chats that are trained; " if weights else ""
            raise ValueError(
                f"{next(iter(self._unread.values()))}: nothing reads these keys of messages: {keys}; neither "
                f"the chat template of {self.tokenizer.name_or_path} nor the run uses them. {why}Remove them "
                "from the data, or use a template that renders them."
            )

    # One message ------------------------------------------------------------------------------------------

    def _normal(self, message: dict) -> dict:
        """Return one message in the form of templates.

        Raises ValueError whose text continues the sentence "message 1 of 3 ...".
        """
        found: dict[str, Any] = {}
        for key, value in message.items():
            name = KEYS.get(key, key)
            if name == REASONING_KEYS[0] and not isinstance(value, str):
                if key == name:
                    raise ValueError(f"has the {key} {describe(value)}; it must be a text")
                name = key
            if name != key and (name in message or name in found):
                if message.get(name, found.get(name)) != value and value:
                    raise ValueError(f"has both {name!r} and {key!r}; keep one of them")
                continue
            if value or isinstance(value, (int, float)) or name in ("role", "content"):
                found[name] = value
                if name != key:
                    self._changed[f"key {key} -> {name}"] += 1
        if "role" not in found:
            raise ValueError(f"has no role, only {', '.join(map(repr, message))}; add it")
        written, found["role"] = found["role"], self._role(found["role"])
        calls = self._calls(found, written)
        if "content" in found:
            found["content"] = self._content(found["content"], found["role"])
        if calls:
            found["tool_calls"] = calls
        elif "content" not in found:
            raise ValueError(f"(role {found['role']}) has no content; write an empty text if it has none")
        return self._weighed(found) if self._reads_weights else found

    def _role(self, role: Any) -> str:
        if role in ROLES:
            return role
        lower = role.strip().lower() if isinstance(role, str) else ""
        known = lower if lower in ROLES else ALIASES.get(lower)
        if isinstance(role, str) and known not in ("user", "assistant") and self.template.knows_role(role):
            return role
        if known is None:
            raise ValueError(
                f"has role {role!r}, which is not a known role and is not rendered by the chat "
                f"template of {self.tokenizer.name_or_path}; use {', '.join(ROLES[:-1])} or {ROLES[-1]}"
            )
        self._changed[f"role {role} -> {known}"] += 1
        return known

    def _content(self, content: Any, role: str) -> Any:
        """Return the content as a text, or as parts if it has images."""
        if isinstance(content, str):
            return content
        parts = content if isinstance(content, list) else []
        parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
        kinds = list(map(_kind, parts))
        known = (*TEXT_PARTS, "image") if self._reads_images else TEXT_PARTS
        if kinds and all(kind in known for kind in kinds):
            if "image" in kinds:
                return [
                    p if k == "image" else {"type": "text", "text": p["text"]} for p, k in zip(parts, kinds)
                ]
            self._changed["parts of text joined"] += 1
            return "".join(part["text"] for part in parts)
        if role == "tool" and not any(kinds):  # the result of a tool is a list, but not a list of parts
            self._changed["results of tools written as JSON"] += 1
            return json.dumps(content, ensure_ascii=False)
        for kind in kinds:
            if kind and kind not in known:
                remedy = "leave the part out, or write it as text"
                if "image" in kind:
                    remedy = "set data.image_key, and write {type: image} there and the image in that column"
                raise ValueError(f"(role {role}) has a part of type {kind!r}, which cannot be read; {remedy}")
        raise ValueError(
            f"(role {role}) has the content {describe(content)}; it must be a text, or a list of parts "
            "{type: text, text: ...}"
        )

    def _calls(self, message: dict, role: Any) -> list[dict]:
        """Remove the tool calls from a message, and return them in the form of templates."""
        calls = message.pop("tool_calls", None) or []
        if older := message.pop("function_call", None):
            self._changed["key function_call -> tool_calls"] += 1
            calls = [*calls, older]
        if isinstance(role, str) and role.strip().lower() in CALL_ROLES:
            calls, message["content"] = read_json(str(message.get("content")), message.get("content")), ""
            calls = calls if isinstance(calls, list) else [calls]
        calls = read_json(calls, calls) if isinstance(calls, str) else calls
        if not isinstance(calls, list):
            raise ValueError(f"has tool_calls {describe(calls)}; they must be a list")
        if calls and message["role"] != "assistant":
            raise ValueError(f"(role {message['role']}) has tool_calls, which only the assistant makes")
        return [self._call(read_json(call, call) if isinstance(call, str) else call) for call in calls]

    def _call(self, call: Any) -> dict:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"has the call {describe(call)}; it must be {{type: function, function: {{name, arguments}}}}"
            )
        key = "arguments" if "arguments" in function else "parameters"
        arguments = function.get(key) or {}
        if isinstance(arguments, str):
            arguments = read_json(arguments, arguments)
        if not isinstance(arguments, dict):
            raise ValueError(
                f"calls {function['name']} with the arguments {describe(arguments)}; they must be a JSON "
                "object, or its text"
            )
        if "function" not in call:
            self._changed["calls without the key function"] += 1
        ids = {"id": call["id"]} if call.get("id") else {}
        return {**ids, "type": "function", "function": {"name": function["name"], "arguments": arguments}}

    def _weighed(self, message: dict) -> dict:
        """Return a message with `weight` 0 if the turn has no loss, otherwise without `weight`."""
        weights = {key: message.pop(key) for key in WEIGHTS if key in message}
        if any(value not in (0, 1) for value in weights.values()):
            raise ValueError(f"has {_pairs(weights)}; a turn is trained or not, so write 1 or 0")
        if len(set(weights.values())) > 1:
            raise ValueError(f"has {_pairs(weights)}, which contradict each other; keep one of them")
        is_turn = message["role"] == "assistant"
        if not is_turn and 1 in weights.values():
            raise ValueError(
                f"(role {message['role']}) has {_pairs(weights)}, but only turns of the assistant are "
                "trained; write 0, or remove the key, and to train all messages of the conversations in "
                "data.messages_key set data.train_on=all"
            )
        return message | {"weight": 0} if is_turn and 0 in weights.values() else message


def _pairs(values: dict) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in values.items())


def without_nulls(value: Any, row: FileRow) -> Any:
    """Return the value without keys that are None, at any depth. A value from a JSONL file stays unchanged.

    In the other formats all objects of a column have the same keys, so that None means no value.
    """
    if row.path.suffix in (".jsonl", ".json"):
        return value
    if isinstance(value, list):
        return [without_nulls(item, row) for item in value]
    if isinstance(value, dict):
        return {key: without_nulls(item, row) for key, item in value.items() if item is not None}
    return value


def _kind(part: Any) -> str:
    """Return the type of a part of a message's content; "" if the value is not a part."""
    if not isinstance(part, dict):
        return ""
    kind = "text" if set(part) == {"text"} else str(part.get("type") or "")
    return "" if kind in TEXT_PARTS and not isinstance(part.get("text"), str) else kind


def tools_of(row: FileRow) -> list[dict]:
    """Return the schemas of tools in the column `tools`.

    The column holds a list of objects, a list of their JSON texts, or the JSON text of a list.
    """
    value = row.values.get("tools")
    value = read_json(value, value) if isinstance(value, str) and value.strip() else value or []
    tools = [read_json(tool, tool) if isinstance(tool, str) else tool for tool in without_nulls(value, row)]
    if isinstance(value, str) or not all(map(_is_tool, tools)):
        raise ValueError(
            f"{row.place}: column 'tools' must be a list of tool schemas, or JSON of one, not "
            f"{describe(row.values['tools'])}."
        )
    # In OpenAI's newer interface the schemas are flat: name and parameters stand beside the type.
    flat = [{key: item for key, item in tool.items() if key != "type"} for tool in tools]
    return [t if "function" in t else {"type": "function", "function": f} for t, f in zip(tools, flat)]


def _is_tool(tool: Any) -> bool:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
