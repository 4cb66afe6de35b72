"""The draw: which prompts each step gets, and where the next step continues.

For example, with data.prompts_per_step=16 step 3 draws rows 32 to 47 of the epoch's order.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rl.checks.batches import CheckFailed
from rl.data.preferences import Labelled, PreferencePair
from rl.data.prompt_order import EpochOrder, MixedOrder
from rl.data.prompts import Prompt


class Draw:
    """Draws the data's rows in the order of its epochs. Identical on every rank.

    seed, shuffle: run.seed and data.shuffle, from which the order is computed again; None as the seed: a
    mixture or user code determines the order.
    """

    def __init__(
        self,
        rows: list[Prompt] | list[PreferencePair] | list[Labelled],
        order: EpochOrder | MixedOrder,
        *,
        seed: int | None = None,
        shuffle: bool = True,
    ):
        self.rows, self._order, self._seed, self._shuffle = rows, order, seed, shuffle
        self.last: list = []
        """Rows of the last draw."""
        self.num_drawn = 0
        """Rows that the steps of the run have drawn, including steps before a resume."""

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
        """Raise CheckFailed unless these rows come next in the epochs of (seed, epoch)."""
        size, start = len(self.rows), self.num_drawn
        if self._seed is None or not len(drawn):
            return
        for epoch in range(start // size, (start + len(drawn) - 1) // size + 1):
            order = np.random.default_rng([self._seed, epoch]).permutation(size)
            order = order if self._shuffle else np.arange(size)
            first, last = (min(max(n - epoch * size, 0), size) for n in (start, start + len(drawn)))
            own = drawn[first + epoch * size - start : last + epoch * size - start]
            if not np.array_equal(own, order[first:last]):
                found, expected = own[:4].tolist(), order[first:last][:4].tolist()
                raise CheckFailed(
                    f"draw check: rows {found} ... were drawn in epoch {epoch}, but with "
                    f"run.seed={self._seed} and data.shuffle={self._shuffle} rows {expected} ... come next: "
                    "rows are repeated, left out, or in the order of another epoch."
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor. Later draws do not modify the returned object."""
        cursor = {"sampler": self._order.state_dict(), "num_drawn": self.num_drawn}
        return cursor | {"num_prompts": len(self.rows), "order": self._order.digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a cursor. Raises ValueError if the cursor does not fit the data."""
        self._order.load_state_dict(state["sampler"])
        is_same = state.get("num_prompts") == len(self.rows)  # else the data has other prompts now
        self.num_drawn = state["num_drawn"] if is_same else self._order.num_drawn or 0
