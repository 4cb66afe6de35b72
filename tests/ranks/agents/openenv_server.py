"""OpenEnv servers for guessing a number: `python openenv_server.py text|tools PORT`."""

import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str


class TextGame(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.secret = seed % 16
        return Hint(hint="Guess a number.")

    def step(self, action, timeout_s=None, **kwargs):
        right = action.number == self.secret
        return Hint(hint="right" if right else "wrong", reward=float(right), done=right)


class ToolGame(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def __init__(self):
        tools = FastMCP("game")

        @tools.tool()
        def guess(number: int) -> str:
            """Guess the number."""
            if number < 0:
                raise ValueError("negative")
            return "right" if number == self.secret else "wrong"

        super().__init__(tools)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.secret = seed % 16
        return Observation()

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise NotImplementedError

    async def step_async(self, action, timeout_s=None, **kwargs):
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if isinstance(action, CallToolAction):
            observation.done = action.arguments.get("number") == self.secret
            observation.reward = float(observation.done)
        return observation


games = {"text": (TextGame, Guess, Hint), "tools": (ToolGame, CallToolAction, CallToolObservation)}
application = create_fastapi_app(*games[sys.argv[1]], max_concurrent_envs=8)
uvicorn.run(application, port=int(sys.argv[2]), log_level="warning")
