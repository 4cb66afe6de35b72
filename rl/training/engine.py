"""A model on the training grid: forward passes and updates over packed micro-batches.

The policy, a critic and reward models, trained or frozen, are TrainingEngines. They share the grid; each has
its own weights, optimizer and head. For example, ppo trains two: the policy and the critic.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import make_viewless_tensor
from torch import Tensor
from torch.nn import Parameter

from rl.config.schema import Training
from rl.data.batch import Batch
from rl.faults.agreement import fail_together
from rl.models import architecture, value_model, value_weights
from rl.models.layout import Weight
from rl.run_directory.progress import Counter
from rl.runtime import tracing
from rl.runtime.collectives import broadcast_object, gather_objects
from rl.runtime.device import Device
from rl.training.attention import can_share
from rl.training.audit import StepAudit
from rl.training.gradients import first_rows, gradient_buffers, only_hooks, part_of, with_gradients
from rl.training.grid import Grid
from rl.training.layer_spec import name_of_layers
from rl.training.micro_batch_plans import MicroBatchPlan
from rl.training.model import DTYPES, Packed, build_model
from rl.training.offload import HostMemory
from rl.training.optimizer import (
    build_optimizer,
    clip_and_step,
    optimizer_tensors,
    reload_main_weights,
    stale_master_weights,
)
from rl.training.packing import MicroBatch, lay_out, with_columns
from rl.training.parts import TrainerPart, TrainerParts
from rl.training.pipeline import run_schedule
from rl.training.reference import Reference
from rl.training.spec import ModelSpec
from rl.training.weights import WeightMap, full_weights, load_hf, mark_split_weights

MicroBatchLoss = Callable[[MicroBatch], tuple[Tensor, dict[str, Tensor]]]
"""micro-batch -> (loss, metrics), both already divided by the mini-batch's global denominators."""


