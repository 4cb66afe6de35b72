"""Sampling masks of a completion: the set of tokens that each token was sampled from, as two held columns.

`kept_ids` has the ids of all masks end to end, sorted within a mask, and `kept_counts` the size of each mask.
For example, two tokens with the masks {3, 7} and {5} have `kept_ids` [3, 7, 5] and `kept_counts` [2, 1]. Both
have the smallest unsigned type that holds the size of the vocabulary. A bit set would be smaller only if a
mask had more than 1/32 of a large vocabulary.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rl.config.adapter import Adapter
from rl.config.options import ConfigError
from rl.config.schema import Config
from rl.rollout.calls import EngineCall
from rl.rollout.parts import EnginePart
from rl.rollout.samples import Request

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput

    from rl.rollout.engine import RolloutEngine


class Masks(EnginePart):
    """Adds the sampling masks to the completions of an engine."""

    def options(self, engine: "RolloutEngine") -> dict:
        if not engine.device.is_cuda:
            return {}
        from vllm.engine.arg_utils import EngineArgs

        if "return_sampling_mask" not in EngineArgs.__dataclass_fields__:  # not in vLLM 0.25
            raise ConfigError(
                "rollout.top_p, top_k or min_p truncates the distribution, but this vLLM does not return the "
                "tokens that it kept; use vLLM 0.32, or rollout.biased_truncation=true."
            )
        # vLLM raises an error if it would use its first model runner, which does not return the masks.
        return {"return_sampling_mask": True}

    def built(self, engine: "RolloutEngine") -> None:
        self._vocab_size = engine.llm.llm_engine.model_config.get_vocab_size()

    def begin(self, engine: "RolloutEngine") -> None:
        if not engine.device.is_cuda:
            engine.runner.sampler.masks = {}

    def request(self, engine: "RolloutEngine", request: Request, call: EngineCall) -> None:
        if engine.device.is_cuda:
            # vLLM refuses to return the masks of requests without top_k, and of greedy ones.
            params = call.params
            if params.temperature:
                params.top_k = params.top_k or self._vocab_size
            else:
                params.temperature, params.top_k = 1.0, 1

    def completion(
        self, engine: "RolloutEngine", internal_id: str, output: "CompletionOutput"
    ) -> dict[str, np.ndarray]:
        if engine.device.is_cuda:
            assert output.sampling_mask is not None
            masks: Sequence[Sequence[int] | np.ndarray] = output.sampling_mask.token_ids
        else:  # none if the request was greedy; one too many if tokens were sampled after a stop string
            masks = list(engine.runner.sampler.masks.pop(internal_id, {}).values())[: len(output.token_ids)]
            masks = masks or [()] * len(output.token_ids)
        assert len(masks) == len(output.token_ids), "the engine did not return a mask for every token"
        return columns_of(masks, self._vocab_size)


def columns_of(masks: Sequence[Sequence[int] | np.ndarray], vocab_size: int) -> dict[str, np.ndarray]:
    """Return the held columns of a completion's tokens, from the ids in each token's mask."""
    dtype = np.min_scalar_type(vocab_size)
    parts = [np.asarray(ids, dtype) for ids in masks]
    return {
        "kept_ids": np.concatenate(parts) if parts else np.zeros(0, dtype),
        "kept_counts": np.array([len(part) for part in parts], dtype),
    }


def parts(config: Config, adapters: Sequence[Adapter]) -> list[EnginePart]:
    """Return the parts of an engine."""
    return [Masks()]
