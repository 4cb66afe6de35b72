"""A game whose answers have images, in verl's format."""

import io

import numpy as np
from PIL import Image


class Views:
    """The game. Its prompt is the row's, with an image or without; answers have two images, one and none."""

    SIZES = ([(56, 84), (28, 28)], [(84, 56)], [], [])

    def __init__(self):
        self.turns = 0

    def step(self, text):
        rng = np.random.default_rng(len(text))
        arrays = [rng.integers(0, 255, (*size, 3)).astype(np.uint8) for size in self.SIZES[self.turns]]
        self.turns += 1
        if len(arrays) < 2:
            return {"text": "and", "image": arrays} if arrays else "no", 0.5, self.turns == 4
        file = io.BytesIO()
        Image.fromarray(arrays[0]).save(file, "PNG")
        views = [file.getvalue(), Image.fromarray(arrays[1])]
        return {"text": "now?", "image": views}, len(set(text)) / 9, False
