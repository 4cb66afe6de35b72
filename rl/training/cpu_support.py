"""Run the unmodified megatron-core wheel without CUDA. Does nothing if CUDA is available.

Megatron-core names the accelerator literally: "cuda", torch.cuda.current_device(), 'torch.cuda.FloatTensor',
x.cuda(). `install` puts a finder in front of sys.meta_path. The finder compiles megatron.core.* from its own
source and maps these names to the CPU. For example, `x.cuda()` becomes `x`. torch is not patched, so vLLM in
the same process sees an ordinary CPU build, and operations have no extra cost. `install` must run before the
first `import megatron.core`.

The finder rewrites the following names; the rest of Megatron works on CPU:
- `torch.cuda` -> a namespace (`_cuda_namespace`): device of weights, buffers and p2p shapes; streams and
  events; RNG tracker.
- the literal "cuda" -> "cpu": device of token counters, found-inf flags, gradient-norm buffers.
- `x.cuda()`, `x.pin_memory()` -> x, `pin_memory=...` -> False: a CPU build refuses pinned memory.
- `x.type()` names the CUDA type: optimizers and clipping assert 'torch.cuda.FloatTensor'.
Changes that the rewrite cannot express are the functions in `_AFTER_IMPORT`, one per module.
"""

import ast
import bisect
import contextlib
import logging
import re
import sys
import types
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

import torch

_PACKAGE = "megatron.core"
_CPU = torch.device("cpu")


def install() -> None:
    """Make `import megatron.core` work without CUDA. Idempotent; does nothing if CUDA is available."""
    if torch.cuda.is_available() or any(isinstance(finder, _StandInFinder) for finder in sys.meta_path):
        return
    if _PACKAGE in sys.modules:
        raise ImportError(
            "megatron.core is already imported; call rl.training.cpu_support.install() before its first "
            "import"
        )
    # Without a driver, transformer_engine raises OSError (libcuda.so.1), which Megatron does not catch.
    sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]
    sys.meta_path.insert(0, _StandInFinder())


class _Stream:
    """A stream or event of a device that executes in program order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...
    def wait(self, *args: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, event: "_Stream | None" = None) -> "_Stream":
        return event or _Stream()


def _cuda_namespace() -> types.ModuleType:
    """Return the module that replaces `torch.cuda` inside megatron.core."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def type_name(tensor: torch.Tensor) -> str:
        kinds = {torch.float32: "Float", torch.bfloat16: "BFloat16", torch.float16: "Half"}
        return f"torch.cuda.{kinds.get(tensor.dtype, '')}Tensor"

    stream = _Stream()
    namespace = types.ModuleType("torch.cuda on cpu")
    names = dict(
        __getattr__=lambda name: getattr(torch.cuda, name),  # is_available() -> False, OutOfMemoryError, ...
        current_device=lambda: _CPU,
        device_count=lambda: 1,
        Stream=_Stream,
        Event=_Stream,
        current_stream=lambda *args: stream,
        default_stream=lambda *args: stream,
        stream=lambda stream: contextlib.nullcontext(),
        manual_seed=torch.default_generator.manual_seed,
        manual_seed_all=torch.default_generator.manual_seed,
        get_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
        set_rng_state=lambda state, *args, **kwargs: torch.set_rng_state(state),
        nvtx=types.SimpleNamespace(
            range_push=nothing, range_pop=nothing, range=lambda *args, **kwargs: contextlib.nullcontext()
        ),
        type_of=type_name,
    )
    names |= dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"), nothing)
    names |= {
        n: getattr(torch, n)
        for n in ("FloatTensor", "HalfTensor", "BFloat16Tensor", "IntTensor", "LongTensor", "ByteTensor")
    }
    namespace.__dict__.update(names)
    return namespace


