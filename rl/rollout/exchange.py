"""Every rank's samples to every rank: token ids and log-probs, a few bytes per token, so that the algorithm sees it all."""

import numpy as np
import torch

from rl.data.batch import Batch
from rl.rollout.engine import Sample
from rl.runtime.collectives import sum_over_world
from rl.runtime.device import Device


def exchange(prompts: list[np.ndarray], mine: list[Sample], samples_per_prompt: int, device: Device) -> Batch:
    """The batch of all samples, ordered by prompt and sample number, alike on every rank. Collective over the world.

    prompts: int32 [P_i] token ids each. `mine` are samples that no other rank gives. Lengths first, then the columns laid out by them: each position is
    written by one rank and 0 elsewhere, so that a sum over ranks is exact.
    """
    total = len(prompts) * samples_per_prompt
    places = [sample.prompt * samples_per_prompt + sample.number for sample in mine]
    header = torch.zeros(3, total, dtype=torch.int64)  # length, truncated, times generated
    for place, sample in zip(places, mine):
        header[:, place] = torch.tensor([len(sample.token_ids), sample.truncated, 1])
    lengths, truncated, times = sum_over_world(header, device.torch)
    assert bool((times == 1).all()), (
        f"{int((times != 1).sum())} of {total} samples were not generated exactly once"
    )

    ends = lengths.cumsum(0)
    tokens = torch.zeros(int(lengths.sum()), dtype=torch.int32)
    logprobs = torch.zeros(len(tokens))
    for place, sample in zip(places, mine):
        span = slice(int(ends[place] - lengths[place]), int(ends[place]))
        tokens[span] = torch.from_numpy(sample.token_ids)
        logprobs[span] = torch.from_numpy(sample.logprobs)
    tokens = sum_over_world(tokens, device.torch).numpy()
    groups = torch.arange(len(prompts)).repeat_interleave(samples_per_prompt)
    return Batch(
        prompt_ids=[prompts[g] for g in groups],
        response_ids=np.split(tokens, ends[:-1].numpy()),
        groups=groups,
        truncated=truncated > 0,
        rollout_logprobs=sum_over_world(logprobs, device.torch),
    )
