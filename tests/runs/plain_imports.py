"""train_rl.py that writes at its end which modules of features it imported: `plain_imports.py OUT ...`."""

import atexit
import sys
from pathlib import Path

import train_rl

OF_FEATURES = (
    "rl.features",
    "rl.data.images",
    "rl.models.qwen2_5_vl",
    "rl.models.qwen3_vl",
    "rl.models.qwen3_5_vl",
    "rl.rollout.cpu_fp8",
    "rl.rollout.dp_attention",
    "rl.sandbox.apart",
    "rl.sandbox.sandbox",
    "rl.models.tower_cost",
)
"""Modules, or packages, that a synchronous run of single turns on text has no need of."""

if __name__ == "__main__":
    out, *sys.argv[1:] = sys.argv[1:]

    def write():
        Path(out).write_text("\n".join(name for name in sys.modules if name.startswith(OF_FEATURES)))

    atexit.register(write)
    train_rl.leave(train_rl.main())
