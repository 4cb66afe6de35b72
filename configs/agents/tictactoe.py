"""TicTacToe in self-play: the model moves for x and for o in turn."""

from typing import Any

LINES = [{1, 2, 3}, {4, 5, 6}, {7, 8, 9}, {1, 4, 7}, {2, 5, 8}, {3, 6, 9}, {1, 5, 9}, {3, 5, 7}]


class TicTacToe:
    """Expects the number of a free square, 1 to 9. Any other reply loses the game.

    The reward of a turn is that of the player who moved: 1 for a line, -1 for a move that is not allowed.
    """

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self._moves: list[int] = []
        self._result = ""
        return row["messages"]

    def step(self, text: str) -> tuple[str, float, bool]:
        square = int(text) if text in list("123456789") else 0
        if square == 0 or square in self._moves:
            self._result = "forbidden"
            return "forbidden", -1.0, True
        self._moves.append(square)
        own = set(self._moves[-1::-2])
        if any(line <= own for line in LINES):
            self._result = "won"
            return "won", 1.0, True
        if len(self._moves) == 9:
            self._result = "draw"
            return "draw", 0.0, True
        return "xo"[len(self._moves) % 2], 0.0, False

    def score(self) -> dict[str, float]:
        """Return 1 for a game that was played to its end by the rules, and how it ended."""
        allowed = float(self._result in ("won", "draw"))
        return {
            "score": allowed,
            "acc": allowed,
            "won": float(self._result == "won"),
            "moves": len(self._moves),
        }
