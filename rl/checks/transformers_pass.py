"""Computes the log-probs of random tokens with transformers, from the files of a checkpoint.

    python -m rl.checks.transformers_pass DIRECTORY TEMPERATURE OUT    writes log-probs to OUT, float64 [T]

The log-probs of an export are computed in their own process, because a vLLM engine changes classes of
transformers in the engine's process.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.data.batch import Batch
from rl.models.by_class import correct

LENGTHS = ((5, 9), (17, 1), (1, 30), (33, 0), (8, 8), (2, 64), (40, 21), (3, 3))
"""Number of tokens of prompt and response of each sample of `random_batch`. One response is empty."""


def random_batch(vocab_size: int, lengths: Sequence[tuple[int, int]] = LENGTHS) -> Batch:
    """Return prompts and responses of these lengths, the same in every call. Each sample is its own group."""
    generator = torch.Generator().manual_seed(3)

    def tokens(length: int) -> np.ndarray:
        return torch.randint(3, vocab_size, (length,), generator=generator).int().numpy()

    return Batch(
        prompt_ids=[tokens(prompt) for prompt, _ in lengths],
        response_ids=[tokens(response) for _, response in lengths],
        groups=torch.arange(len(lengths)),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
    )


def hf_logprobs(model: Any, batch: Batch, *, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropy and sum of squared probabilities at the response tokens, float64 [T] each.

    Nothing is packed or padded. model: a causal model of transformers.
    """
    logprobs, entropies, squares = [], [], []
    for prompt, response in zip(batch.prompt_ids, batch.response_ids):
        ids = torch.tensor([*prompt.tolist(), *response.tolist()], device=model.device)
        log_p = (model(ids[None]).logits[0].double() / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
        logprobs.append(log_p.gather(1, ids[len(prompt) :, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
        squares.append(log_p.exp().square().sum(-1))
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(squares)


@contextmanager
def without_kernels() -> Iterator[None]:
    """Make models of transformers that are imported in the block compute with torch alone, also on a CPU."""
    hidden = ("fla", "causal_conv1d")
    before = {name: sys.modules[name] for name in hidden if name in sys.modules}
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
        sys.modules.update(before)


@torch.no_grad()
def logprobs_of_files(
    directory: str, temperature: float, dtype: torch.dtype
) -> tuple[Tensor, float, list[Tensor]]:
    """Return log-probs of `random_batch` from the files, noise of a dtype, and rotary frequencies.

    The log-probs, float64 [T], are computed in float32. The noise is the mean difference of those computed in
    `dtype`; infinite for float32. Raises what transformers raises if it does not load the files.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    options: dict[str, Any] = dict(local_files_only=True, trust_remote_code=False)
    config = AutoConfig.from_pretrained(directory, **options)
    correct(config)
    options |= dict(dtype=torch.float32, attn_implementation="eager")  # others do not cap scores
    model = AutoModelForCausalLM.from_pretrained(directory, config=config, **options).eval()
    batch = random_batch(model.config.get_text_config().vocab_size)
    exact = hf_logprobs(model, batch, temperature=temperature)[0]
    rotary = [each.clone() for name, each in model.named_buffers() if name.endswith("inv_freq")]
    if dtype is torch.float32:
        return exact, math.inf, rotary
    rounded = hf_logprobs(model.to(dtype), batch, temperature=temperature)[0]
    return exact, float((rounded - exact).abs().mean()), rotary


def main(directory: str, temperature: str, out: str) -> None:
    with without_kernels():
        np.save(out, logprobs_of_files(directory, float(temperature), torch.float32)[0].numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])
