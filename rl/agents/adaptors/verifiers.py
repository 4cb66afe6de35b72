"""Environments of verifiers v1 (github.com/PrimeIntellect-ai/verifiers).

    agents:
      environment: rl.agents.adaptors.verifiers:Verifiers
      kwargs:
        python: /path/to/verifiers/bin/python         # verifiers pins another openai than vLLM accepts
        env:                                          # the block [env] of verifiers' own configuration
          taskset: {id: my-taskset}
          agent: {harness: {id: "null"}, runtime: {type: subprocess}}

The environment drives itself: its harness calls the run's endpoint. The score is the mean reward of the
episode's trainable traces, in which verifiers weights the task's rewards; its metrics are logged.
`PYTHON tools/make_tasks.py verifiers` writes the tasks as rows; `extra_info.task` is a task's data.
"""

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

from rl.agents.adaptors.imports import require
from rl.agents.adaptors.rows import task_of

vf = require("verifiers.v1", extra="verifiers")


def load(env: dict[str, Any]) -> Any:
    """Return the environment of a configuration. Raises ValueError if verifiers does not accept it."""
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    return load_environment(resolve_env_config(env))


def tasks(env: dict[str, Any], size: int) -> Iterator[tuple[str, str]]:
    """Yield the prompt and the data, as JSON, of the first tasks of a configuration."""
    for task in load(env).taskset.take(size):
        yield task.data.prompt_text, task.data.model_dump_json(exclude_none=True)


class Verifiers:
    """One episode."""

    _serving: "dict[str, asyncio.Future[Any]]" = {}
    """Configuration, as JSON, -> the environment, whose servers the trajectories of the process share."""

    def __init__(self, env: dict[str, Any], sampling: dict[str, Any] | None = None, python: str = "") -> None:
        """`python` is the interpreter in which the pool starts the worker."""
        self._env, self._sampling = env, sampling or {}

    async def run(self, base_url: str, api_key: str, row: dict[str, Any]) -> dict[str, float]:
        env = await self._serve()
        taskset = env.taskset
        task_class = type(taskset).task_type()
        data = task_class.data_type().model_validate_json(task_of(row)["task"])
        variable = f"LOCKSTEP_KEY_{id(self)}"  # verifiers reads keys from the environment only
        os.environ[variable] = api_key
        try:
            client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
            context = vf.ModelContext(
                client=client, model="policy", sampling=vf.SamplingConfig(**self._sampling)
            )
            (slot,) = env.slots(task_class(data, taskset.config.task))
            episode = await env.run_slot(slot, context)
        finally:
            del os.environ[variable]
        if not episode.ok:
            errors = [error for part in (episode, *episode.traces) for error in part.errors]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "not ok")
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        metrics = {key: value for trace in traces for key, value in trace.metrics.items() if value is not None}
        return {**metrics, "score": sum(trace.reward for trace in traces) / len(traces)}

    async def _serve(self) -> Any:
        """Return the environment of this configuration; start it for the first trajectory."""
        key = json.dumps(self._env, sort_keys=True)
        if key not in self._serving:
            self._serving[key] = asyncio.get_running_loop().create_future()
            self._holder = asyncio.create_task(_hold(self._env, self._serving[key]))
        return await asyncio.shield(self._serving[key])


async def _hold(env: dict[str, Any], started: "asyncio.Future[Any]") -> None:
    """Hold the servers of an environment until the worker ends."""
    try:
        loaded = load(env)
        async with loaded.serving():
            started.set_result(loaded)
            await asyncio.Event().wait()
    except Exception as error:
        if not started.done():
            started.set_exception(error)
