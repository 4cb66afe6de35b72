"""Uses the optional package `renderers`, which renders the chat templates of many models directly to token
ids."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rl.data.chat_template import CALL, QUESTION, REPLY, TOOL
from rl.features.agents.environment import Messages, ToolCall


class Renderer:
    """A renderer of the package. It gives the same token ids as the chat template of the model."""

    def __init__(self, renderer: Any, prompt: np.ndarray):
        self._renderer, self._prompt = renderer, prompt.tolist()
        self.name = type(renderer).__name__
        self.end_token_ids: list[int] = renderer.get_stop_token_ids()

    def render(self, messages: Messages, tools: Sequence[dict]) -> np.ndarray:
        """Return the ids of a conversation with the generation prompt, int32."""
        ids = self._renderer.render_ids(messages, tools=list(tools) or None, add_generation_prompt=True)
        return np.asarray(ids, np.int32)

    def bridge(
        self, context: np.ndarray, turn: np.ndarray, new_messages: Messages, tools: Sequence[dict]
    ) -> np.ndarray | None:
        """Return the ids between a turn and the next one, or None if the renderer cannot prove them."""
        before = context.tolist(), turn.tolist()
        bridged = self._renderer.bridge_to_next_turn(*before, new_messages, tools=list(tools) or None)
        length = len(context) + len(turn)
        if bridged is None or bridged.token_ids[:length] != [*before[0], *before[1]]:
            return None
        return np.asarray(bridged.token_ids[length:], np.int32)

    def parse(
        self, ids: np.ndarray, tools: Sequence[dict], number: int
    ) -> tuple[str, str, tuple[ToolCall, ...]]:
        """Return the thinking, the content and the tool calls of a turn. ids: the turn without its end
        token."""
        parsed = self._renderer.parse_response(
            ids.tolist(), tools=list(tools) or None, prompt_ids=self._prompt
        )
        thinking = (parsed.reasoning_content or "").strip("\n")
        if not tools:
            return thinking, parsed.content + "".join(call.raw for call in parsed.tool_calls), ()
        calls = []
        for i, call in enumerate(parsed.tool_calls):
            is_read = call.status in ("ok", "unknown_tool") and isinstance(call.arguments, dict)
            id = call.id or f"call{number:03d}{i:02d}"
            calls.append(ToolCall(id, call.name or "", call.arguments if is_read else call.raw))
        return thinking, parsed.content, tuple(calls)


def find_renderer(
    tokenizer: PreTrainedTokenizerBase,
    render: Callable[[Messages, Sequence[dict], dict], np.ndarray],
    template_kwargs: dict,
    *,
    parallel: bool,
) -> Renderer | None:
    """Return the renderer that gives the same ids as the template for conversations of all kinds, or None.

    The renderer is not chosen by the name of the model, because checkpoints of one architecture have
    different templates. The conversations are compared without `template_kwargs`; with them, only the
    generation prompt is compared. For example, with enable_thinking=false the template of Qwen3 drops the
    empty thinking tag of earlier turns, but the renderer keeps it.

    Args:
        render: function (messages, tools, template arguments) -> ids, by the chat template.
        parallel: whether a turn may hold several calls.
    """
    if importlib.util.find_spec("renderers") is None:
        return None
    from renderers import base, config_from_name, create_renderer

    system = {"role": "system", "content": "rules"}
    answer = {"role": "assistant", "content": "answer"}
    thought = {**answer, "reasoning_content": "reason"}
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    count = 2 if parallel else 1
    calls, replies = {**call, "tool_calls": [CALL] * count}, [REPLY] * count
    conversations: list[tuple[Messages, list[dict]]] = [
        ([QUESTION], []),
        ([system, QUESTION], []),
        ([QUESTION, answer, QUESTION], []),
        ([QUESTION, thought, QUESTION, thought, QUESTION], []),
        ([system, QUESTION, call, REPLY], [TOOL]),
        ([QUESTION, {**call, "reasoning_content": "reason"}, REPLY, calls, *replies], [TOOL]),
    ]
    try:
        expected = [render(*conversation, {}) for conversation in conversations]
        prompt = render([QUESTION], [], template_kwargs)
    except ValueError:
        return None

    base._populate_registry()
    for name in sorted(set(base.RENDERER_REGISTRY) - {"default"}):
        config = config_from_name(name)
        try:
            plain = Renderer(create_renderer(tokenizer, config), prompt)
            found = [plain.render(*conversation) for conversation in conversations]
            renderer = Renderer(
                create_renderer(tokenizer, config, chat_template_kwargs=template_kwargs), prompt
            )
            found.append(renderer.render([QUESTION], []))
        except Exception:  # the tokenizer lacks the renderer's special tokens
            continue
        if all(map(np.array_equal, found, [*expected, prompt])):
            return renderer
    return None
