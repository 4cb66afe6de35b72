"""Parity of transformers, Megatron and vLLM on tiny random models, and of refits.

The reference is transformers in float32 on the CPU, with weights rounded to the dtype under test. Bounds
follow from that dtype (tools/bounds.py). In bfloat16, rounding changes the selected experts of some tokens of
a mixture of experts. There the median is bounded, and the share of tokens beyond the bound.
"""

import functools
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tools.acceptance.stages import ARCHITECTURES, FEW
from tools.acceptance.worker import StageTask, world

if TYPE_CHECKING:
    from torch import Tensor

    from rl.config.schema import Config
    from rl.data.batch import Batch
    from rl.runtime.device import Device
    from rl.training.engine import TrainingEngine
    from rl.training.grid import Grid
    from rl.training.packing import MicroBatch

CHANGED_SHARE = 0.1
"""Maximum share of tokens that rounding sends to other experts (3 of 8 experts, random routers, 2 layers)."""
LENGTHS = ((5, 9), (17, 1), (1, 30), (33, 4), (8, 8), (2, 64), (40, 21), (3, 3))
"""Numbers of prompt and response tokens of the compared samples."""
EPS = 1e7
"""Adam's epsilon. It is so large that Adam's step is lr / EPS times the gradient."""
SCALE = 1e3
"""The factor lr / EPS. It is so large that weights do not affect the rounding of weight + step."""


def run(
    task: StageTask,
    *,
    architectures: Sequence[str],
    dtypes: Sequence[Literal["float32", "bfloat16"]],
    rollout_tp: int = 0,
    layouts: bool = False,
    use_te: bool = True,
) -> None:
    """Compare the architectures in each dtype, in one layout or in all that the world has.

    rollout_tp: tensor parallel size of the vLLM engine, 0 for no engine. A process can build only one.
    """
    import importlib.util

    if not use_te:
        if importlib.util.find_spec("transformer_engine") is None:
            return task.findings.skip("without Transformer Engine", "it is not installed: see stage trainer")
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    if task.mode != "full" and len(architectures) > 1:
        architectures = [name for name in architectures if name in FEW]
    with world(task) as device:
        for name, dtype in product(architectures, dtypes):
            case = _Case(task, device, name, dtype)
            for layout in _layouts(case) if layouts else [(1, 1, 1)]:
                case.compare(layout, rollout_tp)


def _layouts(case: "_Case") -> list[tuple[int, int, int]]:
    """Return (tp, pp, ep) of each training layout that fits this world."""
    import torch.distributed as dist

    candidates = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2)]
    world_size = dist.get_world_size()
    return [
        (tp, pp, ep)
        for tp, pp, ep in candidates
        if world_size % (tp * pp) == 0 and world_size % (pp * ep) == 0 and (ep == 1 or case.has_experts)
    ]


