"""The policy in training: forward passes for log-probs, and updates, over packed micro-batches on the training grid."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rl.config import Config, learns_from_samples
from rl.data.batch import Batch
from rl.runtime.collectives import sum_over_world
from rl.runtime.device import Device
from rl.training.grid import Grid
from rl.training.model import DTYPES, build_policy
from rl.training.packing import MicroBatch, MicroBatches, pack, plan_micro_batches
from rl.training.weights import WeightMap, full_weights, load_hf

Loss = Callable[[MicroBatch], tuple[Tensor, dict[str, Tensor]]]
"""(loss of the micro-batch, already divided by the mini-batch's global denominator; sums to be logged)."""


class TrainingEngine:
    """The policy, its gradients and its optimizer on this rank. Every method is collective over the world."""

    def __init__(self, config: Config, hf: dict, grid: Grid, device: Device):
        self.config, self.grid, self.device = config.training, grid, device
        rl = learns_from_samples(config)
        self.temperature = config.rollout.temperature if rl else 1.0
        policy = build_policy(hf, config.training, DTYPES[config.model.dtype], grid).to(device.torch)
        self.policy = policy
        self.weight_map = WeightMap(hf, grid, policy)
        load_hf(config.model.path, self.weight_map)
        self.reference = self._copy_of_weights() if rl and config.objective.kl_coef else None
        policy.config.finalize_model_grads_func = _finalize_without_division
        self.model = DistributedDataParallel(
            policy.config,
            DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
            policy,
            pg_collection=grid.groups,
        )
        self.optimizer = _build_optimizer(config, self.model)
        self.forward_backward = get_forward_backward_func()

    def plan(self, batch: Batch, samples: list[int]) -> list[MicroBatches]:
        """Micro-batches of every data parallel rank for these samples. Local: alike on every rank."""
        lengths = (batch.prompt_lengths + batch.lengths).tolist()
        return plan_micro_batches(
            lengths, indices=samples, dp=self.grid.dp, max_tokens=self.config.micro_batch_tokens
        )

    @torch.no_grad()
    def logprobs(self, batch: Batch, plans: list[list[MicroBatches]], progress=None) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy of every response token under the current weights, float32 [T] each, on every rank.

        `plans` are those that the update will use (one per mini-batch), which makes the two passes equal to the bit.
        """
        out = torch.zeros(2, int(batch.lengths.sum()))

        def keep(micro: MicroBatch):
            if self.grid.speaks:
                out[0, micro.column_index] = micro.logprobs.cpu()
                out[1, micro.column_index] = micro.entropy.cpu()
            return micro.logprobs.new_zeros(()), {}

        self.model.eval()
        for plan in plans:
            self._run(batch, plan, keep, forward_only=True, progress=progress)
        self.model.train()
        return tuple(sum_over_world(out, self.device.torch))

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Within it the policy computes with the weights of the reference policy."""
        assert self.reference is not None, "no reference policy is kept with objective.kl_coef=0"
        own = self._copy_of_weights()
        self._set_weights(self.reference)
        try:
            yield
        finally:
            self._set_weights(own)

    def update(self, batch: Batch, plan: list[MicroBatches], loss: Loss, *, lr: float, progress=None) -> dict[str, float]:
        """One optimizer step on the samples of the plan. Returns the sums that `loss` reported, over all micro-batches
        and data parallel ranks, and `grad_norm` before clipping.

        Raises FloatingPointError, on every rank alike, if the gradient is not finite; the weights are then unchanged.
        """
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums: dict[str, Tensor] = {}

        def accumulate(micro: MicroBatch):
            value, terms = loss(micro)
            for name, term in terms.items():
                sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + term.detach().double().cpu()
            return value, {}

        self._run(batch, plan, accumulate, forward_only=False, progress=progress)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            # wd_mult is 0 for norms and biases; Megatron's own scheduler, not used here, would apply it.
            group["weight_decay"] = self.config.optimizer.weight_decay * group["wd_mult"]
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient norm is {norm}; the update was not applied.")
        self.optimizer.step()
        return self._sum_over_replicas(sums) | {"grad_norm": norm}

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight whole on every rank, by Hugging Face name."""
        return full_weights(self.weight_map)

    def _run(self, batch, plan, consume, *, forward_only, progress):
        """All micro-batches of this rank through Megatron's schedule; `consume` sees each on the last stage."""
        mine = plan[self.grid.dp_rank]
        multiple = self.grid.tp if self.policy.config.sequence_parallel else 1

        def step(iterator, model):
            micro = pack(batch, next(iterator), multiple=multiple, device=self.device.torch)
            if progress is not None:  # here, not in the loss, which only the last stage computes
                progress.update(len(micro.samples) * self.grid.dp)
            output = self.policy.run(micro, self.temperature)

            def loss_function(output):
                micro.logprobs, micro.entropy = output
                value, report = consume(micro)
                return value, torch.zeros((), dtype=torch.int, device=self.device.torch), report

            return output, loss_function

        self.forward_backward(
            forward_step_func=step,
            data_iterator=iter(mine),
            model=[self.model],
            num_microbatches=len(mine),
            seq_length=1,  # variable_seq_lengths: shapes travel with the tensors
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _sum_over_replicas(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """The sums of the last stages over the data parallel ranks, on every rank."""
        names = [list(sums)]
        if self.grid.pp > 1:  # other stages do not know what the loss reports
            dist.broadcast_object_list(names, group=self.grid.groups.pp, group_src=self.grid.pp - 1)
        zero = torch.zeros((), dtype=torch.float64)
        mine = torch.stack([sums[name] if self.grid.speaks else zero for name in names[0]])
        return dict(zip(names[0], sum_over_world(mine, self.device.torch).tolist()))

    def _copy_of_weights(self) -> list[Tensor]:
        """In host memory: a second set of weights on the device would be the largest thing there."""
        return [parameter.detach().to("cpu", copy=True) for parameter in self.policy.parameters()]

    @torch.no_grad()
    def _set_weights(self, weights: list[Tensor]) -> None:
        for parameter, weight in zip(self.policy.parameters(), weights):
            parameter.copy_(weight)


def _finalize_without_division(model, num_tokens=None, **kwargs):
    """Megatron would divide by the token count; the loss carries its denominator already."""
    finalize_model_grads(model, None, **kwargs)


def _build_optimizer(config: Config, model: DistributedDataParallel):
    adam = config.training.optimizer
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
            bf16=config.model.dtype == "bfloat16",
            params_dtype=DTYPES[config.model.dtype],
            use_distributed_optimizer=True,
        ),
        [model],
        use_gloo_process_groups=torch.cuda.is_available(),
    )
