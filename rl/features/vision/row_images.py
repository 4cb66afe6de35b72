"""Images of a packed row, held by `MicroBatch.extras` on the first stage."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rl.data.images import PromptImage


@dataclass
class RowImages:
    """Images of a packed row, in the order of their places."""

    images: list[PromptImage]
    pixels: list[np.ndarray]
    """Pixels of each image, uint8 [height, width, 3]."""
    places: Tensor
    """int64 [n]: position of each of the tower's outputs in the row."""
    inner: list[Tensor] = field(default_factory=list)
    """The tower's inner outputs for the first layers (`rl.features.vision.deepstack`), once the tower has
    run."""

    def patches(self) -> Tensor:
        """Return the patches of all images, float32 [patches, channels], on the CPU."""
        parts = [image.format.patches(own) for image, own in zip(self.images, self.pixels)]
        return torch.from_numpy(np.concatenate(parts))

    def grids(self) -> Tensor:
        """Return frames, rows and columns of patches of each image, int64 [images, 3]."""
        return torch.tensor([(1, *image.grid) for image in self.images])
