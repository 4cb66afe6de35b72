"""Checks of the section `adapter` against the model's layers."""

from collections.abc import Sequence
from typing import Any

from rl.config.options import ConfigError, listed
from rl.config.schema import Config
from rl.models import architecture, qwen3_moe
from rl.models.adapters import LowRank, adapters, check_ranks
from rl.models.layout import FP8_BLOCK, Weight, cuts_fp8_blocks
from rl.models.sizes import num_experts


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
        check_ranks(pairs, weights, num_layers=num_layers, pp=layout.pp, ep=layout.ep, vpp=layout.vpp)
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


def check_layers(config: Config, hf: dict[str, Any]) -> None:
    """Raise ConfigError for a layer to which vLLM applies no adapter. hf: the model's config.json."""
    adapter = config.adapter
    if not adapter.is_on or adapter.in_engine == "merged":
        return
    weights = architecture(hf).weights(hf)
    for pair in adapters_of(config, weights):
        if reason := _refused(pair, hf):
            pairs = adapters(weights, rank=1)
            known = {p.module.rpartition(".")[2] for p in pairs} - {
                p.module.rpartition(".")[2] for p in pairs if _refused(p, hf)
            }
            raise ConfigError(
                f"adapter.in_engine=adapter, but {pair.module} is {reason}; use "
                f"adapter.in_engine=merged, or choose adapter.targets from "
                f"{listed(sorted(known), 'and')}."
            )


def _refused(pair: LowRank, hf: dict[str, Any]) -> str:
    """Return why vLLM 0.32 applies no adapter to the layer, or nothing."""
    if pair.base.expert is not None:
        return "a routed expert, to whose adapters this project does not write"
    if pair.module.endswith(".kv_b_proj"):
        # vLLM loads such an adapter and ignores it: its log-probs are the base's.
        return "a projection that vLLM multiplies into others when it loads the weights"
    if pair.module.endswith((".in_proj_qkv", ".in_proj_z")):
        return "a part of a projection that vLLM divides into four"
    is_text = "vision_config" not in hf
    named = is_text and (hf["architectures"][0] not in qwen3_moe.ARCHITECTURES or hf.get("mlp_only_layers"))
    if num_experts(hf) and not named and pair.module.endswith((".gate_proj", ".up_proj")):
        return "in a dense layer, whose parts vLLM's mixture of experts does not name"
    return ""
