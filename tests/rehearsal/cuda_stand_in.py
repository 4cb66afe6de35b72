"""A stand-in for CUDA, with which the program takes its CUDA branches on a CPU.

It found that training.cp with a model in float32 failed an assertion in the first pass on CUDA (commit
96256659) and that no run on CUDA could use drafts of a draft model (commits d5e57090, 96276f69).

`install` compiles rl.* from its own source with CUDA's names replaced, as rl.training.cpu_support does for
Megatron. Only the program sees CUDA; torch, Megatron and vLLM remain CPU builds. Replaced are:

- `torch.cuda.X`: X must exist in torch, and calls must match its signature. BEHAVIOURS has the replacement.
  An X without an entry raises an error that names this file.
- `x.is_cuda` of tensors and storages is True; the literals "cuda" and "nccl" become "cpu" and "gloo".
- Pinned memory is ordinary memory; `x.cuda()` is x; streams and events execute in program order.
- SDPA computes torch's variable-length attention, torch functions replace the kernels of Triton and of
  flash-linear-attention, and vLLM's sleep mode discards weights and cache.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import sys
import types
from collections.abc import Iterable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path

import torch

from tests.rehearsal.statements import cuda_statements
from tests.spawn import ROOT

CPU_SUPPORT = ("rl.training.cpu_support", "rl.rollout.cpu_support")
"""Modules for CPUs. They are not reloaded, so their names and patches remain."""
LITERALS = {
    "cuda": "cpu",
    "nccl": "gloo",
    "cpu:gloo,cuda:nccl": "cpu:gloo",
    "_dump_nccl_trace_json": "_dump_fr_trace_json",  # only CUDA builds have the former
}
GIB = 1 << 30
noted: set[tuple[str, int]] = set()
"""File and line of statements that `install` makes the program note."""
reached: set[tuple[str, int]] = set()
"""File and line of the statements in `noted` that this process has reached."""
EVENT, STREAM = torch.cuda.streams.Event, torch.cuda.streams.Stream
"""torch's classes, which vLLM on CPU replaces in torch.cuda."""


class Stream:
    """A stream or event of a device that executes in program order."""

    def __init__(self, *args, **options): ...

    def __getattr__(self, name: str):
        real = getattr(STREAM, name, None) or getattr(EVENT, name)
        assert callable(real), name
        return lambda *args, **options: 0.0 if name == "elapsed_time" else self

    def __enter__(self):
        return self

    def __exit__(self, *args): ...


class CudaRuntime:
    """torch.cuda.cudart() with the documented arguments of its C functions."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        return 0


def _nothing(*args, **options) -> None: ...


def _checked(real, behaviour):
    """Return `behaviour` as a function that raises TypeError for arguments that `real` does not accept."""
    signature = inspect.signature(real)

    @functools.wraps(real)
    def call(*args, **options):
        signature.bind(*args, **options)
        return behaviour(*args, **options)

    return call


def _checked_module(module):
    """Return a stand-in with functions that do nothing and accept the same arguments as `module`'s."""
    functions = {name: value for name, value in vars(module).items() if inspect.isfunction(value)}
    return types.SimpleNamespace(**{name: _checked(real, _nothing) for name, real in functions.items()})


BEHAVIOURS = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_capability": lambda *args: (9, 0),
    "get_device_properties": lambda *args: types.SimpleNamespace(
        pci_domain_id=0xFFFF, pci_bus_id=0, pci_device_id=0
    ),
    "get_device_name": lambda *args: "NVIDIA H100 (rehearsal)",
    "memory_allocated": lambda *args: GIB,
    "max_memory_allocated": lambda *args: GIB,
    "memory_reserved": lambda *args: GIB,
    "max_memory_reserved": lambda *args: GIB,
    "mem_get_info": lambda *args: (64 * GIB, 80 * GIB),
    "get_rng_state": lambda *args: torch.get_rng_state(),
    "set_rng_state": lambda state, *args: torch.set_rng_state(state),
    "manual_seed": torch.default_generator.manual_seed,
    "cudart": CudaRuntime,
    "Stream": Stream,
    "Event": Stream,
    "current_stream": Stream,
    "default_stream": Stream,
    "stream": lambda stream: contextlib.nullcontext(),
    "device": lambda device: contextlib.nullcontext(),
    "OutOfMemoryError": torch.cuda.OutOfMemoryError,
    "nvtx": _checked_module(torch.cuda.nvtx),
    "profiler": _checked_module(torch.cuda.profiler),
    "memory": _checked_module(torch.cuda.memory),
} | dict.fromkeys(
    ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "ipc_collect"), _nothing
)
"""Name in torch.cuda -> its replacement."""


