"""Games of TextArena (github.com/LeonGuertler/TextArena), for one player or two.

    agents:
      environment: rl.features.agents.integrations.textarena:Game
      kwargs: {env_id: TicTacToe-v0, opponent: random}

The policy has one seat. In a game of two the seat is the row's `extra_info.seat`, or the seed's last bit: for
example, seat 1 for seed 7. The opponent `random` draws from the moves that the game lists. Any other opponent
is the path of a function `move(text, rng) -> str`.

`SelfPlay` gives both seats to the policy. Each seat is a conversation of its own, so that hidden cards stay
hidden. The policy learns only from the moves of the row's seat. Moves of the other seat are requested with
`store: false`. A random listed move replaces a move that the game does not list. Over the prompts of a batch
the policy learns both seats.

    agents:
      environment: rl.features.agents.integrations.textarena:SelfPlay
      kwargs: {env_id: KuhnPoker-v0}

Wordle, Hangman and other word games download word lists when they are created; all others work offline.
"""

import random
import re
from typing import Any

from rl.config.functions import load_function
from rl.features.agents.integrations.chat import LimitsUsedUp, complete, user_message
from rl.features.agents.integrations.imports import require
from rl.features.agents.integrations.randomness import PrivateRandom
from rl.features.agents.integrations.rows import seed_of, task_of

textarena = require("textarena", extra="textarena")

_LISTED_MOVE = re.compile(r"'(\[[^\]']+\])'")


class _Table:
    """A game of TextArena in progress."""

    def __init__(self, env_id: str, num_players: int, seed: int, **kwargs: Any) -> None:
        self._random = PrivateRandom(seed)
        with self._random:
            # Without TextArena's own wrappers, which repeat the whole history in every observation.
            self._env = textarena.wrappers.ActionFormattingWrapper(textarena.make(f"{env_id}-raw", **kwargs))
            try:
                self._env.reset(num_players=num_players, seed=seed)
            except AssertionError as error:
                raise ValueError(
                    f"env_id={env_id} is not a game of {num_players} players ({error}); set "
                    "agents.kwargs.opponent for a game of two, and only for one."
                ) from error

    def look(self) -> tuple[int, list[str]]:
        """Return the player to move, and the texts for this player since the player's last turn."""
        player, told = self._env.get_observation()
        others = [(sender, text) for sender, text, _ in told if sender != player]
        game = textarena.GAME_ID
        return player, [text if sender == game else f"[Player {sender}] {text}" for sender, text in others]

    def move(self, text: str) -> bool:
        """Make a move for the player to move; return whether the game is over."""
        with self._random:
            return bool(self._env.step(text)[0])

    def reward(self, player: int) -> float:
        """Return a player's reward, in games of two 1, 0 or -1; 0 for an unfinished game."""
        return float((self._env.state.rewards or {}).get(player, 0.0))

    def outcome(self, player: int) -> str:
        """Return why the game is over."""
        return str(self._env.state.game_info[player].get("reason", ""))


def _result(reward: float) -> dict[str, float]:
    return {"score": reward, "won": float(reward > 0), "lost": float(reward < 0)}


class Game:
    """A game of one player, or of two against a fixed opponent."""

    def __init__(self, env_id: str = "", opponent: str = "", **kwargs: Any) -> None:
        """Take the arguments; `kwargs` go to textarena.make. Raises ValueError for an unknown opponent."""
        self._env_id, self._kwargs = env_id, kwargs
        self._num_players = 2 if opponent else 1
        self._opponent = _random_move
        if opponent not in ("", "random"):
            self._opponent = load_function(opponent, key="agents.kwargs.opponent")

    def reset(self, row: dict[str, Any]) -> list[dict[str, str]]:
        task, seed = task_of(row), seed_of(row)
        self._rng = random.Random(seed)
        self._seat = int(task.get("seat", seed % self._num_players))
        self._table = _Table(task.get("env_id", self._env_id), self._num_players, seed, **self._kwargs)
        return user_message(self._next_turn()[0])

    def step(self, text: str) -> tuple[str, float, bool]:
        if not self._table.move(text):
            observation, done = self._next_turn()
            if not done:
                return observation, 0.0, False
        return self._table.outcome(self._seat), self._table.reward(self._seat), True

    def score(self) -> dict[str, float]:
        return _result(self._table.reward(self._seat))

    def _next_turn(self) -> tuple[str, bool]:
        """Let the opponent move until the policy's turn; return the policy's text, and whether the game is
        over."""
        while True:
            player, told = self._table.look()
            if player == self._seat:
                return "\n".join(told), False
            if self._table.move(self._opponent("\n".join(told), self._rng)):
                return "", True


def _listed_moves(text: str) -> list[str]:
    """Return the moves in the last line that lists moves, each in quotes and brackets, for example '[4]'."""
    lines = [moves for line in text.splitlines() if (moves := _LISTED_MOVE.findall(line))]
    return lines[-1] if lines else []


def _random_move(text: str, rng: random.Random) -> str:
    moves = _listed_moves(text)
    if not moves:
        raise RuntimeError(
            "agents.kwargs.opponent=random needs a game that lists its moves, and this game lists none; name "
            "a function as the opponent."
        )
    return rng.choice(moves)


class SelfPlay:
    """A game of two. The policy plays both seats, and learns from one."""

    def __init__(self, env_id: str = "", **kwargs: Any) -> None:
        self._env_id, self._kwargs = env_id, kwargs

    async def run(self, base_url: str, api_key: str, row: dict[str, Any]) -> dict[str, float]:
        """Play a game. The policy loses it if no turns or tokens are left for its move."""
        task, seed = task_of(row), seed_of(row)
        seat = int(task.get("seat", seed % 2))
        table = _Table(task.get("env_id", self._env_id), 2, seed, **self._kwargs)
        conversations: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
        rng, done = random.Random(seed), False
        while not done:
            player, told = table.look()
            text, conversation = "\n".join(told), conversations[player]
            conversation += user_message(text)
            try:
                reply = await complete(base_url, api_key, conversation, store=player == seat)
            except LimitsUsedUp:  # no turns or tokens are left
                return _result(-1.0 if player == seat else 0.0)
            conversation.append(reply)
            move = reply["content"] or ""
            if player != seat and (listed := _listed_moves(text)):
                # An illegal move of the opponent could end the game before the policy has moved.
                move = next((one for one in listed if one[1:-1] in move), rng.choice(listed))
            done = table.move(move)
        return _result(table.reward(seat))
