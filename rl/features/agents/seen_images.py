"""Handles the images of trajectories: the images of the prompt and the images that environments return."""

from collections.abc import Sequence

import numpy as np

from rl.data.held import PLACES
from rl.data.images import ImageFormat, PromptImage, expand, placed_pixels, read_image
from rl.data.prompts import Prompt
from rl.features.agents.environment import Messages
from rl.features.agents.sight import Sight
from rl.rollout.samples import Segment


class SeenImages(Sight):
    """The images of a trajectory, in the order of their tokens.

    Images of the environment are data URIs in its messages (`observations.py`). The environment's `reset` may
    return the messages of the data row, and then the images of the prompt are used. It may also return other
    messages with images of their own.
    """

    suits_agents = False

    def __init__(self, format: ImageFormat, prompt: Prompt):
        super().__init__(prompt)
        self._format = format
        self._images: list[PromptImage] = []
        self._taken: list[PromptImage] = []
        """Images of the messages that were taken last, until `expand` has placed their tokens."""

    def take(self, messages: Messages) -> Messages:
        self._taken = []
        return [self._without_content(message) for message in messages]

    def _without_content(self, message: dict) -> dict:
        if not isinstance(parts := message.get("content"), list):
            return message
        for part in parts:
            if part.get("type") == "image" and "image" in part:
                owner = "an image of the environment's answer"
                self._taken.append(read_image(part["image"], self._format, owner))
        return {**message, "content": [{k: v for k, v in p.items() if k != "image"} for p in parts]}

    def begin(self, token_ids: np.ndarray) -> np.ndarray:
        if np.array_equal(token_ids, self.prompt.rendered_ids) and not self._taken:
            self._images = list(self.prompt.images)
            return self.prompt.token_ids
        if not self._taken and (token_ids == self._format.token_id).any():
            raise ValueError(
                "reset must return the row's own messages, or put each image into its part of the content"
            )
        token_ids = self.expand(token_ids, 0)
        if np.array_equal(token_ids, self.prompt.token_ids):
            if [image.digest for image in self._images] != [image.digest for image in self.prompt.images]:
                raise ValueError("reset returned the row's messages with other images; change the text, too")
        return token_ids

    def expand(self, token_ids: np.ndarray, first: int) -> np.ndarray:
        if not self._taken:
            return token_ids
        token_ids, placed = expand(token_ids, self._taken, "the environment's answer", first=first)
        self._images += placed
        self._taken = []
        return token_ids

    def rendered(self, token_ids: np.ndarray, first: int) -> np.ndarray:
        kept = np.ones(len(token_ids), bool)
        for image in self._images:
            if (start := image.offset - first) >= 0:
                kept[start + 1 : start + image.num_tokens] = False
        return token_ids[kept]

    @property
    def placed(self) -> tuple[np.ndarray, np.ndarray] | None:
        return placed_pixels(self._images) if self._images else None

    def agrees(self, segments: Sequence[Segment]) -> bool:
        known = [s.held[PLACES] for s in segments if PLACES in s.held]
        own = self.placed[0] if self.placed else np.zeros((0, 4), np.int64)
        return np.array_equal(np.concatenate([own[:0], *known]), own)
