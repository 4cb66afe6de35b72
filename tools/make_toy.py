"""Make a task, a tokenizer and a model that learns by RL on a laptop CPU in minutes.

    lockstep data toy --out toy
    lockstep data toy --out toy --seed 1 --hidden 64 --heads 2 --intermediate 128 --tie

The task is two-digit addition: all 8,100 problems a+b= with a and b in 10..99, for example 12+34=; 500 are
held out. The script writes

    OUT/train.parquet   7,600 rows with the columns that lockstep data writes
    OUT/test.parquet    the 500 held-out rows
    OUT/pairs.parquet   the training problems with a right answer (chosen) and a wrong one (rejected), for dpo
    OUT/labels.parquet  the training problems with a right or wrong answer (completion) and its label, for kto
    OUT/model/          a Qwen2 model with random weights, and a tokenizer of printable ASCII characters

The model directory is a normal Hugging Face checkpoint. With random weights it gets no sum
right, so RL has no reward to learn from: run configs/quickstart_sft.yaml first, and train the model that it
exports (runs/quickstart-sft/hf). Equal arguments give equal files; nothing is downloaded.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import (
    AddedToken,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging as transformers_logging

# As a script, Python searches only tools/ for modules.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl.config.command_line import make_parser

NUM_HELD_OUT = 500
MAX_LENGTH = 1024
INITIALIZER_RANGE = 0.04
"""Qwen's 0.02 is for hidden sizes in the thousands."""
SPECIAL_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<user>", "<assistant>"]
CHARACTERS = ["\n"] + [chr(code) for code in range(32, 127)]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<assistant>{{ message['content'] }}<eos>"
    "{% else %}<user>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build_tokenizer(
    words: Sequence[str] = (), *, special: Sequence[str] = (), chat_template: str = CHAT_TEMPLATE
) -> Qwen2Tokenizer:
    """Return a tokenizer with one token per printable ASCII character and newline, and per word of `words`.

    special: further special tokens, which `chat_template` writes.

    It is a byte-level BPE without merges, because AutoTokenizer (transformers 5, vLLM) rebuilds the Qwen2
    pipeline from the vocabulary of any tokenizer.json beside a Qwen2 config and ignores the file's splitting
    and decoding rules. For the same reason, characters outside the vocabulary are dropped instead of becoming
    <unk>.
    """
    # ByteLevel renames bytes that do not print: here, space and newline.
    renamed = {" ": "\u0120", "\n": "\u010a"}
    tokens = [*SPECIAL_TOKENS, *special, *(renamed.get(character, character) for character in CHARACTERS)]
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        extra_special_tokens=["<user>", "<assistant>", *special],
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
        chat_template=chat_template,
    )
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return tokenizer


