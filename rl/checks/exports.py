"""Compares an exported checkpoint, loaded and run by transformers, with the policy."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from rl.checks.logprobs import rounding_limit
from rl.checks.transformers_pass import random_batch
from rl.models.placement import count_experts
from rl.objectives.segments import segment_sum
from rl.training.engine import TrainingEngine
from rl.training.micro_batch_plans import plan_minibatch

MAX_CHECKED = 4 << 30
"""Maximum number of parameters of an exported model that is compared. Rank 0 loads the model in float32 into
host memory."""


def wrong_export(policy: TrainingEngine, directory: Path) -> str | None:
    """Return on rank 0 how the log-probs of transformers differ from the policy's; None if they agree.

    transformers loads the checkpoint, and both compute the log-probs of random tokens. Models that read
    images, and models with more than MAX_CHECKED parameters, are not compared. If the model has routed
    experts, the sample with the largest difference is left out, because a rounding error may send its tokens
    to other experts. Collective over the world.
    """
    hf, weights = policy.weight_map.hf, policy.weight_map.weights
    if "vision_config" in hf or sum(weight.num_elements for weight in weights) > MAX_CHECKED:
        return None
    batch = random_batch(hf["vocab_size"])
    plan = plan_minibatch(batch, list(range(len(batch))), dp=policy.grid.dp, max_tokens=4096)
    (found,) = policy.forward(batch, [plan], ("logprobs",))
    if dist.get_rank():
        return None
    with tempfile.TemporaryDirectory() as name:
        out = Path(name, "logprobs.npy")
        temperature = str(policy.spec.temperature)
        command = [sys.executable, "-m", "rl.checks.transformers_pass", str(directory), temperature, str(out)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode < 0:
            signal = -done.returncode
            print(f"warning: export check: the pass of transformers was ended by signal {signal}", flush=True)
            return None
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
            return f"transformers does not load the files: {said[-1]}"
        expected = torch.from_numpy(np.load(out))
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
