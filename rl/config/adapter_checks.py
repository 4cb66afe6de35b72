"""Checks of the section `adapter`: contradictions with the rest of the config and with the model's layers."""

from collections.abc import Sequence

from rl.config.options import ConfigError, listed
from rl.config.schema import Config
from rl.models.adapters import LowRank, adapters, check_ranks
from rl.models.layout import FP8_BLOCK, Weight, cuts_fp8_blocks


def check_adapter(config: Config) -> None:
    """Raise ConfigError for keys that contradict each other."""
    adapter, critic = config.adapter, config.critic
    if critic.share_base and not adapter.is_on:
        raise ConfigError(
            "critic.share_base=true shares the frozen weights of a policy with adapters, but "
            "adapter.kind=none trains all weights; set adapter.kind=lora, or leave out critic.share_base."
        )
    if critic.share_base and critic.path:
        raise ConfigError(
            f"critic.share_base=true uses the weights of model.path, not those of critic.path={critic.path}; "
            "leave out one of the two."
        )
    if critic.share_base and adapter.init == "pissa":
        raise ConfigError(
            "critic.share_base=true cannot be combined with adapter.init=pissa, which takes the principal "
            "part of every weight out of the shared ones; use adapter.init=zero."
        )
    if not adapter.is_on:
        if adapter.path:
            raise ConfigError(
                f"adapter.path={adapter.path} has no effect with adapter.kind=none, by which all weights "
                "learn; set adapter.kind to that of the directory, or leave out adapter.path."
            )
        return
    if config.model.numerics == "bitwise":
        raise ConfigError(
            f"model.numerics=bitwise does not support adapter.kind={adapter.kind}: its layers add up "
            "products in the engine's order; use adapter.kind=none or leave out model.numerics."
        )
    if adapter.base == "fp8":
        _check_fp8(config)
    if adapter.path and adapter.init != "zero":
        raise ConfigError(
            f"adapter.init={adapter.init} chooses the first A and B, but adapter.path={adapter.path} holds "
            "them; leave out one of the two."
        )


def _check_fp8(config: Config) -> None:
    """Raise ConfigError for keys that read or change the base outside the passes of its layers."""
    reasons = {
        "adapter.kind=dora, which reads the rows of every weight": config.adapter.kind == "dora",
        "adapter.init=pissa, which changes every weight": config.adapter.init == "pissa",
        "critic.share_base=true, whose layers would not dequantise the policy's": config.critic.share_base,
        "sweep.adapters, whose points share one base in model.dtype": config.sweep.is_on,
    }
    for reason in (reason for reason, is_set in reasons.items() if is_set):
        raise ConfigError(f"adapter.base=fp8 cannot be combined with {reason}; use adapter.base=model.")


def adapters_of(config: Config, weights: Sequence[Weight]) -> list[LowRank]:
    """Return the adapters of a model with these weights; none if the section is off.

    Raises ConfigError for a target that matches no layer, and for a rank without an adapter.
    """
    adapter = config.adapter
    if not adapter.is_on:
        return []
    try:
        pairs = adapters(weights, rank=adapter.rank, targets=adapter.targets, dora=adapter.kind == "dora")
        num_layers = 1 + max(weight.layer for weight in weights if weight.layer is not None)
        layout = config.training
        check_ranks(pairs, weights, num_layers=num_layers, pp=layout.pp, ep=layout.ep)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if adapter.init == "pissa":
        for pair in pairs:
            shape = pair.base.shapes[pair.part]
            if adapter.rank > min(shape):
                raise ConfigError(
                    f"adapter.rank={adapter.rank} with adapter.init=pissa exceeds the rank of {pair.module}, "
                    f"which is {shape[0]} x {shape[1]}; use at most {min(shape)}, or adapter.init=zero."
                )
    if adapter.base == "fp8":
        _check_blocks(config, [pair.base for pair in adapters(weights, rank=1)])
    return pairs


def _check_blocks(config: Config, quantised: Sequence[Weight]) -> None:
    """Raise ConfigError for a layout that would change the values of the frozen weights."""
    training = config.training
    for key, tp, weights in (
        ("training.tp", training.tp, [weight for weight in quantised if weight.expert is None]),
        ("training.etp", training.expert_tp, [weight for weight in quantised if weight.expert is not None]),
    ):
        distinct = {(weight.shapes, weight.hf[0].split(".")[-2]): weight for weight in weights}.values()
        cut = next((weight for weight in distinct if cuts_fp8_blocks(weight, tp)), None)
        if cut is not None:
            fits = [
                n for n in range(1, tp) if tp % n == 0 and not any(cuts_fp8_blocks(w, n) for w in distinct)
            ]
            raise ConfigError(
                f"adapter.base=fp8 stores blocks of {FP8_BLOCK} x {FP8_BLOCK} elements, and {key}={tp} cuts "
                f"those of {cut.hf[0]}, whose values would then depend on the layout; use {key}="
                f"{listed(fits, 'or')}, or adapter.base=model."
            )
