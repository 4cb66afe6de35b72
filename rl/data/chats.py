"""Conversations as training data: the tokens of a chat, and which of them have a loss.

A chat is rendered and tokenized once, as a whole. The turns of the assistant have a loss. A turn includes its
end-of-turn token, but not its header. This module finds the turns in the text in one of two ways:

1. Some templates mark the turns with {% generation %}, as transformers' `return_assistant_tokens_mask`
   expects. Then the marks are used.
2. Otherwise two beginnings of the chat are rendered for each turn: the messages before the turn with the
   generation prompt, and the messages up to and including the turn. The turn is the difference of the two
   texts. Both must be beginnings of the text of the whole chat. Therefore the turn is exactly what the policy
   would generate after the text that it would see. A template that rewrites earlier turns is refused.

Spaces after an end-of-turn token do not belong to the turn. Some templates (GLM) write no end-of-turn token,
but the next message begins with a token at which generation stops. Then this token belongs to the turn.
"""

import json
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from rl.data.chat_template import CALL, QUESTION, REPLY, Spans, template_of
from rl.data.messages import MessageReader, Messages, tools_of
from rl.data.prompts import OPTIONAL, Prompt, fields_of, refuse_two_bos, within_limit
from rl.data.reading import FileRow, read_rows
from rl.data.special_tokens import encode, show

log = logging.getLogger(__name__)

TrainOn = Literal["assistant", "last", "all"]
MarkedText = tuple[str, Spans]
"""A rendered chat, and the parts of it that have a loss."""
BATCH = 256
"""Number of chats tokenized at once. It is small because the offsets of tokens need much more memory than
the tokens."""


def load_chats(
    files: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    messages_key: str,
    train_on: TrainOn,
    end_token_ids: Collection[int],
    max_tokens: int,
    overlong: str,
    max_chats: int = 0,
) -> list[Prompt]:
    """Read `files` in order and tokenize the chats.

    The result has one Prompt per chat. Its `token_ids` are the tokens before the first token with a loss. Its
    `response_ids` are the tokens from there to the last token with a loss, and `response_mask` is 1 for
    the tokens with a loss among them. Later tokens have no effect and are left out. For example, a chat of
    system, user, assistant and user has the tokens of its one assistant turn as `response_ids`.

    messages_key: column with {role, content} messages. Messages of the assistant may have tool_calls and
        reasoning_content (`rl.data.messages`). The optional column `tools` has the schemas of the chat's
        tools. A turn with a weight of 0 has no loss.
    train_on: the tokens with a loss. "assistant": every turn of the assistant. "last": only its last turn.
        "all": every token but the first.
    end_token_ids: ids that stop generation, besides the tokenizer's eos.
    overlong: what to do with chats of more than `max_tokens` tokens: "error", "drop" or "truncate_right". If
        truncation removes all tokens with a loss, the chat is dropped.
    max_chats: maximum number of rows to read; 0 reads all.

    Raises ValueError for an invalid file or row, a chat without a token to train, a template that leaves out
    a part of a trained message or rewrites earlier turns, and for overlong chats if `overlong` is "error".
    """
    rows = read_rows(
        files,
        required={messages_key: "name the column with the conversation in data.messages_key"},
        optional=OPTIONAL,
        max_rows=max_chats,
    )
    reader = MessageReader(template_of(tokenizer), reads_weights=True)
    turns = AssistantTurns(reader, end_token_ids)
    chats = []
    for row in rows:
        messages = reader.read(row, messages_key, is_text=False)
        assert isinstance(messages, list)
        chats.append(turns.find(messages, tools_of(row), row, train_on=train_on))
    reader.finish(", ".join(map(str, files)))
    tokenized = tokenize_chats(chats, tokenizer, rows)
    lengths = np.array([len(ids) for ids, _ in tokenized])
    kept = within_limit(
        lengths,
        limit=max_tokens,
        overlong=overlong,
        noun="chats",
        kept_part="first",
        truncation="truncate_right",
    )
    counts = np.array([mask[:max_tokens].sum() for _, mask in tokenized])
    if lost := int((kept & (counts == 0)).sum()):
        log.info("%d chats have no token to train in their first %d tokens and are dropped", lost, max_tokens)
    kept &= counts > 0
    samples = []
    for index in np.flatnonzero(kept).tolist():
        ids, mask = (part[:max_tokens] for part in tokenized[index])
        first, last = np.flatnonzero(mask)[[0, -1]]
        text, spans = chats[index]
        samples.append(
            Prompt(
                index=index,
                token_ids=ids[:first],
                text=show(text[: spans[0][0]], tokenizer),
                response_ids=ids[first : last + 1],
                response_mask=mask[first : last + 1],
                **fields_of(rows[index]),
            )
        )
    if not samples:
        raise ValueError(
            f"no chat has a token to train within data.max_prompt_tokens={max_tokens}: raise it."
        )
    total = int(np.minimum(lengths, max_tokens)[kept].sum())
    log.info(
        "%d chats with %d tokens, of which %.1f %% have a loss; the first, with these in [[ ]]: %s",
        len(samples),
        total,
        100 * counts[kept].sum() / total,
        show(excerpt(*chats[samples[0].index]), tokenizer),
    )
    if train_on != "all":
        turns.warn_of_open_turns(chats)
    return samples


