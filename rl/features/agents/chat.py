"""Messages to token ids, and the bridge from a sampled turn to the next request.

The token ids define a trajectory; messages are derived from them. A sampled turn is never tokenised again:
its ids stay in the context as the engine sampled them. For example, the engine may sample two tokens for a
word that the tokenizer writes as one. Both stay. After a turn, only the tokens between it and the next turn
are added, from one of three sources:

1. The package `renderers`, if it is installed and renders a set of conversations exactly as the model's
   template does (`rl.features.agents.renderer`).
2. The difference of two renderings of the template (`Chat._difference`), accepted only if the template
   renders everything before the sampled turn as it did when the turn was sampled, and keeps the turn.
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

# Replace the parts of a sampled turn in a rendering. The turn's own text could spell special tokens, and
# malformed arguments make templates fail.
THINKING, CONTENT = "~thinking of the turn~", "~content of the turn~"
TAGS = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"))
"""Begin and end tags of thinking, by model family; the first pair is used for templates without tags."""


@dataclass(frozen=True)
class AssistantTurn:
    message: dict
    """The turn as a message: role, content, and reasoning_content and tool_calls if there are any."""
    tool_calls: tuple[ToolCall, ...]
    text: str
    """The whole text of the turn, with thinking. Special tokens stay if `reward.keep_special_tokens` names
    them."""


class TooLong(ValueError):
    """Raised for a text with more characters than the allowed number of tokens can hold."""


class CannotExtend(ValueError):
    """The template does not keep earlier tokens; the message says which rule it breaks."""


class Chat:
    """Converts between messages and tokens for one tokenizer.

    Args:
        end_token_ids: ids that end a turn, besides the tokenizer's eos (`end_token_ids`).
        on_rewrite: "refuse" makes `check` raise for a template that changes earlier tokens.
        template_kwargs: further arguments of the chat template, such as enable_thinking.
        kept: ids of special tokens that stay in the text of a turn (`reward.keep_special_tokens`); None: as
            auto.
        uses_renderer: whether the package `renderers` may be used; it has no tokens of images.
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
        """Source of the tokens between turns, for the log."""
        if not self._template.text:
            return "plain tokens"
        if self._renderer is not None:
            return f"{self._renderer.name} of renderers, else the difference of two renderings"
        return f"difference of two renderings, tool calls as in {self._family.name}"

    # Conversations ----------------------------------------------------------------------------------------

    def open(self, messages: Messages, tools: Sequence[dict], max_tokens: int = 0) -> np.ndarray:
        """Return the token ids of a conversation up to and with the generation prompt, int32.

        max_tokens: a text that certainly has more tokens is not encoded, because encoding a very large text
            blocks the replica; 0: any text is encoded.

        Raises ValueError if the template rejects the messages, or if calls in its form cannot be read, and
        TooLong if the text exceeds the limit.
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
        """Return messages in the form of templates. Raises ValueError for an entry that is not a message."""
        return messages if self._is_plain(messages) else self._reader.normal(messages)

    def refuse_lost(self, messages: Messages, tools: Sequence[dict]) -> None:
        """Raise ValueError if the policy would not see a message or a tool of its environment.

        The messages may describe a tool that the template leaves out; they must then contain its name. The
        policy's own turns are not compared, because their tokens are in the context.
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
        """Return a context as one text, for a conversation with unknown messages."""
        return [{"role": "text", "content": self._decode(token_ids)}]

    def parse(self, turn: np.ndarray, tools: Sequence[dict], number: int) -> AssistantTurn:
        """Return a sampled turn as a message. `number` is the number of the turn in its trajectory.

        Tool calls are searched only if there are tools, and only after the thinking. For example, a call that
        the policy considers within <think> is not made.
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

        The next request is context + turn + the returned ids. If the turn did not end with its end token
        (it was truncated, or ended at a stop string), the returned ids begin by closing an open thinking tag
        and the turn. None: it cannot be proven that the template keeps the earlier tokens.

        Args:
            context: ids before the sampled turn.
            turn: ids of the sampled turn.
            messages: the conversation up to and with the message of the turn.
            new_messages: messages in reply to the turn; no message of the assistant.
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
        """Return the index of the first tokens that a rendering of the whole conversation does not contain.

        The rendering is a second source, with stand-ins for the sampled turns. It must contain the text of
        all tokens between turns, in their order, each right after the end of a turn. Blanks are ignored,
        because tokenizers may change them.

        Args:
            given: the results of `extend` after one turn after the other, int32 [S] each.
            messages: the conversation up to and with the messages of the last result.
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
        """Yield the text of a conversation in the forms that tokens between turns may have."""
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
        """Return the structural tag that makes tool calls fit the tools' schemas, for `Request.grammar`.

        Free text, optional thinking and calls in the model's form are allowed. Raises ValueError if xgrammar
        does not know the form, or rejects the schema of a tool; the message then names the tool.
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
        """Return what `grammar` does. Raises RuntimeError or ValueError, like xgrammar, for a bad schema."""
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
        """Raise ValueError if calls cannot be read, or if on_rewrite is "refuse" and the template changes
        earlier tokens.

        Four turns are tried, because some templates keep only the last turns. With tools, each turn has one
        call, or two calls if the model's form allows several. Without tools, a user answers each turn. The
        first and the third turn think, unless the template has no thinking or its generation prompt closes
        it. The second and the third turn have calls and no content.

        Args:
            opening: messages with which an environment begins; some templates fail only with a system
                message.
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
        """Return why a call that the template writes is not read back unchanged; "" if it is.

        A template without calls passes, because its calls are read in the form of HERMES.
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
        """Return a turn of one call as the template writes it, without its end token."""
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
        """Return the thinking at the beginning of a turn with its tags; an open tag is always closed."""
        opening = "" if self._opens_thinking else f"{self._tags[0]}\n"
        return f"{opening}{thinking}\n{self._tags[1]}\n\n" if thinking or self._opens_thinking else ""

    def _between(
        self, context: np.ndarray, turn: np.ndarray, messages: Messages, new: Messages, tools: Sequence[dict]
    ) -> np.ndarray:
        """Return what `extend` does. Raises CannotExtend."""
        bridged = None
        if self._renderer is not None and hide(new, self.tokenizer) == new:
            bridged = self._renderer.bridge(context, turn, new, tools)
        return self._difference(turn, messages, new, tools) if bridged is None else bridged

    def _message(self, thinking: str, content: str, calls: list[dict]) -> dict:
        """Return a message of the assistant. Thinking is part of the content if the template has no key."""
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
        """Return the thinking at the beginning of a turn (None: none), whether it is open, and the rest."""
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
        """Return the ids between the turn and the next one, from renderings before and after the turn.

        In both, sampled turns are replaced by stand-ins with the same parts. Raises CannotExtend.
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
        # Encoded from the end token on, because some tokenizers treat the begin of a text differently.
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

        Content beside tool calls is not required: many templates have no place for it, and its tokens stay in
        the context nevertheless.
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
    """Return a text without blanks except newlines, which separate turns."""
    return "".join(character for character in text if character == "\n" or not character.isspace())


def _tokens_of(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return dict(zip(ids, tokenizer.convert_ids_to_tokens(ids)))


def _stand_in(message: dict) -> dict:
    """Return a message of the assistant with the same parts and harmless texts. For example, its content
    becomes CONTENT."""
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
