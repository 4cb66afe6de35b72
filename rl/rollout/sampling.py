"""Sampling parameters and the seeds of samples."""

import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rl.config.schema import Config


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one call of the engine; by default from the whole vocabulary.

    vLLM keeps the state of these options in host memory (vllm/v1/worker/gpu/sample/states.py). It allocates
    the state of penalties, logit biases and bad words on the GPU with the weights, where a level-2 sleep
    discards it. Before such an option is added, `RolloutEngine.wake_weights` must restore that state.
    """

    samples_per_prompt: int
    max_tokens: int
    """Maximum tokens of a response."""
    temperature: float = 1.0
    """Sampling temperature; 0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


def train_sampling(config: Config) -> Sampling:
    """Return the sampling parameters of training batches."""
    rollout = config.rollout
    return Sampling(
        samples_per_prompt=rollout.samples_per_prompt,
        max_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
    )


def greedy_sampling(config: Config) -> Sampling:
    """Return the sampling parameters of one greedy response per prompt."""
    training = train_sampling(config)
    return replace(training, samples_per_prompt=1, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)


PARAMETERS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "stop": (),
    "stop_token_ids": (),
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "bad_words": (),
    "logit_bias": (),
    "allowed_token_ids": (),
}
"""vLLM's parameters that change which tokens are sampled, and the values that change nothing."""


def parameters_code(parameters: Mapping[str, Any]) -> int:
    """Return a 32-bit hash of sampling parameters; a name of PARAMETERS that is missing has its value there.

    For example, {"temperature": 0.8, "stop": ["end"]}.
    """
    found = []
    for name, neutral in PARAMETERS.items():
        value = parameters.get(name)
        is_list = isinstance(neutral, tuple)
        found.append(sorted(value or ()) if is_list else float(neutral if value is None else value))
    return zlib.crc32(repr(found).encode())


def seed_of(*parts: object) -> int:
    """Return a 63-bit seed that depends only on the parts, such as run seed, step, prompt and sample."""
    digest = hashlib.blake2b(".".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
