"""Defines what a trajectory sees of images: `Sight` for models that read only text, `SeenImages` for
others."""

from collections.abc import Sequence

import numpy as np

from rl.data.prompts import Prompt
from rl.features.agents.environment import Messages
from rl.rollout.samples import Segment


class Sight:
    """The images of a trajectory; this class has none. If a method raises ValueError, the trajectory
    fails."""

    suits_agents = True
    """Whether agents that call the engine themselves may be trained."""

    def __init__(self, prompt: Prompt):
        self.prompt = prompt

    @property
    def placed(self) -> tuple[np.ndarray, np.ndarray] | None:
        """The value of `Request.images` for the next turn."""
        return None

    def take(self, messages: Messages) -> Messages:
        """Return an environment's messages without the content of their images."""
        for message in messages:
            parts = message.get("content")
            if isinstance(parts, list) and any(part.get("type") == "image" for part in parts):
                raise ValueError(
                    "the environment gave an image, but data.image_key is empty; name the column with the "
                    "prompts' images there, and use a model that reads them"
                )
        return messages

    def begin(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the context of a trajectory, given the rendered messages: int32 [P] both."""
        return token_ids

    def expand(self, token_ids: np.ndarray, first: int) -> np.ndarray:
        """Return tokens between turns, int32 [S], to which the tokens of the images that were taken last are
        added.

        first: number of tokens of the trajectory before `token_ids`.
        """
        return token_ids

    def rendered(self, token_ids: np.ndarray, first: int) -> np.ndarray:
        """Return the tokens as the template rendered them, that is, undo `expand`."""
        return token_ids

    def agrees(self, segments: Sequence[Segment]) -> bool:
        """Return whether segments of a log were sampled after the same images."""
        return True
