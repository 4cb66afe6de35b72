"""Imports of the metric log, in a process of its own."""

import subprocess
import sys


def test_metric_log_imports_no_torch_without_tensorboard(tmp_path):
    code = (
        "import sys; from rl.run_directory.metric_log import MetricLog;"
        f"MetricLog({str(tmp_path)!r}, resume_step=None).write(1, {{'a': 1.0}});"
        "assert 'torch' not in sys.modules and 'tensorboard' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