class AssistantTurns:
    """Finds the parts of chats that have a loss.

    Args:
        reader: the reader that has read the chats.
        end_token_ids: ids that stop generation, besides the tokenizer's eos.
        remedy: advice for the error about a template that rewrites earlier turns.
    """

    def __init__(
        self,
        reader: MessageReader,
        end_token_ids: Collection[int],
        remedy: str = "set data.train_on=last, which trains only the last turn",
    ):
        tokenizer = reader.tokenizer
        if tokenizer.chat_template is None:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path} has no chat template, which conversations need; "
                "use an instruct model, or put a chat_template.jinja into its directory."
            )
        if not tokenizer.is_fast:
            raise ValueError(
                f"the tokenizer of {tokenizer.name_or_path} does not tell which characters a token stands "
                "for, so turns of a conversation cannot be found; add its tokenizer.json."
            )
        self.tokenizer, self._reader, self._template = tokenizer, reader, reader.template
        self._remedy = remedy
        ends = {*end_token_ids, tokenizer.eos_token_id} - {None}
        self._ends = tuple(tokenizer.convert_ids_to_tokens(sorted(ends)))
        added = tokenizer.added_tokens_decoder.values()
        self._special = tuple(token.content for token in added if token.special)
        self._after = ""
        """The special token that follows a turn without an end-of-turn token, for example the header of the
        next message; "" if there is none."""

    def find(
        self,
        messages: Messages,
        tools: list[dict],
        row: FileRow,
        *,
        first: int = 0,
        train_on: TrainOn = "assistant",
    ) -> MarkedText:
        """Return the rendered chat and its parts with a loss.

        first: index of the first message that may have a loss.

        Raises ValueError, with the place of the row, if no part has a loss, or if the template leaves out or
        rewrites something.
        """
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first]
        places = [i for i in turns if messages[i].get("weight") != 0]
        try:
            if not turns and train_on != "all":
                raise ValueError("no message is the assistant's, so nothing would be trained; remove the row")
            if not places and train_on != "all":
                raise ValueError("all turns have weight 0, so nothing would be trained; remove the row")
            text = self._template.render(messages, tools, generation_prompt=False)
            self._reader.compare(messages, tools, text, row, generation_prompt=False)
            if train_on != "all":
                return self._trained(messages, tools, text, places[-1:] if train_on == "last" else places)
            if len(places) < len(turns):
                raise ValueError(
                    "a turn has weight 0, but data.train_on=all trains all; use data.train_on=assistant"
                )
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}.") from error
        return text, [(0, len(text))]

    def _trained(self, messages: Messages, tools: list[dict], text: str, places: list[int]) -> MarkedText:
        """Return the rendered chat, and the parts that the turns at the indices `places` take in it.

        Raises ValueError if the parts do not contain everything that the turns say.
        """
        if self._template.marks_turns:
            spans = self._marked(messages, tools, text, places)
        else:
            text, spans = self._compared(messages, tools, text, places)
        trained = "".join(text[start:end] for start, end in spans)
        self._reader.completeness.check_turns(messages, places, trained)
        return text, spans

    def _marked(self, messages: Messages, tools: list[dict], text: str, places: list[int]) -> Spans:
        """Return the parts that the template marks in the messages at `places`.

        If a token that ends the generation follows a part directly, it belongs to the part.
        """
        spans = self._template.marked(messages, tools)

        def count(end: int) -> int:
            # Only the number of spans is used: in a shorter chat, the text of an earlier turn may differ.
            return len(self._template.marked(messages[:end], tools)) if end else 0

        found: Spans = []
        for start, end in [span for i in places for span in spans[count(i) : count(i + 1)]]:
            if start < end and not text.endswith(self._ends, start, end):
                token = self._token_at(text, end)
                self._after = self._after or token
                end += len(token) if token in self._ends else 0
            found += [(start, end)] if start < end else []
        return found

    def _compared(self, messages: Messages, tools: list[dict], text: str, places: list[int]) -> MarkedText:
        """Return the text, and the turns at `places`, found by comparing renderings (way 2 of the module).

        If the last turn lacks the token that ends it, and a reply would begin with this token, the text gets
        it.
        """
        render, name = self._template.render, self.tokenizer.name_or_path
        spans: Spans = []
        for place in places:
            if not place:
                raise ValueError("the chat begins with the assistant; put a system or user message before it")
            is_last = place == len(messages) - 1
            before = render(messages[:place], tools)
            through = text if is_last else render(messages[: place + 1], tools, generation_prompt=False)
            problem = ""
            if not through.startswith(before):
                problem = (
                    f"not as a continuation of its generation prompt, which ends in {before[-30:]!r}, so the "
                    "policy could not generate it; write the turn's reasoning into reasoning_content"
                )
            elif not text.startswith(through):
                problem = (
                    "differently when further messages follow, as templates do that drop the reasoning of "
                    f"earlier turns; {self._remedy if place < places[-1] else 'remove the messages after it'}"
                )
            if problem:
                raise ValueError(
                    f"the chat template of {name} renders message {place + 1} of {len(messages)} (assistant) "
                    f"{problem}, or use a chat_template.jinja that marks the trained parts with "
                    "{% generation %} and keeps all parts of a turn"
                )
            end = len(before) + len(through[len(before) :].rstrip())
            if not through.endswith(self._ends, len(before), end):
                token = self._reply(messages[-1]) if is_last else self._token_at(text, len(through))
                if token in self._ends:
                    end = len(through) + len(token)
                    text += token if is_last else ""
                elif not through.endswith(self._special, len(before), end):
                    end, self._after = len(through), token
            spans.append((len(before), end))
        return text, spans

    def _reply(self, turn: dict) -> str:
        """Return the special token with which a reply to `turn`, the last one, would begin; "" if none."""
        answer: dict[str, Any] = {"role": "assistant", "content": "answer"}
        chat, reply = [QUESTION, answer], QUESTION
        if turn.get("tool_calls"):
            chat, reply = [QUESTION, {**answer, "content": "", "tool_calls": [CALL]}], REPLY
        try:
            before = self._template.render(chat, generation_prompt=False)
            text = self._template.render([*chat, reply], generation_prompt=False)
        except ValueError:
            return ""
        return self._token_at(text, len(before)) if text.startswith(before) else ""

    def _token_at(self, text: str, position: int) -> str:
        """Return the special token at a position of a text; "" if there is none."""
        tokens = (*self._ends, *self._special)
        return next((token for token in tokens if text.startswith(token, position)), "")

    def warn_of_open_turns(self, chats: Sequence[MarkedText]) -> None:
        """Log a warning with a remedy if turns do not end with a token that ends the generation."""
        ends = [text[start:end].rstrip() for text, spans in chats for start, end in spans]
        open_turns = [end for end in ends if not end.endswith(self._ends)]
        if not open_turns:
            return
        own = next((token for token in self._special if open_turns[0].endswith(token)), "")
        if own or self._after:
            end = own or f"{self._after}, which follows,"
            remedy = f"if {end} ends a turn, add its id to eos_token_id of generation_config.json"
        else:
            remedy = (
                "the chat template writes no end: write {{ eos_token }} after the content of the assistant "
                "there" + (", before {% endgeneration %}" if self._template.marks_turns else "")
            )
        log.warning(
            "warning: chat check: %d of %d trained turns do not end with a token at which generation stops "
            "(%s), so the policy does not learn to end them: they end in %r; %s.",
            len(open_turns),
            len(ends),
            ", ".join(self._ends),
            open_turns[0][-20:],
            remedy,
        )


