"""train_rl.py that writes at its end which modules for images it has imported: `text_imports.py OUT ...`."""

import atexit
import sys
from pathlib import Path

import train_rl

OF_IMAGES = ("rl.vision", "rl.data.images", "rl.models.qwen2_5_vl", "rl.models.qwen3_vl")

if __name__ == "__main__":
    out, *sys.argv[1:] = sys.argv[1:]

    def write():
        Path(out).write_text("\n".join(name for name in sys.modules if name.startswith(OF_IMAGES)))

    atexit.register(write)
    train_rl.leave(train_rl.main())
