"""One rank of test_context.py: bytes and memory of an update with rows shared by context parallel ranks.

    context_worker.py CHECKPOINT OUT_DIR TOKENS CASE [CASE ...]     CASE is TPxPPxCP[+RECOMPUTE]

For example, 1x1x2 has two context parallel ranks. RECOMPUTE as in tests.recompute. Every rank saves
OUT_DIR/CASE.RANK.json: the bytes received from the group in the forward and in the backward pass of the
attention, the maximum of the memory that an update allocates, and a checksum of each weight's gradient.
"""

import json
import sys
from pathlib import Path

from tests.ranks.training.megatron_groups import RANKS, new_grid  # isort: skip

from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker

from rl.config.schema import Optimizer, Training
from rl.data.batch import Batch
from rl.models import read_hf_config
from rl.runtime.session import session
from rl.training.engine import TrainingEngine
from rl.training.micro_batch_plans import plan_minibatch
from rl.training.spec import ModelSpec
from tests.recompute import recompute_of


def one_sample(vocab_size: int, tokens: int) -> Batch:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, vocab_size, (tokens,), generator=generator).int().numpy()
    response = tokens // 4
    return Batch(
        prompt_ids=[ids[:-response]],
        response_ids=[ids[-response:]],
        groups=torch.zeros(1, dtype=torch.long),
        truncated=torch.zeros(1, dtype=torch.bool),
        mask=torch.ones(response),
    )


def measure(checkpoint: str, tokens: int, case: str, device) -> dict:
    sizes, _, recompute = case.partition("+")
    tp, pp, cp = map(int, sizes.split("x"))
    hf = read_hf_config(checkpoint)
    grid = new_grid(tp, pp, cp=cp)
    training = Training(tp=tp, pp=pp, cp=cp, micro_batch_tokens=tokens, **recompute_of(recompute))
    spec = ModelSpec(checkpoint, hf, "float32", optimizer=Optimizer(lr=1e-3))
    engine = TrainingEngine(spec, training, grid, device)
    batch = one_sample(hf["vocab_size"], tokens)
    plan = plan_minibatch(batch, [0], dp=grid.dp, max_tokens=tokens)
    received = dict(forward=0, backward=0)
    gather, scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor
    group = grid.context.group if grid.context else None

    def counted_gather(out, x, group=None, **more):
        if group is grid_group and x.dim() > 1:  # not the outputs of the head
            received["forward"] += out.nbytes - x.nbytes
        return gather(out, x, group=group, **more)

    def counted_scatter(out, x, group=None, **more):
        if group is grid_group:
            received["backward"] += x.nbytes - out.nbytes
        return scatter(out, x, group=group, **more)

    def loss(micro, **_):
        return -micro.logprobs.mean(), {}

    engine.update(batch, plan, loss, lr=0.0)  # allocates the optimizer's state
    grid_group = group
    tracker = MemTracker()
    with (
        mock.patch.object(dist, "all_gather_into_tensor", counted_gather),
        mock.patch.object(dist, "reduce_scatter_tensor", counted_scatter),
        tracker,
    ):
        engine.update(batch, plan, loss, lr=0.0)
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    gradients = {
        name: int(p.main_grad.view(torch.int32).sum(dtype=torch.int64))
        for name, p in engine.model.named_parameters()
    }
    return received | dict(peak=peak, gradients=gradients)


def main() -> None:
    checkpoint, out, tokens, *cases = sys.argv[1:]
    with session(RANKS) as device:
        for case in cases:
            found = measure(checkpoint, int(tokens), case, device)
            Path(out, f"{case}.{RANKS.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
