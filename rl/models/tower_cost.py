"""Operations and activations of a vision tower, for micro-batches' balance, perf/mfu and the dry run."""

from collections.abc import Iterable
from dataclasses import dataclass

from rl.models.layout import Weight


@dataclass(frozen=True)
class TowerCost:
    """Operations of a forward pass of one image: a product and a sum count as two."""

    per_patch: int
    """Operations of the linear layers, per patch."""
    per_token: int
    """Operations of the mergers, per token of the text model."""
    per_pair: int
    """Operations of attention, per pair of a patch and a patch that it attends to."""
    layers: tuple[int, int]
    """Number of layers with attention between all patches, and with attention only within windows."""
    window: int
    """Patches of a window."""
    merged: int
    """Patches per token."""

    @classmethod
    def of_model(cls, hf: dict, weights: Iterable[Weight]) -> "TowerCost":
        """Return the cost of a model's tower. hf: its config.json; weights: from `rl.models`."""
        vision, per_patch, per_token = hf["vision_config"], 0, 0
        for weight in weights:
            if not weight.megatron.startswith("visual.") or "pos_embed" in weight.megatron:
                continue
            if "merger" in weight.megatron:
                per_token += 2 * weight.num_elements
            else:
                per_patch += 2 * weight.num_elements
        full = len(vision["fullatt_block_indexes"]) if "window_size" in vision else vision["depth"]
        return cls(
            per_patch,
            per_token,
            4 * vision["hidden_size"],
            (full, vision["depth"] - full),
            (vision.get("window_size", 0) // vision["patch_size"]) ** 2,
            vision["spatial_merge_size"] ** 2,
        )

    def operations(self, tokens: int) -> int:
        """Return the operations of an image. tokens: its number of tokens in the text model."""
        patches, (full, windowed) = tokens * self.merged, self.layers
        pairs = full * patches**2 + windowed * patches * min(patches, self.window)
        return self.per_patch * patches + self.per_token * tokens + self.per_pair * pairs


@dataclass(frozen=True)
class TowerActivations:
    """Numbers of elements per patch that the backward pass of a vision tower in transformers needs.

    A block of width `D` and intermediate size `F` keeps 15 D + 4 F in Qwen2.5-VL (norms in float32, an MLP
    with a gate) and 11 D + 2 F in Qwen3-VL. tests/unit/models/test_tower_cost.py compares both with the
    tensors that torch 2.13 saves.
    """

    depth: int
    """Number of blocks."""
    block: int
    """Elements that a block keeps."""
    width: int
    """Elements of a block's input, which is kept even if the block is recomputed."""
    outside: int
    """Elements that the embedding of the patches and the mergers keep."""

    @classmethod
    def of_model(cls, hf: dict) -> "TowerActivations":
        """Return the numbers for the tower of a model. hf: its config.json."""
        vision = hf["vision_config"]
        width, ffn = vision["hidden_size"], vision["intermediate_size"]
        block = 15 * width + 4 * ffn if "window_size" in vision else 11 * width + 2 * ffn
        pixels = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
        mergers = 1 + len(vision.get("deepstack_visual_indexes", ()))
        return cls(vision["depth"], block, width, pixels + (4 + 3 * mergers) * width)

    def kept(self, *, recomputes: bool) -> int:
        """Return the number of elements that a forward pass keeps.

        recomputes: whether it keeps only the inputs of the blocks.
        """
        return self.depth * (self.width if recomputes else self.block) + self.outside
