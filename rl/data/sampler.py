"""The order in which prompts are drawn: epochs of permutations, or a mixture of sources that each have their own.

A sampler is a function of its arguments and a cursor, and the cursor is all there is to checkpoint: every rank draws the same,
and a resumed run continues where the saved one stood, on any number of ranks. All of them have `draw`, `state_dict`,
`load_state_dict` and `epoch`; an order that the user writes is in `rl.data.curriculum`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


class EpochWalk:
    """Walks through epochs, each of them a list of prompts that `order_of(epoch)` makes anew, np.int64 [n], n > 0.

    An epoch's last prompts and the next one's first share a batch: no prompt is dropped.
    """

    def __init__(self, order_of: Callable[[int], np.ndarray], *, owner: str):
        """owner: who decides how many prompts an epoch has, for messages: "{owner} {n} prompts"."""
        self._order_of = order_of
        self._owner = owner
        self._move_to(epoch=0, position=0)

    @property
    def epoch(self) -> int:
        """Epoch of the next prompt, from 0."""
        return self._epoch

    def draw(self, n: int) -> np.ndarray:
        """The next `n` prompts: np.int64 [n]. `n` may exceed the prompts of an epoch."""
        assert n >= 0, n
        drawn = np.empty(n, dtype=np.int64)
        filled = 0
        while filled < n:
            step = min(n - filled, len(self._order) - self._position)
            drawn[filled : filled + step] = self._order[self._position : self._position + step]
            filled += step
            self._position += step
            if self._position == len(self._order):
                self._move_to(epoch=self._epoch + 1, position=0)
        return drawn

    def state_dict(self) -> dict[str, int]:
        """The cursor: `epoch` and `position` of the next prompt."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a cursor.

        Raises ValueError if no epoch has such a position, as when prompts went missing, or for the state of a mixture.
        """
        if not {"epoch", "position"} <= set(state):
            raise ValueError(
                f"the checkpoint's place in the data is {sorted(state)}, but here it is an epoch and a position: the saved "
                "run had data.train_weights. Resume with them."
            )
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch >= 0:
            self._move_to(epoch=epoch, position=position)
        if epoch < 0 or not 0 <= position < len(self._order):
            raise ValueError(
                f"the checkpoint stands at prompt {position} of epoch {epoch}, but {self._owner} {len(self._order)} "
                "prompts: resume with the data.train and data.max_prompt_tokens of the saved run."
            )

    def _move_to(self, *, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position
        self._order = self._order_of(epoch)


class PromptSampler(EpochWalk):
    """Walks over `num_prompts` prompts epoch after epoch; epoch e is a permutation made from (seed, e).

    No prompt comes twice in an epoch. Draws np.int64 in [0, num_prompts).

    Raises ValueError for `num_prompts` < 1 or a negative seed.
    """

    def __init__(self, num_prompts: int, *, seed: int, shuffle: bool):
        if num_prompts < 1:
            raise ValueError(f"cannot draw from {num_prompts} prompts: there must be at least one.")
        check_seed(seed)
        self.num_prompts = num_prompts

        def order_of(epoch: int) -> np.ndarray:
            # Seeding with the pair, not with seed + epoch: else epoch 1 of seed 1 would be epoch 0 of seed 2.
            return (
                np.random.default_rng([seed, epoch]).permutation(num_prompts)
                if shuffle
                else np.arange(num_prompts)
            )

        super().__init__(order_of, owner="the training data has")


class MixedSampler:
    """Draws each prompt from one of several sources, picked with the probability of its weight.

    The source of draw t is a function of (seed, t) alone, so that the order does not depend on how it is cut into draws.
    Each source is walked through in epochs of its own: a small source with a large weight comes round more often.

    sources: the prompts of each source, int [n_i], n_i > 0: what `draw` returns.
    weights: one per source, >= 0, any sum > 0. 0 switches a source off.
    seed: also of the orders of the sources, which differ from each other.
    shuffle: False walks each source in the given order; the sources are picked at random all the same.

    Raises ValueError for no or an empty source, weights that do not fit, or a negative seed.
    """

    _BLOCK = 4096
    """Picks are made in blocks of so many; another number would give another order."""
    _PICKS = 1 << 20
    """Tells the random numbers of the picks from those of the orders, which are seeded with numbers of 64 bits."""

    def __init__(self, sources: Sequence[np.ndarray], weights: Sequence[float], *, seed: int, shuffle: bool):
        check_seed(seed)
        _check_mixture(sources, weights)
        self._seed = seed
        self._sources = [np.asarray(source, dtype=np.int64) for source in sources]
        self._walks = [
            PromptSampler(len(source), seed=_source_seed(seed, i), shuffle=shuffle)
            for i, source in enumerate(self._sources)
        ]
        self._weights = np.array(weights, dtype=np.float64)
        # Divided by its own end, the last value is 1 exactly, above every random number: rounding picks no source of weight 0.
        self._cumulative = np.cumsum(self._weights)
        self._cumulative /= self._cumulative[-1]
        self._num_drawn = 0

    @property
    def epoch(self) -> int:
        """How often every source of positive weight has been gone through, from 0."""
        return min(walk.epoch for walk, weight in zip(self._walks, self._weights, strict=True) if weight > 0)

    def draw(self, n: int) -> np.ndarray:
        """The next `n` prompts: np.int64 [n], values of `sources`."""
        assert n >= 0, n
        picks = self._picks(self._num_drawn, n)
        drawn = np.empty(n, dtype=np.int64)
        for i, (source, walk) in enumerate(zip(self._sources, self._walks, strict=True)):
            places = np.flatnonzero(picks == i)
            drawn[places] = source[walk.draw(len(places))]
        self._num_drawn += n
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """The cursor: the number of prompts drawn, and the cursor of each source."""
        return {"num_drawn": self._num_drawn, "sources": [walk.state_dict() for walk in self._walks]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a cursor. The weights may be others than those of the saved run.

        Raises ValueError for another number of sources, a source with fewer prompts than its cursor says, or the state of a
        sampler without weights.
        """
        if not {"num_drawn", "sources"} <= set(state):
            raise ValueError(
                f"the checkpoint's place in the data is {sorted(state)}, but here it is one in each source: the saved run had "
                "no data.train_weights. Resume without them."
            )
        if len(state["sources"]) != len(self._walks):
            raise ValueError(
                f"the checkpoint stands in {len(state['sources'])} sources, but the training data has {len(self._walks)}: "
                "resume with the data.train of the saved run."
            )
        for walk, cursor in zip(self._walks, state["sources"], strict=True):
            walk.load_state_dict(cursor)
        self._num_drawn = int(state["num_drawn"])

    def _picks(self, start: int, n: int) -> np.ndarray:
        """The source of draws start .. start + n - 1: int [n]."""
        first, last = start // self._BLOCK, (start + max(n, 1) - 1) // self._BLOCK
        blocks = [
            np.random.default_rng([self._seed, self._PICKS, block]).random(self._BLOCK)
            for block in range(first, last + 1)
        ]
        offset = start - first * self._BLOCK
        return np.searchsorted(self._cumulative, np.concatenate(blocks)[offset : offset + n], side="right")


