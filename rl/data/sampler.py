"""The order in which prompts are drawn: epochs of permutations, with a cursor that is all there is to checkpoint."""

import numpy as np


class PromptSampler:
    """Walks over `num_prompts` prompts epoch after epoch; epoch e is a permutation made from (seed, e).

    The order is a function of the arguments only, so that every rank draws the same and a resumed run continues where
    the saved one stood, on any number of ranks. An epoch's last prompts and the next one's first share a batch: no
    prompt is dropped, and none comes twice in an epoch.

    Raises ValueError for `num_prompts` < 1 or a negative seed.
    """

    def __init__(self, num_prompts: int, *, seed: int, shuffle: bool):
        if num_prompts < 1:
            raise ValueError(f"cannot draw from {num_prompts} prompts: there must be at least one.")
        if seed < 0:
            raise ValueError(f"run.seed is {seed}: a seed must not be negative.")
        self.num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._move_to(epoch=0, position=0)

    @property
    def epoch(self) -> int:
        """Epoch of the next prompt, from 0."""
        return self._epoch

    def draw(self, n: int) -> np.ndarray:
        """The next `n` prompts: np.int64 [n], each in [0, num_prompts). `n` may exceed `num_prompts`."""
        assert n >= 0, n
        drawn = np.empty(n, dtype=np.int64)
        filled = 0
        while filled < n:
            step = min(n - filled, self.num_prompts - self._position)
            drawn[filled : filled + step] = self._order[self._position : self._position + step]
            filled += step
            self._position += step
            if self._position == self.num_prompts:
                self._move_to(epoch=self._epoch + 1, position=0)
        return drawn

    def state_dict(self) -> dict[str, int]:
        """The cursor: `epoch` and `position` of the next prompt."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a cursor. Raises ValueError if no epoch has such a position, as when prompts went missing."""
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position < self.num_prompts:
            raise ValueError(
                f"the checkpoint stands at prompt {position} of epoch {epoch}, but the training data has "
                f"{self.num_prompts} prompts: resume with the data.train and data.max_prompt_tokens of the saved run."
            )
        self._move_to(epoch=epoch, position=position)

    def _move_to(self, *, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position
        # Seeding with the pair, not with seed + epoch: else epoch 1 of seed 1 would be epoch 0 of seed 2.
        if self._shuffle:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self.num_prompts)
        else:
            self._order = np.arange(self.num_prompts)
