"""Activations that `training.recompute` does not keep, and the operations that compute them again."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl.config.schema import Training
from rl.models.layout import Weight, recomputed_layers

if TYPE_CHECKING:
    from rl.dry_run.shape import ModelShape


@dataclass(frozen=True)
class Kept:
    """Parts of a layer that keep their activations for the backward pass."""

    without: frozenset[str] = frozenset()
    """Parts that are computed again, by the names of `training.recompute_modules`."""

    def holds(self, weight: Weight) -> bool:
        """Return whether input and output of the weight's product are kept."""
        name = weight.megatron
        if ".shared_experts." in name:
            return self.without.isdisjoint({"shared_experts", "moe"})
        if ".experts." in name or ".router." in name:
            return "moe" not in self.without
        if ".mlp." in name:
            return "mlp" not in self.without
        return not ("_up_proj." in name and "mla_up_proj" in self.without)


EVERYTHING = Kept()


def kept_parts(training: Training) -> Kept:
    """Return the parts of a layer that keep their activations."""
    return Kept(frozenset(training.recompute_modules)) if training.recompute == "selective" else EVERYTHING


def kept_and_computed_again(
    training: Training, layers: list[float], kept: list[float], layer_input: float
) -> tuple[float, float, int]:
    """Return what a stage keeps per micro-batch, what it computes again at once, and layers with attention.

    layers, kept: elements per layer, all and with `kept_parts`. layer_input: elements of a layer's input. The
    last number counts the layers that keep their keys and values.
    """
    if training.recompute == "full":
        again = recomputed_layers(len(layers), training.recompute_every)
        # The other layers' backward passes come first, so they are then free.
        working = max(0.0, max(layers[:again]) - sum(layers[again:]))
        return again * layer_input + sum(layers[again:]), working, len(layers) - again
    working = max(everything - part for everything, part in zip(layers, kept))
    return sum(kept), working, 0 if attention_again(training) == 1 else len(layers)


def attention_again(training: Training) -> float:
    """Return the share of layers that compute their attention again in the backward pass."""
    if training.recompute == "full":
        return 1 / training.recompute_every
    return float(training.recompute == "selective" and "core_attn" in training.recompute_modules)


def computed_again(training: Training, model: "ModelShape", length: float) -> float:
    """Return the share of a forward pass's operations that the backward pass repeats.

    length: tokens of a sequence, which attention depends on.
    """
    if training.recompute != "selective":
        return attention_again(training)
    parts, again = kept_parts(training), 0.0
    for part in model.parts:
        if part.weight.layer is not None and len(part.weight.shapes[0]) > 1 and not parts.holds(part.weight):
            routed = model.experts_per_token / model.num_experts if part.weight.expert is not None else 1
            again += part.elements * routed
    attention = model.score_products(length)
    again += attention * attention_again(training)
    return again / (model.multiplied + attention)