class Adam(torch.optim.Optimizer):
    """Adam (AdamW with `adam_w_mode`) with the state layout of Transformer Engine's FusedAdam.

    The group has `step`; each parameter has `exp_avg` and `exp_avg_sq`.

    megatron-core 0.16 falls back to torch.optim.AdamW, which has a `step` tensor per parameter. It can
    neither load a resharded checkpoint of the distributed optimizer (KeyError: 'step') nor share checkpoints
    with runs on CUDA.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **_: Any,
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # Megatron gives no closure
        """Update the parameters, with one pass over the memory of each."""
        fused = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                if not self.state[param]:
                    self.state[param].update(
                        exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param)
                    )
            beta1, beta2 = group["betas"]
            fused(
                params,
                [param.grad for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                [],
                [torch.tensor(float(group["step"]))] * len(params),
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )


_WORDS = re.compile(rb"cuda|pin_memory|\.[\s\\]*type\b")
"""Pattern of the lines that `_Rewrite` changes."""


class _Rewrite(ast.NodeTransformer):
    def __init__(self, lines: list[int]) -> None:
        self._lines = lines
        """Numbers of the lines with one of `_WORDS`, in order."""

    def visit(self, node: ast.AST) -> Any:
        """Visit a node if one of its lines can change; three quarters of Megatron's lines cannot."""
        if isinstance(node, (ast.stmt, ast.expr)):
            next_line = bisect.bisect_left(self._lines, node.lineno)
            if next_line == len(self._lines) or self._lines[next_line] > (node.end_lineno or node.lineno):
                return node
        return super().visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name("__cuda__", node.ctx), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr in ("cuda", "pin_memory"):
            return called.value
        if not isinstance(called, ast.Attribute) or node.args or node.keywords:
            return node
        if called.attr == "type":
            type_of = ast.Attribute(ast.Name("__cuda__", ast.Load()), "type_of", ast.Load())
            return ast.fix_missing_locations(ast.copy_location(ast.Call(type_of, [called.value], []), node))
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        self.generic_visit(node)
        if node.arg == "pin_memory":
            node.value = ast.copy_location(ast.Constant(False), node.value)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if node.value == "cuda":
            node.value = "cpu"
        return node


def _no_compiler(jit: Any) -> None:
    """Disable Megatron's jit_fuser, because torch.compile needs a C++ compiler and seconds per function."""
    jit.disable_jit_fuser()


def _cpu_rng_states(random: Any) -> None:
    """Make the CUDA RNG tracker track the CPU generator, and suppress its warning at each call.

    Megatron's functions call torch._C, so mapping names in the source is not enough.
    """
    random._get_cuda_rng_state = lambda device=None, clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _no_dropout(fused_bias_dropout: Any) -> None:
    """Add residuals in place in passes without gradients.

    Megatron does so only in eval(), because of dropout, which this project never uses.
    """
    choose = fused_bias_dropout.get_bias_dropout_add
    fused_bias_dropout.get_bias_dropout_add = lambda training, fused: choose(False, fused)


def _adam_of_optimizer(optimizer: Any) -> None:
    if optimizer.USING_PYTORCH_OPTIMIZER:
        optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = Adam, False


def _adam_of_distributed_optimizer(distrib_optimizer: Any) -> None:
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        distrib_optimizer.Adam = Adam
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True


def _split_sizes_as_lists(moe_utils: Any) -> None:
    """Convert split sizes to numpy on CPU too; the token dispatcher requires it but converts only on CUDA."""

    def to_numpy(tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = to_numpy


def _uneven_collectives(mappings: Any) -> None:
    """Emulate all-gather and reduce-scatter of parts of different sizes, which gloo lacks.

    Experts with tensor parallelism require them, because the ranks of a group have different numbers of
    tokens.
    """
    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def uneven_gather(
        part: torch.Tensor,
        group: torch.distributed.ProcessGroup,
        output_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(part, group, None, use_global_buffer)
        longest = max(output_split_sizes)
        padded = torch.cat([part, part.new_zeros(longest - len(part), *part.shape[1:])])
        parts = gather(padded, group).split(longest)
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes)])

    def uneven_scatter(
        whole: torch.Tensor,
        group: torch.distributed.ProcessGroup,
        input_split_sizes: list[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return scatter(whole, group, None, use_global_buffer)
        total = whole.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].contiguous()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = uneven_gather, uneven_scatter


_AFTER_IMPORT = {
    "megatron.core.jit": _no_compiler,
    "megatron.core.fusions.fused_bias_dropout": _no_dropout,
    "megatron.core.tensor_parallel.random": _cpu_rng_states,
    "megatron.core.tensor_parallel.mappings": _uneven_collectives,
    "megatron.core.transformer.moe.moe_utils": _split_sizes_as_lists,
    "megatron.core.optimizer": _adam_of_optimizer,
    "megatron.core.optimizer.distrib_optimizer": _adam_of_distributed_optimizer,
}


class _Loader(SourceFileLoader):
    cuda = _cuda_namespace()

    def get_code(self, fullname: str) -> types.CodeType | None:
        """Return the rewritten module's code; the code of __pycache__ if nothing is rewritten."""
        path = self.get_filename(fullname)
        source = self.get_data(path)
        lines = [source.count(b"\n", 0, word.start()) + 1 for word in _WORDS.finditer(source)]
        if not lines:
            return super().get_code(fullname)
        return compile(_Rewrite(lines).visit(ast.parse(source, path)), path, "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__cuda__"] = self.cuda
        super().exec_module(module)
        _AFTER_IMPORT.get(module.__name__, lambda module: None)(module)


class _StandInFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if not (fullname + ".").startswith(_PACKAGE + "."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec
