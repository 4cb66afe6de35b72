"""AdamW with bfloat16 moments. A share of its state can stay in host memory, where the host updates it.

Transformer Engine's Adam rounds bfloat16 moments to the nearest number. Rounding to nearest suits a second
moment that decays by 5 % per step, as in DeepSeek-V3 (arXiv:2412.19437, 3.3.1: bfloat16 moments, beta2 0.95,
no loss in quality). Rounding to nearest does not suit beta2 = 0.999, the default here. A step then changes
the second moment by 0.1 %, which is less than half of the distance between two bfloat16 numbers (2^-9), so
the moment would never decrease. Therefore both moments are rounded stochastically: up with a probability
equal to the relative distance from the number below, so that the mean is exact (arXiv:2010.06192 does this
for weights). The random bits do not come from a generator; they are a hash of the moments, the gradient and
the step. For example, a resumed run in another layout rounds as the first run did.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rl.runtime.device import aligned, host_memory
from rl.training.optimizer import IN_HOST, MASTER, gradient_of

CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Number of elements with float32 moments at once, by device. On a CPU they fit the cache of a core; a GPU
needs more work per launch."""
STAGED = 1 << 22
"""Elements of a message between device and host. Two are in flight: one moves while the host updates the
other."""


class CompactAdam(torch.optim.Optimizer):
    """AdamW over the groups of another optimizer, with the state layout of Transformer Engine's Adam.

    Args:
        groups: used without a copy, so that a change of a group's learning rate changes this optimizer.
        moments: dtype of the moments.
        in_host: weights with their state in host memory.
        masters: the weights of `in_host` that copy a weight of another dtype. Their state holds the
            values, as MASTER; on the device they exist only between `step` and `release_masters`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        moments: torch.dtype,
        in_host: Sequence[Tensor] = (),
        masters: Sequence[Tensor] = (),
    ):
        # The weights are no leaves, which torch would refuse.
        super().__init__([torch.empty(0)], {IN_HOST: {id(weight) for weight in in_host}})
        self.param_groups = groups
        self._moments, self._room = moments, dict[int, tuple[Tensor, ...]]()
        copied = {id(weight) for weight in masters}
        sizes = [
            (len(weight), dtype)
            for weight in in_host
            for dtype in (*[torch.float32] * (id(weight) in copied), moments, moments)
        ]
        places = _places(sizes)
        for weight in in_host:
            if id(weight) in copied:
                self.state[weight][MASTER] = next(places).copy_(weight.detach())
            self._room[id(weight)] = next(places), next(places)
        self._staged = [host_memory(2 * 4 * STAGED) for _ in range(2)] if in_host else []
        self._stream = torch.cuda.Stream() if in_host and in_host[0].is_cuda else None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # Megatron gives no closure
        """Update the weights. The host's share is updated while the device updates its own."""
        device: list[tuple[dict, Tensor]] = []
        host: list[tuple[dict, Tensor]] = []
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            for weight in group["params"]:
                if weight.grad is not None:
                    self._make_moments(weight)
                    (host if id(weight) in self._room else device).append((group, weight))
        for group, weight in device:
            state = self.state[weight]
            gradient = gradient_of(weight).view(-1)
            _update(weight.view(-1), gradient, state["exp_avg"], state["exp_avg_sq"], group)
        if host:
            self._update_on_host(host)

    def _make_moments(self, weight: Tensor) -> None:
        state = self.state[weight]
        if "exp_avg" not in state:
            room = self._room.get(id(weight)) or [torch.empty_like(weight, dtype=self._moments) for _ in "mv"]
            state["exp_avg"], state["exp_avg_sq"] = (moment.zero_() for moment in room)

    def _update_on_host(self, weights: Sequence[tuple[dict, Tensor]]) -> None:
        """Move gradients to the host and updated weights back, chunk by chunk, beside the updates."""
        for _, weight in weights:
            storage = weight.untyped_storage()
            if not storage.nbytes():
                storage.resize_(weight.nbytes)
        stream, jobs = self._stream, list(_jobs(weights))
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            arriving = self._send(jobs[0], 0)
            for number, (group, weight, part) in enumerate(jobs):
                (values, gradient), event = arriving
                if number + 1 < len(jobs):
                    arriving = self._send(jobs[number + 1], number + 1)
                if event is not None:
                    event.synchronize()
                state = self.state[weight]
                moments = state["exp_avg"][part], state["exp_avg_sq"][part]
                _update(values, gradient, *moments, group)
                weight.view(-1)[part].copy_(values, non_blocking=True)
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)

    def _send(self, job: tuple[dict, Tensor, slice], number: int) -> tuple[tuple[Tensor, Tensor], Any]:
        """Return (values, gradient) of a job in host memory, and the event after which they are there."""
        _, weight, part = job
        size = part.stop - part.start
        gradient, values = self._staged[number % 2].view(torch.float32)[: 2 * size].view(2, size)
        gradient.copy_(gradient_of(weight).view(-1)[part], non_blocking=True)
        if MASTER in self.state[weight]:
            values = self.state[weight][MASTER][part]
        else:
            values.copy_(weight.view(-1)[part], non_blocking=True)
        return (values, gradient), None if self._stream is None else self._stream.record_event()


