"""Parts of a generation engine: what a platform or a feature adds to vLLM, behind named hooks.

A feature is a subclass of `EnginePart` in a file of its own. `RolloutEngine` calls the hooks of its parts in
their order and knows no feature; `rl.engines.rollout_engines` chooses the parts of a run.
"""

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from rl.rollout.calls import EngineCall
from rl.rollout.samples import Request

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

    from rl.rollout.engine import RolloutEngine


class EnginePart:
    """One part of an engine. The hooks are called on every rank; by default they change nothing."""

    def options(self, engine: "RolloutEngine") -> dict:
        """Return arguments of vLLM's LLM. Patches of vLLM are applied here, before it is built."""
        return {}

    def built(self, engine: "RolloutEngine") -> None:
        """Prepare the model, the runner and the scheduler that vLLM has built."""

    def check(self, engine: "RolloutEngine", prompt: np.ndarray, num_samples: int) -> None:
        """Check the engine before a training or validation generation. Collective over the world.

        prompt: token ids of the first prompt, int32 [P]. num_samples: samples of the generation, on all
        replicas. The engine is awake and has its weights.
        """

    def begin(self, engine: "RolloutEngine") -> None:
        """Prepare a call of `RolloutEngine.run`."""

    def step_together(self, engine: "RolloutEngine", steps: bool) -> bool:
        """Return whether an engine step follows; without requests to compute it is a dummy step.

        Called once per iteration of `RolloutEngine.run`. steps: whether this replica has requests to compute.
        """
        return steps

    def end(self, engine: "RolloutEngine") -> None:
        """End a call of `RolloutEngine.run`."""

    def request(self, engine: "RolloutEngine", request: Request, call: EngineCall) -> None:
        """Change the arguments of a request to vLLM.

        Further samples of a prompt begin with the first sample's changed arguments and their own seed.
        """

    def completion(
        self, engine: "RolloutEngine", internal_id: str, output: "CompletionOutput"
    ) -> dict[str, np.ndarray]:
        """Return the held columns of a request that has finished, or was aborted after some tokens."""
        return {}

    def metrics(self, engine: "RolloutEngine") -> dict[str, float]:
        """Return metrics of the last call of `RolloutEngine.run`. Collective over the world."""
        return {}

    def weights(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights that a refit writes, by vLLM's names. weights: the model's parameters."""
        return weights

    def weights_changed(self, engine: "RolloutEngine") -> None:
        """Discard what was computed from the old weights."""

    def sleep(self, engine: "RolloutEngine") -> None:
        """Release memory for the trainer."""

    def wake(self, engine: "RolloutEngine", what: str) -> None:
        """Restore what `sleep` released. what: "weights" before a refit, "kv_cache" after it."""


class WeightSlots(EnginePart):
    """Weights beside the model's, such as several adapters, each in a slot with a number."""

    versions: list[int]
    """Version of the policy's weights in each slot; -1: none yet."""
    has_base = False
    """Whether the engine holds the model's weights; else the next refit writes them too."""

    def buffers(self, slot: int) -> dict[str, Tensor]:
        """Return this rank's weights of a slot by vLLM's name, as views of the memory that vLLM reads."""
        raise NotImplementedError