class _Cuda(types.ModuleType):
    def __getattr__(self, name: str):
        real = getattr(torch.cuda, name)  # AttributeError: torch has no such name
        if name not in BEHAVIOURS:
            raise NotImplementedError(
                f"torch.cuda.{name} has no stand-in yet: add it to BEHAVIOURS in {__file__}"
            )
        behaviour = BEHAVIOURS[name]
        return _checked(real, behaviour) if inspect.isfunction(real) else behaviour


def _is_cuda(value) -> bool:
    tensors = (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)
    return True if isinstance(value, tensors) else value.is_cuda


def _wide(product, *tensors, out_dtype, out=None):
    """Compute a product of 16-bit matrices in a wider dtype, which torch supports only on CUDA."""
    return product(*(tensor.to(out_dtype) for tensor in tensors), out=out)


class _Rewrite(ast.NodeTransformer):
    def visit_Attribute(self, node):
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name("__cuda__", node.ctx), node)
        if node.attr == "is_cuda" and isinstance(node.ctx, ast.Load):
            return ast.copy_location(ast.Call(ast.Name("__is_cuda__", ast.Load()), [node.value], []), node)
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        if any(keyword.arg == "out_dtype" for keyword in node.keywords):
            node.args.insert(0, node.func)
            node.func = ast.copy_location(ast.Name("__wide__", ast.Load()), node)
        elif isinstance(node.func, ast.Attribute):
            if node.func.attr in ("cuda", "pin_memory"):
                return node.func.value
            if node.func.attr == "record_stream":
                return ast.copy_location(ast.Constant(None), node)
        return node

    def visit_keyword(self, node):
        self.generic_visit(node)
        if node.arg == "pin_memory":
            node.value = ast.copy_location(ast.Call(ast.Name("bool", ast.Load()), [], []), node.value)
        return node

    def visit_Constant(self, node):
        if isinstance(node.value, str):
            node.value = LITERALS.get(node.value, node.value)
        return node


class _Loader(SourceFileLoader):
    def get_code(self, fullname):
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        _note_reached(tree, path)
        tree = ast.fix_missing_locations(_Rewrite().visit(tree))
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module):
        module.__dict__.update(__cuda__=_Cuda("torch.cuda on a CPU"), __is_cuda__=_is_cuda, __wide__=_wide)
        module.__dict__["__reached__"] = reached.add
        super().exec_module(module)


def _note_reached(tree: ast.Module, path: str) -> None:
    """Insert a note in `reached` before each statement that depends on CUDA."""
    file = str(Path(path).relative_to(ROOT))
    lines = {line for name, line in noted if name == file}
    for node in ast.walk(tree) if lines else ():
        for part in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(node, part, None), list):
                for place in reversed(range(len(statements))):
                    if (line := statements[place].lineno) in lines:
                        (note,) = ast.parse(f"__reached__(({file!r}, {line}))").body
                        statements.insert(place, note)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if not (fullname + ".").startswith("rl.") or fullname in CPU_SUPPORT:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install(*, notes: bool = False) -> None:
    """Import rl.* again with CUDA's names replaced; replace the parts of vLLM and torch that need a GPU.

    notes: note in `reached` which statements of tests/rehearsal/statements.py run.
    """
    if notes:
        noted.update((statement.file, statement.line) for statement in cuda_statements())
    for module in CPU_SUPPORT:
        importlib.import_module(module)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rl" and name not in CPU_SUPPORT]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder())
    import torch.nn.attention.varlen as varlen

    varlen.varlen_attn = _checked(varlen.varlen_attn, varlen_attn)
    _replace_kernels()
    _add_delta_rule()
    _refuse_sums_without_order()
    _replace_sleep_mode()
    _replace_block_copies()
    _share_log_probs()


def _replace_kernels() -> None:
    """Replace the Triton kernels of the head, which tests run in Triton's interpreter, by their reference."""
    import rl.training.logprobs as reference

    path = Path(reference.__file__).with_name("head_kernels.py")
    kernels = types.ModuleType("rl.training.head_kernels")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and hasattr(reference, node.name):
            function = getattr(reference, node.name)
            assert [a.arg for a in node.args.args] == list(inspect.signature(function).parameters), node.name
            setattr(kernels, node.name, function)
    sys.modules[kernels.__name__] = kernels


