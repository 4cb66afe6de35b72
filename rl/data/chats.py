"""Conversations as training data: the tokens of a chat, and which of them have a loss.

A chat is rendered and tokenized once, as a whole. The turns of the assistant have a loss, each with
its end-of-turn token and without its header. Their places in the text come from one of two sources:

1. The template, if it marks them with {% generation %}, as transformers' `return_assistant_tokens_mask`
   expects.
2. Renderings of the chat's beginnings: a turn lies between the messages before it with the generation prompt,
   and the messages up to it. Both must be beginnings of the whole text, so a turn is what the policy would
   generate after what it would see. A template that rewrites earlier turns is refused.

Spaces after an end-of-turn token do not belong to the turn. If a turn has no such token, but the next message
begins with a token that ends the generation (GLM), that token belongs to the turn.
"""

import json
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from rl.data.chat_template import ChatTemplate, Spans, read_json
from rl.data.prompts import (
    AGENT_COLUMNS,
    Messages,
    Prompt,
    data_source,
    extra_info,
    is_chat,
    refuse_two_bos,
    within_limit,
    without_nulls,
)
from rl.data.reading import Row, describe, read_rows
from rl.data.special_tokens import encode, show

log = logging.getLogger(__name__)

TrainOn = Literal["assistant", "last", "all"]
Chat = tuple[str, Spans]
"""A rendered chat, and the parts of it that have a loss."""
BATCH = 256
"""Number of chats tokenized at once; offsets of tokens take more memory than the tokens."""


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

    A sample's `token_ids` are those before the first token with a loss, its `response_ids` those up to the
    last one, and `response_mask` is 1 where there is a loss. Tokens after it have no effect and are left out.

    messages_key: column with {role, content} messages, of which the assistant's may have tool_calls and
        reasoning_content. The column `tools` (optional) has the schemas of the chat's tools.
    train_on: assistant: every turn of the assistant. last: only its last one. all: every token but the first.
    end_token_ids: ids at which generation stops, besides the tokenizer's eos.
    overlong: "error", "drop" or "truncate_right", for chats of more than `max_tokens` tokens. A chat of which
        no token with a loss is left is dropped.
    max_chats: maximum number of rows to read; 0 reads all.

    Raises ValueError for an invalid file or row, a chat without a token to train, a template that loses a
    part of a trained message or rewrites earlier turns, and overlong chats according to `overlong`.
    """
    rows = read_rows(
        files,
        required={messages_key: "name the column with the conversation in data.messages_key"},
        optional=["data_source", "reward_model", "extra_info", "tools", *AGENT_COLUMNS],
        max_rows=max_chats,
    )
    turns = AssistantTurns(tokenizer, end_token_ids)
    chats = [turns.find(_messages(row, messages_key), tools_of(row), row, train_on=train_on) for row in rows]
    tokenized = tokenize_chats(chats, tokenizer, rows)
    lengths = np.array([len(ids) for ids, _ in tokenized])
    limits = dict(limit=max_tokens, noun="chats", kept_part="first", truncation="truncate_right")
    kept = within_limit(lengths, overlong=overlong, **limits)
    counts = np.array([mask[:max_tokens].sum() for _, mask in tokenized])
    if lost := int((kept & (counts == 0)).sum()):
        log.info("%d chats have no token to train in their first %d tokens and are dropped", lost, max_tokens)
    kept &= counts > 0
    samples = []
    for index in np.flatnonzero(kept).tolist():
        ids, mask = (part[:max_tokens] for part in tokenized[index])
        first, last = np.flatnonzero(mask)[[0, -1]]
        row = rows[index]
        samples.append(
            Prompt(
                index=index,
                token_ids=ids[:first],
                text=show(chats[index][0][: chats[index][1][0][0]], tokenizer),
                data_source=data_source(row),
                ground_truth=(row.values.get("reward_model") or {}).get("ground_truth"),
                extra_info=extra_info(row),
                response_ids=ids[first : last + 1],
                response_mask=mask[first : last + 1],
                source=row.source,
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
    """Finds the parts of chats that have a loss, for one tokenizer.

    Args:
        end_token_ids: ids at which generation stops, besides the tokenizer's eos.
        remedy: what may be done about a template that rewrites earlier turns.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: Collection[int],
        remedy: str = "set data.train_on=last, which trains only the last turn",
    ):
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
        self.tokenizer, self._template = tokenizer, ChatTemplate(tokenizer)
        self._remedies = (
            f"{remedy}, or use a chat_template.jinja that marks the trained parts with {{% generation %}}"
        )
        ends = {*end_token_ids, tokenizer.eos_token_id} - {None}
        self._ends = tuple(tokenizer.convert_ids_to_tokens(sorted(ends)))
        added = tokenizer.added_tokens_decoder.values()
        self._special = tuple(token.content for token in added if token.special)

    def find(
        self,
        messages: Messages,
        tools: list[dict],
        row: Row,
        *,
        first: int = 0,
        train_on: TrainOn = "assistant",
    ) -> Chat:
        """Return the rendered chat and its parts with a loss, among the messages from number `first` on.

        Raises ValueError, with the place of the row, if there is none, or if the template loses or rewrites
        something.
        """
        places = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first]
        places = places[-1:] if train_on == "last" else places
        try:
            if train_on == "all":
                text = self._template.render(messages, tools, generation_prompt=False)
                return text, [(0, len(text))]
            if not places:
                raise ValueError("no message is the assistant's, so nothing would be trained; remove the row")
            text, spans = self._marked(messages, tools, places) or self._compared(messages, tools, places)
            self._check_parts([messages[i] for i in places], tools, text, spans)
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}.") from error
        return text, spans

    def _marked(self, messages: Messages, tools: list[dict], places: list[int]) -> Chat | None:
        """Return the parts that the template marks in the messages at `places` and between them.

        None: it marks no part of any chat.
        """
        if not self._template.marks_turns:
            return None
        text, spans = self._template.render_marked(messages, tools)
        # Those of earlier turns are counted, because an earlier turn may be rendered differently there.
        num_before = len(self._template.render_marked(messages[: places[0]], tools)[1]) if places[0] else 0
        return text, [span for span in spans[num_before:] if span[0] < span[1]]

    def _compared(self, messages: Messages, tools: list[dict], places: list[int]) -> Chat:
        """Return the parts between renderings of the chat's beginnings."""
        render, name = self._template.render, self.tokenizer.name_or_path
        text = render(messages, tools, generation_prompt=False)
        spans: Spans = []
        for place in places:
            if not place:
                raise ValueError("the chat begins with the assistant; put a system or user message before it")
            is_last = place == len(messages) - 1
            before = render(messages[:place], tools)
            through = text if is_last else render(messages[: place + 1], tools, generation_prompt=False)
            if not through.startswith(before):
                raise ValueError(
                    f"the chat template of {name} renders message {place + 1} of {len(messages)} (assistant) "
                    f"not as a continuation of its generation prompt, which ends in {before[-30:]!r}, so the "
                    f"policy could not generate it; {self._remedies}"
                )
            if not text.startswith(through):
                raise ValueError(
                    f"the chat template of {name} renders message {place + 1} of {len(messages)} (assistant) "
                    "differently when further messages follow, as templates do that drop the reasoning of "
                    f"earlier turns; {self._remedies}"
                )
            end = len(before) + len(through[len(before) :].rstrip())
            if not through.endswith(self._ends, len(before), end):
                following = self._reply(messages, tools) if is_last else text
                if following.startswith(through) and (token := self._token_at(following, len(through))):
                    end = len(through) + len(token)
                    text += token if is_last else ""
                elif not through.endswith(self._special, len(before), end):
                    end = len(through)
            spans.append((len(before), end))
        return text, spans

    def _reply(self, messages: Messages, tools: list[dict]) -> str:
        """Return the chat with a reply to its last turn; "" if the template rejects it."""
        role = "tool" if messages[-1].get("tool_calls") else "user"
        try:
            reply = {"role": role, "content": ""}
            return self._template.render([*messages, reply], tools, generation_prompt=False)
        except ValueError:
            return ""

    def _token_at(self, text: str, position: int) -> str:
        return next((token for token in self._ends if text.startswith(token, position)), "")

    def _check_parts(self, turns: Messages, tools: list[dict], text: str, spans: Spans) -> None:
        """Raise ValueError if a part of the trained messages, or a tool, is not in the rendered text."""
        name = self.tokenizer.name_or_path
        text = self._template.show(text)
        # Without spaces, which templates strip and add.
        trained = _squeeze("".join(text[start:end] for start, end in spans))
        for message in turns:
            calls = [call.get("function", call) for call in message.get("tool_calls") or []]
            parts = {"content": message.get("content"), "reasoning_content": message.get("reasoning_content")}
            parts |= {f"tool call {number}": call["name"] for number, call in enumerate(calls, start=1)}
            for key, part in parts.items():
                if isinstance(part, str) and _squeeze(part) not in trained:
                    raise ValueError(
                        f"the chat template of {name} leaves out the {key} of a turn, {describe(part)}; "
                        f"{self._remedies} and keeps all parts of a turn"
                    )
        for tool in tools:
            if tool.get("function", tool)["name"] not in text:
                raise ValueError(
                    f"the chat template of {name} leaves out the tool "
                    f"{tool.get('function', tool)['name']!r} of column 'tools'; use a template with tools"
                )

    def warn_of_open_turns(self, chats: Sequence[Chat]) -> None:
        """Log a warning if turns end without a token that ends the generation."""
        ends = [text[start:end].rstrip() for text, spans in chats for start, end in spans]
        if open_turns := [end for end in ends if not end.endswith(self._ends)]:
            log.warning(
                "warning: chat check: %d of %d trained turns do not end with a token at which generation "
                "stops (%s), so the policy does not learn to end them: they end in %r. If that is the "
                "end of a turn, make it the eos_token of tokenizer_config.json and generation_config.json.",
                len(open_turns),
                len(ends),
                ", ".join(self._ends),
                open_turns[0][-20:],
            )


