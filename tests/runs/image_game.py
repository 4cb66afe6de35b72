"""A game with images in its answers, in verl's format."""

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


class Shown(Views):
    """The same game. Its first messages show an image if the row has none."""

    def reset(self, row):
        if row.get("images"):
            return row["messages"]
        rng = np.random.default_rng(len(row["ground_truth"]))
        shown = rng.integers(0, 255, (56, 84, 3)).astype(np.uint8)
        if row["ground_truth"] == "red":
            return {"text": "and this?", "image": [shown]}
        parts = [{"type": "text", "text": "see"}, {"type": "image", "image": Image.fromarray(shown)}]
        return [{"role": "user", "content": parts}]
