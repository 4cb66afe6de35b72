"""Sampling parameters and the seeds of samples."""

import hashlib
from dataclasses import dataclass, replace

from rl.config.schema import Config


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one call of the engine.

    vLLM keeps the state of these options in host memory (vllm/v1/worker/gpu/sample/states.py). It allocates
    the state of penalties, logit biases and bad words on the GPU with the weights, where a level-2 sleep
    discards it. Before such an option is added, `RolloutEngine.wake_weights` must restore that state.
    """

    samples_per_prompt: int
    temperature: float
    """Sampling temperature; 0 means greedy."""
    top_p: float
    top_k: int
    min_p: float
    max_tokens: int
    """Maximum tokens of a response."""
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]


def plain_sampling(samples_per_prompt: int, max_tokens: int, *, temperature: float = 1.0) -> Sampling:
    """Return the parameters that sample from the whole vocabulary, up to an end token or max_tokens."""
    return Sampling(samples_per_prompt, temperature, 1.0, 0, 0.0, max_tokens, (), ())


def train_sampling(config: Config) -> Sampling:
    """Return the sampling parameters of training batches."""
    rollout = config.rollout
    return Sampling(
        samples_per_prompt=rollout.samples_per_prompt,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        max_tokens=rollout.max_response_tokens,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
    )


def greedy_sampling(config: Config) -> Sampling:
    """Return the sampling parameters of one greedy response per prompt."""
    training = train_sampling(config)
    return replace(training, samples_per_prompt=1, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)


def seed_of(*parts: object) -> int:
    """Return a 63-bit seed that depends only on the parts, such as run seed, step, prompt and sample."""
    digest = hashlib.blake2b(".".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
