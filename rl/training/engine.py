"""A model in training: forward passes and updates over packed micro-batches on the training grid.

The policy, a critic, a reward model that learns and one that does not are all of this kind; they share the grid, and each
has its own weights, optimizer and head.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rl.config.schema import Optimizer, Training
from rl.data.batch import Batch
from rl.models import architecture, value_model, value_weights
from rl.runtime.collectives import broadcast_object, sum_over_world
from rl.runtime.device import Device
from rl.training.grid import Grid
from rl.training.model import DTYPES, build_model
from rl.training.offload import HostStay
from rl.training.packing import MicroBatch, MicroBatches, pack
from rl.training.weights import WeightMap, full_weights, load_hf

Loss = Callable[[MicroBatch], tuple[Tensor, dict[str, Tensor]]]
"""(loss of the micro-batch, already divided by the mini-batch's global denominator; sums to be logged)."""


class TrainingEngine:
    """One model on this rank, with gradients and optimizer if it is to learn. Every method is collective over the world.

    Args:
        path: Hugging Face checkpoint directory.
        hf: its config.json.
        dtype: of the weights; master weights and gradient sums are float32.
        values: a value model (critic, reward model) instead of a policy.
        optimizer: None for a model that stays as it is.
        temperature: of the distribution whose log-probs a policy gives.
        keep_reference: keep a copy of the weights at the start, for `reference_weights`.
    """

    def __init__(
        self,
        path: str,
        hf: dict,
        *,
        training: Training,
        dtype: str,
        grid: Grid,
        device: Device,
        values: bool = False,
        optimizer: Optimizer | None = None,
        temperature: float = 1.0,
        keep_reference: bool = False,
    ):
        self.config, self.grid, self.device, self.temperature = training, grid, device, temperature
        self.adam = optimizer
        hf = value_model(hf) if values else hf
        model = build_model(hf, training, DTYPES[dtype], grid, values=values).to(device.torch)
        self.model = model
        weights = value_weights(hf, needs_head=False) if values else architecture(hf).weights(hf)
        self.weight_map = WeightMap(hf, weights, grid, model)
        load_hf(path, self.weight_map)
        self.reference = self._copy_of_weights() if keep_reference else None
        self.version = 0
        """Number of optimizer updates applied since the run began."""
        self.optimizer = None
        self.wrapped: torch.nn.Module = model
        if optimizer is not None:
            model.config.finalize_model_grads_func = _finalize_without_division
            self.wrapped = DistributedDataParallel(
                model.config,
                DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
                model,
                pg_collection=grid.groups,
            )
            self.optimizer = _build_optimizer(optimizer, DTYPES[dtype], self.wrapped)
        self.forward_backward = get_forward_backward_func()
        self._weights_away, self._learning_state_away = HostStay(), HostStay()

    @torch.no_grad()
    def forward(
        self, batch: Batch, plans: list[list[MicroBatches]], names: tuple[str, ...], progress=None
    ) -> tuple[Tensor, ...]:
        """The named outputs of the model at every response token under the current weights, float32 [T] each, on every rank:
        logprobs, entropy and sum_p_squared of a policy, values of a value model.

        `plans` are those that the update will use (one per mini-batch), which makes the two passes equal to the bit.
        """
        out = torch.zeros(len(names), int(batch.lengths.sum()))

        def keep(micro: MicroBatch):
            for row, name in zip(out, names):
                if self.grid.speaks:
                    row[micro.column_index] = getattr(micro, name).cpu()
            return getattr(micro, names[0]).new_zeros(()), {}

        self.wrapped.eval()
        for plan in plans:
            self._run(batch, plan, keep, forward_only=True, progress=progress)
        self.wrapped.train()
        return tuple(sum_over_world(out, self.device.torch))

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Within it the model computes with the weights that it was built with."""
        assert self.reference is not None, "no reference weights are kept"
        own = self._copy_of_weights()
        self._set_weights(self.reference)
        try:
            yield
        finally:
            self._set_weights(own)

    def update(
        self, batch: Batch, plan: list[MicroBatches], loss: Loss, *, lr: float, progress=None
    ) -> dict[str, float]:
        """One optimizer step on the samples of the plan. Returns the sums that `loss` reported, over all micro-batches
        and data parallel ranks, and `grad_norm` before clipping.

        Raises FloatingPointError, on every rank alike, if the gradient is not finite; the weights are then unchanged.
        """
        assert self.optimizer is not None and self.adam is not None, "this model does not learn"
        assert not self._learning_state_away.anything_away, "the optimizer's state is in host memory"
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums: dict[str, Tensor] = {}

        def accumulate(micro: MicroBatch):
            value, terms = loss(micro)
            for name, term in terms.items():
                sums[name] = (
                    sums.get(name, torch.zeros((), dtype=torch.float64)) + term.detach().double().cpu()
                )
            return value, {}

        self._run(batch, plan, accumulate, forward_only=False, progress=progress)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            # wd_mult is 0 for norms and biases; Megatron's own scheduler, not used here, would apply it.
            group["weight_decay"] = self.adam.weight_decay * group["wd_mult"]
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient norm is {norm}; the update was not applied.")
        self.optimizer.step()
        self.version += 1
        return self._sum_over_replicas(sums) | {"grad_norm": norm}

    def start_from_present_weights(self) -> None:
        """After weights were loaded: master weights and reference are what the weights are now. Not collective."""
        if self.optimizer is not None:
            self.optimizer.reload_model_params()
        if self.reference is not None:
            self.reference = self._copy_of_weights()

    # Memory -----------------------------------------------------------------------------------------------------------

    def offload(self, *, weights: bool) -> None:
        """Give the device memory of gradients and optimizer state, and with `weights` of the weights, to others until `reload`.
        Nothing may be computed meanwhile. Not collective."""
        own = list(self.model.parameters())
        if isinstance(self.wrapped, DistributedDataParallel):
            buffers = [*self.wrapped.buffers, *self.wrapped.expert_parallel_buffers]
            self._learning_state_away.send(
                [buffer.grad_data for buffer in buffers], contents=False
            )  # `update` starts from 0
            # Main weights of a float32 model lie in the weights themselves, which are not for this stay.
            kept = {weight.untyped_storage()._cdata for weight in own}
            state = [
                tensor
                for tensor in optimizer_tensors(self.optimizer)
                if tensor.untyped_storage()._cdata not in kept
            ]
            self._learning_state_away.send(state, contents=True)
        if weights:
            self._weights_away.send(own, contents=True)

    def reload(self) -> None:
        """Bring back what `offload` gave away. Not collective."""
        self._weights_away.fetch()
        self._learning_state_away.fetch()

    @property
    def has_weights(self) -> bool:
        """Whether the weights are on the device."""
        return not self._weights_away.anything_away

    def replicas(self) -> list[tuple[dist.ProcessGroup, dict[str, Tensor]]]:
        """The weights that data parallel ranks hold alike, by Megatron's name, with the group of those ranks. Routed experts have
        a group of their own; the optimizer's state is split over it, so nothing of that is held twice."""
        groups: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        for name, weight in sorted(self.weight_map.parameters.items()):
            groups[".experts." in name][name] = weight
        return [(self.grid.groups.dp_cp, groups[0]), (self.grid.groups.expt_dp, groups[1])]

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight whole on every rank, by Hugging Face name."""
        return full_weights(self.weight_map)

    def _run(self, batch, plan, consume, *, forward_only, progress):
        """All micro-batches of this rank through Megatron's schedule; `consume` sees each on the last stage."""
        assert self.has_weights, "the weights are in host memory"
        mine = plan[self.grid.dp_rank]
        multiple = self.grid.tp if self.model.config.sequence_parallel else 1

        def step(iterator, model):
            micro = pack(batch, next(iterator), multiple=multiple, device=self.device.torch)
            if progress is not None:  # here, not in the loss, which only the last stage computes
                progress.update(len(micro.samples) * self.grid.dp)
            output = self.model.run(micro, self.temperature)

            def loss_function(output):
                for name, value in zip(self.model.outputs, output):
                    setattr(micro, name, value)
                value, report = consume(micro)
                return value, torch.zeros((), dtype=torch.int, device=self.device.torch), report

            return output, loss_function

        self.forward_backward(
            forward_step_func=step,
            data_iterator=iter(mine),
            model=[self.wrapped],
            num_microbatches=len(mine),
            seq_length=1,  # variable_seq_lengths: shapes travel with the tensors
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _sum_over_replicas(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """The sums of the last stages over the data parallel ranks, on every rank."""
        names = list(sums)
        if self.grid.pp > 1:  # other stages do not know what the loss reports
            names = broadcast_object(names, self.grid.pp - 1, self.grid.groups.pp)
        zero = torch.zeros((), dtype=torch.float64)
        mine = torch.stack([sums[name] if self.grid.speaks else zero for name in names])
        return dict(zip(names, sum_over_world(mine, self.device.torch).tolist()))

    def _copy_of_weights(self) -> list[Tensor]:
        """In host memory: a second set of weights on the device would be the largest thing there."""
        return [parameter.detach().to("cpu", copy=True) for parameter in self.model.parameters()]

    @torch.no_grad()
    def _set_weights(self, weights: list[Tensor]) -> None:
        for parameter, weight in zip(self.model.parameters(), weights):
            parameter.copy_(weight)


def optimizer_tensors(optimizer: MegatronOptimizer) -> Iterator[Tensor]:
    """Main weights and moments of Megatron's optimizer on this rank."""
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for part in parts:
        if part.is_stub_optimizer:  # a rank without parameters of this kind
            continue
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _finalize_without_division(model, num_tokens=None, **kwargs):
    """Megatron would divide by the token count; the loss carries its denominator already."""
    finalize_model_grads(model, None, **kwargs)


def _build_optimizer(adam: Optimizer, dtype: torch.dtype, model: DistributedDataParallel):
    return get_megatron_optimizer(
        OptimizerConfig(
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
        ),
        [model],
        use_gloo_process_groups=torch.cuda.is_available(),
    )
