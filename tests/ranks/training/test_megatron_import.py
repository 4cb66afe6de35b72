"""Importing Megatron-core on a host without CUDA, which changes the interpreter and therefore needs
subprocesses."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from tests.spawn import ROOT

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="install does nothing where there is CUDA")


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


def test_megatron_imports_and_torch_stays_as_it_was(tmp_path):
    out = run_python(
        """
        import sys
        import torch

        assert not torch.cuda.is_available()
        places = torch, torch.cuda, torch.Tensor
        before = [dict(vars(place)) for place in places]

        import rl.training
        from rl.training.cpu_support import _StandInFinder, install

        install()
        rl.training.install()
        assert sum(isinstance(finder, _StandInFinder) for finder in sys.meta_path) == 1

        import megatron.core
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import get_megatron_optimizer
        install()
        assert sum(isinstance(finder, _StandInFinder) for finder in sys.meta_path) == 1

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
    assert not (tmp_path / "lockstep" / "megatron-on-cpu").exists()  # no code is read from there


def test_installing_after_megatron_is_refused():
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
    assert "call rl.training.cpu_support.install() before its first import" in out
