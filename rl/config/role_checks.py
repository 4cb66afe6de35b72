"""Checks of the section `roles`, and the ranks of each role."""

import re

from rl.config.options import ConfigError
from rl.config.schema import Config


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
    """Raise ConfigError for ranks that do not follow each other, and for more replicas than there are."""
    roles = config.roles
    if not roles.is_on:
        return
    train, rollout = _ranks("train", roles.train), _ranks("rollout", roles.rollout)
    if train.start != 0 or rollout.start != train.stop:
        raise ConfigError(
            f"roles.train={roles.train} must begin at rank 0, and roles.rollout={roles.rollout} at the rank "
            f"after its last, {train.stop}."
        )
    num_replicas = len(rollout) // config.rollout.tp
    if roles.min_replicas > num_replicas:
        raise ConfigError(
            f"roles.min_replicas={roles.min_replicas}, but roles.rollout={roles.rollout} with "
            f"rollout.tp={config.rollout.tp} has {num_replicas} replicas; set at most that many."
        )


def _ranks(role: str, text: str) -> range:
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise ConfigError(
            f"roles.{role}={text or '(empty)'} must be the first and the last rank of the role, such as 0-3; "
            "the two keys roles.train and roles.rollout are set together."
        )
    return range(int(match[1]), int(match[2]) + 1)
