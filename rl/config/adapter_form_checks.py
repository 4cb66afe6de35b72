"""Checks of `adapter.in_engine=adapter`: what vLLM cannot apply beside the weights."""

from typing import Any

from rl.config.adapter_checks import adapters_of
from rl.config.options import ConfigError, listed
from rl.config.schema import Config
from rl.models import architecture
from rl.models.adapters import LowRank, adapters

MAX_RANK = 512
"""The largest rank of vLLM's adapters."""
NAME = "adapter.in_engine=adapter"
REMEDY = "use adapter.in_engine=merged."


def check_form(config: Config) -> None:
    """Raise ConfigError for a key that contradicts adapters beside the engine's weights."""
    adapter = config.adapter
    if not adapter.is_on or adapter.in_engine == "merged":
        return
    reasons = {
        "adapter.kind=dora, whose magnitudes vLLM does not apply": adapter.kind == "dora",
        f"adapter.rank={adapter.rank}, because vLLM's largest rank is {MAX_RANK}": adapter.rank > MAX_RANK,
        "model.numerics=bitwise, because vLLM adds an adapter with kernels of another rounding": (
            config.model.numerics == "bitwise"
        ),
        f"roles.rollout={config.roles.rollout}, because requests that run while weights arrive would keep "
        "the name of the old adapter": config.roles.is_on,
        "rollout.carry_over_cache=keep, because an adapter's new version does not use the old one's cache": (
            config.rollout.carry_over and config.rollout.carry_over_cache == "keep"
        ),
    }
    for reason in (reason for reason, is_set in reasons.items() if is_set):
        raise ConfigError(f"{NAME} cannot be combined with {reason}; {REMEDY}")


def check_layers(config: Config, hf: dict[str, Any]) -> None:
    """Raise ConfigError for a layer to which vLLM applies no adapter. hf: the model's config.json."""
    adapter = config.adapter
    if not adapter.is_on or adapter.in_engine == "merged":
        return
    weights = architecture(hf).weights(hf)
    for pair in adapters_of(config, weights):
        if reason := _refused(pair):
            known = {p.module.rpartition(".")[2] for p in adapters(weights, rank=1) if not _refused(p)}
            raise ConfigError(
                f"{NAME}, but {pair.module} is {reason}; {REMEDY[:-1]}, or choose adapter.targets from "
                f"{listed(sorted(known), 'and')}."
            )


def _refused(pair: LowRank) -> str:
    """Return why vLLM 0.32 applies no adapter to the layer, or nothing."""
    if pair.base.expert is not None:
        return "a routed expert, to whose adapters this project does not write"
    if pair.module.endswith(".kv_b_proj"):
        # vLLM loads such an adapter and ignores it: its log-probs are those of the base.
        return "a projection that vLLM multiplies into others when it loads the weights"
    return ""
