"""Checks of `run.mode`: what can be replayed from stored rollouts."""

from pathlib import Path

from rl.config.options import ConfigError
from rl.config.schema import Config, algorithm_of, learns_from_data


def check_mode(config: Config) -> None:
    """Raise ConfigError for a mode that contradicts the rest of the config."""
    run, needs = config.run, algorithm_of(config).needs
    name = f"run.mode={run.mode}"
    if run.mode in ("train", "check", "rollout_only") and run.rollouts:
        raise ConfigError(
            f"run.rollouts={run.rollouts} is read with run.mode=score_only or train_only, not with {name}; "
            "leave it out."
        )
    if run.mode in ("train", "check"):
        return
    if "samples" not in needs or learns_from_data(config):
        raise ConfigError(
            f"{name} replays responses of the policy, but algorithm={config.algorithm} learns from responses "
            "in the data; use another algorithm, or run.mode=train."
        )
    if config.roles.is_on or config.rollout.carry_over:
        asynchronous = "the section roles" if config.roles.is_on else "rollout.carry_over=true"
        raise ConfigError(f"{name} cannot be combined with {asynchronous}; leave it out.")
    if run.mode == "rollout_only" and config.logging.rollouts != "all":
        raise ConfigError(
            f"{name} generates in order to store, but logging.rollouts={config.logging.rollouts} does not "
            "store all samples; set logging.rollouts=all."
        )
    if run.mode == "train_only" and (not run.rollouts or _same(run.rollouts, run.dir)):
        raise ConfigError(
            f"{name} needs run.rollouts, the directory of another run than run.dir={run.dir}, because a run "
            "replaces the rollouts of its own directory; set both."
        )
    if run.mode == "score_only":
        _check_scores(config)


def _check_scores(config: Config) -> None:
    others = {
        "reward.model.path": bool(config.reward.model.path),
        "reward.judge.path": bool(config.reward.judge.path),
        "the section agents": config.agents.is_on,
    }
    for key in (key for key, is_set in others.items() if is_set):
        raise ConfigError(
            f"run.mode=score_only calls only the reward function, and {key} gives scores too; leave it out."
        )


def _same(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()
