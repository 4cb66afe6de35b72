"""Images of a trajectory: `Sight` for models that read only text, else `SeenImages`."""

from collections.abc import Sequence

import numpy as np

from rl.data.prompts import Prompt
from rl.features.agents.environment import Messages
from rl.rollout.samples import Segment


class Sight:
    """No images. A ValueError of a method fails the trajectory."""

    suits_agents = True
    """Whether agents that call the engine themselves may be trained."""

    def __init__(self, prompt: Prompt):
        self.prompt = prompt

    @property
    def placed(self) -> tuple[np.ndarray, np.ndarray] | None:
        """`Request.images` of the next turn."""
        return None

    def take(self, messages: Messages) -> Messages:
        """Return an environment's messages without the content of images."""
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
        """Return tokens between turns, int32 [S], with the tokens of the images that were taken last.

        first: number of tokens before them.
        """
        return token_ids

    def rendered(self, token_ids: np.ndarray, first: int) -> np.ndarray:
        """Return the tokens that `expand` was given."""
        return token_ids

    def agrees(self, segments: Sequence[Segment]) -> bool:
        """Return whether segments of a log were sampled after the same images."""
        return True
