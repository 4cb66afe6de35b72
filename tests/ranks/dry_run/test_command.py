"""The dry run as a process."""

import os
import resource
import subprocess
import sys
import textwrap

import pytest

from tests.spawn import ROOT


@pytest.mark.slow
def test_the_largest_model_takes_little_of_a_login_node():
    command = ["train_rl.py", "--config", "configs/ppo_deepseek671b.yaml", "--dry-run", "--world-size", "512"]
    core = {min(os.sched_getaffinity(0))}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, core),
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0 and "671.03 B parameters" in done.stdout, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 120
    assert after.ru_maxrss < 8 << 20  # KiB, of the largest child so far


def test_a_dry_run_imports_neither_megatron_nor_vllm():
    code = (
        "import sys; sys.argv = ['train_rl.py', '--config', 'configs/qwen2.5-7b_gsm8k_grpo_8gpu.yaml', "
        "'--dry-run', '--world-size', '8']; import train_rl; assert train_rl.main() == 0; assert not "
        "{'megatron', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, timeout=120)


def test_a_dry_run_needs_only_pyyaml_and_numpy():
    """`pip install .` on a login node installs these two; the test hides all other packages."""
    code = """
        import importlib.abc
        import sys
        from pathlib import Path

        here = {path.stem for path in Path().iterdir()} | sys.stdlib_module_names | {"yaml", "numpy"}

        class LoginNode(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name.partition(".")[0] not in here:
                    raise ModuleNotFoundError(f"No module named '{name}'", name=name)

        sys.meta_path.insert(0, LoginNode())
        sys.argv = ["train_rl.py", *sys.argv[1:]]
        import train_rl
        assert train_rl.main() == 0
    """
    arguments = ("--config", "configs/qwen2.5-7b_gsm8k_grpo_8gpu.yaml", "--dry-run", "--world-size", "8")
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "7.62 B parameters" in done.stdout
    assert "\nFITS" in done.stdout
