"""Checkpoints and data for all sides of a comparison: random models whose answers have natural lengths.

A model with random weights does not end its answers. Therefore three channels of the residual stream, to
which no layer writes, encode a Markov chain of three states that depend only on the last token: the end of
the prompt, a short answer, and a long answer. The first character of an answer determines its state. A short
answer ends with the same probability after each token. A long answer continues to the limit. All other
weights are random. The end is sampled like any token, so the lengths have the same distribution in every
program that samples from the checkpoint.
"""

import math
from pathlib import Path

SIZES = {
    "0.7M": {},
    "21M": {"hidden": 512, "layers": 9, "heads": 8, "kv_heads": 4, "intermediate": 1024},
    "tiny": {"hidden": 32, "layers": 1, "heads": 1, "kv_heads": 1, "intermediate": 32},
}
"""Arguments of tools.make_toy.build_model; the first is the quickstart's model."""
NEVER = -30.0
"""Logit of a token that a state never samples."""
LONG = range(54, 102)
"""Token ids of the characters of long answers. Short answers have the characters 6 to 53."""
REWARD = """
def score(prompt, response, ground_truth, **extra):
    return len(set(response)) / 96
"""
"""Reward function whose values differ within a group: the share of all characters that occur in an answer."""


def save_task(
    directory: Path, size: str, *, mean_length: float, max_length: int, long_share: float = 0.0
) -> Path:
    """Write model, train.parquet, test.parquet and reward.py to `directory`, which is created.

    mean_length: mean number of tokens of short answers, which have at most `max_length`.
    long_share: probability of a long answer.
    """
    from transformers.utils import logging

    from tools.make_toy import addition_problems, build_model, build_tokenizer, write_split

    logging.disable_progress_bar()
    directory.mkdir(parents=True)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, **SIZES[size])
    make_chain(model, tokenizer, end_probability(mean_length, max_length), long_share)
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    for split, problems in addition_problems(0).items():
        write_split(directory / f"{split}.parquet", split, problems)
    (directory / "reward.py").write_text(REWARD)
    return directory


def end_probability(mean_length: float, max_length: int) -> float:
    """Return the probability of an end after each token that gives lengths up to max_length this mean."""
    low, high = 1e-6, 1.0
    for _ in range(60):
        p = (low + high) / 2
        low, high = (p, high) if (1 - (1 - p) ** max_length) / p > mean_length else (low, p)
    return low


def make_chain(model, tokenizer, end: float, long_share: float) -> None:
    """Overwrite three channels of the model such that answers end, and are long, with these probabilities."""
    import torch

    from tools.make_toy import SPECIAL_TOKENS

    model.requires_grad_(False)
    body, head = model.model, model.lm_head.weight
    start, short, long = channels = [0, 1, 2]
    for layer in body.layers:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight[channels] = 0.0
    embedding = body.embed_tokens.weight
    embedding[:, channels] = 0.0
    embedding[:, short] = 1.0
    embedding[LONG, short], embedding[LONG, long] = 0.0, 1.0
    assistant = tokenizer.convert_tokens_to_ids("<assistant>")
    embedding[assistant, short], embedding[assistant, start] = 0.0, 1.0
    shorts, longs = range(len(SPECIAL_TOKENS), LONG.start), LONG
    eos = tokenizer.eos_token_id
    logits = torch.full((len(head), 3), NEVER)
    logits[shorts, start] = 0.0
    if long_share:
        logits[longs, start] = math.log(long_share / (1 - long_share) * len(shorts) / len(longs))
    logits[shorts, short] = 0.0
    logits[eos, short] = math.log(end / (1 - end) * len(shorts))
    logits[longs, long] = 0.0
    head[eos] = 0.0
    # The final norm scales the channel of the state, which is 1, by almost the same factor at every token.
    ids = torch.arange(len(SPECIAL_TOKENS), len(head))[None]
    scale = body(ids).last_hidden_state[0][:, [short, long]].sum(-1).mean()
    head[:, channels] = logits / scale


def prompt_ids(task: Path, count: int) -> list[list[int]]:
    """Return the token ids of the first prompts of the training data, with the chat template."""
    import pyarrow.parquet as pq
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(task / "model")
    rows = pq.read_table(task / "train.parquet").column("prompt").to_pylist()[:count]
    return [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        for messages in rows
    ]
