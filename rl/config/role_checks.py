"""Checks of the section `roles`, and the ranks of each role."""

import re

from rl.config.options import ConfigError
from rl.config.schema import Config, algorithm_of, learns_from_samples


def role_ranks(config: Config, world_size: int) -> tuple[range, range]:
    """Return the ranks that train and the ranks that generate. Without roles both are all ranks.

    Raises ConfigError unless the ranks of the two roles are all ranks of the job.
    """
    roles = config.roles
    if not roles.is_on:
        return range(world_size), range(world_size)
    train, rollout = _ranks("train", roles.train), _ranks("rollout", roles.rollout)
    if rollout.stop != world_size:
        raise ConfigError(
            f"roles.train={roles.train} and roles.rollout={roles.rollout} name {rollout.stop} ranks, but the "
            f"job has {world_size}; start it with {rollout.stop} ranks, or let roles.rollout end at "
            f"{world_size - 1}."
        )
    return train, rollout


def check_roles(config: Config) -> None:
    """Raise ConfigError for roles that contradict each other or the rest of the config."""
    roles, correction = config.roles, config.rollout_correction
    if not roles.is_on:
        if config.rollout.min_replicas:
            raise ConfigError(
                f"rollout.min_replicas={config.rollout.min_replicas} requires the section roles: without "
                "it every rank trains, and the run cannot go on without one; leave it out."
            )
        return
    train, rollout = _ranks("train", roles.train), _ranks("rollout", roles.rollout)
    if train.start != 0 or rollout.start != train.stop:
        raise ConfigError(
            f"roles.train={roles.train} must begin at rank 0, and roles.rollout={roles.rollout} at the rank "
            f"after its last, {train.stop}."
        )
    _check_min_replicas(config, len(rollout) // config.rollout.tp)
    if not learns_from_samples(config):
        raise ConfigError(
            f"algorithm={config.algorithm} does not learn from samples, so roles.rollout={roles.rollout} "
            "would generate nothing; leave out the section roles."
        )
    others = {
        "rollout.carry_over=true": config.rollout.carry_over,
        "rollout.longest_first=true": config.rollout.longest_first,
        "the section agents": config.agents.is_on,
    }
    for key in (key for key, is_set in others.items() if is_set):
        raise ConfigError(
            f"{key} cannot be combined with roles.rollout={roles.rollout}, because the generators produce "
            "samples of one turn in one fixed order; leave out one of the two."
        )
    if config.reward.judge.path:
        raise ConfigError(
            f"reward.judge.path={config.reward.judge.path} must generate on the ranks that train, but with "
            "roles these have no engine; leave out the judge or the section roles."
        )
    if roles.granularity != "batch" and not roles.lag:
        raise ConfigError(
            f"roles.granularity={roles.granularity} continues samples under new weights, but roles.lag=0 "
            "allows no tokens of older weights; use roles.lag=1 or more, or granularity=batch."
        )
    if roles.lag and "greedy_baseline" in algorithm_of(config).needs:
        raise ConfigError(
            f"algorithm={config.algorithm} needs a greedy response by the weights that sampled, which the "
            f"engine no longer holds with roles.lag={roles.lag}; use roles.lag=0."
        )
    if roles.lag and "responses" in algorithm_of(config).needs:
        raise ConfigError(
            f"algorithm={config.algorithm} compares with the policy that sampled, which the trainers no "
            f"longer hold with roles.lag={roles.lag}; use roles.lag=0."
        )
    if roles.lag and not correction.corrects:
        raise ConfigError(
            f"roles.lag={roles.lag} learns from samples of older weights, which requires a correction; set "
            "rollout_correction.truncate_tokens=2, or another weight, or rollout_correction.bypass=true."
        )


def _check_min_replicas(config: Config, num_replicas: int) -> None:
    least = config.rollout.min_replicas
    if least > num_replicas:
        raise ConfigError(
            f"rollout.min_replicas={least}, but roles.rollout={config.roles.rollout} with "
            f"rollout.tp={config.rollout.tp} has {num_replicas} replicas; set at most that many."
        )
    if least and config.rollout.deterministic:
        raise ConfigError(
            f"rollout.min_replicas={least} cannot be combined with rollout.deterministic=true, which assigns "
            "groups to replicas by a fixed rule; set one of the two."
        )


def _ranks(role: str, text: str) -> range:
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise ConfigError(
            f"roles.{role}={text or '(empty)'} must be the first and the last rank of the role, such as 0-3; "
            "the two keys roles.train and roles.rollout are set together."
        )
    return range(int(match[1]), int(match[2]) + 1)
