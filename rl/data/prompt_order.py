"""The order in which prompts are drawn: permuted epochs, or a mixture of sources that have their own epochs.

The next prompts depend only on the arguments of the order and on its cursor. The cursor is checkpointed.
Therefore all ranks draw the same prompts, and a resumed run continues at the saved position on any number of
ranks. All orders have `draw`, `state_dict`, `load_state_dict` and `epoch`. User-defined orders are in
`rl.data.curriculum`.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


def warn_of_repeated_rows(num_rows: int, prompts_per_step: int) -> str:
    """Return a warning if a step draws more rows than data.train has; "" otherwise."""
    if prompts_per_step <= num_rows:
        return ""
    return (
        f"warning: data check: data.prompts_per_step={prompts_per_step} is above the {num_rows} rows of "
        f"data.train, so each step draws rows twice; set it to at most {num_rows}, or add rows."
    )


class EpochOrder:
    """Draws prompts, epoch after epoch.

    order_of: order_of(epoch) returns the prompts of an epoch in order, np.int64 [n], n > 0. key: what
        determines the order besides the prompts, for messages.

    A batch may contain prompts of two epochs; no prompt is dropped at the end of an epoch.
    """

    def __init__(self, order_of: Callable[[int], np.ndarray], *, owner: str, key: str):
        """Start at epoch 0. owner: beginning of the error message "{owner} {n} prompts"."""
        self._order_of = order_of
        self._owner, self._key = owner, key
        self._move_to(epoch=0, position=0)

    @property
    def epoch(self) -> int:
        """Epoch of the next prompt, from 0."""
        return self._epoch

    @property
    def num_drawn(self) -> int | None:
        """Number of prompts drawn so far. None if it is unknown, because epochs may differ in size."""
        return None

    @property
    def digest(self) -> dict[str, int]:
        """Hash of the present epoch's order, under a name that says what determines the order."""
        return {self._key: zlib.crc32(self._order.astype(np.int64).tobytes())}

    def draw(self, n: int) -> np.ndarray:
        """Return the next `n` prompts: np.int64 [n]. `n` may exceed the number of prompts of an epoch."""
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
        """Return the cursor: `epoch` and `position` of the next prompt."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a cursor.

        Raises ValueError if the cursor's position exceeds the number of prompts of its epoch, or if the state
        is one of a mixture.
        """
        if not {"epoch", "position"} <= set(state):
            raise ValueError(
                f"the checkpoint's data cursor is {sorted(state)}, but must be an epoch and a position: the "
                "saved run had data.train_weights. Resume with them."
            )
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch >= 0:
            self._move_to(epoch=epoch, position=position)
        if epoch < 0 or not 0 <= position < len(self._order):
            raise ValueError(
                f"the checkpoint stands at prompt {position} of epoch {epoch}, but {self._owner} "
                f"{len(self._order)} prompts: resume with the data.train and data.max_prompt_tokens of the "
                "saved run."
            )

    def _move_to(self, *, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position
        self._order = self._order_of(epoch)


class PromptOrder(EpochOrder):
    """Draws all prompts, np.int64 in [0, num_prompts), in each epoch. (seed, epoch) determines their order.

    Raises ValueError for `num_prompts` < 1 or a negative seed.
    """

    def __init__(self, num_prompts: int, *, seed: int, shuffle: bool):
        if num_prompts < 1:
            raise ValueError(f"num_prompts={num_prompts}: an order needs at least one prompt.")
        check_seed(seed)
        self.num_prompts = num_prompts

        def order_of(epoch: int) -> np.ndarray:
            if not shuffle:
                return np.arange(num_prompts)
            # The seed is the pair. With the sum seed + epoch, epoch 1 of seed 1 would equal epoch 0 of seed
            # 2.
            return np.random.default_rng([seed, epoch]).permutation(num_prompts)

        super().__init__(order_of, owner="the training data has", key=f"seed {seed}, shuffle {shuffle}")

    @property
    def num_drawn(self) -> int:
        return self._epoch * self.num_prompts + self._position


class MixedOrder:
    """Draws each prompt from one of several sources, selected with probability proportional to its weight.

    The source of the t-th prompt depends only on the weights and on (seed, t). How many prompts a call of
    `draw` returns does not matter. Each source has its own epochs, so a small source with a large weight is
    repeated more often. For example, with the weights 3 and 1, about three of four prompts come from the
    first source, whatever the sizes of the sources.

    sources: for each source, the indices of its prompts, int [n_i], n_i > 0. `draw` returns these indices.
    weights: one per source, >= 0, with a sum > 0. 0 disables a source.
    seed: seed for the selection of sources and for the order of each source. The orders of two sources
        differ.
    shuffle: if False, each source is drawn in the given order. The selection of sources is random all the
        same.

    Raises ValueError for a missing or empty source, invalid weights, or a negative seed.
    """

    BLOCK = 4096
    """Number of draws whose sources are selected at once. Another number would give another order."""
    PICKS = 1 << 20
    """Component of the seed that keeps the random numbers of this selection apart from the random numbers of
    the orders, which have 64-bit seeds."""

    def __init__(self, sources: Sequence[np.ndarray], weights: Sequence[float], *, seed: int, shuffle: bool):
        check_seed(seed)
        _check_mixture(sources, weights)
        self._seed = seed
        self._sources = [np.asarray(source, dtype=np.int64) for source in sources]
        self._walks = [
            PromptOrder(len(source), seed=_source_seed(seed, i), shuffle=shuffle)
            for i, source in enumerate(self._sources)
        ]
        self._weights = np.array(weights, dtype=np.float64)
        # The division makes the last element exactly 1, which is above every random number. Therefore
        # rounding cannot select a source of weight 0.
        self._cumulative = np.cumsum(self._weights)
        self._cumulative /= self._cumulative[-1]
        self._num_drawn = 0

    @property
    def epoch(self) -> int:
        """Number of epochs that every source with a positive weight has completed."""
        return min(walk.epoch for walk, weight in zip(self._walks, self._weights, strict=True) if weight > 0)

    @property
    def num_drawn(self) -> int:
        """Number of prompts drawn so far, from all sources together."""
        return sum(walk.num_drawn for walk in self._walks)

    @property
    def digest(self) -> dict[str, int]:
        """Hashes of the orders of the sources."""
        return {f"source {i}, {k}": v for i, walk in enumerate(self._walks) for k, v in walk.digest.items()}

    def draw(self, n: int) -> np.ndarray:
        """Return the next `n` prompts, as indices from `sources`: np.int64 [n]."""
        assert n >= 0, n
        picks = self._picks(self._num_drawn, n)
        drawn = np.empty(n, dtype=np.int64)
        for i, (source, walk) in enumerate(zip(self._sources, self._walks, strict=True)):
            places = np.flatnonzero(picks == i)
            drawn[places] = source[walk.draw(len(places))]
        self._num_drawn += n
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor: the number of prompts drawn, and the cursor of each source."""
        return {"num_drawn": self._num_drawn, "sources": [walk.state_dict() for walk in self._walks]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a cursor. The weights may differ from the weights of the saved run.

        Raises ValueError if the number of sources differs, if the cursor of a source is beyond its prompts,
        or if the state is one of an order without weights.
        """
        if not {"num_drawn", "sources"} <= set(state):
            raise ValueError(
                f"the checkpoint's data cursor is {sorted(state)}, but must hold one per source: the saved "
                "run had no data.train_weights. Resume without them."
            )
        if len(state["sources"]) != len(self._walks):
            raise ValueError(
                f"the checkpoint has {len(state['sources'])} data sources, but data.train has "
                f"{len(self._walks)}: resume with the data.train of the saved run."
            )
        for walk, cursor in zip(self._walks, state["sources"], strict=True):
            walk.load_state_dict(cursor)
        self._num_drawn = int(state["num_drawn"])

    def _picks(self, start: int, n: int) -> np.ndarray:
        """Return the source of each of the draws start .. start + n - 1: int [n]."""
        first, last = start // self.BLOCK, (start + max(n, 1) - 1) // self.BLOCK
        blocks = [
            np.random.default_rng([self._seed, self.PICKS, block]).random(self.BLOCK)
            for block in range(first, last + 1)
        ]
        offset = start - first * self.BLOCK
        return np.searchsorted(self._cumulative, np.concatenate(blocks)[offset : offset + n], side="right")


def check_seed(seed: int) -> None:
    """Raise ValueError for a seed that numpy does not accept."""
    if seed < 0:
        raise ValueError(f"run.seed={seed} must not be negative.")


def _check_mixture(sources: Sequence[np.ndarray], weights: Sequence[float]) -> None:
    if len(sources) == 0:
        raise ValueError("data.train is empty: it must name at least one file.")
    if len(weights) != len(sources):
        raise ValueError(f"data.train_weights={list(weights)} needs one weight per file, {len(sources)}.")
    for i, (source, weight) in enumerate(zip(sources, weights, strict=True)):
        if len(source) == 0:
            raise ValueError(
                f"data.train[{i}] has no prompts within the limit: raise data.max_prompt_tokens, or remove "
                "the file and its weight."
            )
        if not np.isfinite(weight) or weight < 0:
            raise ValueError(f"data.train_weights[{i}]={weight} must be a finite number, 0 or more.")
    if sum(weights) == 0:
        raise ValueError("data.train_weights are all 0: one of them must be positive.")


def _source_seed(seed: int, source: int) -> int:
    """Return the seed for the order of a source. It makes the orders of two files of equal length differ."""
    return int(np.random.SeedSequence([seed, source]).generate_state(1, np.uint64)[0])
