"""Compares the files of a checkpoint, loaded and run by transformers, with the policy."""

import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl.checks.few_samples import random_output
from rl.checks.logprobs import LogprobMismatch, rounding_limit
from rl.checks.transformers_pass import logprobs_of_files, random_batch
from rl.models.placement import count_experts
from rl.objectives.segments import segment_sum
from rl.runtime.collectives import broadcast_object
from rl.training.engine import TrainingEngine
from rl.training.model import Packed

MAX_CHECKED, MAX_AT_START = 4 << 30, 1 << 30
"""Maximum number of parameters of a compared model, of an export and at the start, in rank 0's memory."""
NOISE = 8
"""Maximum difference at the start, relative to the noise of the policy's dtype."""


def wrong_export(policy: TrainingEngine, directory: Path) -> str | None:
    """Return on rank 0 how the log-probs of transformers from an export differ from the policy's.

    None if they agree, or for models with images or more than MAX_CHECKED parameters. Collective.
    """
    found = _own_logprobs(policy, MAX_CHECKED)
    if found is None or dist.get_rank():
        return None
    expected = _in_own_process(policy, directory)
    if not isinstance(expected, Tensor):
        return expected
    return _difference(policy, found, expected)


def check_function(policy: TrainingEngine, slack: float) -> None:
    """Raise LogprobMismatch on every rank if transformers computes other log-probs from the model's files.

    The policy must have the weights of its files. Models that read images, are quantised, are classes of
    transformers, or have more than MAX_AT_START parameters are not compared. slack:
    `agreement.logprob_slack`. Collective over the world.
    """
    is_quantised = "quantization_config" in policy.weight_map.hf
    if not slack or is_quantised or not isinstance(policy.chunks[0], Packed):
        return
    found, difference = _own_logprobs(policy, MAX_AT_START), None
    if found is not None and not dist.get_rank():
        directory, dtype = Path(policy.spec.path), policy.weight_map.dtype
        try:
            expected, noise, rotary = logprobs_of_files(str(directory), policy.spec.temperature, dtype)
            difference = _difference(policy, found, expected, slack, noise)
            if difference is not None:  # this process may have other classes than transformers
                again = _in_own_process(policy, directory)
                if isinstance(again, Tensor):
                    difference = _difference(policy, found, again, slack, noise)
            own = getattr(getattr(policy.chunks[0], "rotary", None), "frequencies", None)
            if difference is not None and own is not None and rotary:
                is_equal = [len(each) == len(own) and torch.allclose(own.cpu(), each) for each in rotary]
                difference += "" if any(is_equal) else ", and so do the rotary frequencies"
        except Exception as error:  # of any type, if transformers does not know the model
            print(f"start check: transformers does not compute {directory}: {error}", flush=True)
    if (text := broadcast_object(difference)) is not None:
        sharing = policy.grid.sharing
        parts = f", or ranks ({sharing}) hold wrong parts of it" if sharing else ""
        files = f"of the config.json of {policy.spec.path}"
        raise LogprobMismatch(f"start check: {text}: a value {files} is used in another way{parts}.")


def _own_logprobs(policy: TrainingEngine, most: int) -> Tensor | None:
    """Return the policy's log-probs of `random_batch`; None if it has images or too many parameters."""
    hf, weights = policy.weight_map.hf, policy.weight_map.weights
    if "vision_config" in hf or sum(weight.num_elements for weight in weights) > most:
        return None
    return random_output(policy, "logprobs")


def _in_own_process(policy: TrainingEngine, directory: Path) -> Tensor | str | None:
    """Return what transformers computes in a new process, or why it computes nothing."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name, "logprobs.npy")
        temperature = str(policy.spec.temperature)
        command = [sys.executable, "-m", "rl.checks.transformers_pass", str(directory), temperature, str(out)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode < 0:
            text = f"warning: export check: the pass of transformers was ended by signal {-done.returncode}"
            print(text, flush=True)
            return None
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
            return f"transformers does not load the files: {said[-1]}"
        return torch.from_numpy(np.load(out))


def _difference(
    policy: TrainingEngine, found: Tensor, expected: Tensor, slack: float = 1.0, noise: float = math.inf
) -> str | None:
    """Return how two log-probs of `random_batch` differ; None if they agree.

    With routed experts, the sample with the largest difference is left out. noise: mean difference that the
    policy's dtype makes in transformers' pass.
    """
    hf, weights = policy.weight_map.hf, policy.weight_map.weights
    batch = random_batch(hf["vocab_size"])
    gaps, lengths = segment_sum((found.double() - expected).abs(), batch.lengths), batch.lengths.double()
    if count_experts(weights):
        worst = int((gaps / lengths.clamp(min=1)).argmax())
        gaps[worst], lengths[worst] = 0, 0
    gap = float(gaps.sum() / lengths.sum())
    exact, rounded = (rounding_limit(hf, dtype) for dtype in (torch.float32, policy.weight_map.dtype))
    limit = min(slack * rounded * max(1.0, float(expected.abs().mean())), NOISE * slack * max(noise, exact))
    text = "transformers computes log-probs from the files that differ from the policy's by"
    return f"{text} {gap:.3g} nats per token, more than rounding ({limit:.2g})" if gap > limit else None
