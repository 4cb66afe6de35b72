"""Sections of the configuration for the limits that end a run: time per phase, heartbeats, agreement,
memory."""

from dataclasses import dataclass, field
from typing import Annotated

from rl.config.ranges import NOT_NEGATIVE, POSITIVE


@dataclass
class PhaseLimits:
    """Maximum time in one phase, in seconds. The limits detect hangs; a slow phase must not end a run."""

    start_up: Annotated[float, POSITIVE] = 7200.0
    """Reading data and weights, building models and engines; also the time limit for ranks to meet."""
    generate: Annotated[float, POSITIVE] = 7200.0
    """One call of the generation engine, for training or validation, until all ranks have all samples."""
    environments: Annotated[float, POSITIVE] = 1800.0
    """One wait of a replica for environments while nothing runs in its engine. It should exceed
    `agents.timeout_s`, after which a single environment has failed."""
    score: Annotated[float, POSITIVE] = 3600.0
    """Reward functions, reward model and judge on one batch."""
    log_probs: Annotated[float, POSITIVE] = 3600.0
    """One pass of log-probs or values over a batch, of the policy, its reference, the critic or a reward
    model."""
    update: Annotated[float, POSITIVE] = 7200.0
    """All optimizer steps of one model on one batch."""
    refit: Annotated[float, POSITIVE] = 1800.0
    """Transfer of the weights from the trainer to the engine, with its check."""
    save: Annotated[float, POSITIVE] = 3600.0
    """One checkpoint, or the export at the end."""
    wait_samples: Annotated[float, POSITIVE] = 14400.0
    """Roles: the wait of trainers until the generators have sent the samples of a batch. It must exceed the
    time that the generators may take, for example `generate`."""
    wait_weights: Annotated[float, POSITIVE] = 14400.0
    """Roles: the wait of generators for weights or prompts, which may last for all phases of a step of the
    trainers; and the wait of trainers until the generators have taken the weights."""
    other: Annotated[float, POSITIVE] = 3600.0
    """Everything between phases: advantages, metrics, the algorithm's own lines."""


@dataclass
class WatchdogConfig:
    """A thread per rank that writes heartbeats, enforces the limits of phases, and ends its rank when another
    has failed."""

    beat_s: Annotated[float, POSITIVE] = 5.0
    """Seconds between two heartbeats of a rank: a small file each, `<run.dir>/heartbeat/rank_N.json`."""
    lost_s: Annotated[float, POSITIVE] = 300.0
    """Seconds without a heartbeat after which a rank on another host counts as lost, and its lock as stale.
    It must exceed the longest time for which native code holds Python's interpreter lock."""
    limits: PhaseLimits = field(default_factory=PhaseLimits)


@dataclass
class AgreementConfig:
    """Before each phase ranks compare step, phase, configuration, code and batch. This is always on."""

    weights_every: Annotated[int, NOT_NEGATIVE] = 10
    """Steps between comparisons of the weights' checksums across data parallel replicas, before the first
    update of a step. The first step of every start is compared too. 0: never."""
    logprob_slack: Annotated[float, NOT_NEGATIVE] = 1.0
    """Factor by which the largest allowed mean difference between the log-probs of engine and trainer is
    multiplied. The allowed difference follows from dtypes and depth (docs/checks.md). A larger difference
    ends the run. 0: the log-probs are not compared."""


@dataclass
class Memory:
    host_limit_gib: Annotated[float, NOT_NEGATIVE] = 0.0
    """Maximum resident memory of the process of one rank, without its scoring processes, in GiB. Above it the
    run ends with an error. The kernel's out-of-memory killer would end it without an error. 0: no limit."""
