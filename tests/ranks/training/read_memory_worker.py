"""One rank of test_read_memory.py: how much memory reading a checkpoint at TP 2 takes at its peak.

    read_memory_worker.py CHECKPOINT OUT_DIR

Each rank writes {"held": bytes of its parameters, "peak": growth of its peak resident memory} to
OUT_DIR/<rank>.json.
"""

import json
import sys
from pathlib import Path

from megatron_groups import RANKS, new_grid  # isort: skip


from rl.config.schema import Training
from rl.models import read_hf_config
from rl.runtime.session import session
from rl.training.engine import TrainingEngine
from rl.training.spec import ModelSpec


def resident(field: str) -> int:
    """VmRSS or VmHWM, the peak of VmRSS, in bytes; pages of mapped files count."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10


def main(checkpoint: str, out_dir: str) -> None:
    with session(RANKS) as device:
        grid, hf = new_grid(2, 1), read_hf_config(checkpoint)
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = resident("VmRSS")
        trainer = TrainingEngine(ModelSpec(checkpoint, hf, "bfloat16"), Training(tp=2), grid, device)
        peak = resident("VmHWM") - before
        held = sum(parameter.numel() * parameter.element_size() for parameter in trainer.model.parameters())
        Path(out_dir, f"{RANKS.rank}.json").write_text(json.dumps({"held": held, "peak": peak}))


if __name__ == "__main__":
    main(*sys.argv[1:])
