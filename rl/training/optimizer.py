"""Megatron's distributed optimizer: construction from the config, and its tensors on this rank.

A main weight is the float32 weight that the optimizer updates. Messages and checkpoints call it a master
weight.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from torch import Tensor

from rl.config.schema import Optimizer

MASTER = "master"
"""Key of a main weight's values in its optimizer state, if this state is in host memory."""
IN_HOST = "in_host"
"""Key in an optimizer's defaults: the ids of the main weights whose state is in host memory."""
DEVIATE, BIAS = 7.0, 2.0**-5
"""Maximum bias of rounded moments: in standard deviations, and in units of the last place for 1 - beta."""
SAMPLED = 256
"""Approximate number of elements of each tensor that `StateSample` compares."""
RELATIVE = 1e-3
"""Maximum relative error of a step of AdamW. The rounding of 1 - beta in float32 may raise this maximum."""


def build_optimizer(
    adam: Optimizer, dtype: torch.dtype, chunks: list[DistributedDataParallel]
) -> MegatronOptimizer:
    """Build Adam for the chunks of a model, with a part of its state in host memory if `host_share` says so.

    Collective over the world.
    """
    config = OptimizerConfig(
        optimizer="adam",
        lr=adam.lr,
        min_lr=adam.min_lr,
        weight_decay=adam.weight_decay,
        adam_beta1=adam.beta1,
        adam_beta2=adam.beta2,
        adam_eps=adam.eps,
        clip_grad=adam.clip_grad or float("inf"),
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    if adam.moments != "float32" or adam.host_share:
        _replace_adam(optimizer, adam)
    return optimizer


def _replace_adam(optimizer: MegatronOptimizer, adam: Optimizer) -> None:
    """Replace Megatron's Adam by `CompactAdam` before the first step. Not collective."""
    from rl.training.compact_adam import CompactAdam, chosen

    for part in optimizer_parts(optimizer):
        groups = part.optimizer.param_groups
        held = chosen([weight for group in groups for weight in group["params"]], adam.host_share)
        copies = {id(weight) for group in part.shard_fp32_from_float16_groups for weight in group}
        masters = [weight for weight in held if id(weight) in copies]
        dtype = getattr(torch, adam.moments)
        part.optimizer = CompactAdam(groups, moments=dtype, in_host=held, masters=masters)
    release_masters(optimizer)


def release_masters(optimizer: MegatronOptimizer) -> None:
    """Free the device memory of main weights that are in host memory."""
    for part in optimizer_parts(optimizer):
        for weight, state in part.optimizer.state.items():
            if MASTER in state:
                weight.untyped_storage().resize_(0)


def reload_main_weights(optimizer: MegatronOptimizer) -> None:
    """Copy the model's weights to the main weights, wherever they are. Not collective."""
    held = [
        (weight, state[MASTER])
        for part in optimizer_parts(optimizer)
        for weight, state in part.optimizer.state.items()
        if MASTER in state
    ]
    for weight, master in held:
        weight.untyped_storage().resize_(master.nbytes)
    optimizer.reload_model_params()
    for weight, master in held:
        master.copy_(weight)
    release_masters(optimizer)


def optimizer_parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return Megatron's optimizers that update parameters of this rank.

    There is one for routed experts and one for all other parameters.
    """
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    return [part for part in parts if not part.is_stub_optimizer]


def owned_part(optimizer: MegatronOptimizer, parameter: Tensor) -> slice | None:
    """Return the elements of the flattened parameter that this rank updates; None if it updates none."""
    for part in optimizer_parts(optimizer):
        if parameter in part.model_param_gbuf_map:
            owned = part._get_model_param_range_map(parameter)["param"]
            return slice(owned.start, owned.end)
    return None


def main_weights(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor, Mapping[str, Any]]]:
    """Yield (parameter, this rank's part of its main weight, the part's state) for every parameter that this
    rank updates.

    The values of a main weight in host memory are in its state, as MASTER.
    """
    for part in optimizer_parts(optimizer):
        for parameter, (group, place) in part.model_param_group_index_map.items():
            main = part.optimizer.param_groups[group]["params"][place]
            yield parameter, main, part.optimizer.state.get(main, {})


def clip_and_step(optimizer: MegatronOptimizer, norm: float) -> None:
    """Clip the gradients by their norm `norm`, and update the parameters. Requires `prepare_grads`.

    `MegatronOptimizer.step` would prepare the gradients and compute their norm again. Collective over the
    data parallel group.
    """
    for part in optimizer_parts(optimizer):
        # A rank has no parameters if the other ranks' shards hold all. The CUDA kernels refuse an empty list.
        if parameters := part.get_parameters():
            clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, norm)
    optimizer.step_with_ready_grads()
    release_masters(optimizer)


def stale_master_weights(optimizer: MegatronOptimizer, weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of weights that differ, on this rank, from their rounded master weights."""
    found, name_of = [], {weight: name for name, weight in weights.items()}
    for weight, main, state in main_weights(optimizer):
        if weight in name_of and main.dtype is not weight.dtype:
            main = state.get(MASTER, main)
            present = weight.detach().view(-1)[owned_part(optimizer, weight)].to(main.device)
            if not torch.equal(main.to(weight.dtype), present):
                found.append(name_of[weight])
    return found


def optimizer_tensors(optimizer: MegatronOptimizer, *, in_host: bool = True) -> Iterator[Tensor]:
    """Yield the main weights and the moments on this rank.

    in_host: also yield the tensors that stay in host memory.
    """
    for part in optimizer_parts(optimizer):
        held = part.optimizer.defaults.get(IN_HOST, ())
        for group in part.optimizer.param_groups:
            for weight in group["params"]:
                state = dict(part.optimizer.state.get(weight, {}))
                if in_host or id(weight) not in held:
                    yield state.pop(MASTER, weight)
                    yield from (value for value in state.values() if isinstance(value, Tensor))


class WrongStep(RuntimeError):
    """Raised on every rank if an update did not change weights and moments as AdamW does."""


class StateSample:
    """Checks that only updates change about SAMPLED elements of each weight and its moments, and as AdamW
    does (arXiv:1711.05101, algorithm 2; weights of one dimension do not decay).

    adam: the optimizer's section of the config. names: names of the parameters, for the messages.
    """

    def __init__(self, adam: Optimizer, names: Mapping[Tensor, str]):
        self._adam, self._names = adam, names
        self._rows: list[tuple[Tensor, Tensor, list[Tensor]]] = []
        """Parameter, its main weight, and the sampled elements of main weight and both moments."""
        self._before: Tensor | None = None
        self._noted: Tensor | None = None
        self._wrong = torch.zeros(0)

    def forget(self) -> None:
        """Discard the stored elements, after a load of other weights."""
        self._noted = None

    def note(self, optimizer: MegatronOptimizer, device: torch.device) -> None:
        """Store the elements before the first update after a load."""
        if self._noted is None:
            self._noted = self._elements(optimizer, device)

    def num_changed(self, optimizer: MegatronOptimizer, device: torch.device) -> Tensor:
        """Return, before an update, the number of elements that changed since the last update or `note`."""
        self._before = self._elements(optimizer, device)
        if self._noted is None or self._noted.shape != self._before.shape:
            return torch.zeros((), dtype=torch.int64, device=device)
        return (self._before != self._noted).sum()

    def changes(
        self, optimizer: MegatronOptimizer, lr: float, *, compares: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return how many elements the update did not change as AdamW does, and how many weights it changed.

        Both are int64 []. lr: the learning rate. compares: whether to compute AdamW.
        """
        before, self._before = self._before, None
        assert before is not None
        self._noted = after = self._elements(optimizer, before.device)
        num_moved = (after[0] != before[0]).sum()
        if not compares or not self._rows:
            return torch.zeros_like(num_moved), num_moved
        gradients = torch.cat([_every(gradient_of(main).view(-1)) for _, main, _ in self._rows])
        device, rows = before.device, ((own[0], parameter.dim() > 1) for parameter, _, own in self._rows)
        decays = torch.cat([torch.full((len(own),), flag, device=device) for own, flag in rows])
        step = next((int(counter["step"]) for counter in step_counters(optimizer)), 1)
        expected, tolerance = _adamw(before, gradients, decays, self._adam, lr, step)
        self._wrong = ~((after - expected).abs() <= tolerance)
        if self._adam.moments == "bfloat16":
            self._wrong[1:] |= _is_biased(after[1:].abs(), expected[1:].abs())[:, None]
        return self._wrong.sum(), num_moved

    def describe(self) -> str:
        """Return the errors of the last update on this rank, for a message; "" if there were none."""
        if not self._wrong.any():
            return ""
        kinds = ("the weights", "the first moments", "the second moments")
        found = [f"{int(n)} of {kind}" for kind, n in zip(kinds, self._wrong.sum(1)) if n]
        parts = self._wrong.any(0).split([len(own[0]) for *_, own in self._rows])
        wrong = [row[0] for row, part in zip(self._rows, parts) if part.any()]
        return (
            f"{', '.join(found)} in {len(wrong)} of {len(parts)} weights "
            f"({sum(weight.dim() < 2 for weight in wrong)} norms and biases), first "
            f"{self._names.get(wrong[0], '?')}"
        )

    def _elements(self, optimizer: MegatronOptimizer, device: torch.device) -> Tensor:
        """Return the elements of main weights and of both moments, float64 [3, n]; 0 without moments."""
        self._rows = []
        for parameter, main, state in main_weights(optimizer):
            own = _every(state.get(MASTER, main).detach().view(-1))
            kept = [state.get(key) for key in ("exp_avg", "exp_avg_sq")]
            moments = [torch.zeros_like(own) if x is None else _every(x.detach().view(-1)) for x in kept]
            self._rows.append((parameter, main, [own, *moments]))
        columns = []
        for views in zip(*(own for *_, own in self._rows)):
            # For a tensor that is on the device, `to` would count as a wait for the device.
            moved = [x if x.device == device else x.to(device, non_blocking=True) for x in views]
            columns.append(torch.cat(moved).double())
        return torch.stack(columns) if columns else torch.zeros(3, 0, dtype=torch.float64, device=device)


def gradient_of(main: Tensor) -> Tensor:
    """Return the gradient that the optimizer used last for a main weight."""
    assert main.grad is not None, "the optimizer has used it"
    return main.grad


def _is_biased(rounded: Tensor, exact: Tensor) -> Tensor:
    """Return whether numbers were not rounded to bfloat16 stochastically, bool [2]. Both float64 [2, n].

    The error must have the mean 0 and the variance f (1 - f), with the distance f of the exact number from
    the one below, in units of the last place. If rounded to nearest, its mean times f - 1/2 is not 0.
    """
    unit = 2.0 ** exact.clamp(min=1e-30).log2().floor() * torch.finfo(torch.bfloat16).eps
    error, f = (rounded - exact) / unit, (exact / unit) % 1
    weights = torch.stack((torch.ones_like(f), f - 0.5))
    variance = (weights.square() * f * (1 - f)).sum(-1)
    slack = BIAS * (weights.abs() * (f > 0)).sum(-1)
    return ((weights * error).sum(-1).abs() > DEVIATE * variance.sqrt() + slack).any(0)


def _every(flat: Tensor) -> Tensor:
    """Return about SAMPLED elements of a flat tensor, of different columns: the distance is odd."""
    return flat[:: len(flat) // SAMPLED | 1]


def step_counters(optimizer: MegatronOptimizer) -> Iterator[dict[str, Any]]:
    """Yield the dictionaries that count the steps under "step"; there are none before the first step.

    Transformer Engine's Adam and ours have one per group, torch's has one per parameter.
    """
    for part in optimizer_parts(optimizer):
        for group in part.optimizer.param_groups:
            states = [part.optimizer.state.get(weight, {}) for weight in group["params"]]
            yield from (holder for holder in (group, *states) if "step" in holder)


def _adamw(
    before: Tensor, gradient: Tensor, decays: Tensor, adam: Optimizer, lr: float, step: int
) -> tuple[Tensor, Tensor]:
    """Return weights and moments after a step, and the largest error of float32 arithmetic, float64 [3, n].

    before: weights and moments before the step. gradient: after clipping, [n]. decays: bool [n].
    """
    (weight, mean, square), gradient = before, gradient.double()
    beta1, beta2 = adam.beta1, adam.beta2
    terms = beta1 * mean.abs() + (1 - beta1) * gradient.abs()
    mean, square = beta1 * mean + (1 - beta1) * gradient, beta2 * square + (1 - beta2) * gradient.square()
    scale = lr / (1 - beta1**step) / ((square / (1 - beta2**step)).sqrt() + adam.eps)
    expected = weight * (1 - lr * adam.weight_decay * decays) - scale * mean
    eps, tiny = torch.finfo(torch.float32).eps, torch.finfo(torch.float32).tiny
    relative = max(RELATIVE, eps / (1 - max(beta1, beta2)))  # error of 1 - beta in float32
    rounding = max(relative, 2 * torch.finfo(getattr(torch, adam.moments)).eps)
    bounds = 2 * eps * weight.abs() + relative * scale * terms
    return (
        torch.stack((expected, mean, square)),
        torch.stack((bounds, rounding * terms, rounding * square + tiny)) + tiny,
    )
