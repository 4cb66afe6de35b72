"""Converts messages to token ids, and finds the token ids between a sampled turn and the next request.

The token ids define a trajectory, and messages are derived from them. A sampled turn is never tokenised
again: its ids stay in the context as the engine sampled them. For example, the engine may sample two tokens
for a word that the tokenizer would write as one token. Both tokens stay. After a turn, only the tokens
between this turn and the next one are added. They come from one of three sources:

1. The package `renderers`, if it is installed and renders a set of conversations exactly as the model's
   template does (`rl.features.agents.renderer`).
2. The difference of two renderings by the template (`Chat._difference`). It is accepted only if the template
   keeps the sampled turn and renders everything before the turn as it did when the turn was sampled.
3. Plain tokenisation, for environments that begin with a text and for tokenizers without a template.

If no source keeps the earlier tokens, `Chat.extend` returns None.
"""

import functools
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from rl.data.chat_template import CALL, NAMED_CALL, QUESTION, REPLY, TOOL, ChatTemplate, kept_ids
from rl.data.completeness import texts_of
from rl.data.messages import MessageReader
from rl.data.special_tokens import decode, decode_responses, encode, hide
from rl.features.agents.environment import Messages, ToolCall
from rl.features.agents.renderer import Renderer, find_renderer
from rl.features.agents.tool_calls import FAMILIES, HERMES, as_message, find_family, is_call, parse_calls

log = logging.getLogger(__name__)

# These texts replace the parts of a sampled turn in a rendering. The turn itself is not rendered, because its
# text could spell special tokens, and malformed arguments make templates fail.
THINKING, CONTENT = "~thinking of the turn~", "~content of the turn~"
TAGS = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"))
"""Begin and end tags of thinking, by model family; the first pair is used for templates without tags."""


@dataclass(frozen=True)
class AssistantTurn:
    message: dict
    """The turn as a message: role, content, and reasoning_content and tool_calls if there are any."""
    tool_calls: tuple[ToolCall, ...]
    text: str
    """The whole text of the turn, including its thinking. Special tokens are removed unless
    `reward.keep_special_tokens` names them."""


class TooLong(ValueError):
    """Raised for a text that has more characters than the allowed number of tokens can hold."""


class CannotExtend(ValueError):
    """Raised if the template does not keep earlier tokens. The message says which rule the template
    breaks."""


