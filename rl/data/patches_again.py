"""Compares an image's patches with those of transformers, as trainer and engine get the same ones."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl.data.images import upright
from rl.data.prompts import Prompt


def check_patches(prompts: Sequence[Prompt], directory: str, max_pixels: int) -> None:
    """Raise ValueError unless the first image of the data has the patches of preprocessor_config.json.

    directory: of the model. max_pixels: `data.max_pixels`.
    """
    image = next((image for prompt in prompts for image in prompt.images), None)
    if image is None:
        return
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    keys: Any = json.loads(Path(directory, "preprocessor_config.json").read_text())
    limit: Any = {"max_pixels": max_pixels} if max_pixels else {}
    processor: Any = Qwen2VLImageProcessorPil.from_dict(keys, **limit)
    expected = processor(upright(image), return_tensors="np")
    grid, patches = tuple(expected["image_grid_thw"][0].tolist()), expected["pixel_values"]
    found = image.format.patches(image.pixels)
    same_size = grid == (1, *image.grid) and found.shape == patches.shape
    if not same_size or not np.allclose(found, patches, atol=1e-5):
        raise ValueError(
            f"image check: the first image of the data has {image.grid} patches, and transformers gives it "
            f"{grid[1:]} by {directory}/preprocessor_config.json, or patches of other order or values."
        )