class _Case:
    """Parity of one architecture in one dtype, on this rank."""

    def __init__(self, task: StageTask, device: "Device", name: str, dtype: Literal["float32", "bfloat16"]):
        import torch
        import torch.distributed as dist
        from transformers import AutoModelForCausalLM

        from rl.checks.transformers_pass import without_kernels
        from rl.models import architecture, read_hf_config
        from tools import bounds
        from tools.hf_reference import hf_gradient, random_batch
        from tools.tiny_models import SIZES, save_tiny

        self.task, self.device, self.name = task, device, name
        self.dtype_name, self.dtype = dtype, getattr(torch, dtype)
        self.path = str(task.out / "models" / task.findings.path.stem / name)
        if dist.get_rank() == 0:
            with without_kernels():  # of a reference on the CPU
                save_tiny(ARCHITECTURES[name], Path(self.path), seed=0)
        dist.barrier()
        self.hf = read_hf_config(self.path)
        architecture(self.hf).check(self.hf)
        self.batch = random_batch(self.hf["vocab_size"], LENGTHS)
        self.engine: Any = None
        width = 1 if dtype == "bfloat16" else SIZES["hidden_size"]
        self.logprob_bound = bounds.of_logits(self.hf["num_hidden_layers"], width, self.dtype)
        self.gradient_bound = bounds.of_gradient(self.hf["num_hidden_layers"], width, self.dtype)
        if dist.get_rank() == 0:
            model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
            self.reference: Any = model.to(self.dtype).float().eval()
            expected = _hf_logprobs(self.reference, self.batch)
            self.gradient = hf_gradient(self.reference, expected, Path(self.path, "gradient"))
            self.expected = expected.detach()
            same: Any = AutoModelForCausalLM.from_pretrained(self.path, dtype=self.dtype)
            same = same.to(device.torch).eval()
            with torch.no_grad():
                self._bounded("transformers log-probs", _hf_logprobs(same, self.batch), self.expected)

    @property
    def has_experts(self) -> bool:
        return any("expert" in key for key in self.hf)

    def compare(self, layout: tuple[int, int, int], rollout_tp: int) -> None:
        """Compare Megatron in one layout with the reference and, if rollout_tp > 0, vLLM after a refit."""
        import torch.distributed as dist
        from megatron.core import parallel_state

        from rl.engines.engines import build_policy
        from rl.models.files import as_stored
        from rl.training.grid import build_grid
        from rl.training.micro_batch_plans import plan_minibatch

        tp, pp, ep = layout
        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
        config = self._config(layout, rollout_tp)
        grid = build_grid(tp=tp, pp=pp, ep=ep, etp=config.training.expert_tp, seed=1)
        if dist.get_world_size() > 1:
            self.label = f"tp {tp} pp {pp} ep {ep}"
            self._warm_up(grid)
        else:
            self.label = ""
        trainer = build_policy(config, self.hf, grid, self.device)
        if rollout_tp:
            self._engine(config, trainer, rollout_tp)
            if not self.label:
                return  # stage trainer compares the rest
        samples = list(range(len(self.batch)))
        plan = plan_minibatch(self.batch, samples, dp=grid.dp, max_tokens=config.training.micro_batch_tokens)
        (found,) = trainer.forward(self.batch, [plan], ("logprobs",))
        in_files = functools.partial(as_stored, trainer.weight_map.weights)
        before = {name: tensor.cpu().float() for name, tensor in in_files(trainer.full_weights())}
        gaps: list[float] = []

        def loss(micro: "MicroBatch") -> "tuple[Tensor, dict[str, Tensor]]":
            old = found[micro.column_index.cpu()].to(micro.logprobs.device)
            gaps.append(float((micro.logprobs.detach() - old).abs().max()) if len(old) else 0.0)
            value = -micro.logprobs.sum()
            return value, {"loss": value}

        norm = trainer.update(self.batch, plan, loss, lr=SCALE * EPS).grad_norm
        after = {name: tensor.cpu().float() for name, tensor in in_files(trainer.full_weights())}
        if dist.get_rank() == 0:
            self._bounded("Megatron log-probs", found, self.expected)
            if gaps:  # only the last pipeline stage has log-probs
                self._at_most("first update: |log ratio|", max(gaps), 0.0)
            self._gradients({name: (after[name] - before[name]) / SCALE for name in after}, norm)

    def _warm_up(self, grid: "Grid") -> None:
        """Run the first collective of each group; report the GPU's free memory before and after."""
        import torch

        from rl.models.sizes import is_tied
        from rl.runtime.group_warm_up import warm_up

        groups = grid.step_groups(has_experts=self.has_experts, ties_embedding=is_tied(self.hf))
        before = torch.cuda.mem_get_info()[0] if self.device.is_cuda else 0
        number = warm_up(self.device, groups)
        if self.device.is_cuda:
            after = torch.cuda.mem_get_info()[0]
            text = (
                f"free: {before / 2**30:.2f} GiB before, {after / 2**30:.2f} GiB after {number} collectives"
            )
            self.task.findings.note(
                f"{self.label}: memory of NCCL", (before - after) / 2**30, unit="GiB", text=text
            )

    def _engine(self, config: "Config", trainer: "TrainingEngine", rollout_tp: int) -> None:
        """Refit, check the weights and generate, before and after a sleep; compare with the reference."""
        import torch
        import torch.distributed as dist

        from rl.engines.rollout_engines import model_parts
        from rl.refit.refit import check_refit, refit
        from rl.rollout.batches import batch_of
        from rl.rollout.engine import RolloutEngine
        from rl.rollout.exchange import exchange
        from rl.rollout.sampling import train_sampling
        from rl.rollout.vllm_model import ServedModel

        if self.engine is None:
            model = ServedModel(self.path, config.model.dtype, max_tokens=128)
            parts = model_parts(config.rollout, self.hf)
            self.engine = RolloutEngine(model, config.rollout, seed=1, device=self.device, parts=parts)
        engine = self.engine
        if not engine.awake:
            engine.wake_weights()
        moved = refit(trainer, engine)
        check_refit(trainer, engine)
        engine.weights_version = 0
        if not engine.awake:
            engine.wake_cache()
        sampling = train_sampling(config)

        def generate() -> "Batch":
            drawn = engine.generate(self.batch.prompt_ids, sampling, list(range(len(self.batch))))
            mine = drawn if engine.rank_in_replica == 0 else []
            samples = exchange(mine, self.device)
            return batch_of(samples, self.batch.prompt_ids, samples_per_prompt=sampling.samples_per_prompt)

        first = generate()
        engine.sleep()
        engine.wake_weights()
        start = time.perf_counter()
        refit(trainer, engine)
        seconds = time.perf_counter() - start
        check_refit(trainer, engine)
        engine.wake_cache()
        second = generate()
        engine.sleep()
        if dist.get_rank() > 0:
            return
        self._check("engine weights equal the trainer's, twice", True, "check_refit compares every element")
        self._at_most("bytes through vLLM's own loader", moved.fallback, 0)
        self.task.findings.note(self._name("second refit"), seconds * 1e3, unit="ms")
        with torch.no_grad():
            expected = _hf_logprobs(self.reference, first)
        assert first.rollout_logprobs is not None  # an engine drew the samples
        self._bounded("vLLM log-probs", first.rollout_logprobs, expected)
        pairs = list(zip(first.response_ids, second.response_ids))
        equal = sum(a.shape == b.shape and bool((a == b).all()) for a, b in pairs)
        self._check("same samples after sleep and refit", equal == len(pairs), f"{equal} of {len(pairs)}")

    def _config(self, layout: tuple[int, int, int], rollout_tp: int) -> "Config":
        from rl.config.schema import Config, Data, Model, Optimizer, Rollout, Training, resolve

        tp, pp, ep = layout
        return resolve(
            Config(
                model=Model(path=self.path, dtype=self.dtype_name),
                data=Data(max_prompt_tokens=64),
                training=Training(
                    tp=tp, pp=pp, ep=ep, micro_batch_tokens=96, optimizer=Optimizer(eps=EPS, clip_grad=0.0)
                ),
                rollout=Rollout(
                    tp=rollout_tp or 1,
                    samples_per_prompt=1,
                    max_response_tokens=48,
                    max_concurrent_samples=8,
                    deterministic=True,
                    gpu_memory_utilization=0.3,
                    enforce_eager=self.name not in FEW,  # CUDA graphs take seconds to capture
                    cpu_kv_cache_mib=16,
                ),
            )
        )

    def _name(self, what: str) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return ", ".join(filter(None, (self.name, dtype, getattr(self, "label", ""), what)))

    def _at_most(self, what: str, value: float, limit: float) -> None:
        self.task.findings.at_most(self._name(what), value, limit)

    def _check(self, what: str, passed: bool, text: str) -> None:
        self.task.findings.check(self._name(what), passed, text)

    def _bounded(self, what: str, found: "Tensor", expected: "Tensor") -> None:
        """Check the differences of log-probs against the bound, relative to the largest log-prob."""
        import torch

        differences = (found.double().cpu() - expected.double().cpu()).abs()
        limit = self.logprob_bound * float(expected.abs().max())
        if not (self.has_experts and self.dtype is torch.bfloat16):
            return self._at_most(what, float(differences.max()), limit)
        self._at_most(f"{what}, median", float(differences.median()), limit)
        self._at_most(
            f"{what}, share beyond the bound", float((differences > limit).double().mean()), CHANGED_SHARE
        )

    def _gradients(self, found: dict, norm: float) -> None:
        """Check the differences of the gradient and of its norm against the bound, relative to the norm."""
        import torch

        def size(tensors: "Iterable[Tensor]") -> float:
            return float(torch.stack([tensor.double().norm() for tensor in tensors]).norm())

        whole = size(self.gradient.values())
        off = size([found[name] - expected for name, expected in self.gradient.items()]) / whole
        if self.has_experts and self.dtype is torch.bfloat16:
            text = "not bounded: some tokens choose other experts"
            self.task.findings.note(self._name("gradient"), off, text=text)
            self.task.findings.note(self._name("gradient's norm"), abs(norm / whole - 1), text=text)
        else:
            self._at_most("gradient", off, self.gradient_bound)
            self._at_most("gradient's norm", abs(norm / whole - 1), self.gradient_bound)


def _hf_logprobs(model: Any, batch: "Batch") -> "Tensor":
    """Return transformers' log-probs of the response tokens, float32 [T]."""
    from tools.hf_reference import hf_logprobs

    return hf_logprobs(model, batch)[0].float()
