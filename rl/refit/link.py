"""The link between the ranks that train and the ranks that generate: weights one way, samples the other.

Each role has its own default process group, so Megatron and vLLM work in it as in a job of its own. The link
spans all ranks of the job, with communicators of its own. Ranks of the link are the job's ranks.

    trainer                                        generator
    link.send_weights(version)   -- "weights v" -> link.weights_ready() == v, read by a replica's leader
    log-prob pass, in which no weight changes      link.receive_weights(v), between two engine steps
    link.wait_sent()   # before the update
    link.receive_samples()       <- "samples" ---- link.send_samples(key, samples), called by a leader

Weights travel by the plan of a refit (`rl.refit.plan`), from the trainer's parameters to the engine's. A
thread sends while the trainer computes. Samples travel to the first training rank, which broadcasts them.
"""

import datetime
from typing import Any, NamedTuple

import torch.distributed as dist

from rl.config.schema import Config
from rl.refit.transfer import BytesMoved
from rl.rollout.engine import RolloutEngine
from rl.rollout.turns import Sample
from rl.runtime.device import Device
from rl.training.engine import TrainingEngine


class Delivery(NamedTuple):
    """Samples that a replica has sent."""

    key: Any
    """The sender's `key`."""
    replica_rank: int
    """Rank of the job that sent them."""
    samples: list[Sample]


class Link:
    """Communication between the two roles. The constructor and `plan_weights` are collective over the job.

    Args:
        store: the job's store; the link uses keys with a prefix and connections of its own.
        rank: this process's rank in the job.
        train, rollout: ranks of the job in the two roles, ascending.
        timeout: limit of a collective while the link is made. Later messages have no limit of their own: a
            phase's limit and the heartbeats end a run whose other side is gone.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        train: tuple[int, ...],
        rollout: tuple[int, ...],
        device: Device,
        timeout: datetime.timedelta,
    ):
        raise NotImplementedError

    def plan_weights(
        self,
        config: Config,
        hf: dict,
        *,
        trainer: TrainingEngine | None = None,
        engine: RolloutEngine | None = None,
    ) -> None:
        """Plan the refits of the policy. Collective over the job.

        A training rank passes `trainer`, a generating rank `engine`. hf: the policy's config.json. Raises
        ValueError on every rank if an engine holds a weight in another form than the trainer.
        """
        raise NotImplementedError

    # Weights ----------------------------------------------------------------------------------------------

    def send_weights(self, version: int) -> None:
        """Begin to send the trainer's weights; return at once. Called by every training rank.

        The weights must not change and keep their memory until `wait_sent` has returned. The first training
        rank announces the version to the generators.
        """
        raise NotImplementedError

    def wait_sent(self) -> BytesMoved | None:
        """Wait until the weights have been sent; return this rank's bytes, None if none were being sent.

        Raises what the sending thread raised.
        """
        raise NotImplementedError

    def weights_ready(self, timeout_s: float = 0.0) -> int | None:
        """Return the version that is being sent to this rank, None if there is none. Not collective.

        Waits at most `timeout_s` for one. There is at most one: the trainer sends the next version when all
        generators have received this one.
        """
        raise NotImplementedError

    def receive_weights(self, version: int, *, keep_cache: bool = False) -> BytesMoved:
        """Write the announced weights into the engine, between two engine steps; return this rank's bytes.

        Called by every generating rank, for each version that the trainer sends, in order. Sets the engine's
        `weights_version`. keep_cache: keep the KV cache of running requests, which older weights computed.
        After the first refit and every `refit.check_every` versions both ends compare checksums; raises
        RefitMismatch, naming weight and ranks, on the rank whose weights differ.
        """
        raise NotImplementedError

    # Samples ----------------------------------------------------------------------------------------------

    def send_samples(self, key: Any, samples: list[Sample]) -> None:
        """Send finished samples to all training ranks; return at once. Called by a replica's leader.

        key: says what they are, such as the number of a group; any picklable value.
        """
        raise NotImplementedError

    def receive_samples(self, timeout_s: float = 0.0) -> list[Delivery]:
        """Return what has arrived since the last call, in order of arrival, identical on all training ranks.

        Collective over the training role. If nothing has arrived, waits at most `timeout_s` for the first.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End the link's connections. Called by every rank at the end of a run."""
        raise NotImplementedError
