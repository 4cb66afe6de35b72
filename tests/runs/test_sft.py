"""SFT on conversations from the command line: loss, validation, epochs and resume."""

import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl.data.prompts import load_tokenizer
from tests.checkpoints import assert_same_checkpoint
from tests.records import comparable
from tests.toy import SFT, train, write_config


def conversations(number: int, seed: int) -> list[dict]:
    """Return rows with chats of one to three turns, of two data sources."""
    chance = random.Random(seed)

    def text() -> str:
        return "".join(chance.choices("0123456789+ ", k=chance.randint(1, 25)))

    return [
        {
            "messages": [
                {"role": role, "content": text()}
                for _ in range(chance.randint(1, 3))
                for role in ("user", "assistant")
            ],
            "data_source": chance.choice(["long", "short"]),
        }
        for _ in range(number)
    ]


def expected_loss(toy, rows: list[dict]) -> float:
    """Return transformers' loss of the assistants' tokens, which are found here message by message."""
    tokenizer = load_tokenizer(toy / "model")
    model = AutoModelForCausalLM.from_pretrained(toy / "model", dtype=torch.float32)
    total = count = 0
    for row in rows:
        ids, labels = [], []
        for message in row["messages"]:
            is_trained = message["role"] == "assistant"
            header = tokenizer.encode("<assistant>" if is_trained else "<user>", add_special_tokens=False)
            body = tokenizer.encode(message["content"] + "<eos>" * is_trained, add_special_tokens=False)
            ids += header + body
            labels += [-100] * len(header) + (body if is_trained else [-100] * len(body))
        number = sum(label != -100 for label in labels)
        with torch.no_grad():
            loss = model(torch.tensor([ids]), labels=torch.tensor([labels])).loss
        total, count = total + float(loss) * number, count + number
    return total / count


def test_chats_over_epochs_with_held_out_loss_and_resume(toy, tmp_path):
    chats, held_out = conversations(12, seed=0), conversations(5, seed=1)
    for name, rows in (("train", chats), ("val", held_out)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = write_config(tmp_path, toy)
    overrides = (
        *SFT,
        f"data.train=[{tmp_path}/train.jsonl]",
        f"data.val=[{tmp_path}/val.jsonl]",
        *("data.messages_key=messages", "data.max_prompt_tokens=200", "data.shuffle=false"),
        *("validation.every=1", "checkpoint.every=1", "checkpoint.keep_last=1", "checkpoint.keep_best=1"),
        *("checkpoint.best_metric=val/loss", "checkpoint.best_is=lowest"),
    )
    three = ("run.max_steps=3", "training.micro_batch_tokens=4096")
    straight, resumed, packed = tmp_path / "straight", tmp_path / "resumed", tmp_path / "packed"
    before, first, second, third = train(1, config, *overrides, *three, run=straight)

    # One rank and one packed row of chats, against one chat after another in transformers.
    assert first["sft/loss"] == pytest.approx(expected_loss(toy, chats[:8]), rel=1e-5)
    assert before["val/loss"] == pytest.approx(expected_loss(toy, held_out), rel=1e-5)
    short = [row for row in held_out if row["data_source"] == "short"]
    assert before["val-core/short/loss"] == pytest.approx(expected_loss(toy, short), rel=1e-5)
    assert before["val/perplexity"] == pytest.approx(torch.tensor(before["val/loss"]).exp().item())
    assert 0.2 < first["sft/trained_share"] < 0.8
    assert [step["training/epoch"] for step in (first, second, third)] == pytest.approx([2 / 3, 4 / 3, 2])
    assert third["val/loss"] < before["val/loss"]

    # Step 2 has chats of two epochs; the second start begins before it.
    train(1, config, *overrides, *three, "run.max_steps=1", run=resumed)
    train(1, config, *overrides, *three, run=resumed)
    assert comparable(resumed) == comparable(straight)
    best = min((first, second, third), key=lambda step: step["val/loss"])["training/global_step"]
    kept = {f"step_{step:06d}" for step in (best, 3)}
    assert {path.name for path in (straight / "checkpoints").iterdir() if path.is_dir()} == kept
    assert_same_checkpoint(*(run / "checkpoints" / "step_000003" for run in (straight, resumed)))

    small = ("run.max_steps=1", "training.micro_batch_tokens=100", "checkpoint.every=0")
    other_before, other = train(2, config, *overrides, *small, run=packed)
    assert other["training/micro_batches"] > 1
    for name in ("sft/loss", "actor/grad_norm"):
        assert other[name] == pytest.approx(first[name], rel=1e-5)
    assert other_before["val/loss"] == pytest.approx(before["val/loss"], rel=1e-5)