@dataclass(frozen=True)
class UpdateResult:
    """Result of one optimizer step, identical on all ranks."""

    metrics: dict[str, float]
    """The loss's metrics, summed over micro-batches and data parallel ranks."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    has_moved: bool
    """Whether sampled weights of the last stage changed on any data parallel rank (`StepAudit`)."""


class TrainingEngine:
    """One model on this rank, with gradients and optimizer if it learns.

    Methods are collective over the world unless they say otherwise.

    Args:
        training: section of the config: layout, micro-batches, memory.
        parts: features that take part in the passes (`rl.training.parts`), in the order of their hooks.
    """

    def __init__(
        self,
        spec: ModelSpec,
        training: Training,
        grid: Grid,
        device: Device,
        parts: Sequence[TrainerPart] = (),
    ):
        audits = [StepAudit()] if spec.optimizer is not None else []
        self.spec, self.grid, self.device, self.parts = spec, grid, device, TrainerParts([*parts, *audits])
        self.version = 0
        """Number of batches that the model has learned from; a checkpoint restores it for the policy."""
        self.num_updates = 0
        """Number of optimizer updates since the process started."""
        self.num_restored_steps = 0
        """Number of optimizer steps before the process started, from a checkpoint."""
        hf, dtype = value_model(spec.hf) if spec.has_values else spec.hf, DTYPES[spec.dtype]
        chunks = self._build(hf, training, dtype)
        for part in self.parts:
            part.extend(hf, chunks)
        self.chunks = [chunk.to(device.torch) for chunk in chunks]
        """Parts of the model on this rank, in the order of their layers: several with `training.vpp`."""
        self.model = model = self.chunks[0] if grid.vpp == 1 else torch.nn.ModuleList(self.chunks)
        self.shares_prompts = training.shared_prefix and can_share(device.torch, dtype)
        holders = self.parts.weight_grid(grid)
        self.weight_map = WeightMap(hf, self._weights(hf), holders, model, dtype=dtype, device=device.torch)
        mark_split_weights(self.weight_map)
        with fail_together():  # each rank reads its own part of the files
            if not any(part.load(self.weight_map) for part in self.parts):
                load_hf(spec.path, self.weight_map)
        for part in self.parts:
            part.attach(self)
        self.learned_map = self.parts.learned_map(self.weight_map)
        """The weights that learn."""
        self.reference = Reference(self.learned) if spec.keeps_reference else None
        self.optimizer = None
        self.wrapped: list = self.chunks
        if spec.optimizer is not None:
            self.wrapped = with_gradients(self.chunks, training, grid)
            self.optimizer = build_optimizer(spec.optimizer, dtype, self.wrapped)
            for part in self.parts:
                part.optimizer_built(self)
        assert self.optimizer is not None or self.reference is None, "a frozen model is its own reference"
        for chunk in self.wrapped:
            chunk.train(self.optimizer is not None)
        self._weights_in_host, self._learning_state_in_host = HostMemory(), HostMemory()

    def _build(self, hf: dict, training: Training, dtype: torch.dtype) -> list[Packed]:
        """Return this rank's chunks of the model. Collective over the world."""
        for part in self.parts:
            if (chunks := part.build(self.spec, training, dtype, self.grid)) is not None:
                return chunks
        return build_model(
            hf,
            training,
            dtype,
            self.grid,
            values=self.spec.has_values,
            uses_te=all(part.uses_te for part in self.parts),
            fuses_norms=all(part.fuses_norms for part in self.parts),
        )

    def _weights(self, hf: dict) -> list[Weight]:
        return value_weights(hf, needs_head=False) if self.spec.has_values else architecture(hf).weights(hf)

    @property
    def has_frozen_weights(self) -> bool:
        """Whether the learning weights are not the checkpoint's weights but, for example, an adapter's."""
        return self.learned_map is not self.weight_map

    @property
    def layers(self) -> str:
        """The kind of Megatron's layers on CUDA in words, for the log; "" on CPUs and for other layers."""
        chunk = self.chunks[0]
        return name_of_layers(chunk.config) if isinstance(chunk, Packed) else ""

    @property
    def learned(self) -> list[Parameter]:
        """This rank's parameters that learn, in the model's order."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def forward(
        self,
        batch: Batch,
        plans: list[MicroBatchPlan],
        names: tuple[str, ...],
        progress: Counter | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the named outputs at every response token, float32 [T] each, on every rank.

        names: some of logprobs, entropy and sum_p_squared for a policy; values for a value model. plans: one
        per mini-batch. With the plans of the update, both passes give bitwise equal results,
        unless the model has adapters.
        """
        places, values = [], []

        def keep(micro: MicroBatch) -> None:
            if self.grid.reports_results:
                places.append(micro.column_index)
                values.append(torch.stack([micro.outputs[name] for name in names]))

        # A model in training stays in train() here: in eval() Transformer Engine may choose another attention
        # kernel than in the update. Nothing else depends on the mode, because there is no dropout.
        for plan in plans:
            self.visit(batch, plan, names, keep, progress)
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
        progress: Counter | None = None,
    ) -> None:
        """Run forward passes; on the last stage, call `consume` with each micro-batch and its named outputs.

        All tensor parallel ranks of the last stage call `consume` with the same micro-batches, in the same
        order.
        """

        def step(micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            consume(micro)
            return torch.zeros((), device=self.device.torch), {}

        self._run(batch, plan, step, forward_only=True, progress=progress, outputs=names)

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Use the reference weights inside the context, for forward passes.

        The reference weights are copied into the gradient buffers. `update` sets the gradient buffers to 0
        before it uses them.
        """
        assert self.reference is not None, "the model keeps no reference"
        assert not self._learning_state_in_host.occupied, (
            "reload the gradient buffers first: the reference weights need them"
        )
        with self.reference.applied():
            yield

    def update(
        self,
        batch: Batch,
        plan: MicroBatchPlan,
        loss: MicroBatchLoss,
        *,
        lr: float,
        outputs: tuple[str, ...] | None = None,
        progress: Counter | None = None,
    ) -> UpdateResult:
        """Take one optimizer step on the samples of the plan and increment `num_updates`.

        outputs: names of the model's outputs that `loss` reads; None for all.

        Raises FloatingPointError on every rank if the gradient is not finite; the weights are then unchanged.
        """
        self._begin_update()
        sums: dict[str, Tensor] = {}

        def accumulate(micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            value, metrics = loss(micro)
            for name, term in metrics.items():
                sums[name] = sums.get(name, 0.0) + term.detach().double()
            return value, {}

        self._run(batch, plan, accumulate, forward_only=False, progress=progress, outputs=outputs)
        result = self._step(sums, lr=lr)
        for part in self.parts:
            part.after_update()
        return result

    def _begin_update(self) -> None:
        """Set the gradients to 0, and let the parts prepare. Collective over the world."""
        assert self.optimizer is not None, "the model is frozen"
        assert not self._learning_state_in_host.occupied, "the optimizer's state is in host memory"
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        for part in self.parts:
            part.before_update()

    def _step(self, sums: dict[str, Tensor], *, lr: float) -> UpdateResult:
        """Take an optimizer step with the reduced gradients. Raises FloatingPointError as `update` does.

        sums: the loss's metrics, summed over this rank's micro-batches; {} on all stages but the last.
        """
        assert self.optimizer is not None and self.spec.optimizer is not None
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            # wd_mult is 0 for norms and biases. Megatron's scheduler, which is not used here, would apply it.
            group["weight_decay"] = self.spec.optimizer.weight_decay * group["wd_mult"]
        self.optimizer.prepare_grads()
        with tracing.span("gradient norm"):
            norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm is {norm}; the update was not applied. {_not_finite(sums)}"
            )
        for part in self.parts:
            part.before_step()
        with tracing.span("optimizer"):
            clip_and_step(self.optimizer, norm)
        self.num_updates += 1
        metrics = self._sum_over_replicas(sums, norm=norm, lr=lr)
        audit = self.parts.get(StepAudit)
        assert audit is not None
        return UpdateResult(metrics, norm, audit.has_moved)

    def gradients(
        self, batch: Batch, plan: MicroBatchPlan, loss: MicroBatchLoss, weights: Sequence[Weight], output: str
    ) -> list[tuple[Any, Tensor | None, float]]:
        """Return for each weight this rank's parameter, its part of a loss's gradient, and a factor.

        The gradient of a weight is the sum over all ranks of factor times part, float64, of the weight's
        `first_rows`. Parameter and part are None on a rank that learns no part of the weight. loss: reads
        only `output`. Collective over the world.
        """
        found = [part_of(self.learned_map, weight, self.chunks[0].config) for weight in weights]
        parts: list[list[Tensor]] = [[] for _ in found]
        hooks = [
            parameter.register_hook(lambda part, own=own: own.append(first_rows(part).double()))
            for (parameter, _), own in zip(found, parts)
            if parameter is not None
        ]
        with only_hooks(self.wrapped):
            self._run(batch, plan, loss, forward_only=False, progress=None, outputs=(output,))
        for hook in hooks:
            hook.remove()
        gradients: list[tuple[Any, Tensor | None, float]] = []
        for (parameter, share), own in zip(found, parts):
            zeros = None if parameter is None else torch.zeros_like(first_rows(parameter)).double()
            gradients.append((parameter, zeros if zeros is None else sum(own, zeros), share))
        return gradients

    def start_from_present_weights(self) -> None:
        """Copy newly loaded weights to the master weights and the reference. Not collective."""
        if self.optimizer is not None:
            reload_main_weights(self.optimizer)
            for part in self.parts:
                part.weights_loaded()
        if self.reference is not None:
            self.reference.take()

    # Memory -------------------------------------------------------------------------------------------------

    def offload(self, *, weights: bool) -> None:
        """Free the device memory of gradients and optimizer state until `reload`. Not collective.

        weights: also free the memory of the weights; the model can then compute only after `reload`.
        """
        for model in self.parts.models().values():
            model.offload(weights=weights)
        own = self.parts.resident(list(self.model.parameters()))
        if self.optimizer is not None:
            gradients = gradient_buffers(self.wrapped)
            self._learning_state_in_host.send(gradients, contents=False)  # `update` sets them to 0 first
            # A float32 model's main weights share the storage of its weights.
            kept = {weight.untyped_storage()._cdata for weight in own}
            moving = optimizer_tensors(self.optimizer, in_host=False)
            state = [tensor for tensor in moving if tensor.untyped_storage()._cdata not in kept]
            self._learning_state_in_host.send(state, contents=True)
        if weights:
            self._weights_in_host.send(own, contents=True)

    def reload(self) -> None:
        """Move the tensors that `offload` moved back to the device. Not collective."""
        self._weights_in_host.fetch()
        self._learning_state_in_host.fetch()
        for model in self.parts.models().values():
            model.reload()

    @property
    def has_weights(self) -> bool:
        """Whether the weights are on the device."""
        return not self._weights_in_host.occupied and all(part.has_weights for part in self.parts)

    def replicas(self) -> list[tuple[dist.ProcessGroup, dict[str, Tensor]]]:
        """Return pairs (group, learned weights by Megatron's name); all ranks of a group hold equal copies.

        The first pair is the data parallel group with all weights except routed experts. The second pair is
        the expert data parallel group with the routed experts. Further pairs are tensor parallel groups with
        the parts of adapters that all their ranks hold. Optimizer states are not included, because they are
        sharded.
        """
        return self.learned_map.replicas() + [pair for part in self.parts for pair in part.replicas()]

    def stale_master_weights(self) -> list[str]:
        """Return the names of learned weights that differ from their master weights after rounding.

        Not collective.
        """
        return stale_master_weights(self.optimizer, self.learned_map.parameters)

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) of every exported weight, on every rank.

        The values are the ones that the passes use: an adapter, for example, is merged into its weight.
        """
        return full_weights(self.parts.exported_map(self.weight_map), self.parts.merging())

    def _run(
        self,
        batch: Batch,
        plan: MicroBatchPlan,
        consume: MicroBatchLoss,
        *,
        forward_only: bool,
        progress: Counter | None,
        outputs: tuple[str, ...] | None = None,
    ) -> None:
        """Run this rank's micro-batches through Megatron's pipeline schedule.

        On the last stage, `consume` gets each micro-batch with its outputs and returns (loss, report). On
        CUDA, this method does not wait for the device.
        """
        assert self.has_weights, "the weights are in host memory"
        grid, config, device = self.grid, self.chunks[0].config, self.device.torch
        last = self.chunks[-1]
        last.outputs = type(last).outputs if outputs is None else outputs
        known = *type(last).outputs, *(name for part in self.parts for name in part.outputs(batch))
        if last.outputs != ("hidden",) and (unknown := [name for name in last.outputs if name not in known]):
            raise ValueError(
                f"a loss reads the output {unknown[0]}, but the model computes {', '.join(known)} for this "
                "batch; change the reads of the loss, or provide the output first: for example, divergence "
                "needs a teacher (teacher.path) and phases.distributions(batch)."
            )
        self.parts.fetch(batch, plan, grid, device)
        config.timers = None if tracing.active is None else tracing.active.timers
        multiple = grid.tp if config.sequence_parallel else 1
        rows = [
            lay_out(
                batch,
                samples,
                multiple=multiple,
                device=device,
                share=self.shares_prompts,
                context=grid.context,
            )
            for samples in plan[grid.dp_rank]
        ]
        is_reference = self.reference is not None and self.reference.is_applied
        rows = self.parts.rows(batch, rows, is_reference=is_reference)

        def step(iterator: Iterator[MicroBatch], wrapped: Any) -> tuple[Any, Callable[..., Any]]:
            chunk = wrapped.module if self.optimizer is not None else wrapped
            micro = with_columns(next(iterator), batch)
            if tracing.active is not None:
                counts = dict(samples=len(micro.samples), tokens=micro.tokens.numel())
                tracing.active.timers.micro_batch = counts
            for part in self.parts if chunk.post_process else ():
                part.micro_batch(batch, micro)
            if progress is not None and chunk is last:  # only the last stage computes the loss
                progress.update(len(micro.samples) * grid.dp)
            output = chunk.run(micro, self.spec.temperature)

            def loss_function(output: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                micro.outputs |= zip(last.outputs, output)
                value, report = consume(micro)
                # On CUDA the schedule frees the outputs of a stage, including the loss, and refuses tensors
                # that are views.
                value = make_viewless_tensor(value, requires_grad=value.requires_grad, keep_graph=True)
                return value, torch.zeros((), dtype=torch.int, device=device), report

            return output, loss_function

        run_schedule(self.wrapped, rows, step, grid, forward_only=forward_only)

    def _sum_over_replicas(self, sums: dict[str, Tensor], *, norm: float, lr: float) -> dict[str, float]:
        """Return the loss's metrics, which the last stages have, summed over the data parallel ranks.

        The same all-reduce sums the numbers that the parts return from `after_step`. `TrainerPart.summed`
        then checks these sums and raises an error if one is wrong. Collective over the world.
        """
        names = list(sums)
        if self.grid.pp > 1:  # only the last stage knows the names of the metrics
            names = broadcast_object(names, self.grid.pp - 1, self.grid.groups.pp)
        mine = torch.zeros(len(names), dtype=torch.float64, device=self.device.torch)
        if self.grid.reports_results and names:
            mine.copy_(torch.stack(list(sums.values())))
        of_parts = [[x.to(mine) for x in part.after_step(norm=norm, lr=lr)] for part in self.parts]
        total = torch.cat([mine, *(x for own in of_parts for x in own)])
        dist.all_reduce(total)
        found = iter(total.tolist())
        metrics = dict(zip(names, islice(found, len(names))))
        for part, own in zip(self.parts, of_parts):
            part.summed(list(islice(found, sum(map(len, own)))))
        return metrics


def _not_finite(sums: dict[str, Tensor]) -> str:
    """Return a sentence that names the metrics of the loss that are NaN or infinite, and their ranks.

    Collective over the world.
    """
    mine = [name for name, value in sums.items() if not math.isfinite(float(value))]
    found = [f"{', '.join(names)} on rank {rank}" for rank, names in enumerate(gather_objects(mine)) if names]
    if not found:
        return "The loss is finite on every rank, so the backward pass produced it."
    return f"Not finite in the loss: {'; '.join(found)}."
