"""A forward pass by transformers over an exported checkpoint, as second source of the policy's log-probs."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rl.checks.logprobs import rounding_limit
from rl.data.batch import Batch
from rl.models.placement import count_experts
from rl.objectives.segments import segment_sum
from rl.training.engine import TrainingEngine
from rl.training.micro_batch_plans import plan_minibatch

LENGTHS = ((5, 9), (17, 1), (1, 30), (33, 0), (8, 8), (2, 64), (40, 21), (3, 3))
"""Tokens of the prompt and of the response of each sample of `random_batch`; one response is empty."""
MAX_CHECKED = 4 << 30
"""Parameters up to which rank 0 loads the exported model, in float32 in host memory."""


def random_batch(vocab_size: int, lengths: Sequence[tuple[int, int]] = LENGTHS) -> Batch:
    """Return random prompts and responses of these lengths, the same in each call; each is a group."""
    generator = torch.Generator().manual_seed(3)

    def tokens(length):
        return torch.randint(3, vocab_size, (length,), generator=generator).int().numpy()

    return Batch(
        prompt_ids=[tokens(prompt) for prompt, _ in lengths],
        response_ids=[tokens(response) for _, response in lengths],
        groups=torch.arange(len(lengths)),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
    )


def hf_logprobs(model, batch: Batch, *, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropy and sum of squared probabilities at the response tokens, float64 [T] each.

    Nothing is packed or padded. The softmax is computed in float64.

    model: a causal model of transformers.
    """
    logprobs, entropies, squares = [], [], []
    for prompt, response in zip(batch.prompt_ids, batch.response_ids):
        ids = torch.tensor([*prompt.tolist(), *response.tolist()], device=model.device)
        log_p = (model(ids[None]).logits[0].double() / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
        logprobs.append(log_p.gather(1, ids[len(prompt) :, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
        squares.append(log_p.exp().square().sum(-1))
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(squares)


def wrong_forward(policy: TrainingEngine, directory: Path) -> str | None:
    """Return on rank 0 how log-probs of a checkpoint in transformers differ from the policy's, if they do.

    Both compute log-probs of random tokens. They are not compared for models that read images, or of more
    than MAX_CHECKED parameters. With routed experts the sample with the largest difference is left out,
    because a rounding error may route its tokens elsewhere. Collective over the world.
    """
    hf, weights = policy.weight_map.hf, policy.weight_map.weights
    if "vision_config" in hf or sum(weight.num_elements for weight in weights) > MAX_CHECKED:
        return None
    batch = random_batch(hf["vocab_size"])
    plan = plan_minibatch(batch, list(range(len(batch))), dp=policy.grid.dp, max_tokens=4096)
    (found,) = policy.forward(batch, [plan], ("logprobs",))
    if dist.get_rank():
        return None
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        expected = hf_logprobs(model, batch, temperature=policy.spec.temperature)[0]
    gaps, lengths = segment_sum((found.double() - expected).abs(), batch.lengths), batch.lengths.double()
    if count_experts(weights):
        worst = int((gaps / lengths.clamp(min=1)).argmax())
        gaps[worst], lengths[worst] = 0, 0
    gap = float(gaps.sum() / lengths.sum())
    limit = rounding_limit(hf, policy.weight_map.dtype) * max(1.0, float(expected.abs().mean()))
    if gap <= limit:
        return None
    return (
        f"transformers computes log-probs from the files that differ from the policy's by {gap:.3g} nats per "
        f"token, more than rounding ({limit:.2g})"
    )
