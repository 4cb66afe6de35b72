"""Megatron's distributed optimizer: construction from the config, and its tensors on this rank."""

from collections.abc import Iterator, Mapping

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from torch import Tensor

from rl.config.schema import Optimizer
from rl.runtime.checksum import bit_sum

MASTER = "master"
"""Key of a main weight in its optimizer state, if it is there because its state is in host memory."""
IN_HOST = "in_host"
"""Key of an optimizer's defaults: the ids of the main weights whose state is in host memory."""
SAMPLED = 256
"""Approximate number of elements of each tensor that `StateSample` compares."""


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
    optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=torch.cuda.is_available())
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


def main_weights(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (parameter, this rank's part of its main weight) of the parameters that this rank updates.

    The values of a main weight in host memory are in its state, as MASTER.
    """
    for part in optimizer_parts(optimizer):
        for parameter, (group, place) in part.model_param_group_index_map.items():
            yield parameter, part.optimizer.param_groups[group]["params"][place]


def clip_and_step(optimizer: MegatronOptimizer, norm: float) -> None:
    """Clip the gradients, whose norm is `norm`, and update the parameters. Requires `prepare_grads`.

    `MegatronOptimizer.step` would prepare the gradients and compute their norm again. Collective over the
    data parallel group.
    """
    for part in optimizer_parts(optimizer):
        # A rank has none if the other ranks' shards hold all; the CUDA kernels refuse an empty list.
        if parameters := part.get_parameters():
            clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, norm)
    optimizer.step_with_ready_grads()
    release_masters(optimizer)


def stale_master_weights(optimizer: MegatronOptimizer, weights: Mapping[str, Tensor]) -> list[str]:
    """Return the names of weights that differ from their master weights, rounded, on this rank."""
    found = []
    for part in optimizer_parts(optimizer):
        for name, weight in weights.items():
            if weight in part.model_param_gbuf_map:
                owned = part._get_model_param_range_map(weight)["param"]
                tensors = part._get_main_param_and_optimizer_states(weight)
                main = tensors.get(MASTER, tensors["param"])
                present = weight.detach().view(-1)[owned.start : owned.end].to(main.device)
                if main.dtype is not weight.dtype and not torch.equal(main.to(weight.dtype), present):
                    found.append(name)
    return found


def optimizer_tensors(optimizer: MegatronOptimizer, *, in_host: bool = True) -> Iterator[Tensor]:
    """Yield the main weights and the moments on this rank. in_host: also those that stay in host memory."""
    for part in optimizer_parts(optimizer):
        held = part.optimizer.defaults.get(IN_HOST, ())
        for group in part.optimizer.param_groups:
            for weight in group["params"]:
                state = dict(part.optimizer.state.get(weight, {}))
                if in_host or id(weight) not in held:
                    yield state.pop(MASTER, weight)
                    yield from (value for value in state.values() if isinstance(value, Tensor))


def _main_values(part: MegatronOptimizer) -> Iterator[Tensor]:
    """Yield the values of the main weights of one of Megatron's optimizers."""
    for group in part.optimizer.param_groups:
        for weight in group["params"]:
            yield part.optimizer.state.get(weight, {}).get(MASTER, weight)


def _on(device: torch.device, value: Tensor) -> Tensor:
    """Return a value on the device; only one that belongs to state in host memory moves."""
    return value if value.device == device else value.to(device, non_blocking=True)


class StateSample:
    """Compares about SAMPLED elements of each of the optimizer's tensors, which only updates may change."""

    def __init__(self):
        self._addresses: list[int] = []
        self._views: list[Tensor] = []
        self._noted: list[Tensor] | None = None

    def note(self, optimizer: MegatronOptimizer) -> None:
        """Store the elements at the end of an update."""
        self._noted = self._elements(optimizer)

    def forget(self) -> None:
        """Discard the stored elements, after a load of other weights."""
        self._noted = None

    def num_changed(self, optimizer: MegatronOptimizer, device: torch.device) -> Tensor:
        """Return the number of elements that changed since `note`, int64 [] on the device, without a sync."""
        if self._noted is None:
            return torch.zeros((), dtype=torch.int64, device=device)
        present = zip(self._elements(optimizer), self._noted)
        return sum(_on(device, (new != old).sum()) for new, old in present)

    def _elements(self, optimizer: MegatronOptimizer) -> list[Tensor]:
        """Return the elements, one tensor per device and dtype."""
        tensors = list(optimizer_tensors(optimizer))
        addresses = [tensor.data_ptr() for tensor in tensors]
        if addresses != self._addresses:
            flat = [tensor.detach().view(-1) for tensor in tensors]
            self._views = [x[:: max(1, len(x) // SAMPLED)] for x in flat]
            self._addresses = addresses
        kinds = dict.fromkeys((view.device, view.dtype) for view in self._views)
        return [torch.cat([v for v in self._views if (v.device, v.dtype) == kind]) for kind in kinds]


@torch.no_grad()
def weights_sum(optimizer: MegatronOptimizer, device: torch.device) -> Tensor:
    """Return the sum of the bits of this rank's main weights, int64 []; a change of any weight changes it."""
    weights = [weight for part in optimizer_parts(optimizer) for weight in _main_values(part)]
    sums = [_on(device, bit_sum(weight)) for weight in weights]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64, device=device)
