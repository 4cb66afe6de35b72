"""One file per algorithm: one step, written in the phases of `rl.phases`."""

from types import ModuleType

from rl.algorithms import grpo, sft

ALGORITHMS: dict[str, ModuleType] = {"grpo": grpo, "sft": sft}
