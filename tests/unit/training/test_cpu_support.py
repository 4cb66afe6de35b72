"""Megatron-core on a host without CUDA. Importing it changes the interpreter, so most of this happens in
subprocesses."""

import ast
import importlib.util

import pytest
import torch

from rl.training.cpu_support import _WORDS, Adam, _Loader, _Rewrite
from tests import bounds

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="install does nothing where there is CUDA")


def test_other_modules_are_left_to_python():
    from rl.training.cpu_support import _StandInFinder

    finder = _StandInFinder()
    for name in ("torch", "megatron", "megatron.corex", "megatron.training", "json"):
        assert finder.find_spec(name, None) is None


# The rewritten modules --------------------------------------------------------------------------------------

MODULE = """
import torch

def where():
    return "cuda", torch.cuda, torch.tensor([2.0]).cuda().type(), torch.zeros(1, pin_memory=True)
"""


def load(path):
    """Execute a module through the loader that rewrites Megatron's."""
    spec = importlib.util.spec_from_file_location("example", path, loader=_Loader("example", str(path)))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_rewritten(module):
    device, namespace, type_name, buffer = module.where()
    assert device == "cpu" and type_name == "torch.cuda.FloatTensor"
    assert namespace is _Loader.cuda and namespace is not torch.cuda
    assert buffer.device.type == "cpu"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "example.py"
    path.write_text(MODULE)
    return path


def test_code_is_compiled_from_megatrons_source_and_no_cache(source, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(2):
        assert_rewritten(load(source))
    # __pycache__ would be read by an interpreter that does not rewrite.
    assert not (source.parent / "__pycache__").exists() and not (tmp_path / "cache").exists()


def test_lines_that_need_no_rewriting_change_nothing():
    source = MODULE + "def other(x):\n    return x.\\\n    type()\n\nplain = [x for x in 'ab']\n"
    lines = [source.encode().count(b"\n", 0, w.start()) + 1 for w in _WORDS.finditer(source.encode())]
    every = list(range(1, source.count("\n") + 2))
    assert len({ast.dump(_Rewrite(known).visit(ast.parse(source))) for known in (lines, every)}) == 1


# Adam -------------------------------------------------------------------------------------------------------


def trajectories(make_optimizers, *, steps=8, dtype=torch.float64):
    """Parameters after each step of several optimizers that get the same gradients; the second one skips step
    3."""
    generator = torch.Generator().manual_seed(1)
    start = [
        torch.randn(4, 3, generator=generator, dtype=dtype),
        torch.randn(5, generator=generator, dtype=dtype),
    ]
    gradients = [[torch.randn_like(p) for p in start] for _ in range(steps)]
    out = []
    for make in make_optimizers:
        params = [torch.nn.Parameter(p.clone()) for p in start]
        optimizer, path = make(params), []
        for gradient in gradients:
            for param, grad in zip(params, gradient):
                param.grad = grad.clone()
            optimizer.step()
            path.append([p.detach().clone() for p in params])
        out.append(path)
    return out


def assert_same_path(mine, theirs):
    """Each step adds a few roundings of its size, about lr = 0.1 or less, and one of the parameter's size."""
    for step, (ours, other) in enumerate(zip(mine, theirs, strict=True)):
        for a, b in zip(ours, other, strict=True):
            error = bounds.of_sum(2 * len(mine), a.dtype) * float(b.abs().max())
            assert (a - b).abs().max() <= error, f"step {step + 1}"


SETTINGS = [
    dict(lr=1e-2),
    dict(lr=1e-1, weight_decay=0.1),
    dict(lr=1e-2, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.5),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("settings", SETTINGS, ids=["defaults", "decay", "all"])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_takes_the_steps_of_torchs(settings, dtype, decoupled):
    options = {"weight_decay": 0.0, **settings}
    theirs = torch.optim.AdamW if decoupled else torch.optim.Adam
    ours, torchs = trajectories(
        [lambda p: Adam(p, adam_w_mode=decoupled, **options), lambda p: theirs(p, **options)], dtype=dtype
    )
    assert_same_path(ours, torchs)


def test_adam_keeps_its_step_in_the_group():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = Adam([param], lr=0.1)
    for _ in range(2):
        param.grad = torch.ones(3)
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 2
    assert set(optimizer.state[param]) == {"exp_avg", "exp_avg_sq"}
    assert param.grad.tolist() == [1, 1, 1]


def test_adam_leaves_parameters_without_gradient_alone():
    still, moves = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = Adam([still, moves], lr=0.1, weight_decay=0.5)
    moves.grad = torch.ones(2)
    optimizer.step()
    assert still.tolist() == [1, 1] and still not in optimizer.state
    assert (moves < 1).all()
