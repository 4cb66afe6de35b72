"""The configuration is checked, and its help printed, without torch."""

import subprocess
import sys
from pathlib import Path


def test_config_imports_neither_torch_nor_vllm():
    program = (
        "import sys\nfrom rl.config.schema import Config\n"
        "from rl.config.command_line import parse_command_line\n"
        "assert not {'torch', 'vllm', 'megatron', 'numpy'} & set(sys.modules)\nparse_command_line(Config, "
        "sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--help", "all"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "") and "training.optimizer.lr" in done.stdout
