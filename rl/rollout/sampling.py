"""How responses are drawn in training and for greedy baselines, from the config."""

from rl.config.schema import Config
from rl.rollout.engine import Sampling


def train_sampling(config: Config) -> Sampling:
    """Sampling of training batches."""
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
    """One response per prompt, the most probable token each time, out of the whole vocabulary."""
    rollout = config.rollout
    return Sampling(
        samples_per_prompt=1,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        max_tokens=rollout.max_response_tokens,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
    )
