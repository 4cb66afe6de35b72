"""Checks of model.numerics=bitwise: what cannot be combined with bitwise equal log-probs."""

from rl.config.options import ConfigError, flatten
from rl.config.schema import Config, learns_from_samples

CHANGED = {
    "rollout.top_p": (1.0, "the bitwise log-softmax is over the whole vocabulary"),
    "rollout.top_k": (0, "the bitwise log-softmax is over the whole vocabulary"),
    "rollout.min_p": (0.0, "the bitwise log-softmax is over the whole vocabulary"),
    "agents.structured_tool_calls": (False, "the bitwise log-softmax is over the whole vocabulary"),
    "rollout.carry_over": (False, "older weights then sample a part of the tokens"),
    "training.ep": (1, "experts of several ranks are not summed in one order"),
    "training.router_replay": ("none", "both choose the same experts without it"),
    "rollout_correction.truncate_tokens": (0.0, "there is no difference to correct"),
    "rollout_correction.truncate_samples": (0.0, "there is no difference to correct"),
    "rollout_correction.icepop_high": (0.0, "there is no difference to correct"),
    "rollout_correction.reject": ("none", "there is no difference to correct"),
    "rollout_correction.bypass": (False, "the log-probs are then not compared"),
}
"""Key -> (the only value that is allowed, the reason)."""


def check_numerics(config: Config) -> None:
    """Raise ConfigError if a run with model.numerics=bitwise could not keep its promise."""
    if config.model.numerics != "bitwise":
        return
    name = "model.numerics=bitwise"
    if not learns_from_samples(config):
        raise ConfigError(
            f"{name} compares the trainer with the engine that sampled, but algorithm={config.algorithm} "
            "does not learn from samples; use fast."
        )
    values = flatten(config)
    for key, (allowed, reason) in CHANGED.items():
        if values[key] != allowed:
            raise ConfigError(
                f"{name} cannot be combined with {key}={values[key]}, because {reason}; use {key}={allowed}."
            )
    if config.roles.is_on and config.roles.lag:
        raise ConfigError(
            f"{name} compares log-probs of the same weights, but with roles.lag={config.roles.lag} older "
            "weights sample; use roles.lag=0."
        )