def build_model(
    tokenizer: Qwen2Tokenizer,
    *,
    seed: int = 0,
    hidden: int = 192,
    layers: int = 2,
    heads: int = 6,
    kv_heads: int = 2,
    intermediate: int = 384,
    tie: bool = False,
    experts: int = 0,
) -> PreTrainedModel:
    """Return a Qwen2 in float32 with weights drawn from `seed` and the tokenizer's vocabulary size.

    experts: if above 0, the model is a Qwen3-MoE; two of so many experts compute each token. Raises
    ValueError for sizes that do not divide.
    """
    if hidden % heads or (hidden // heads) % 2:
        raise ValueError(
            f"--hidden {hidden} must be --heads {heads} times an even number (rotary embedding)."
        )
    if heads % kv_heads:
        raise ValueError(f"--heads {heads} must be a multiple of --kv-heads {kv_heads}.")
    sizes: dict[str, Any] = dict(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=tie,
        dtype="float32",
        **(special := special_keys(tokenizer)),
    )
    if not experts:
        return draw(Qwen2ForCausalLM, Qwen2Config(intermediate_size=intermediate, **sizes), special, seed)
    sizes |= dict(num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=intermediate // 4)
    head: dict[str, Any] = dict(head_dim=hidden // heads)  # a key that the class takes and does not declare
    config = Qwen3MoeConfig(norm_topk_prob=True, **sizes, **head)
    return draw(Qwen3MoeForCausalLM, config, special, seed)


def special_keys(tokenizer: Qwen2Tokenizer) -> dict[str, int]:
    """Return the keys of config.json that name the tokens of padding, begin and end."""
    return {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}


def draw(
    kind: type[PreTrainedModel], config: PreTrainedConfig, special: dict[str, int], seed: int
) -> PreTrainedModel:
    """Return a model in float32 with weights drawn from `seed`; torch's global random state stays.

    special: keys of its generation_config.json, which are `special_keys`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config).float()
    model.generation_config = GenerationConfig(**special)
    return model


def save(model: PreTrainedModel, tokenizer: Qwen2Tokenizer, directory: Path) -> None:
    """Write a model and its tokenizer."""
    transformers_logging.disable_progress_bar()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def addition_problems(seed: int) -> dict[str, list[tuple[int, int]]]:
    """Return all (a, b) with a, b in 10..99, split by `seed` into `train` (7,600) and `test` (500)."""
    problems = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    order = np.random.default_rng(seed).permutation(len(problems))
    shuffled = [problems[i] for i in order]
    return {"train": shuffled[NUM_HELD_OUT:], "test": shuffled[:NUM_HELD_OUT]}


def write_problems(path: Path, problems: list[tuple[int, int]]) -> None:
    """Write a file of addition problems."""
    rows = [([{"role": "user", "content": f"{a}+{b}="}], str(a + b)) for a, b in problems]
    write_rows(path, "addition", rows, ability="math")


def write_rows(path: Path, data_source: str, rows: Sequence[tuple[Any, str]], **columns: str) -> None:
    """Write (prompt, answer) pairs with verl's columns to a parquet file, which is named after its split.

    columns: further columns of one value.
    """
    table = [
        {
            "data_source": data_source,
            "prompt": prompt,
            **columns,
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": path.stem, "index": index},
        }
        for index, (prompt, answer) in enumerate(rows)
    ]
    pq.write_table(pa.Table.from_pylist(table), path)


def write_answers(out: Path, problems: list[tuple[int, int]], seed: int) -> None:
    """Write the parquet files of correct and wrong answers; a wrong one differs by 1 to 20."""
    generator = np.random.default_rng([seed, 1])
    rows: list[dict[str, Any]] = []
    labelled: list[dict[str, Any]] = []
    for a, b in problems:
        error = int(generator.integers(1, 21)) * int(generator.choice([-1, 1]))
        prompt = [{"role": "user", "content": f"{a}+{b}="}]
        answers = {"chosen": str(a + b), "rejected": str(max(a + b + error, 0))}
        row = {"data_source": "addition", "prompt": prompt}
        rows.append({**row, **answers})
        label = len(labelled) % 2 == 0
        labelled.append({**row, "completion": answers["chosen" if label else "rejected"], "label": label})
    pq.write_table(pa.Table.from_pylist(rows), out / "pairs.parquet")
    pq.write_table(pa.Table.from_pylist(labelled), out / "labels.parquet")


def make_toy(out: str | Path, *, seed: int = 0, **sizes: Any) -> Path:
    """Write the data and the model to `out` (created if needed) and return `out`.

    `seed` determines the held-out problems and the weights, `sizes` go to `build_model`, for example
    hidden=64. Raises ValueError for sizes that do not divide.
    """
    out = Path(out)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=seed, **sizes)
    out.mkdir(parents=True, exist_ok=True)
    splits = addition_problems(seed)
    for split, problems in splits.items():
        write_problems(out / f"{split}.parquet", problems)
    write_answers(out, splits["train"], seed)
    save(model, tokenizer, out / "model")
    return out


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--out", required=True, help="directory to write to")
    add("--seed", type=int, default=0, help="seed of the held-out problems and the weights")
    add("--hidden", type=int, default=192, help="hidden size")
    add("--layers", type=int, default=2, help="transformer layers")
    add("--heads", type=int, default=6, help="attention heads")
    add("--kv-heads", type=int, default=2, help="key/value heads")
    add("--intermediate", type=int, default=384, help="size of the MLP")
    add("--tie", action="store_true", help="share the input and output embedding")
    arguments = vars(parser.parse_args(argv))
    try:
        out = make_toy(arguments.pop("out"), **arguments)
    except ValueError as error:
        parser.error(str(error))
    print(
        f"wrote {out}/train.parquet, test.parquet, pairs.parquet, labels.parquet and model, whose random "
        "weights score 0; before RL, fine-tune it: lockstep train --config configs/quickstart_sft.yaml "
        f"model.path={out}/model data.train=[{out}/train.parquet]"
    )


if __name__ == "__main__":
    main()
