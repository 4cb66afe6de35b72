"""The memory of a host, before a run on CPUs builds its models.

The kernel ends a process of a host whose memory is used up, and the process cannot report it.
"""

import math
from dataclasses import replace

from rl.config.schema import Config
from rl.dry_run.grids import layout_of
from rl.dry_run.hardware import GIB, Hardware
from rl.dry_run.memory import estimate_memory
from rl.dry_run.shape import models_of
from rl.models.by_class import MARK
from rl.runtime.ranks import Ranks

LATER = 1.45
"""Memory of a rank after tens of steps / as estimated: 1.01 after 6 steps with SmolLM2-135M in bfloat16, 1.43
after 48. oneDNN's cache of 1,024 kernels is 0.18 GiB of it; saves, exports and the engine's cache are not the
cause. The rest is not explained."""
LEAST_TOKENS = 256
"""Smallest training.micro_batch_tokens that the warning proposes."""


def memory_warning(config: Config, ranks: Ranks, available: float) -> str:
    """Return a sentence if the ranks of this host may need more memory than there is, else "".

    available: bytes that the ranks can use in all. A config whose memory cannot be estimated gives a
    sentence too, because an estimate must not end a run. Not collective.
    """
    try:
        models, _ = models_of(config)
        local = ranks.local_world_size
        layout = layout_of(config, ranks.world_size, local, models)
        hardware = Hardware(host_memory_gib=available / GIB, ranks_per_node=local)

        def needed(tokens: int, shard: int) -> float:
            """Return the bytes of this host's ranks with these training.micro_batch_tokens and .shard."""
            training = replace(config.training, micro_batch_tokens=tokens, shard=shard)
            found = estimate_memory(replace(config, training=training), ranks.world_size, models, hardware)
            phases = ("training", "refit", "generation") if found.engine else ("training",)
            peaks = [max(found.at(phase, stage) for phase in phases) for stage in found.stages]
            return LATER * local * sum(peaks) / layout.pp

        tokens, shard = config.training.micro_batch_tokens, config.training.shard
        if (total := needed(tokens, shard)) <= available:
            return ""
        remedies, together = [], math.gcd(layout.world_size, local)
        if layout.shard == 1 and any(MARK in model.hf for model in models.values()):
            if needed(tokens, together) < total:
                shard = together
                remedies.append(f"training.shard={shard}")
        while tokens > LEAST_TOKENS and needed(tokens, shard) > available:
            tokens //= 2
        if not remedies or tokens < config.training.micro_batch_tokens:
            remedies.append(f"training.micro_batch_tokens={tokens}")
        remedy = f"set {' and '.join(remedies)}"
        if needed(tokens, shard) > available:
            remedy += " and training.recompute=full, or start fewer ranks, or free memory"
        return (
            f"training.micro_batch_tokens={config.training.micro_batch_tokens}: with full micro-batches the "
            f"ranks of this host ({local}) need up to {total / GIB:.1f} GiB, but MemAvailable is "
            f"{available / GIB:.1f} GiB, and the kernel kills a rank that finds no memory; {remedy}."
        )
    except Exception as error:  # the run itself reports what is wrong with a config
        return f"the memory of this host's ranks was not estimated ({type(error).__name__}: {error})."
