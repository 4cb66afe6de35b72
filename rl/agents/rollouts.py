"""The environments of a run, and the generation of a call's trajectories with them."""

import logging
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from rl.agents.chat import Chat
from rl.agents.pool import EnvironmentPool
from rl.agents.source import AgentSource
from rl.config.agent_plan import make_agent_plan
from rl.config.schema import Config
from rl.data.prompts import Prompt, end_token_ids
from rl.rewards.pool.pool import default_workers
from rl.rollout.engine import RolloutEngine
from rl.rollout.queue import OrderedQueue, Queue, StaticQueue
from rl.rollout.samples import Sample
from rl.rollout.sampling import Sampling
from rl.rollout.stored_log import DIRECTORY, Recorder, store

log = logging.getLogger(__name__)


class AgentRollouts:
    """Generates trajectories. The leader of each replica of the engine holds the environments.

    Build it before the engines, because they pin this thread to a core. Raises ValueError if the environments
    cannot be loaded, or if the chat template does not suit them.
    """

    def __init__(self, config: Config, tokenizer):
        self._config, agents = config, config.agents
        self.pool: EnvironmentPool | None = None
        self._tokenizer, self._endpoint = tokenizer, None
        if dist.get_rank() % config.rollout.tp:
            return
        own_cores = "SLURM_CPUS_PER_TASK" in os.environ  # the task is bound to its cores
        leaders = 1 if own_cores else max(1, int(os.environ["LOCAL_WORLD_SIZE"]) // config.rollout.tp)
        ends = end_token_ids(config.model.path) | set(config.rollout.stop_token_ids)
        self._chat = Chat(
            tokenizer,
            end_token_ids=ends,
            on_rewrite=agents.on_rewrite,
            template_kwargs=agents.template_kwargs,
        )
        log.info("tokens between turns: %s", self._chat.description)
        self.pool = EnvironmentPool(
            make_agent_plan(agents.environment, agents.kwargs, agents.tools, agents.sources),
            workers=agents.workers or default_workers(leaders),
            timeout_s=agents.timeout_s,
            memory_mib=agents.memory_mib,
            max_output_chars=agents.max_output_chars,
            interpreter=agents.interpreter,
            variables=agents.variables,
        )
        try:
            for tools in self.pool.check():
                self._chat.check(tools)
                if tools and agents.structured_tool_calls:
                    self._chat.grammar(tools)
        except ValueError:
            self.close()
            raise

    def close(self) -> None:
        """Close the environments and end their processes."""
        if self._endpoint is not None:
            self._endpoint.shutdown()
        if self.pool is not None:
            self.pool.shutdown()

    def _start_endpoint(self):
        """Return the server for agents that run by themselves. The first call starts it."""
        from rl.agents.endpoint import Endpoint

        if self._endpoint is None:
            assert self.pool is not None
            longest = self._config.data.max_prompt_tokens + self._config.rollout.max_response_tokens
            self._endpoint = Endpoint(self._tokenizer, context_tokens=longest, wake=self.pool.wake)
        return self._endpoint

    def generate(
        self,
        engine: RolloutEngine,
        prompts: list[Prompt],
        sampling: Sampling,
        seeds: list[int],
        *,
        progress=None,
        interrupt: Callable[[], bool] | None = None,
        on_wait: Callable[[str], None],
        order: list[int] | None = None,
        keeps_failed: bool = False,
        log_name: str = "",
    ) -> tuple[list[Sample] | None, Counter[str]]:
        """Return this replica's samples and counts; the samples are None if the call was interrupted.

        The leader returns them; other ranks return [] and no counts. Collective over the replica. The
        arguments are those of `RolloutEngine.generate`.

        keeps_failed: see `AgentSource`.
        log_name: `step_<number>/<purpose>` of the stored event log; empty: it is not stored.
        """
        queue = self._queue(engine, len(prompts))
        if order is not None:
            queue = OrderedQueue(queue, order)
        engine.llm.reset_prefix_cache()  # what the engine computes then depends on the events alone
        if self.pool is None:
            is_complete = engine.run(None, sampling, interrupt=interrupt, on_wait=on_wait)
            return ([] if is_complete else None), Counter()
        source = AgentSource(
            prompts,
            sampling,
            seeds,
            config=self._config.agents,
            pool=self.pool,
            chat=self._chat,
            queue=queue,
            capacity=engine.capacity(len(prompts), sampling.samples_per_prompt),
            max_context=self._config.data.max_prompt_tokens + sampling.max_tokens,
            start_endpoint=self._start_endpoint,
            keeps_failed=keeps_failed,
            progress=progress,
        )
        try:
            recorder = Recorder(source)
            is_complete = engine.run(recorder, sampling, interrupt=interrupt, on_wait=on_wait)
        except BaseException:
            source.close()
            self.close()  # waits: the workers end with this process, and environments may have much to close
            raise
        source.close()
        if is_complete and log_name and self._config.agents.order == "arrival":
            path = Path(self._config.run.dir, DIRECTORY, f"{log_name}_replica_{engine.replica}.npz")
            store(path, sampling, engine.events, recorder.completions)
        return (source.samples if is_complete else None), source.counts

    def _queue(self, engine: RolloutEngine, num_prompts: int) -> Queue:
        """Return the work of a call. In waves nothing may depend on which replica is faster."""
        if self._config.agents.order == "waves":
            return StaticQueue(num_prompts, replica=engine.replica, num_replicas=engine.num_replicas)
        return engine.queue(num_prompts)
