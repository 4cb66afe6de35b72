"""What ends a run: time per phase, silence of a rank, ranks that disagree, host memory. Sections of the configuration tree."""

from dataclasses import dataclass, field


@dataclass
class PhaseLimits:
    """Longest time in one phase, in seconds. Generous: they are for hangs, and a phase that is only slow must not end a run."""

    start_up: float = 7200.0
    """Reading data and weights, building models and engines; also the time limit for ranks to meet."""
    generate: float = 7200.0
    """One call of the generation engine, for training or validation, until all ranks have all samples."""
    score: float = 3600.0
    """Reward functions, reward model and judge on one batch."""
    log_probs: float = 3600.0
    """One pass of log-probs or values over a batch, of the policy, its reference, the critic or a reward model."""
    update: float = 7200.0
    """All optimizer steps of one model on one batch."""
    refit: float = 1800.0
    """Weights from the trainer to the engine, with the check of them."""
    save: float = 3600.0
    """One checkpoint, or the export at the end."""
    other: float = 3600.0
    """What lies between phases: advantages, metrics, the algorithm's own lines."""


@dataclass
class WatchdogConfig:
    """A thread per rank that writes heartbeats, holds phases to their limits, and ends this rank when another has failed."""

    beat_s: float = 5.0
    """Seconds between two heartbeats of a rank: a small file each, `<run.dir>/heartbeat/rank_N.json`."""
    lost_s: float = 300.0
    """Seconds without a heartbeat after which a rank on another host counts as lost, and a lock as left behind. Above the time
    for which native code may hold Python's interpreter lock."""
    limits: PhaseLimits = field(default_factory=PhaseLimits)


@dataclass
class AgreementConfig:
    """Before each phase ranks compare step, phase, configuration, code and batch. This is always on."""

    weights_every: int = 10
    """Steps between comparisons of the weights' checksums across data parallel replicas, before the first update of a step.
    The first step of every start is compared too. 0: never."""


@dataclass
class Memory:
    host_limit_gib: float = 0.0
    """Resident memory of one rank's process, without its scoring processes, in GiB, above which the run ends with a sentence
    that says so: the kernel's out-of-memory killer says nothing. 0: no limit."""
