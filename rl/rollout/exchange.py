"""Exchange of samples. Every rank receives all samples, a few bytes per token."""

import numpy as np
import torch

from rl.data.batch import Batch
from rl.rollout.turns import Sample
from rl.runtime.collectives import sum_over_world
from rl.runtime.device import Device


def exchange(prompts: list[np.ndarray], own: list[Sample], samples_per_prompt: int, device: Device) -> Batch:
    """Return the batch of all samples, ordered by prompt and sample number. Collective over the world.

    The lengths are exchanged first and determine the positions in the token columns. Each position is written
    by one rank and is 0 on the others, so the sum over ranks is exact.

    Args:
        prompts: token ids of each prompt, int32 [P_i].
        own: the samples of this rank; no other rank has them.
    """
    total = len(prompts) * samples_per_prompt
    places = [sample.prompt * samples_per_prompt + sample.number for sample in own]
    header = torch.zeros(3, total, dtype=torch.int64)  # length, truncated, times generated
    for place, sample in zip(places, own):
        header[:, place] = torch.tensor([len(sample.token_ids), sample.truncated, 1])
    lengths, truncated, times = sum_over_world(header, device.torch)
    assert bool((times == 1).all()), (
        f"{int((times != 1).sum())} of {total} samples were not generated exactly once"
    )

    ends = lengths.cumsum(0)
    columns = torch.zeros(3, int(lengths.sum()), dtype=torch.int32)  # token ids, mask, weight versions
    logprobs = torch.zeros(columns.shape[1])
    for place, sample in zip(places, own):
        span = slice(int(ends[place] - lengths[place]), int(ends[place]))
        values = np.stack([sample.token_ids, sample.mask, sample.weight_versions])
        columns[:, span] = torch.from_numpy(values)
        logprobs[span] = torch.from_numpy(sample.logprobs)
    token_ids, mask, weight_versions = sum_over_world(columns, device.torch)
    groups = torch.arange(len(prompts)).repeat_interleave(samples_per_prompt)
    return Batch(
        prompt_ids=[prompts[g] for g in groups],
        response_ids=np.split(token_ids.clone().numpy(), ends[:-1].numpy()),
        groups=groups,
        truncated=truncated > 0,
        mask=mask.float(),
        rollout_logprobs=sum_over_world(logprobs, device.torch),
        weight_versions=weight_versions.clone(),
    )
