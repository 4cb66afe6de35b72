"""TicTacToe in self-play: the model moves for x and for o in turn."""

from typing import Any

LINES = [{1, 2, 3}, {4, 5, 6}, {7, 8, 9}, {1, 4, 7}, {2, 5, 8}, {3, 6, 9}, {1, 5, 9}, {3, 5, 7}]


class TicTacToe:
    """Expects the number of a free square, 1 to 9. Any other reply loses the game.

    The reward of a turn is that of the player who moved: 1 for a line, -1 for a move that is not allowed.
    """

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self._moves: list[int] = []
        self._end, self._reward = "", 0.0
        return row["messages"]

    def step(self, text: str) -> tuple[str, float, bool]:
        square = int(text) if text in list("123456789") else 0
        is_allowed = square != 0 and square not in self._moves
        self._moves.append(square)
        own = set(self._moves[-1::-2])
        if not is_allowed:
            self._end, self._reward = "forbidden", -1.0
        elif any(line <= own for line in LINES):
            self._end, self._reward = "won", 1.0
        elif len(self._moves) == 9:
            self._end = "draw"
        return self._end or "xo"[len(self._moves) % 2], self._reward, bool(self._end)

    def score(self) -> dict[str, float]:
        """Return the reward of the last move, and whether all moves were allowed."""
        ends = {f"end_{name}": float(self._end == name) for name in ("won", "draw", "forbidden")}
        is_allowed = float(self._end in ("won", "draw"))
        return {"score": self._reward, "acc": is_allowed, "moves": float(len(self._moves)), **ends}
