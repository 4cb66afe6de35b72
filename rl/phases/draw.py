"""The draw: which prompts each step gets, and where the next step continues.

For example, with data.prompts_per_step=16 step 3 draws rows 32 to 47 of the epoch's order.
"""

from collections.abc import Mapping
from typing import Any

from rl.checks.batches import CheckFailed
from rl.data.preferences import Labelled, PreferencePair
from rl.data.prompt_order import EpochOrder, MixedOrder
from rl.data.prompts import Prompt


class Draw:
    """Draws the data's rows in the order of its epochs. Identical on every rank."""

    def __init__(
        self, rows: list[Prompt] | list[PreferencePair] | list[Labelled], order: EpochOrder | MixedOrder
    ):
        self.rows, self._order = rows, order
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
        self.num_drawn += number
        return [self.rows[i] for i in self._order.draw(number)]

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor. Later draws do not modify the returned object."""
        cursor = {"sampler": self._order.state_dict(), "num_drawn": self.num_drawn}
        return cursor | {"num_prompts": len(self.rows), "order": self._order.digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a cursor. Raises ValueError if the cursor does not fit the data."""
        self._order.load_state_dict(state["sampler"])
        is_same = state.get("num_prompts") == len(self.rows)  # else the data has other prompts now
        self.num_drawn = state["num_drawn"] if is_same else self._order.num_drawn or 0
