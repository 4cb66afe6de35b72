"""Count waits for the device in the project's code, in passes of one and of several micro-batches.

    host_sync_worker.py CHECKPOINT

On CUDA torch itself reports each wait (`torch.cuda.set_sync_debug_mode`). On CPU a stand-in counts the calls
from `rl/` that would wait. It excludes batch and packing (their tensors are in host memory) and the attention
of the CPU. Prints {pass: {number of micro-batches: [calls]}} as JSON.
"""

import json
import sys
import warnings
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from rl.config.objective import Objective
from rl.config.schema import Config, Optimizer, resolve
from rl.data.batch import Batch
from rl.models import read_hf_config
from rl.phases.policy_gradient import policy_loss
from rl.runtime.ranks import discover
from rl.runtime.session import session
from rl.training.engine import TrainingEngine
from rl.training.grid import build_grid
from rl.training.loss import Totals
from rl.training.micro_batch_plans import plan_minibatch
from rl.training.spec import ModelSpec

RANKS = discover()
ROOT = Path(__file__).parents[3]
METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")
METHODS += ("nonzero", "masked_select", "unique", "to", "repeat_interleave")
FUNCTIONS = ("nonzero", "masked_select", "unique", "unique_consecutive", "repeat_interleave")
ON_THE_HOST = (
    "rl/data/batch.py",
    "rl/training/packing.py",
    "rl/training/layer_spec",
    "rl/training/attention",
)


def waits(name: str, args: tuple, given: dict) -> bool:
    """Return whether the call would wait for the device if its tensors were on CUDA."""
    if name == "to":
        return "cpu" in map(str, args[1:])
    return given.get("output_size") is None


@contextmanager
def stand_in(found: Counter):
    """Count the calls for which `waits` is true, by line of the project's code."""

    def counting(name, function):
        def call(*args, **given):
            path = Path(sys._getframe(1).f_code.co_filename)
            if path.is_relative_to(ROOT / "rl") and waits(name, args, given):
                place = str(path.relative_to(ROOT))
                if not place.startswith(ON_THE_HOST):
                    found[f"{place}: {name}"] += 1
            return function(*args, **given)

        return call

    with ExitStack() as patches:
        for owner, names in ((torch.Tensor, METHODS), (torch, FUNCTIONS)):
            for name in names:
                replacement = counting(name, getattr(owner, name))
                patches.enter_context(patch.object(owner, name, replacement))
        yield


@contextmanager
def counted(on_cuda: bool):
    found: Counter[str] = Counter()
    if not on_cuda:
        with stand_in(found):
            yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        yield found
        torch.cuda.set_sync_debug_mode("default")
    found.update(str(warning.filename) for warning in caught if "synchroniz" in str(warning.message))


def main(checkpoint: str) -> None:
    config = resolve(
        replace(Config(), objective=Objective(advantage="grpo", loss="ppo", entropy_coef=0.01, kl_coef=0.1))
    )
    rng = np.random.default_rng(0)
    ids = [rng.integers(8, 90, size=6).astype(np.int32) for _ in range(8)]
    batch = Batch(ids, ids, groups=torch.arange(8), truncated=torch.zeros(8, dtype=torch.bool))
    for name in ("old_logprobs", "ref_logprobs", "advantages"):
        setattr(batch, name, torch.randn(48))
    results: dict[str, dict[int, dict]] = {"forward": {}, "update": {}, "update, per sample": {}}
    with session(RANKS) as device:
        grid = build_grid(tp=1, pp=1, seed=1)
        spec = ModelSpec(checkpoint, read_hf_config(checkpoint), "float32", optimizer=Optimizer())
        model = TrainingEngine(spec, config.training, grid, device)
        totals = Totals(num_tokens=48.0, num_samples=8.0, num_units=8.0)
        loss = partial(policy_loss(config), totals=totals)
        by_sample = replace(config, objective=replace(config.objective, loss="gspo"))
        losses = {"update": loss, "update, per sample": partial(policy_loss(by_sample), totals=totals)}
        for max_tokens in (96, 12):
            plan = plan_minibatch(batch, list(range(8)), dp=1, max_tokens=max_tokens)
            number = len(plan[0])
            with counted(device.is_cuda) as found:
                model.forward(batch, [plan], ("logprobs", "entropy"))
            results["forward"][number] = found
            for name, function in losses.items():
                with counted(device.is_cuda) as found:
                    model.update(batch, plan, function, lr=1e-4)
                results[name][number] = found
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
