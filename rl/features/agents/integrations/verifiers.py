"""Environments of verifiers v1 (github.com/PrimeIntellect-ai/verifiers).

    agents:
      environment: rl.features.agents.integrations.verifiers:Verifiers
      interpreter: /path/to/bin/python     # an environment with verifiers, which pins another openai
      kwargs:
        env:                               # the block [env] of verifiers' own configuration
          taskset: {id: my-taskset}
          agent: {harness: {id: "null"}, runtime: {type: subprocess}}

The environment drives itself: its harness calls the run's endpoint. The score is the mean reward of the
episode's trainable traces; in each trace verifiers weights the task's rewards. The metrics of verifiers are
logged. `PYTHON -m lockstep data tasks verifiers` writes the tasks as rows; `extra_info.task` is a task's
data.
"""

import os
from collections.abc import Iterator
from typing import Any

from rl.features.agents.integrations.imports import require
from rl.features.agents.integrations.rows import task_of

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
    """An episode of verifiers."""

    def __init__(self, env: dict[str, Any], **sampling: Any) -> None:
        """Load `env`; `sampling` are fields of SamplingConfig. Raises ValueError for an invalid `env`."""
        self._env, self._sampling = load(env), vf.SamplingConfig(**sampling)

    async def run(self, base_url: str, api_key: str, row: dict[str, Any]) -> dict[str, float]:
        variable = f"LOCKSTEP_KEY_{id(self)}"  # verifiers reads keys from environment variables only
        os.environ[variable] = api_key
        try:
            client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
            context = vf.ModelContext(client=client, model="policy", sampling=self._sampling)
            async with self._env.serving():
                (slot,) = self._env.slots(self._task(row))
                episode = await self._env.run_slot(slot, context)
        finally:
            del os.environ[variable]
        if not episode.ok:
            errors = [error for part in (episode, *episode.traces) for error in part.errors]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors))
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        metrics = {name: value for trace in traces for name, value in trace.metrics.items()}
        numbers = {name: value for name, value in metrics.items() if value is not None}
        return {**numbers, "score": sum(trace.reward for trace in traces) / len(traces)}

    def _task(self, row: dict[str, Any]) -> Any:
        """Return a row's task, built from its data as verifiers' own server builds it."""
        taskset = self._env.taskset
        task = type(taskset).task_type()
        return task(task.data_type().model_validate_json(task_of(row)["task"]), taskset.config.task)
