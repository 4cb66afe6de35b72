"""The draw: which prompts each step gets, and where the next step continues.

For example, with data.prompts_per_step=16 step 3 draws rows 32 to 47 of the epoch's order.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from rl.checks.batches import CheckFailed
from rl.data.preferences import Labelled, PreferencePair
from rl.data.prompt_order import EpochOrder, MixedOrder
from rl.data.prompts import Prompt


class Draw:
    """Draws the data's rows in the order of its epochs. Identical on every rank.

    seed, shuffle, weights: run.seed, data.shuffle and data.train_weights, from which the order is computed
    again; None as the seed: user code determines the order.
    """

    def __init__(
        self,
        rows: list[Prompt] | list[PreferencePair] | list[Labelled],
        order: EpochOrder | MixedOrder,
        *,
        seed: int | None = None,
        shuffle: bool = True,
        weights: Sequence[float] = (),
    ):
        self.rows, self._order, self._seed, self._shuffle = rows, order, seed, shuffle
        self._shares = np.cumsum(weights) / np.cumsum(weights)[-1] if len(weights) else None
        self.last: list = []
        """Rows of the last draw."""
        self.num_drawn = 0
        """Rows that the steps of the run have drawn, including steps before a resume."""
        self.num_learned = 0
        """Rows that its complete steps have drawn: an aborted step has drawn more."""

    @property
    def epochs(self) -> float:
        """Number of epochs drawn so far, possibly with a fraction."""
        return self.num_drawn / len(self.rows)

    def next(self, number: int) -> list:
        """Return the next rows. Raises CheckFailed if the cursor and the count of drawn rows differ."""
        passed = self._order.num_drawn
        if passed is not None and passed != self.num_drawn:
            raise CheckFailed(
                f"draw check: the data cursor is behind {passed} prompts, but the steps so far have drawn "
                f"{self.num_drawn}: prompts are {'skipped' if passed > self.num_drawn else 'repeated'}."
            )
        drawn = self._order.draw(number)
        self._check_order(drawn)
        self.num_drawn += number
        self.last = [self.rows[i] for i in drawn]
        return self.last

    def _check_order(self, drawn: np.ndarray) -> None:
        """Raise CheckFailed unless these rows, or in a mixture their sources, come next by seed and epoch."""
        if self._seed is None or not len(drawn):
            return
        size = len(self.rows) if self._shares is None else MixedOrder.BLOCK
        found, what, expected = drawn, "rows", list[int]()
        for block, places in groupby(range(self.num_drawn, self.num_drawn + len(drawn)), lambda t: t // size):
            if self._shares is None:
                order = np.random.default_rng([self._seed, block]).permutation(size)
                order = order if self._shuffle else np.arange(size)
            else:
                draws = np.random.default_rng([self._seed, MixedOrder.PICKS, block]).random(size)
                order = (draws[:, None] >= self._shares).sum(1)
            expected += [int(order[t % size]) for t in places]
        if self._shares is not None:
            found, what = np.array([self.rows[i].source for i in drawn]), "rows of the files"
        if not np.array_equal(found, expected):
            raise CheckFailed(
                f"draw check: {what} {found[:4].tolist()} ... were drawn after {self.num_drawn} prompts, but "
                f"with run.seed={self._seed}, data.shuffle={self._shuffle} and data.train_weights {what} "
                f"{expected[:4]} ... come next: rows are repeated, left out, or in another order."
            )

    def check_cursor(self, cursor: Mapping[str, Any]) -> None:
        """Raise CheckFailed unless a cursor is behind the prompts of the last complete step."""
        if cursor["num_drawn"] != self.num_learned:
            raise CheckFailed(
                f"draw check: a checkpoint of this step would continue after {cursor['num_drawn']} prompts, "
                f"but complete steps have drawn {self.num_learned}."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor. Later draws do not modify the returned object."""
        cursor = {"sampler": self._order.state_dict(), "num_drawn": self.num_drawn}
        return cursor | {"num_prompts": len(self.rows), "order": self._order.digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a cursor. Raises ValueError if the cursor does not fit the data."""
        self._order.load_state_dict(state["sampler"])
        is_same = state.get("num_prompts") == len(self.rows)  # else the data has other prompts now
        self.num_drawn = self.num_learned = state["num_drawn"] if is_same else self._order.num_drawn or 0