class Chat:
    """Converts between messages and tokens for one tokenizer.

    Args:
        end_token_ids: ids that end a turn, besides the tokenizer's eos (`end_token_ids`).
        on_rewrite: "refuse" makes `check` raise for a template that changes earlier tokens.
        template_kwargs: further arguments of the chat template, such as enable_thinking.
        kept: ids of special tokens that stay in the text of a turn (`reward.keep_special_tokens`). None: the
            same as the setting "auto".
        uses_renderer: whether the package `renderers` may be used. It cannot render images.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_token_ids: Iterable[int] = (),
        on_rewrite: str = "refuse",
        template_kwargs: dict | None = None,
        kept: Collection[int] | None = None,
        uses_renderer: bool = True,
    ):
        self.tokenizer, self.on_rewrite = tokenizer, on_rewrite
        self._template = ChatTemplate(tokenizer, template_kwargs)
        ends = {*end_token_ids, tokenizer.eos_token_id} - {None}
        self._ends = _tokens_of([int(id) for id in ends], tokenizer)
        self._kept = kept_ids(tokenizer, ["auto"], ends) if kept is None else kept
        self._family, self._reads_calls = HERMES, True
        self._takes_reasoning = self._template.reasoning_key is not None
        self._reader = MessageReader(self._template, reads_images=True)
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        self._opens_thinking = self._thinks = False
        self._tags = next((tags for tags in TAGS if tags[1] in self._template.text), TAGS[0])
        self._renderer: Renderer | None = None
        if self._template.text:
            prompt = self._template.render([QUESTION])
            opening, closing = self._tags
            self._opens_thinking = prompt.rstrip().endswith(opening)
            self._thinks = closing in self._template.text and not prompt.rstrip().endswith(closing)
            if self._template.call_form is not None:
                found = [find_family(self._written(call), [TOOL], call) for call in (CALL, NAMED_CALL)]
                self._reads_calls = any(found)
                self._family = next(filter(None, found), HERMES)
            if uses_renderer:
                self._renderer = find_renderer(
                    tokenizer,
                    lambda *conversation: self._encode(self._template.render(*conversation)),
                    self._template.kwargs,
                    parallel=self._family.parallel,
                )
        if self._renderer is not None:
            self._ends |= _tokens_of(list(self._renderer.end_token_ids), tokenizer)

    @property
    def description(self) -> str:
        """Describe the source of the tokens between turns, for the log."""
        if not self._template.text:
            return "plain tokens"
        if self._renderer is not None:
            return f"{self._renderer.name} of renderers, else the difference of two renderings"
        return f"difference of two renderings, tool calls as in {self._family.name}"

    # Conversations ----------------------------------------------------------------------------------------

    def open(self, messages: Messages, tools: Sequence[dict], max_tokens: int = 0) -> np.ndarray:
        """Return the token ids of a conversation, int32, up to and including the generation prompt.

        max_tokens: a text that is certain to have more tokens than this is not encoded, because the encoding
            of a very large text would block the replica. 0: any text is encoded.

        Raises ValueError if the template rejects the messages, or if tool calls in the form of this template
        cannot be read. Raises TooLong if the text exceeds the limit.
        """
        is_bare = is_plain = self._is_plain(messages)
        if is_plain:
            text = "".join(message["content"] for message in messages)
            is_bare = not (self.tokenizer.bos_token and text.startswith(self.tokenizer.bos_token))
        else:
            if tools and self.call_problem:
                raise ValueError(self.call_problem)
            text = self._template.render(messages, tools)
        if max_tokens and len(text) > max_tokens * self._longest_token:
            raise TooLong(f"a prompt of {len(text)} characters has more than {max_tokens} tokens")
        return self._encode(text, add_special_tokens=is_bare)

    def normal(self, messages: Messages) -> Messages:
        """Return messages in the form that templates take. Raises ValueError for an entry that is no
        message."""
        return messages if self._is_plain(messages) else self._reader.normal(messages)

    def refuse_lost(self, messages: Messages, tools: Sequence[dict]) -> None:
        """Raise ValueError if the policy would not see a message or a tool of its environment.

        If the template leaves tools out, the messages must describe them; each tool's name must then appear
        in the messages. The policy's own turns are not compared, because their tokens are in the context.
        """
        if not self._is_plain(messages):
            shown = tools if self._template.shows_tools else ()
            text = self._template.render(messages, shown)
            self._reader.completeness.check(messages, shown, text, generation_prompt=True, with_turns=False)
            if shown:
                return
        text = "".join(holder[key] for message in messages for holder, key in texts_of(message))
        if lost := [tool["function"]["name"] for tool in tools if tool["function"]["name"] not in text]:
            raise ValueError(
                f"the policy would not see the tool {lost[0]!r}: the chat template of "
                f"{self.tokenizer.name_or_path} leaves tools out, and the first messages do not name it; use "
                "a template with tools, or describe the tools in the messages of reset"
            )

    def as_messages(self, token_ids: np.ndarray) -> Messages:
        """Return a context as one message of text, for a conversation whose messages are unknown."""
        return [{"role": "text", "content": self._decode(token_ids)}]

    def parse(self, turn: np.ndarray, tools: Sequence[dict], number: int) -> AssistantTurn:
        """Return a sampled turn as a message. `number` is the number of the turn in its trajectory.

        Tool calls are looked for only if there are tools, and only after the thinking. For example, a call
        that the policy writes within <think> is not made.
        """
        ids = self._without_end(turn)
        calls: tuple[ToolCall, ...] = ()
        thinking, is_open, content = self._split_thinking(self._decode(ids))
        if not self._reads_calls and self._renderer is not None and not is_open:
            thinking, content, calls = self._renderer.parse(ids, tools, number)
        elif not is_open and (tools or self._family.split):
            content, found = parse_calls(self._family, content, tools, number)
            calls = found if tools else ()
        if calls and self._template.call_form is None:
            content = self._decode(ids)
        message = self._message(thinking or "", content, [as_message(call) for call in calls])
        return AssistantTurn(message, calls, decode_responses([ids], self.tokenizer, self._kept)[0])

    def extend(
        self,
        context: np.ndarray,
        turn: np.ndarray,
        messages: Messages,
        new_messages: Messages,
        tools: Sequence[dict],
    ) -> np.ndarray | None:
        """Return the token ids between a sampled turn and the next one, int32, or None.

        The next request is context + turn + the returned ids. A turn that was truncated, or that ended at a
        stop string, has no end token. In this case the returned ids first close an open thinking tag and then
        the turn. The result is None if it cannot be proven that the template keeps the earlier tokens.

        Args:
            context: ids before the sampled turn.
            turn: ids of the sampled turn.
            messages: the conversation up to and including the message of the turn.
            new_messages: messages in reply to the turn, none of them from the assistant.
        """
        if self._is_plain(messages):
            text = "".join(message["content"] for message in new_messages)
            return self._encode(hide(text, self.tokenizer), add_special_tokens=False)
        try:
            return self._between(context, turn, messages, new_messages, tools)
        except CannotExtend:
            return None

    def find_strange(
        self, given: Sequence[np.ndarray], messages: Messages, tools: Sequence[dict]
    ) -> int | None:
        """Return the index of the first entry of `given` that a rendering of the conversation lacks, or None.

        In the rendering, stand-ins replace the sampled turns. It must contain the text of each entry, without
        blanks, in order, directly after the end of a turn. given: the results of `extend` for consecutive
        turns, int32 [S] each. messages: the conversation with the messages of the last result.
        """
        texts = [_squeezed(self._decode(ids)).removeprefix(self._tags[1]) for ids in given]
        first: int | None = None
        for rendered in self._renderings(messages, tools) if texts else ():
            position, first = 0, None
            for number, text in enumerate(texts):
                found = rendered.find(text, position)
                while found >= 0 and not self._follows_turn(text, rendered[position:found], messages):
                    found = rendered.find(text, found + 1)
                if found < 0:
                    first = number
                    break
                position = found + len(text)
            if first is None:
                return None
        return first

    def _follows_turn(self, text: str, before: str, messages: Messages) -> bool:
        """Return whether nothing is missing between the end of a turn's stand-in and the text after it."""
        if self._is_plain(messages):
            turns = [_stand_in(message)["content"] for message in messages if message["role"] == "assistant"]
            return not all(turns) or before.endswith(_squeezed(CONTENT))
        ends = tuple(map(_squeezed, self._ends.values()))
        return text.startswith(ends) or before.endswith(ends)

    def _renderings(self, messages: Messages, tools: Sequence[dict]) -> Iterator[str]:
        """Yield the text of a conversation in each form that the tokens between turns may have."""
        stand_ins = [_stand_in(m) if m["role"] == "assistant" else m for m in messages]
        if self._is_plain(messages):
            text = "".join(message["content"] for message in stand_ins)
        else:
            try:
                text = self._template.render(stand_ins, tools)
            except ValueError:  # the renderer takes messages that the template rejects
                return
        yield _squeezed(self._template.show(text))
        yield _squeezed(self._decode(self._encode(text)))  # some tokenizers normalise texts
        if self._renderer is not None and not self._is_plain(messages):
            yield _squeezed(self._decode(self._renderer.render(stand_ins, tools)))

    def grammar(self, tools: Sequence[dict]) -> str:
        """Return a structural tag of xgrammar for `Request.grammar`: it makes tool calls fit the tools'
        schemas.

        The tag allows free text, optional thinking, and calls in the form of the model. Raises ValueError if
        xgrammar does not know this form, or if it rejects the schema of a tool; the error names the tool.
        """
        if not self._family.grammar or self._template.call_form is None:
            raise ValueError(
                "agents.structured_tool_calls=true: xgrammar has no grammar for tool calls as the template "
                f"of {self.tokenizer.name_or_path} writes them; set agents.structured_tool_calls=false."
            )
        try:
            return self._structural_tag(tools)
        except (RuntimeError, ValueError) as error:
            rejected = [tool["function"]["name"] for tool in tools if not self._has_grammar(tool)]
            raise ValueError(
                f"agents.structured_tool_calls=true: xgrammar rejects the schema of {', '.join(rejected)}: "
                f"{error}; correct the schema, or set agents.structured_tool_calls=false."
            ) from error

    def _structural_tag(self, tools: Sequence[dict]) -> str:
        """Return the structural tag. Raises RuntimeError or ValueError, as xgrammar does, for a bad
        schema."""
        from xgrammar import Grammar, get_model_structural_tag

        thinking: Literal["enabled", "auto"] = "enabled" if self._opens_thinking else "auto"
        found = get_model_structural_tag(self._family.grammar, tools=list(tools), reasoning=thinking)
        tag = found.model_dump_json(exclude_none=True)
        Grammar.from_structural_tag(tag)  # vLLM compiles it in add_request, where an error ends the run
        return tag

    def _has_grammar(self, tool: dict) -> bool:
        try:
            self._structural_tag([tool])
        except (RuntimeError, ValueError):
            return False
        return True

    def check(self, tools: Sequence[dict], opening: Messages | None = None) -> None:
        """Raise ValueError if tool calls cannot be read, or if the template changes earlier tokens.

        A template that changes earlier tokens is allowed unless on_rewrite is "refuse".

        The check tries a conversation of four turns, because some templates keep only the last turns. With
        tools, the first and the last turn have one call; the second and the third have two calls if the form
        of the model allows several. Without tools, a user message answers each turn. The first and the third
        turn contain thinking, unless the template has no thinking or its generation prompt closes the
        thinking tag. The second and the third turn have no content if they have calls.

        Args:
            opening: messages with which an environment begins. Some templates fail only if a conversation has
                a system message.
        """
        messages = [*(opening or [QUESTION])]
        if tools and self.call_problem:
            raise ValueError(self.call_problem)
        if tools and self._template.text:
            call: dict = {"role": "assistant", "content": "", "tool_calls": [CALL]}
            self.refuse_lost([{**QUESTION, "content": str(tools)}, call, REPLY], tools)
            if not self._template.shows_tools:
                log.warning(
                    "the chat template of %s leaves tools out; the policy knows them only from the "
                    "environment's messages",
                    self.tokenizer.name_or_path,
                )
        if self.on_rewrite != "refuse" or self._is_plain(messages):
            return
        context = self.open(messages, tools)
        several = 2 if self._family.parallel else 1
        for number, num_calls in enumerate([1, several, several, 1] if tools else [0] * 4, 1):
            name = "functions.lookup:" if self._family.names_ids else "call"
            calls = [{**CALL, "id": f"{name}{number:03d}{i:02d}"} for i in range(num_calls)]
            thinking = "reason" if self._thinks and number % 2 else ""
            content = "" if number in (2, 3) and calls else "answer"
            turn = self._encode(self._thinking_tags(thinking) + content + self.tokenizer.eos_token)
            messages.append(self._message(thinking, content, calls))
            reply: Messages = [{**REPLY, "tool_call_id": call["id"]} for call in calls] or [QUESTION]
            try:
                added = self._between(context, turn, messages, reply, tools)
            except CannotExtend as error:
                kind = f"turn {number} ({'thinking, ' if thinking else ''}{num_calls} tool calls)"
                raise ValueError(
                    f"agents.on_rewrite=refuse: the chat template of {self.tokenizer.name_or_path} does not "
                    f"keep the tokens of {kind} when a message of role {reply[0]['role']} follows: {error}. "
                    "Use a template that only appends, or agents.on_rewrite=new_row, which begins a new "
                    "training row there."
                ) from error
            context = np.concatenate([context, turn, added])
            messages += reply

    @functools.cached_property
    def call_problem(self) -> str:
        """Return why a call that the template writes is not read back unchanged. Returns "" if it is.

        A template that cannot write calls passes, because the policy's calls are then read in the form
        HERMES.
        """
        if self._template.call_form is None:
            return ""
        for call in (CALL, NAMED_CALL):
            text = self._written(call)
            read = self.parse(self._encode(text), [TOOL], 0).tool_calls
            if is_call(read, call):
                return ""
        name = self.tokenizer.name_or_path
        return (
            f"the chat template of {name} writes a call of a tool as {text!r:.400}, which is read as {read}, "
            "so no call of the policy would reach a tool; use a template that writes calls in the form of "
            f"{', '.join(family.name for family in FAMILIES)}, install the package renderers if it knows the "
            "model, or use an environment without tools, with step or run."
        )

    def _written(self, call: dict) -> str:
        """Return the text of a turn with one call, as the template writes it, without the end token."""
        messages: Messages = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            whole = self._template.render(messages, [TOOL], generation_prompt=False)
        except ValueError:  # some templates accept only ids of their own form
            return ""
        prompt = self._template.render([QUESTION], [TOOL])
        text = whole.removeprefix(prompt)
        if not whole.startswith(prompt):
            shorter = self._template.render([QUESTION], [TOOL], generation_prompt=False)
            text = self._thinking_tags("") + whole.removeprefix(shorter)
        return re.split("|".join(map(re.escape, self._ends.values())), text)[0] if self._ends else text

    def _thinking_tags(self, thinking: str) -> str:
        """Return the beginning of a turn: the thinking with its tags.

        If the generation prompt opens the thinking tag, the result closes it, also for an empty thinking.
        """
        opening = "" if self._opens_thinking else f"{self._tags[0]}\n"
        return f"{opening}{thinking}\n{self._tags[1]}\n\n" if thinking or self._opens_thinking else ""

    def _between(
        self, context: np.ndarray, turn: np.ndarray, messages: Messages, new: Messages, tools: Sequence[dict]
    ) -> np.ndarray:
        """Do the work of `extend` for a template. Raises CannotExtend instead of returning None."""
        bridged = None
        if self._renderer is not None and hide(new, self.tokenizer) == new:
            bridged = self._renderer.bridge(context, turn, new, tools)
        return self._difference(turn, messages, new, tools) if bridged is None else bridged

    def _message(self, thinking: str, content: str, calls: list[dict]) -> dict:
        """Return a message of the assistant. If the template has no key for thinking, it goes into the
        content."""
        message: dict = {"role": "assistant", "content": content}
        if thinking and self._takes_reasoning:
            message["reasoning_content"] = thinking
        elif thinking:
            message["content"] = f"<think>\n{thinking}\n</think>\n\n{content}"
        return message | ({"tool_calls": calls} if calls else {})

    # Tokens and text --------------------------------------------------------------------------------------

    def _is_plain(self, messages: Messages) -> bool:
        return not self._template.text or messages[0]["role"] == "text"

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> np.ndarray:
        return encode([text], self.tokenizer, add_special_tokens=add_special_tokens)[0][0]

    def _decode(self, ids: np.ndarray) -> str:
        return decode(ids.tolist(), self.tokenizer)

    def _without_end(self, turn: np.ndarray) -> np.ndarray:
        return turn[:-1] if len(turn) and int(turn[-1]) in self._ends else turn

    def _split_thinking(self, text: str) -> tuple[str | None, bool, str]:
        """Return the thinking at the beginning of a turn (None if there is none), whether its tag is still
        open, and the rest of the turn."""
        if self._family.split is not None:
            return self._family.split(text)
        body, (opening, closing) = text.lstrip(), self._tags
        if not (self._opens_thinking or body.startswith(opening)):
            return None, False, text
        thinking, tag, rest = body.removeprefix(opening).partition(closing)
        return thinking.strip("\n"), not tag, rest.lstrip("\n")

    # Templates --------------------------------------------------------------------------------------------

    def _difference(
        self, turn: np.ndarray, messages: Messages, new_messages: Messages, tools: Sequence[dict]
    ) -> np.ndarray:
        """Return the ids between the turn and the next one, from two renderings: before and after the turn.

        In both renderings, stand-ins with the same parts replace the sampled turns. Raises CannotExtend.
        """
        stand_ins = [_stand_in(m) if m["role"] == "assistant" else m for m in messages]
        try:
            before = self._template.render(stand_ins[:-1], tools)
            after = self._template.render([*stand_ins, *new_messages], tools)
        except ValueError as error:
            raise CannotExtend(str(error)) from error
        if not after.startswith(before):
            raise CannotExtend("it renders the messages before the turn differently")
        position = len(before)
        for kind, part in self._parts(stand_ins[-1]):
            position = after.find(part, position)
            if position < 0:
                raise CannotExtend(f"it drops the {kind} of the turn")
            position += len(part)
        found = [
            (after.find(text, position), id) for id, text in self._ends.items() if text in after[position:]
        ]
        if not found:
            raise CannotExtend(f"none of the end tokens {sorted(self._ends.values())} ends the turn")
        position, end = min(found)
        # The text to encode begins with the end token, because some tokenizers encode the beginning of a text
        # differently.
        ids = self._encode(after[position:])
        if len(ids) == 0 or ids[0] != end:
            raise CannotExtend(f"the end token {self._ends[end]!r} is not one token")
        if len(turn) and turn[-1] == end:
            return ids[1:]
        _, is_open, _ = self._split_thinking(self._decode(self._without_end(turn)))
        if not is_open:
            return ids
        if len(self._without_end(turn)) < len(turn):
            raise CannotExtend("the turn ended within its thinking")
        return np.concatenate([self._encode(self._tags[1]), ids])

    def _parts(self, stand_in: dict) -> list[tuple[str, str]]:
        """Return the parts of a stand-in that a rendering must contain, in order.

        A turn with tool calls need not show its content, because many templates have no place for content
        beside calls. The tokens of the content stay in the context in any case.
        """
        content = stand_in["content"]
        calls = stand_in.get("tool_calls", []) if self._template.call_form is not None else []
        parts = []
        if "reasoning_content" in stand_in or THINKING in content:
            parts.append(("thinking", THINKING))
        if CONTENT in content and not calls:
            parts.append(("content", CONTENT))
        return parts + [("tool calls", call["function"]["name"]) for call in calls]


def _squeezed(text: str) -> str:
    """Return a text without blanks. Newlines stay, because they separate turns."""
    return "".join(character for character in text if character == "\n" or not character.isspace())


def _tokens_of(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return dict(zip(ids, tokenizer.convert_ids_to_tokens(ids)))


def _stand_in(message: dict) -> dict:
    """Return a message of the assistant with the same parts, but with harmless texts.

    For example, its content becomes CONTENT.
    """
    content = message.get("content") or ""
    thinking, tag, answer = content.partition("</think>")
    stand_in = {**message, "content": CONTENT if content.strip() else ""}
    if message.get("reasoning_content"):
        stand_in["reasoning_content"] = THINKING
    elif content.lstrip().startswith("<think>") or tag:
        stand_in["content"] = f"<think>\n{THINKING}\n</think>\n\n" + (CONTENT if answer.strip() else "")
    if message.get("tool_calls"):
        stand_in["tool_calls"] = [
            {**call, "function": {"name": call["function"]["name"], "arguments": {}}}
            for call in message["tool_calls"]
        ]
    return stand_in