def tokenize_chats(
    chats: Sequence[Chat], tokenizer: PreTrainedTokenizerBase, rows: Sequence[Row]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the ids, int32 [n], and the mask, float32 [n], of each chat: 1 for tokens of its spans.

    A token that is only partly in a span is in it, as in transformers. The first token, which nothing
    predicts, has no loss. Raises ValueError for a chat without a token to train, or with two BOS tokens.
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


def tools_of(row: Row) -> list[dict]:
    """Return the schemas in column `tools`: a list of objects or JSON texts, or the JSON text of a list."""
    value = row.values.get("tools")
    value = read_json(value, value) if isinstance(value, str) and value.strip() else value or []
    tools = [read_json(tool, tool) if isinstance(tool, str) else tool for tool in _without_nulls(value, row)]
    if not all(isinstance(tool, dict) and tool.get("function", tool).get("name") for tool in tools):
        raise ValueError(
            f"{row.place}: column 'tools' must be a list of tool schemas, or JSON of one, not "
            f"{describe(row.values['tools'])}."
        )
    return tools


def excerpt(text: str, spans: Spans, *, width: int = 60) -> str:
    """Return the text around its first two spans on one line, with the spans in [[ ]]."""

    def short(part: str) -> str:
        shown = part if len(part) <= width else f"{part[: width // 2]} ... {part[-width // 2 :]}"
        return json.dumps(shown, ensure_ascii=False)[1:-1]

    parts, position = [], 0
    for start, end in spans[:2]:
        parts += [short(text[position:start]), f"[[{short(text[start:end])}]]"]
        position = end
    return "".join(parts) + ("" if position == len(text) else " ...")


def _messages(row: Row, column: str) -> Messages:
    value = row.values[column]
    if not is_chat(value):
        raise ValueError(
            f"{row.place}: column {column!r} must be a list of {{role, content}} messages, not "
            f"{describe(value)}."
        )
    return chat_of(value, row)


def chat_of(messages: Messages, row: Row) -> Messages:
    """Return the messages without keys that are None; in their calls, too, if the file adds such keys."""
    return [
        {k: _without_nulls(v, row) if k == "tool_calls" else v for k, v in message.items()}
        for message in without_nulls(messages)
    ]


def _without_nulls(value: Any, row: Row) -> Any:
    """Return the value without keys that are None at any depth, unless the file is JSONL.

    The other formats give all objects of a column the same keys.
    """
    if row.path.suffix == ".jsonl":
        return value
    if isinstance(value, list):
        return [_without_nulls(item, row) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item, row) for key, item in value.items() if item is not None}
    return value


def _squeeze(text: str) -> str:
    return "".join(text.split())