def check_seed(seed: int) -> None:
    """Raises ValueError for a seed that numpy does not take."""
    if seed < 0:
        raise ValueError(f"run.seed is {seed}: a seed must not be negative.")


def _check_mixture(sources: Sequence[np.ndarray], weights: Sequence[float]) -> None:
    if len(sources) == 0:
        raise ValueError("cannot draw from no source: data.train must name at least one file.")
    if len(weights) != len(sources):
        raise ValueError(
            f"data.train_weights has {len(weights)} numbers for {len(sources)} files in data.train: give one for each."
        )
    for i, (source, weight) in enumerate(zip(sources, weights, strict=True)):
        if len(source) == 0:
            raise ValueError(
                f"file {i} of data.train has no prompts that fit: raise data.max_prompt_tokens, or leave the file and its "
                "weight out."
            )
        if not np.isfinite(weight) or weight < 0:
            raise ValueError(
                f"data.train_weights[{i}] is {weight}: a weight must be a finite number, 0 or more."
            )
    if sum(weights) == 0:
        raise ValueError("data.train_weights are all 0: one of them must be positive.")


def _source_seed(seed: int, source: int) -> int:
    """A seed for the order of a source: else two files of one length would be walked in the same order."""
    return int(np.random.SeedSequence([seed, source]).generate_state(1, np.uint64)[0])
