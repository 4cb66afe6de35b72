"""The images of a prompt in a dry run, which reads no data: all tokens of the prompt belong to one image."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl.config.schema import Config
from rl.dry_run.hardware import Hardware
from rl.dry_run.shape import ModelShape
from rl.models.layout import TOWER

if TYPE_CHECKING:
    from rl.dry_run.generation import Lengths
    from rl.dry_run.parameters import CountedWeight


@dataclass(frozen=True)
class Images:
    """The image of a prompt of mean length, of at most data.max_pixels."""

    tokens: int
    pixels: int
    operations: int
    """Operations of the tower's forward pass."""
    passes: int
    """Forward passes that take as many operations as an update of the tower."""

    def pass_operations(self, per_parameter: float) -> float:
        """Return the tower's operations in a pass that takes so many per parameter and token of text."""
        return self.operations * min(per_parameter / 2, self.passes)


def images_of(config: Config, model: ModelShape, lengths: "Lengths") -> Images | None:
    """Return the images of a prompt; None for a model that reads none."""
    if "vision_config" not in model.hf:
        return None
    from rl.models.tower_cost import TowerCost

    vision, cost = model.hf["vision_config"], TowerCost.of_model(model.hf, model.weights)
    unit = cost.merged * vision["patch_size"] ** 2
    tokens = int(min(lengths.prompt, config.data.max_pixels // unit or lengths.prompt))
    passes = 3 if config.model.vision == "train" else 1
    return Images(tokens, tokens * unit, cost.operations(tokens), passes)


def without_frozen_tower(
    config: Config, model: ModelShape
) -> tuple[list["CountedWeight"], list["CountedWeight"]]:
    """Return the parts of a model without a frozen tower, and the tower's parts."""
    parts: tuple[list[CountedWeight], list[CountedWeight]] = [], []
    for part in model.parts:
        parts[config.model.vision == "frozen" and part.weight.megatron.startswith(TOWER)].append(part)
    return parts


def tower_bytes(config: Config, model: ModelShape, row: int, itemsize: int) -> tuple[float, float]:
    """Return a tower's bytes for a micro-batch of `row` tokens: kept ones, and further ones in a block.

    The share of image tokens equals the prompt's share of the longest sequence: for example, 1/4 with prompts
    of 1,024 of 4,096 tokens.
    """
    if "vision_config" not in model.hf:
        return 0.0, 0.0
    from rl.models.tower_cost import TowerActivations

    prompt, cost = config.data.max_prompt_tokens, TowerActivations.of_model(model.hf)
    tokens = row * prompt / (prompt + config.rollout.max_response_tokens)
    bytes_per_element = itemsize * tokens * model.hf["vision_config"]["spatial_merge_size"] ** 2
    recomputes = config.training.recompute == "full"
    kept = cost.kept(recomputes=recomputes) if config.model.vision == "train" else 0
    return kept * bytes_per_element, cost.block * bytes_per_element


def encoding_seconds(images: Images, prompts: int, num_ranks: int, hardware: Hardware) -> float:
    """Return the seconds that engines on so many ranks take to encode the images, each rank its share."""
    return prompts * images.operations / (num_ranks * hardware.tflops * 1e12 * hardware.train_share)
