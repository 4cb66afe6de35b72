"""A model on the training grid: forward passes and updates over packed micro-batches.

The policy, a critic and reward models, trained or frozen, are TrainingEngines. They share the grid; each has
its own weights, optimizer and head.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.nn import Parameter

from rl.config.adapter import Adapter
from rl.config.schema import Optimizer, Training
from rl.data.batch import Batch
from rl.data.held import SAMPLING_MASKS
from rl.models import architecture, value_model, value_weights
from rl.models.adapters import LowRank
from rl.runtime import tracing
from rl.runtime.checksum import INTEGERS
from rl.runtime.collectives import broadcast_object, gather_objects, sum_over_world
from rl.runtime.device import Device, aligned, host_memory
from rl.training.attention import can_share
from rl.training.gradients import ReductionProbe, with_gradients
from rl.training.grid import Grid
from rl.training.held_transfer import BytesMoved, Need, fetch
from rl.training.micro_batch_plans import MicroBatchPlan
from rl.training.model import DTYPES, build_model
from rl.training.offload import HostMemory
from rl.training.optimizer import (
    build_optimizer,
    clip_and_step,
    optimizer_tensors,
    stale_master_weights,
    weights_sum,
)
from rl.training.packing import MicroBatch, lay_out, with_columns
from rl.training.pipeline import KnownShapes
from rl.training.weights import WeightMap, full_weights, load_hf, mark_split_weights, share_weights

MicroBatchLoss = Callable[[MicroBatch], tuple[Tensor, dict[str, Tensor]]]
"""micro-batch -> (loss, metrics), both already divided by the mini-batch's global denominators."""


