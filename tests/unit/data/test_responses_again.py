"""Responses of the data against the rows of the files, and the order of the draw against seed and epoch."""

import json
from dataclasses import replace

import numpy as np
import pytest

from rl.checks.batches import CheckFailed
from rl.config.schema import Data
from rl.data.chats import load_chats
from rl.data.preferences import load_preferences
from rl.data.prompt_order import PromptOrder
from rl.data.responses_again import check_responses
from rl.phases.draw import Draw
from tests.chat_templates import end_ids, tokenizer_of
from tests.each import each


def test_exchanged_sides_and_rows_of_pairs_are_found(tmp_path):
    rows = [{"prompt": f"{n}+1=", "chosen": f"It is {n + 1}.", "rejected": f"No: {n}."} for n in range(4)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    tokenizer = tokenizer_of("qwen2.5")
    pairs = load_preferences(
        [path],
        tokenizer,
        chosen_key="chosen",
        rejected_key="rejected",
        prompt_key="prompt",
        max_prompt_tokens=32,
        max_response_tokens=32,
        overlong="error",
        end_token_ids=set(),
    )
    check_responses(pairs, tokenizer, Data())
    one = pairs[0]
    sides = replace(one, chosen_ids=one.rejected_ids, rejected_ids=one.chosen_ids)
    moved = replace(one, chosen_ids=pairs[1].chosen_ids, chosen_mask=pairs[1].chosen_mask)
    for wrong in (sides, moved):
        with pytest.raises(ValueError, match=r"row check: .*row 1: the tokens of the chosen response say"):
            check_responses([wrong, *pairs[1:]], tokenizer, Data())


@each("family", ["qwen2.5", "llama3.1", "deepseek-v3.1"])
def test_a_loss_beside_the_turns_or_of_a_part_of_one_is_found(tmp_path, family):
    chat = [{"role": role, "content": f"{role} {n}"} for n in range(2) for role in ("user", "assistant")]
    path, tokenizer, ends = tmp_path / "chats.jsonl", tokenizer_of(family), end_ids(family)
    path.write_text(json.dumps({"messages": chat}))
    data = Data(messages_key="messages", max_prompt_tokens=128)
    options = dict(messages_key="messages", train_on="assistant", max_tokens=128, overlong="error")
    (right,) = load_chats([path], tokenizer, end_token_ids=ends, **options)
    check_responses([right], tokenizer, data, ends)
    mask = right.response_mask
    later, sooner = np.append(0, mask[:-1]), np.append(mask[1:], 0)
    for wrong, what in (
        (np.maximum(mask, later), r"the loss of turn 2 .* covers 'assistant 0<.+', but the policy samples"),
        (np.maximum(mask, sooner), r"the loss of turn 4 .* covers '.+assistant 1"),
        (np.minimum(mask, later), r"covers 'istant 0.*' samples 'assistant 0|the last turn say 'sist"),
        (np.minimum(mask, sooner), r"covers 'assistant 0', but the policy samples 'assistant 0<"),
    ):
        with pytest.raises(ValueError, match=f"row check: .*, row 1: .*({what})"):
            check_responses([replace(right, response_mask=wrong)], tokenizer, data, ends)


def test_rows_in_the_order_of_another_epoch_are_found():
    draw = Draw(list(range(10)), PromptOrder(10, seed=3, shuffle=True), seed=3)
    assert sorted(draw.next(4) + draw.next(13) + draw.next(3)) == sorted([*range(10)] * 2)
    for order in (PromptOrder(10, seed=3, shuffle=False), PromptOrder(10, seed=4, shuffle=True)):
        with pytest.raises(CheckFailed, match="were drawn after 0 prompts, but with run.seed=3"):
            Draw(list(range(10)), order, seed=3).next(4)
