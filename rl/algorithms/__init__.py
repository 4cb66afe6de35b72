"""One file per algorithm: one step, written in the phases of `rl.phases.phases`.

At its top a file declares, as literals, what a run of it needs and which config values make it the published algorithm:

    NEEDS = ("samples", "reward")
    DEFAULTS = {"objective.advantage": "rloo", "objective.reward_kl.coef": 0.05}

    def step(phases, config): ...

`algorithm: path/to/mine.py` in a config runs such a file from anywhere. The declarations are read without running the file,
because a config is checked before torch is imported.
"""

import importlib
from types import ModuleType

from rl.config.declarations import describe
from rl.config.functions import import_file


def load(name: str) -> ModuleType:
    """The module of an algorithm, by name or path."""
    if not name.endswith(".py"):
        return importlib.import_module(f"rl.algorithms.{name}")
    return import_file(describe(name).path)
