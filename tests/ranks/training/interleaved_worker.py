"""One rank of test_interleaved.py: results as in gradient_worker.py, and the time that the pipeline waits.

    interleaved_worker.py CHECKPOINT OUT_DIR NAME=TPxPPxCPxVPP:TOKENS [...]

Time is counted, not measured: a forward pass of a stage takes 1, a backward pass 2, of a chunk 1/vpp of that,
and whoever receives waits until the sender's time. For example, with vpp=2 a chunk's backward pass takes 1.
`idle` is, for [forward passes, update], the time until the last rank is done, less a rank's own passes, in
units of its own passes.
"""

import sys

from megatron_groups import run_cases  # isort: skip
from gradient_worker import config_of, megatron  # isort: skip

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from rl.training import engine

ACTIVATION, GRADIENT = 1, 2
"""Tags of the messages with times."""


@contextmanager
def counted_time(vpp: int) -> Iterator[list[float]]:
    """Yield a list to which every run of a schedule appends the idle share."""
    time, own, shares = 0.0, 0.0, []
    sends, kept = [], []
    run, communicate = engine.run_schedule, P2PCommunicator._communicate

    def takes(function, amount):
        def counted(*args, **kwargs):
            nonlocal time, own
            time, own = time + amount, own + amount
            return function(*args, **kwargs)

        return counted

    def now() -> torch.Tensor:
        return torch.tensor([time], dtype=torch.float64)

    def sending_time(self, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, **more):
        nonlocal time
        options = dict(
            tensor_send_next=tensor_send_next,
            tensor_send_prev=tensor_send_prev,
            recv_prev=recv_prev,
            recv_next=recv_next,
        )
        group, received = self.pp_group, [torch.zeros(1, dtype=torch.float64) for _ in range(2)]
        # Nobody waits until a time is sent: that would be another order than without this test.
        if tensor_send_next is not None:
            sends.append(dist.isend(mine := now(), self.next_rank, group, tag=ACTIVATION))
            kept.append(mine)
        if tensor_send_prev is not None:
            sends.append(dist.isend(mine := now(), self.prev_rank, group, tag=GRADIENT))
            kept.append(mine)
        found = communicate(self, **options, **more)
        if recv_prev:
            dist.recv(received[0], self.prev_rank, group, tag=ACTIVATION)
        if recv_next:
            dist.recv(received[1], self.next_rank, group, tag=GRADIENT)
        time = max(time, *map(float, received))
        return found

    def timed_run(*args, **kwargs):
        nonlocal time, own
        time = own = 0.0
        run(*args, **kwargs)
        while sends:
            sends.pop().wait()
        kept.clear()
        end = torch.tensor(time, dtype=torch.float64)
        dist.all_reduce(end, dist.ReduceOp.MAX)
        shares.append(float(end) / own - 1)

    with (
        mock.patch.object(schedules, "forward_step", takes(schedules.forward_step, 1 / vpp)),
        mock.patch.object(schedules, "backward_step", takes(schedules.backward_step, 2 / vpp)),
        mock.patch.object(P2PCommunicator, "_communicate", sending_time),
        mock.patch.object(engine, "run_schedule", timed_run),
    ):
        yield shares


def main(checkpoint: str, out_dir: str, *cases: str) -> None:
    def results(how: str, device) -> dict:
        layout, _, tokens = how.partition(":")
        tp, pp, cp, vpp = map(int, layout.split("x"))
        with counted_time(vpp) as shares:
            found = megatron(config_of(checkpoint, tp, pp, int(tokens), cp, vpp), device)
        return found | {"idle": shares}

    run_cases(out_dir, cases, results)


if __name__ == "__main__":
    main(*sys.argv[1:])