def chosen(weights: Sequence[Tensor], share: float) -> list[Tensor]:
    """Return weights that together have at most `share` of all elements, and at most one weight fewer.

    The chosen weights are spread over the list, so that every layer has some of them.
    """
    found: list[Tensor] = []
    seen = held = 0
    for weight in weights:
        seen += len(weight)
        if held + len(weight) <= share * seen:
            held += len(weight)
            found.append(weight)
    return found


def _jobs(weights: Sequence[tuple[dict, Tensor]]) -> Iterator[tuple[dict, Tensor, slice]]:
    for group, weight in weights:
        for start in range(0, len(weight), STAGED):
            yield group, weight, slice(start, min(len(weight), start + STAGED))


def _places(sizes: Sequence[tuple[int, torch.dtype]]) -> Iterator[Tensor]:
    """Yield tensors of these numbers of elements and dtypes in one block of host memory."""
    memory, start = host_memory(sum(aligned(size * dtype.itemsize) for size, dtype in sizes)), 0
    for size, dtype in sizes:
        yield memory[start : start + size * dtype.itemsize].view(dtype)
        start += aligned(size * dtype.itemsize)


def _update(
    weight: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, group: Mapping[str, Any]
) -> None:
    """Take one step of AdamW (arXiv:1711.05101) with float32 arithmetic, on float32 weights [n]."""
    beta1, beta2 = group["betas"]
    options = dict(beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"])
    step = torch.full((), float(group["step"]), device=weight.device)
    tensors = (weight, gradient, exp_avg, exp_avg_sq)
    for w, g, m, v in zip(*(tensor.split(CHUNK[weight.device.type]) for tensor in tensors)):
        exact = m.float(), v.float()  # the same tensors if they are float32
        torch._fused_adamw_(
            [w],
            [g],
            [exact[0]],
            [exact[1]],
            [],
            [step],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            **options,
        )
        if m.dtype is torch.bfloat16:
            bits = _random_bits(*exact, g, group["step"])
            m.copy_(rounded(exact[0], bits))
            v.copy_(rounded(exact[1], bits >> 16))


def rounded(values: Tensor, bits: Tensor) -> Tensor:
    """Return float32 values rounded to bfloat16, up if the lower 16 of the random int32 bits say so.

    bfloat16 lacks the lower 16 bits of a float32 value. Adding a random number to these bits carries into the
    upper bits with a probability equal to the value of the lower bits.
    """
    carried = values.view(torch.int32) + (bits & 0xFFFF)
    return (carried & -0x10000).view(torch.float32).bfloat16()


def _random_bits(exp_avg: Tensor, exp_avg_sq: Tensor, gradient: Tensor, step: int) -> Tensor:
    """Return a hash of the arguments, int32 [n]; the mixing function is lowbias32."""
    salt = (step * 0x9E3779B9 + 0x7F4A7C15) & 0x7FFFFFFF
    bits = exp_avg_sq.view(torch.int32) * 0x01000193
    bits.bitwise_xor_(exp_avg.view(torch.int32)).mul_(0x01000193)
    bits.bitwise_xor_(gradient.contiguous().view(torch.int32)).add_(salt)
    for shift, mask, factor in ((16, 0xFFFF, 0x7FEB352D), (15, 0x1FFFF, -0x7B935975), (16, 0xFFFF, 1)):
        bits.bitwise_xor_((bits >> shift) & mask).mul_(factor)
    return bits