def tokenize_chats(
    chats: Sequence[MarkedText], tokenizer: PreTrainedTokenizerBase, rows: Sequence[FileRow]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return for each chat its token ids, int32 [n], and its mask, float32 [n]: 1 for tokens of its spans.

    A token that lies only partly in a span counts as a token of the span, as in transformers. The first token
    of a chat has no loss, because nothing predicts it.

    Raises ValueError for a chat without a token to train, or with two BOS tokens.
    """
    found = []
    for start in range(0, len(chats), BATCH):
        part = chats[start : start + BATCH]
        encoded = encode([text for text, _ in part], tokenizer, offsets=True)
        for number, ((_, spans), ids, offsets) in enumerate(zip(part, *encoded)):
            mask = np.zeros(len(ids), np.float32)
            for first, last in spans:
                mask[(offsets[:, 0] < last) & (offsets[:, 1] > first)] = 1.0
            mask[:1] = 0.0
            row = rows[start + number]
            if not mask.any():
                raise ValueError(
                    f"{row.place}: no token would be trained, because the assistant's turns are empty; "
                    "remove the row."
                )
            refuse_two_bos(ids, tokenizer, f"{row.place}: the chat")
            found.append((ids, mask))
    return found


def excerpt(text: str, spans: Spans, *, width: int = 60) -> str:
    """Return one line with the text around the first two spans, and the spans in [[ ]]."""

    def short(part: str) -> str:
        shown = part if len(part) <= width else f"{part[: width // 2]} ... {part[-width // 2 :]}"
        return json.dumps(shown, ensure_ascii=False)[1:-1]

    parts, position = [], 0
    for start, end in spans[:2]:
        parts += [short(text[position:start]), f"[[{short(text[start:end])}]]"]
        position = end
    return "".join(parts) + ("" if position == len(text) else " ...")