@dataclass(frozen=True)
class UpdateResult:
    """Result of one optimizer step, identical on all ranks."""

    metrics: dict[str, float]
    """Metrics of the loss, summed over micro-batches and data parallel ranks."""
    observed: list[float]
    """Sums of what `observe` returned; empty without it."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    has_moved: bool
    """Whether weights of the last stage changed on any data parallel rank."""


SAMPLED_ELEMENTS = 1024
"""Number of elements of each reference weight that are compared before a pass with the reference."""


class TrainingEngine:
    """One model on this rank, with gradients and optimizer if it learns.

    Methods are collective over the world unless they say otherwise.

    Args:
        path: Hugging Face checkpoint directory.
        hf: its config.json.
        dtype: dtype of the weights; master weights and gradient sums are float32.
        values: build a value model (critic, reward model) instead of a policy.
        optimizer: None for a frozen model.
        temperature: temperature of the distribution whose log-probs a policy computes.
        keep_reference: keep a copy of the initial weights for `reference_weights`.
        router_replay: `training.router_replay`, for a policy.
        bitwise: compute a policy's log-probs bitwise as an engine in the same mode does.
        adapter: low-rank adapters, which then learn instead of the weights; None or kind none for none.
        seed: of the adapters' initial values.
        base_of: a model with the same weights, whose memory the frozen weights then use. Until then they have
            memory of their own.
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
        router_replay: str = "none",
        bitwise: bool = False,
        adapter: Adapter | None = None,
        seed: int = 0,
        base_of: "TrainingEngine | None" = None,
    ):
        self.config, self.grid, self.device, self.temperature = training, grid, device, temperature
        self.adam = optimizer
        self.version = 0
        """Number of batches that the model has learned from; a checkpoint restores it for the policy."""
        self.num_updates = 0
        """Number of optimizer updates since the process started."""
        self._base_of = base_of
        self.needs: dict[str, Need] = {}
        """Held columns that the passes read, and which part of them."""
        self._moved = BytesMoved()
        self.replay: Any = None
        """Chooses the experts of a policy's passes (`rl.training.router_replay`); None: the routers do."""
        hf = value_model(hf) if values else hf
        is_adapted = adapter is not None and adapter.is_on
        model = build_model(
            hf, training, DTYPES[dtype], grid, values=values, bitwise=bitwise, is_adapted=is_adapted
        )
        self.model = model = model.to(device.torch)
        self.shares_prompts = training.shared_prefix and can_share(device.torch, DTYPES[dtype])
        if router_replay != "none":
            from rl.training.router_replay import RouterReplay

            self.replay = RouterReplay(
                model, router_replay, architecture(hf).megatron_config(hf)["moe_layer_freq"], grid
            )
            if router_replay == "engine":
                self.needs["routes"] = self.replay.need
        weights = value_weights(hf, needs_head=False) if values else architecture(hf).weights(hf)
        self.weight_map = WeightMap(hf, weights, grid, model)
        mark_split_weights(self.weight_map)
        if base_of is None:
            load_hf(path, self.weight_map)
        else:
            share_weights(self.weight_map, base_of.weight_map)
        self.adapter = adapter
        self.adapters: Any = None
        """The adapters (`rl.training.adapter.Adapters`); None: all weights learn."""
        if adapter is not None and adapter.is_on:
            assert base_of is None or adapter.init != "pissa", "PiSSA changes the weights of another model"
            from rl.training.adapter import Adapters

            self.adapters = Adapters(adapter, self.weight_map, model, seed=seed)
            mark_split_weights(self.adapters.weight_map)
        assert optimizer is not None or not keep_reference, (
            "keep_reference requires an optimizer: a frozen model is its own reference"
        )
        self._is_reference = False
        self.reference: list[Tensor] | None = None
        if keep_reference:
            self._keep_reference()
        self.optimizer = None
        self.wrapped: torch.nn.Module = model
        if optimizer is not None:
            self.wrapped = with_gradients(model, training, grid)
            self.optimizer = build_optimizer(optimizer, DTYPES[dtype], self.wrapped)
            self._probe = ReductionProbe(self.learned_map)
        self.wrapped.train(self.optimizer is not None)
        self.forward_backward = get_forward_backward_func()
        self._weights_in_host, self._learning_state_in_host = HostMemory(), HostMemory()

    @property
    def adapter_map(self) -> WeightMap | None:
        """The adapters, and the value head of a value model that has adapters; None without adapters."""
        return None if self.adapters is None else self.adapters.weight_map

    @property
    def pairs(self) -> list[LowRank]:
        """The adapters of all layers of the model."""
        return [] if self.adapters is None else self.adapters.pairs

    @property
    def learned_map(self) -> WeightMap:
        """The weights that learn."""
        return self.adapter_map or self.weight_map

    @property
    def learned(self) -> list[Parameter]:
        """This rank's parameters that learn, in the model's order."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def forward(
        self, batch: Batch, plans: list[MicroBatchPlan], names: tuple[str, ...], progress=None
    ) -> tuple[Tensor, ...]:
        """Return the named outputs at every response token, float32 [T] each, on every rank.

        names: some of logprobs, entropy and sum_p_squared for a policy; values for a value model. plans: one
        per mini-batch. With the plans of the update, both passes give bitwise equal results.
        """
        places, values = [], []

        def keep(micro: MicroBatch):
            if self.grid.reports_results:
                places.append(micro.column_index)
                values.append(torch.stack([getattr(micro, name) for name in names]))
            return getattr(micro, names[0]).new_zeros(()), {}

        # A model in training stays in train() here: in eval() Transformer Engine may choose another attention
        # kernel than in the update. Nothing else depends on the mode, because there is no dropout.
        for plan in plans:
            self._run(batch, plan, keep, forward_only=True, progress=progress, outputs=names)
        out = torch.zeros(len(names), int(batch.lengths.sum()), device=self.device.torch)
        if places:
            out[:, torch.cat(places).to(out.device)] = torch.cat(values, dim=1)
        dist.all_reduce(out)
        return tuple(out.cpu())

    @torch.no_grad()
    def visit(
        self,
        batch: Batch,
        plan: MicroBatchPlan,
        names: tuple[str, ...],
        consume: Callable[[MicroBatch], None],
        progress=None,
    ) -> None:
        """Run forward passes; on the last stage, call `consume` with each micro-batch and its named outputs.

        The tensor parallel ranks of the stage call it with the same micro-batches in the same order.
        """

        def step(micro: MicroBatch):
            consume(micro)
            return torch.zeros((), device=self.device.torch), {}

        self._run(batch, plan, step, forward_only=True, progress=progress, outputs=names)

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Use the reference weights inside the context, for forward passes.

        They are copied into the gradient buffers, which `update` sets to 0 before it uses them. The trained
        weights stay in their own memory. With adapters these are the initial adapters.
        """
        assert self.reference is not None, "keep_reference was not set"
        assert not self._learning_state_in_host.occupied, (
            "reload the gradient buffers first: the reference weights need them"
        )
        if _sampled(self.reference) != self._reference_sum:
            raise RuntimeError(
                f"the reference weights of rank {dist.get_rank()} have changed since the run started: "
                "something trains them or writes into their memory."
            )
        parameters = self.learned
        own = [parameter.data for parameter in parameters]
        self._is_reference = True
        try:
            for parameter, weight in zip(parameters, self.reference):
                unused = parameter.main_grad.view(-1).view(weight.dtype)[: weight.numel()]
                parameter.data = unused.view(weight.shape).copy_(weight, non_blocking=True)
            yield
        finally:
            self._is_reference = False
            for parameter, data in zip(parameters, own):
                parameter.data = data

    def update(
        self,
        batch: Batch,
        plan: MicroBatchPlan,
        loss: MicroBatchLoss,
        *,
        lr: float,
        outputs: tuple[str, ...] | None = None,
        observe: Callable[[MicroBatch], Tensor] | None = None,
        progress=None,
    ) -> UpdateResult:
        """Take one optimizer step on the samples of the plan and increment `num_updates`.

        outputs: names of the model's outputs that `loss` and `observe` read; None for all. observe: called
        with each micro-batch after `loss`; returns float64 [n] with the same n for all.

        Raises FloatingPointError on every rank if the gradient is not finite; the weights are then unchanged.
        """
        assert self.optimizer is not None and self.adam is not None, "the model is frozen"
        assert not self._learning_state_in_host.occupied, "the optimizer's state is in host memory"
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._probe.begin()
        sums: dict[str, Tensor] = {}
        observed = torch.zeros(0, dtype=torch.float64, device=self.device.torch)

        def accumulate(micro: MicroBatch):
            nonlocal observed
            value, metrics = loss(micro)
            for name, term in metrics.items():
                sums[name] = sums.get(name, 0.0) + term.detach().double()
            if observe is not None:
                values = observe(micro)
                observed = observed + values if len(observed) else values
            return value, {}

        self._run(batch, plan, accumulate, forward_only=False, progress=progress, outputs=outputs)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            # wd_mult is 0 for norms and biases. Megatron's scheduler, which is not used here, would apply it.
            group["weight_decay"] = self.adam.weight_decay * group["wd_mult"]
        self.optimizer.prepare_grads()
        with tracing.span("gradient norm"):
            norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm is {norm}; the update was not applied. {_not_finite(sums)}"
            )
        probe = self._probe.sums(self.optimizer)
        before = weights_sum(self.optimizer, self.device.torch)
        with tracing.span("optimizer"):
            clip_and_step(self.optimizer, norm)
        moved = weights_sum(self.optimizer, self.device.torch) != before
        self.num_updates += 1
        observed = torch.cat((moved.double().view(1), observed))
        metrics, (num_moved, *rest) = self._sum_over_replicas(sums, observed, probe)
        return UpdateResult(metrics, rest, norm, num_moved > 0)

    def held_metrics(self) -> dict[str, float]:
        """Return the bytes of held columns that all ranks received since the last call, and those planned.

        With routes of the engine also the share that the trainer's routers would have chosen otherwise.
        """
        moved, self._moved = torch.tensor([self._moved.received, self._moved.planned]), BytesMoved()
        total = sum_over_world(moved, self.device.torch).tolist()
        metrics = dict(zip(("perf/held_bytes_received", "perf/held_bytes_planned"), total))
        return metrics | (self.replay.metrics() if "routes" in self.needs else {})

    def start_from_present_weights(self) -> None:
        """Copy newly loaded weights to the master weights and the reference. Not collective."""
        if self.optimizer is not None:
            self.optimizer.reload_model_params()
        if self.reference is not None:
            self._keep_reference()

    # Memory -------------------------------------------------------------------------------------------------

    def offload(self, *, weights: bool) -> None:
        """Free the device memory of gradients and optimizer state until `reload`. Not collective.

        weights: also free that of the weights. The model cannot compute before `reload`.
        """
        own: list[Tensor] = list(self.model.parameters()) if self._base_of is None else list(self.learned)
        if self.adapters is not None and self.adapters.fp8_base is not None:
            own += self.adapters.fp8_base.tensors
        if isinstance(self.wrapped, DistributedDataParallel):
            buffers = [*self.wrapped.buffers, *self.wrapped.expert_parallel_buffers]
            gradients = [buffer.grad_data for buffer in buffers]
            self._learning_state_in_host.send(gradients, contents=False)  # `update` sets them to 0 first
            # A float32 model's main weights share the storage of its weights.
            kept = {weight.untyped_storage()._cdata for weight in own}
            state = [t for t in optimizer_tensors(self.optimizer) if t.untyped_storage()._cdata not in kept]
            self._learning_state_in_host.send(state, contents=True)
        if weights:
            self._weights_in_host.send(own, contents=True)

    def reload(self) -> None:
        """Move back to the device what `offload` moved to the host. Not collective."""
        self._weights_in_host.fetch()
        self._learning_state_in_host.fetch()

    @property
    def has_weights(self) -> bool:
        """Whether the weights are on the device."""
        own = not self._weights_in_host.occupied
        return own and (self._base_of is None or self._base_of.has_weights)

    def replicas(self) -> list[tuple[dist.ProcessGroup, dict[str, Tensor]]]:
        """Return (group, weights by Megatron's name) of learned weights that the group's ranks replicate.

        The first entry is for the data parallel group, the second for routed experts and their expert data
        parallel group. Further ones are for the tensor parallel groups, which replicate parts of adapters.
        Optimizer states are not included, because they are sharded.
        """
        groups: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        for name, weight in sorted(self.learned_map.parameters.items()):
            groups[".experts." in name][name] = weight
        out = [(self.grid.groups.dp_cp, groups[0]), (self.grid.groups.expt_dp, groups[1])]
        return out if self.adapters is None else [*out, *self.adapters.replicas()]

    def stale_master_weights(self) -> list[str]:
        """Return the names of weights that are not their rounded master weights. Not collective."""
        return stale_master_weights(self.optimizer, self.learned_map.parameters)

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) of every weight on every rank.

        With adapters they are those of W + scale * B A.
        """
        return full_weights(self.weight_map, *([] if self.adapters is None else [self.adapters.merging()]))

    def _run(self, batch, plan, consume, *, forward_only, progress, outputs=None):
        """Run this rank's micro-batches through Megatron's pipeline schedule.

        On the last stage, `consume` gets each micro-batch with its outputs and returns (loss, report). On
        CUDA nothing here waits for the device.
        """
        assert self.has_weights, "the weights are in host memory"
        if self.needs:
            self._moved += fetch(batch, plan, self.needs, self.grid, self.device.torch)
        self.model.outputs = type(self.model).outputs if outputs is None else outputs
        config, groups, device = self.model.config, self.grid.groups, self.device.torch
        config.timers = None if tracing.active is None else tracing.active.timers
        rows = [
            lay_out(
                batch,
                samples,
                multiple=self.grid.tp if config.sequence_parallel else 1,
                device=device,
                share=self.shares_prompts,
            )
            for samples in plan[self.grid.dp_rank]
        ]
        if self.replay is not None:
            reference = self._is_reference
            rows = [
                replace(row, routes=self.replay.routes(batch, row, is_reference=reference)) for row in rows
            ]

        def step(iterator, model):
            micro = with_columns(next(iterator), batch)
            if tracing.active is not None:
                counts = dict(samples=len(micro.samples), tokens=micro.tokens.numel())
                tracing.active.timers.micro_batch = counts
            if SAMPLING_MASKS[0] in self.needs and self.grid.is_last_stage:
                from rl.training.sampling_masks import masks_of

                micro.masks = masks_of(batch, micro.samples)
            if "divergence" in self.model.outputs and self.grid.is_last_stage:
                micro.teacher = batch.teacher.of(micro.samples, device)
            if progress is not None:  # only the last stage computes the loss
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
            data_iterator=iter(rows),
            model=[self.wrapped],
            num_microbatches=len(rows),
            seq_length=1,  # unused: `KnownShapes` provides the shapes
            micro_batch_size=1,
            forward_only=forward_only,
            p2p_communicator=KnownShapes(groups.pp, config, rows),
            pg_collection=groups,
        )

    def _sum_over_replicas(
        self, sums: dict[str, Tensor], values: Tensor, probe: Tensor
    ) -> tuple[dict[str, float], list[float]]:
        """Return the last stages' metrics and other values, summed over the data parallel ranks.

        values: float64 [n], with another n on stages before the last one. probe: see `ReductionProbe.sums`.
        Raises WrongReduction. Collective over the world.
        """
        names, size = list(sums), len(values)
        if self.grid.pp > 1:  # only the last stage knows them
            names, size = broadcast_object((names, size), self.grid.pp - 1, self.grid.groups.pp)
        mine = torch.zeros(len(names) + size, dtype=torch.float64, device=self.device.torch)
        if self.grid.reports_results:
            mine.copy_(torch.cat([*(term.view(1) for term in sums.values()), values]))
        mine = torch.cat((mine, probe.to(mine)))
        dist.all_reduce(mine)
        total = mine.tolist()
        self._probe.check(total[len(names) + size :])
        return dict(zip(names, total)), total[len(names) : len(names) + size]

    def _keep_reference(self) -> None:
        """Keep a copy of the present weights as the reference."""
        self.reference = self._copy_of_weights()
        self._reference_sum = _sampled(self.reference)

    def _copy_of_weights(self) -> list[Tensor]:
        """Return a copy of the weights that learn in one block of host memory, page-locked on CUDA."""
        own = [parameter.detach() for parameter in self.learned]
        sizes = [aligned(weight.nbytes) for weight in own]
        parts = host_memory(sum(sizes)).split(sizes)
        return [
            part[: weight.nbytes].view(weight.dtype).view(weight.shape).copy_(weight)
            for part, weight in zip(parts, own)
        ]


def _sampled(weights: list[Tensor]) -> int:
    """Return the sum of the bits of about 1,000 elements of each weight."""
    total = 0
    for weight in weights:
        flat = weight.detach().view(-1)
        some = flat[:: max(1, len(flat) // SAMPLED_ELEMENTS)]
        total += int(some.view(INTEGERS[some.element_size()]).sum(dtype=torch.int64))
    return total


def _not_finite(sums: dict[str, Tensor]) -> str:
    """Return a sentence with the loss's terms that are not finite on any rank. Collective over the world."""
    mine = [name for name, value in sums.items() if not math.isfinite(float(value))]
    found = [f"{', '.join(names)} on rank {rank}" for rank, names in enumerate(gather_objects(mine)) if names]
    if not found:
        return "The loss is finite on every rank, so the backward pass produced it."
    return f"Not finite in the loss: {'; '.join(found)}."
