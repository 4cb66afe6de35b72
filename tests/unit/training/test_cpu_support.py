"""Megatron-core on a host without CUDA. Importing it changes the interpreter, so most of this happens in subprocesses."""

import copy
import importlib.util
import marshal
import os
import stat
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch

from rl.training.cpu_support import Adam, _Loader
from tests import bounds
from tests.spawn import ROOT

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="inert where there is CUDA")


def run_python(source, **env):
    """stdout of a fresh interpreter that runs the source."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Importing ------------------------------------------------------------------------------------------------------------


def test_megatron_imports_and_torch_stays_as_it_was(tmp_path):
    out = run_python(
        """
        import sys
        import torch

        assert not torch.cuda.is_available()
        places = torch, torch.cuda, torch.Tensor
        before = [dict(vars(place)) for place in places]

        import rl.training
        from rl.training.cpu_support import _Finder, install

        install()
        rl.training.install()
        assert sum(isinstance(finder, _Finder) for finder in sys.meta_path) == 1

        import megatron.core
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import get_megatron_optimizer
        install()
        assert sum(isinstance(finder, _Finder) for finder in sys.meta_path) == 1

        for place, names in zip(places, before):
            for name, value in names.items():
                assert vars(place)[name] is value, f"{place.__name__}.{name} was replaced"
        tensor = torch.tensor([1.0])
        assert tensor.device.type == "cpu" and tensor.type() == "torch.FloatTensor"
        for forbidden in (torch.cuda.current_device, tensor.cuda, lambda: torch.zeros(1, device="cuda")):
            try:
                forbidden()
            except (AssertionError, RuntimeError):
                continue
            raise SystemExit(f"{forbidden} works without CUDA")

        # What Megatron sees in the place of the device.
        from megatron.core.tensor_parallel import mappings, random
        assert random.torch is torch and str(random.__cuda__.current_device()) == "cpu"
        from megatron.core.optimizer import Adam
        from rl.training.cpu_support import Adam as ours
        assert Adam is ours
        print("done")
        """,
        XDG_CACHE_HOME=str(tmp_path),
    )
    assert out == "done\n"
    cached = [path for path in (tmp_path / "lockstep" / "megatron-on-cpu").rglob("*") if path.is_file()]
    assert len(cached) > 50  # the modules that were compiled, for the next start
    assert not [path for path in cached if path.suffix]  # no unfinished ones


def test_installing_after_megatron_says_what_to_do():
    out = run_python(
        """
        import sys, types

        sys.modules["megatron"] = types.ModuleType("megatron")
        sys.modules["megatron.core"] = types.ModuleType("megatron.core")
        try:
            import rl.training
        except ImportError as error:
            print(error)
        """
    )
    assert "must run before the first import of megatron.core" in out


def test_modules_outside_megatron_core_are_left_to_python():
    from rl.training.cpu_support import _Finder

    finder = _Finder()
    for name in ("torch", "megatron", "megatron.corex", "megatron.training", "json"):
        assert finder.find_spec(name, None) is None


# The cache of rewritten modules ---------------------------------------------------------------------------------------

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


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The files of the cache, which is in XDG_CACHE_HOME."""
    root = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(root))
    return lambda: [path for path in root.rglob("*") if path.is_file()]


def test_rewritten_code_is_kept_in_xdg_cache_home_and_read_back(source, cache):
    assert_rewritten(load(source))
    [file] = cache()
    assert sys.implementation.cache_tag in file.parts
    kept = marshal.loads(file.read_bytes())
    assert isinstance(kept, types.CodeType)

    file.write_bytes(marshal.dumps(compile("read_from_cache = True", "x", "exec")))
    assert load(source).read_from_cache


