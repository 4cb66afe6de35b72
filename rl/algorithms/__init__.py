"""One file per algorithm: it collects a batch and learns from it by calling the methods of `Phases`.

At its top, a file declares as literals what its runs need and the defaults of the published algorithm:

    NEEDS = ("samples", "reward")
    DEFAULTS = {"objective.advantage": "rloo", "objective.reward_kl.coef": 0.05}

    def collect(phases) -> Batch: ...     # draw prompts, generate, score
    def learn(phases, batch): ...         # log-probs, advantages, updates

The loop (`rl.run.loop`) calls both functions in each step, and skips `learn` if the batch is empty. The
configuration may name a file outside this package: `algorithm: path/to/mine.py`. Declarations are read
without running the file, because a configuration is checked before torch is imported.
"""

import importlib
from types import ModuleType

from rl.config.declarations import describe
from rl.config.functions import import_file


def load(name: str) -> ModuleType:
    """Return the module of an algorithm, by name or path."""
    if not name.endswith(".py"):
        return importlib.import_module(f"rl.algorithms.{name}")
    return import_file(describe(name).path)
