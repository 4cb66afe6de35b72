"""Checkpoints and data for all sides of a comparison: random models with answers of natural lengths.

A model with random weights does not end its answers. Therefore two channels of the residual stream, to which
no layer writes, tell the end of the prompt from an answer, which ends with the same probability after each
token. All other weights are random. The end is sampled like any token, so the lengths have the same
distribution in every program that samples from the checkpoint. Log-normal lengths are a Markov chain with a
state per character.
"""

import json
import math
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Qwen2Tokenizer

SIZES: dict[str, dict[str, Any]] = {
    "0.7M": {},
    "2.6M": {"layers": 8},
    "21M": {"hidden": 512, "layers": 9, "heads": 8, "kv_heads": 4, "intermediate": 1024},
    "tiny": {"hidden": 32, "layers": 1, "heads": 1, "kv_heads": 1, "intermediate": 32},
}
"""Arguments of tools.make_toy.build_model; the first is the quickstart's model."""
NEVER = -30.0
"""Logit of a token that a state never samples."""
CLASSES, STAGES = 24, 4
"""Classes of log-normal lengths, and the number of states of a class: 96 characters in all."""
REWARD = """
def score(prompt, response, ground_truth, **extra):
    return len(set(response)) / 96
"""
"""Reward function whose values differ within a group: the share of all characters that occur in an answer."""


def save_task(
    directory: Path, size: str, *, mean_length: float, max_length: int, is_log_normal: bool = False
) -> Path:
    """Write model, train.parquet, test.parquet and reward.py to `directory`, which is created.

    mean_length: mean number of tokens of answers, which have at most `max_length`.
    is_log_normal: see `make_log_normal`, for which mean_length is the median.
    """
    from tools.make_toy import addition_problems, build_model, build_tokenizer, save, write_problems

    directory.mkdir(parents=True)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, **SIZES[size])
    if is_log_normal:
        make_log_normal(model, tokenizer, mean_length)
    else:
        make_chain(model, tokenizer, end_probability(mean_length, max_length))
    save(model, tokenizer, directory / "model")
    for split, problems in addition_problems(0).items():
        write_problems(directory / f"{split}.parquet", problems)
    (directory / "reward.py").write_text(REWARD)
    return directory


def save_task_of(directory: Path, model: Path) -> Path:
    """Write model, train.parquet and reward.py with a copy of a checkpoint that never ends its answers.

    The end of an answer is the tokenizer's last special token, which a model hardly ever samples.
    """
    from tools.make_toy import addition_problems, write_problems

    copy = directory / "model"
    copy.mkdir(parents=True)
    for file in model.resolve().iterdir():
        (copy / file.name).symlink_to(file)
    last = json.loads((model / "tokenizer.json").read_text())["added_tokens"][-1]
    ends = {"tokenizer_config.json": {"eos_token": last["content"]}}
    ends |= dict.fromkeys(("config.json", "generation_config.json"), {"eos_token_id": last["id"]})
    for name, values in ends.items():
        found = json.loads((model / name).read_text())
        (copy / name).unlink()
        (copy / name).write_text(json.dumps(found | values))
    write_problems(directory / "train.parquet", addition_problems(0)["train"])
    (directory / "reward.py").write_text(REWARD)
    return directory


def end_probability(mean_length: float, max_length: int) -> float:
    """Return the probability of an end after each token that gives lengths up to max_length this mean."""
    low, high = 1e-6, 1.0
    for _ in range(60):
        p = (low + high) / 2
        low, high = (p, high) if (1 - (1 - p) ** max_length) / p > mean_length else (low, p)
    return low


def make_chain(model: "PreTrainedModel", tokenizer: "Qwen2Tokenizer", end: float) -> None:
    """Overwrite two channels of the model such that answers end with this probability after each token."""
    import torch

    from tools.make_toy import SPECIAL_TOKENS

    model.requires_grad_(False)
    body, head = model.model, model.lm_head.weight
    start, inside = channels = [0, 1]
    for layer in body.layers:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight[channels] = 0.0
    embedding = body.embed_tokens.weight
    embedding[:, channels] = 0.0
    embedding[:, inside] = 1.0
    assistant = tokenizer.convert_tokens_to_ids("<assistant>")
    embedding[assistant, inside], embedding[assistant, start] = 0.0, 1.0
    characters, eos = range(len(SPECIAL_TOKENS), len(head)), tokenizer.eos_token_id
    logits = torch.full((len(head), 2), NEVER)
    logits[characters] = 0.0
    logits[eos, inside] = math.log(end / (1 - end) * len(characters))
    head[eos] = 0.0
    # The final norm scales the channel of the state, which is 1, by almost the same factor at every token.
    ids = torch.tensor([[*characters]])
    scale = body(ids).last_hidden_state[0][:, inside].mean()
    head[:, channels] = logits / scale


def make_log_normal(model: "PreTrainedModel", tokenizer: "Qwen2Tokenizer", median: float) -> None:
    """Overwrite channels of the model such that the lengths of answers are about log-normal, with sigma 1.

    The first token of an answer draws one of CLASSES classes, each with the same probability. An answer
    passes through STAGES tokens of its class, and repeats each a geometric number of times. The mean lengths
    of the classes are quantiles of a log-normal distribution.
    """
    import torch

    model.requires_grad_(False)
    body, head, size = model.model, model.lm_head.weight, len(model.lm_head.weight)
    for layer in body.layers:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight[:size] = 0.0
    signal = 30.0  # large beside the other channels, so that the final norm scales it by a constant
    body.embed_tokens.weight[:, :size] = signal * torch.eye(size)
    head[:] = 0.0
    logits = torch.full((size, size), NEVER)  # of the next token, by the last token
    spread = math.sqrt(1 - 0.3 / STAGES)  # the rest is due to the stages
    first = range(6, 6 + STAGES * CLASSES, STAGES)
    logits[tokenizer.convert_tokens_to_ids("<assistant>"), list(first)] = 0.0
    for number, token in enumerate(first):
        mean = median * math.exp(spread * NormalDist().inv_cdf((number + 0.5) / CLASSES))
        leave = min(0.99, STAGES / mean)
        for stage in range(STAGES):
            last = stage == STAGES - 1
            logits[token + stage, token + stage] = math.log(1 - leave)
            logits[token + stage, tokenizer.eos_token_id if last else token + stage + 1] = math.log(leave)
    head[:, :size] = logits.T / math.sqrt(body.embed_tokens.weight.shape[1])