def test_cache_is_in_the_home_directory_where_xdg_cache_home_is_not_set(source, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in (None, ""):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        if value is not None:
            monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert_rewritten(load(source))
    assert len([p for p in (tmp_path / "home" / ".cache" / "lockstep").rglob("*") if p.is_file()]) == 1


def test_changed_source_is_compiled_again(source, cache):
    load(source)
    source.write_text(MODULE + "\nchanged = True\n")
    assert load(source).changed
    assert len(cache()) == 2


def test_python_keeps_no_code_of_its_own(source, cache):
    """__pycache__ would be read by an interpreter that does not rewrite."""
    load(source)
    assert not (source.parent / "__pycache__").exists()


@pytest.mark.parametrize("damage", ["empty", "half", "one byte short", "zeros", "text"])
def test_a_torn_cache_file_is_compiled_again_and_replaced(source, cache, damage):
    load(source)
    [file] = cache()
    whole = file.read_bytes()
    file.write_bytes(
        {
            "empty": b"",
            "half": whole[: len(whole) // 2],
            "one byte short": whole[:-1],
            "zeros": bytes(len(whole)),
            "text": b"<html>quota exceeded</html>",
        }[damage]
    )
    assert_rewritten(load(source))
    assert file.read_bytes() == whole


def test_a_cache_directory_that_cannot_be_made_does_no_harm(source, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert_rewritten(load(source))


def test_a_cache_that_refuses_to_be_written_does_no_harm(source, tmp_path, monkeypatch):
    """As on a read-only file system, also for root."""

    def refuse(self, data):
        raise OSError(30, "Read-only file system")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Path, "write_bytes", refuse)
    assert_rewritten(load(source))


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_a_cache_without_permission_does_no_harm(source, tmp_path, monkeypatch):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(closed))
    assert_rewritten(load(source))
    closed.chmod(stat.S_IRWXU)


def test_two_copies_of_a_module_name_their_own_file_in_tracebacks(tmp_path, cache):
    """Two environments with the same Megatron share the cache."""
    for directory in ("first", "second"):
        path = tmp_path / directory / "example.py"
        path.parent.mkdir()
        path.write_text(MODULE)
        assert load(path).where.__code__.co_filename == str(path)


# Adam -----------------------------------------------------------------------------------------------------------------


def trajectories(make_optimizers, *, steps=8, dtype=torch.float64):
    """Parameters after each step of several optimizers that get the same gradients; the second one skips step 3."""
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
def test_adam_takes_the_steps_of_torchs_adamw(settings, dtype):
    ours, torchs = trajectories(
        [lambda p: Adam(p, **settings), lambda p: torch.optim.AdamW(p, **{"weight_decay": 0.0, **settings})],
        dtype=dtype,
    )
    assert_same_path(ours, torchs)


@pytest.mark.parametrize("settings", SETTINGS, ids=["defaults", "decay", "all"])
def test_adam_without_adam_w_mode_adds_the_decay_to_the_gradient(settings):
    ours, torchs = trajectories(
        [lambda p: Adam(p, adam_w_mode=False, **settings), lambda p: torch.optim.Adam(p, **settings)]
    )
    assert_same_path(ours, torchs)
    if "weight_decay" in settings:
        [decoupled] = trajectories([lambda p: Adam(p, **settings)])
        assert (decoupled[-1][0] - ours[-1][0]).abs().max() > 1e-3


def test_adam_keeps_its_step_in_the_group_as_transformer_engine_does():
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


def test_adam_goes_on_from_a_saved_state():
    def optimizer_of(value):
        param = torch.nn.Parameter(value.clone())
        return param, Adam([param], lr=0.1, weight_decay=0.1)

    def advance(param, optimizer, grads):
        for grad in grads:
            param.grad = grad.clone()
            optimizer.step()

    grads = list(torch.randn(6, 4, generator=torch.Generator().manual_seed(2)))
    whole, optimizer = optimizer_of(torch.ones(4))
    advance(whole, optimizer, grads[:3])
    resumed, second = optimizer_of(whole.detach())
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    advance(whole, optimizer, grads[3:])
    advance(resumed, second, grads[3:])
    assert torch.equal(whole, resumed)
