"""Text games and tasks of gem-llm (github.com/axon-rl/gem), by their id.

agents:
  environment: rl.features.agents.integrations.gem:Gem
  kwargs: {env_id: "game:GuessTheNumber-v0-easy"}
"""

from typing import Any

from rl.features.agents.integrations.chat import user_message
from rl.features.agents.integrations.imports import require
from rl.features.agents.integrations.randomness import PrivateRandom
from rl.features.agents.integrations.rows import seed_of, task_of

gem = require("gem", extra="gem")


class Gem:
    """An episode of gem; the row's `extra_info` holds `seed` and, unless the config does, `env_id`."""

    def __init__(self, env_id: str = "", **kwargs: Any) -> None:
        """Take the arguments; `kwargs` go to gem.make."""
        self._env_id, self._kwargs = env_id, kwargs

    def reset(self, row: dict[str, Any]) -> list[dict[str, str]]:
        seed = seed_of(row)
        self._random = PrivateRandom(seed)
        with self._random:
            self._env = gem.make(task_of(row).get("env_id", self._env_id), **self._kwargs)
            observation, info = self._env.reset(seed)
        return user_message(_join(observation, info))

    def step(self, text: str) -> tuple[str, float, bool]:
        with self._random:
            observation, reward, terminated, truncated, info = self._env.step(text)
        return _join(observation, info), float(reward), bool(terminated or truncated)


def _join(observation: str, info: dict[str, Any]) -> str:
    """Return an observation with gem's suffix, which asks for the next action."""
    return "\n".join(part for part in (observation, info.get("suffix", "")) if part)
