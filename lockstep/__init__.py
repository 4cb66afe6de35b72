"""Lockstep as a library and as one command.

    import lockstep

    run = lockstep.train("configs/quickstart.yaml", {"run.max_steps": 10}, ranks=2)
    print(run.state, run.values("critic/score/mean"))
    run = lockstep.read_run("runs/quickstart")

`python -m lockstep`, installed as `lockstep`, is the command; `lockstep.commands` has its words. After
`import lockstep` you can import the packages `rl` and `launch`: in a checkout they are beside this package,
and an installed wheel has them in lockstep/home, in the folders of a checkout.
"""

import sys
from pathlib import Path

_INSIDE = Path(__file__).resolve().parent / "home"
HOME = _INSIDE if _INSIDE.is_dir() else _INSIDE.parents[1]
"""Directory with train_rl.py, rl, launch, tools, configs and slurm."""
if str(HOME) not in sys.path:
    sys.path.insert(0, str(HOME))

from rl import __version__  # noqa: E402, I001  first, because it refuses an old Python
from lockstep.library import RunError, RunResult, read_run, train  # noqa: E402

__all__ = ["HOME", "__version__", "RunError", "RunResult", "read_run", "train"]