def _add_delta_rule() -> None:
    """Register a module with the function of flash-linear-attention that the program calls."""
    from rl.models.delta_rule import Chunks, gated_delta_rule

    def chunk_gated_delta_rule(
        q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, *, cu_seqlens
    ):
        assert q.dtype is k.dtype is v.dtype is torch.bfloat16 and g.dtype is torch.float32 and scale == 1.0
        assert len(q) == 1 and all(x.is_contiguous() for x in (q, k, v, g, beta))
        assert cu_seqlens.dtype is torch.int64 and q.shape[1] == cu_seqlens[-1]
        chunks = Chunks.of(cu_seqlens.diff().tolist(), q.device)
        out, final = gated_delta_rule(*(x[0] for x in (q, k, v, g, beta)), chunks, initial_state)
        return out[None], final if output_final_state else None

    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.chunk_gated_delta_rule = chunk_gated_delta_rule
        sys.modules[name] = module


def _refuse_sums_without_order() -> None:
    """Refuse functions with gradients that CUDA adds in no fixed order, where elements are selected twice."""
    real = torch.Tensor.index_select

    def index_select(self, dim, index):
        own = sys._getframe(1).f_globals["__name__"].startswith("rl.")
        if own and torch.is_grad_enabled() and self.requires_grad:
            assert len(index.unique()) == len(index), "use rl.training.rows.select_rows"
        return real(self, dim, index)

    torch.Tensor.index_select = index_select


def varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """Compute causal attention per segment, with the mask aligned at the bottom right."""
    assert window_size == (-1, 0) and cu_q.dtype is cu_k.dtype is torch.int32
    assert query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] == value.shape[-1]
    assert enable_gqa == (query.shape[1] != key.shape[1])
    out = []
    for (q0, q1), (k0, k1) in zip(*(zip(c.tolist(), c.tolist()[1:]) for c in (cu_q, cu_k))):
        assert q1 - q0 <= max_q and k1 - k0 <= max_k
        mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        part = (x.transpose(0, 1)[None] for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        attended = torch.nn.functional.scaled_dot_product_attention(
            *part, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        out.append(attended[0].transpose(0, 1))
    return torch.cat(out)


CPU_ENGINE = dict(
    enforce_eager=True,
    kv_cache_memory_bytes=16 << 20,
    compilation_config={"custom_ops": ["all", "-rotary_embedding"]},
)
"""Options of rl.rollout.vllm_model for CPUs."""
CUDA_ENGINE = (
    "enable_sleep_mode",
    "moe_backend",
    "gpu_memory_utilization",
    "sleep_mode_offload_cudagraph",
    "return_sampling_mask",
)
"""Options of the CUDA engine that the CPU build refuses; tools/library_names.py checks that they exist."""


def _replace_sleep_mode() -> None:
    """Make vLLM's CPU engine accept the CUDA engine's options and discard the same data in its sleep."""
    import vllm

    from rl.rollout.cpu_support import release_packed_weights
    from rl.rollout.platforms import Cuda

    # CUDA packs no weights, so its platform releases no packed copies after a refit.
    Cuda.weights_written = lambda self, model: release_packed_weights(model)

    class Engine(vllm.LLM):
        def __init__(self, *args, **options):
            self.can_sleep = options.get("enable_sleep_mode", False)
            assert options["async_scheduling"] is ("speculative_config" not in options)
            kept = {name: value for name, value in options.items() if name not in CUDA_ENGINE}
            super().__init__(*args, **kept | CPU_ENGINE)
            if options.get("return_sampling_mask"):
                _return_sampling_masks(self.llm_engine)
            if "speculative_config" in options:
                _hold_drafter_as_cuda(self.llm_engine)
            if "enable_return_routed_experts" in options:
                _call_before_free(self.llm_engine)
            self.asleep: set[str] = set()

        def sleep(self, level=1, **options):
            assert self.can_sleep and level == 2 and not self.asleep
            super().sleep(level=level, **options)
            self.asleep = {"weights", "kv_cache"}
            with torch.no_grad():
                for module in self.apply_model(lambda model: model)[0].modules():
                    _discard(module.parameters(recurse=False))
                    if hasattr(module, "punica_wrapper"):  # a layer with buffers of adapters
                        _discard([*vars(module).values(), *vars(module.punica_wrapper).values()])

        def wake_up(self, tags=None):
            assert set(tags) <= self.asleep, f"{tags} do not sleep"
            self.asleep -= set(tags)
            return super().wake_up(tags=tags)

    vllm.LLM = Engine


def _replace_block_copies() -> None:
    """Replace vLLM's copies between addresses of GPU and host."""
    import ctypes

    from vllm import _custom_ops

    def swap_blocks_batch(src_ptrs, dst_ptrs, sizes, is_src_access_order_any=False):
        assert {each.dtype for each in (src_ptrs, dst_ptrs, sizes)} == {torch.int64}
        for source, target, size in zip(src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist()):
            ctypes.memmove(target, source, size)

    _custom_ops.swap_blocks_batch = _checked(_custom_ops.swap_blocks_batch, swap_blocks_batch)


def _discard(values: Iterable) -> None:
    """Overwrite tensors and tuples of them; no number is valid as an index."""
    for value in values:
        if isinstance(value, tuple):
            _discard(value)
        elif isinstance(value, torch.Tensor):
            value.fill_(torch.nan if value.is_floating_point() else torch.iinfo(value.dtype).max)


def _share_log_probs() -> None:
    """Make the CPU build's sampler call that function of the CUDA build's sampler, once it is replaced."""
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.worker.gpu.sample import logprob

    kernel, native = logprob.compute_token_logprobs, TopKTopPSampler.forward_cpu

    def forward_cpu(self, logits, generators, k, p):
        sampled, logprobs = native(self, logits.clone(), generators, k, p)
        if logprob.compute_token_logprobs is not kernel:
            every = torch.arange(logits.shape[1]).expand(len(logits), -1)
            logprobs = logprob.compute_token_logprobs(logits, every)
        return sampled, logprobs

    TopKTopPSampler.forward_cpu = forward_cpu


def _return_sampling_masks(engine) -> None:
    """Make the CPU's model runner return sampling masks as CUDA's does, and check requests as for CUDA."""
    import numpy as np
    from vllm.v1.outputs import SamplingMaskLists

    engine.model_config.return_sampling_mask = True
    engine.engine_core.engine_core.scheduler.return_sampling_mask = True
    runner = engine.model_executor.driver_worker.worker.model_runner
    sampler, sample_tokens, sets = runner.sampler.topk_topp_sampler, runner.sample_tokens, []
    draw = sampler.forward

    def record(*args):
        tokens, logprobs = draw(*args)
        sets[:] = [row.nonzero()[:, 0].int().numpy() for row in logprobs > -torch.inf]
        return tokens, logprobs

    def with_masks(*args):
        output = sample_tokens(*args)  # rl.rollout.cpu_async.StepOutput
        output.output.sampling_masks = SamplingMaskLists(
            np.concatenate(sets), np.cumsum([0, *map(len, sets)])
        )
        return output

    sampler.forward, runner.sample_tokens = record, with_masks


def _call_before_free(engine) -> None:
    """Make vLLM's scheduler call `before_free` of rl.rollout.cpu_scheduler, which stores routes on a CPU."""
    scheduler = engine.engine_core.engine_core.scheduler
    free = scheduler._free_request_blocks

    def free_request_blocks(request):
        scheduler.before_free(request)
        free(request)

    scheduler.before_free, scheduler._free_request_blocks = _nothing, free_request_blocks


def _hold_drafter_as_cuda(engine) -> None:
    """Give the CPU's model runner the interface to its drafter that CUDA's has, and verify drafts rightly.

    CUDA's runner holds it as `speculator`, calls `propose` with the batch first, and reads from the scheduler
    how many tokens to propose.
    """
    from rl.rollout import cpu_drafts

    runner = engine.model_executor.driver_worker.worker.model_runner
    drafter, scheduler = runner.drafter, engine.engine_core.engine_core.scheduler
    assert drafter._enable_probabilistic_draft_probs
    drafter._enable_probabilistic_draft_probs = False  # the class below has no use for them
    cpu_drafts.install(runner)
    take = scheduler.add_request

    def add_request(request):
        params = request.sampling_params  # the CPU's sampler reads the seed elsewhere
        params.extra_args, params.seed = {"seed": params.seed}, None
        take(request)

    class Speculator:
        model, speculative_config = drafter.model, drafter.speculative_config
        draft_tokens = torch.zeros(scheduler.max_num_running_reqs, drafter.num_speculative_tokens).long()

        def propose(self, batch, **options):
            self.draft_tokens[: batch.num_reqs] = propose(**options)
            return self.draft_tokens[: batch.num_reqs]

    def call(*, next_token_ids, num_speculative_tokens, **options):
        batch = types.SimpleNamespace(num_reqs=len(next_token_ids))
        every = dict(options, next_token_ids=next_token_ids, num_speculative_tokens=length)
        return runner.speculator.propose(batch, **every)[:, :num_speculative_tokens]

    propose, length = drafter.propose, drafter.num_speculative_tokens
    drafter.propose, runner.speculator, scheduler.add_request = call, Speculator(), add_request
