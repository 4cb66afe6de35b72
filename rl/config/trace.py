"""The section of the configuration for timelines of chosen steps."""

from dataclasses import dataclass, field
from typing import Literal

from rl.config.options import ConfigError

PhaseName = Literal["step", "generate", "score", "log_probs", "update", "refit", "save"]


@dataclass
class Trace:
    """Timelines for Perfetto (docs/traces.md). With no `steps` nothing is recorded."""

    steps: list[int] = field(default_factory=list)
    """Steps with a timeline, which every rank writes to `<run.dir>/trace`; 0 is the validation before
    training. `lockstep trace RUN` merges the ranks."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks of the job for which the three keys below hold."""
    torch_profiler: list[PhaseName] = field(default_factory=list)
    """Phases of these steps that torch.profiler records too, with every operator and kernel. step: the whole
    step and no phases; its file may have gigabytes."""
    memory_snapshot: bool = False
    """Record every allocation on the GPU during these steps, for https://pytorch.org/memory_viz."""
    nvtx: bool = False
    """Mark spans as NVTX ranges, and tell Nsight Systems where these steps begin and end. Needs a GPU."""


def check_trace(trace: Trace, max_steps: int) -> None:
    """Raise ConfigError for steps that the run does not have, and for a phase within a recorded step."""
    for name in ("steps", "ranks"):
        if min(getattr(trace, name), default=0) < 0:
            raise ConfigError(
                f"trace.{name} holds {min(getattr(trace, name))}, but {name} are 0 or more; remove it."
            )
    if max(trace.steps, default=0) > max_steps:
        raise ConfigError(
            f"trace.steps holds {max(trace.steps)}, but the run ends with step run.max_steps={max_steps}; "
            "choose an earlier step."
        )
    if "step" in trace.torch_profiler and len(trace.torch_profiler) > 1:
        raise ConfigError(
            "trace.torch_profiler holds step and a phase of it, but torch.profiler cannot record one within "
            "the other; keep only step, or only phases."
        )
