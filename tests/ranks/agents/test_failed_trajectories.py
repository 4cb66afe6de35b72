"""Costs of failures of real worker processes: the source of trajectories with a policy of the test."""

from pathlib import Path

import pytest

from rl.agents import pool as pool_module
from rl.agents.chat import Chat
from rl.agents.pool import EnvironmentPool
from rl.agents.source import AgentSource
from rl.config.agent_plan import make_agent_plan
from rl.config.agents import Agents
from rl.rollout.queue import StaticQueue
from rl.rollout.sampling import Sampling, seed_of
from tests.chat_templates import end_ids, tokenizer_of
from tests.virtual_engine import VirtualEngine, prompts_of

FILE = Path(__file__).parent / "hostile_environments.py"
FAMILY = "qwen2.5"
SAMPLING = Sampling(
    samples_per_prompt=4,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    max_tokens=200,
    stop=(),
    stop_token_ids=(),
)


class CountedPool(EnvironmentPool):
    """A pool that counts its worker processes."""

    now, most_workers = 0.0, 0

    def poll(self, timeout_s=0.0):
        self.most_workers = max(self.most_workers, len(self._workers.all))
        return super().poll(timeout_s)


def generate(what, *, num_prompts=6, timeout_s=30.0, **agents):
    """Return the source and the pool after a game per sample, in which all of prompt 0 go wrong."""
    tokenizer = tokenizer_of(FAMILY)
    prompts = prompts_of([f"question {i} " for i in range(num_prompts)], tokenizer)
    plan = make_agent_plan(f"{FILE}:Fragile", {"what": what}, [], {})
    turn = tokenizer("move<|im_end|>")["input_ids"]
    with CountedPool(plan, workers=2, timeout_s=timeout_s, memory_mib=1024) as pool:
        source = AgentSource(
            prompts,
            SAMPLING,
            [seed_of(7, i) for i in range(num_prompts)],
            config=Agents(**agents),
            pool=pool,
            chat=Chat(tokenizer, end_token_ids=end_ids(FAMILY)),
            queue=StaticQueue(num_prompts, replica=0, num_replicas=1),
            capacity=64,
            max_context=1000,
            start_endpoint=lambda: pytest.fail("no agent runs by itself"),
        )
        VirtualEngine(pool, lambda request: turn).run(source)
        source.close()
    return source, pool


@pytest.mark.parametrize("order", ["arrival", "waves"])
def test_a_prompt_that_ends_its_process_costs_only_itself(order):
    source, _ = generate("kills itself", on_failure="shrink", order=order)
    assert source.counts["dropped"] == 4 and source.counts["failures/lost"] == 4
    assert sorted({sample.prompt for sample in source.samples}) == [1, 2, 3, 4, 5]
    assert len(source.samples) == 20


def test_calls_that_time_out_start_no_further_workers():
    source, pool = generate("hangs", timeout_s=1.0, on_failure="refill")
    assert pool.most_workers <= 2
    assert source.counts["failures/time"] == 12 and len(source.samples) == 20


def test_a_traceback_of_each_kind_of_failure_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(pool_module, "_logged", set())
    source, _ = generate("raises", num_prompts=1, on_failure="refill")
    assert source.counts["failures/error"] == 12
    assert caplog.text.count("failed in step: RuntimeError: wrong answer") == 12
    assert caplog.text.count("Traceback") == 1
