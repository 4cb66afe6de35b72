"""Costs of failures of real worker processes: the source of trajectories with a policy of the test."""

from pathlib import Path

import pytest

from rl.config.agent_plan import make_agent_plan
from rl.config.agents import Agents
from rl.features.agents import pool as pool_module
from rl.features.agents.chat import Chat
from rl.features.agents.dialogue import Trajectories
from rl.features.agents.pool import EnvironmentPool
from rl.features.agents.replica_environments import Environments
from rl.rollout.queue import static_queue
from rl.rollout.queue_schedule import QueueSchedule
from rl.rollout.sampling import Sampling, seed_of
from rl.rollout.source import SampleSource
from tests.chat_templates import end_ids, tokenizer_of
from tests.virtual_engine import VirtualEngine, prompts_of

FILE = Path(__file__).parent / "hostile_environments.py"
FAMILY = "qwen2.5"
SAMPLING = Sampling(4, 200)


class CountedPool(EnvironmentPool):
    """A pool that counts its worker processes."""

    now, most_workers = 0.0, 0

    def poll(self, timeout_s=0.0):
        self.most_workers = max(self.most_workers, len(self.all))
        return super().poll(timeout_s)


def generate(what, *, num_prompts=6, timeout_s=30.0, **agents):
    """Return samples, counts and the pool after a game per sample. All games of prompt 0 go wrong."""
    tokenizer = tokenizer_of(FAMILY)
    prompts = prompts_of([f"question {i} " for i in range(num_prompts)], tokenizer)
    plan = make_agent_plan(f"{FILE}:Fragile", {"what": what}, [], {})
    turn = tokenizer("move<|im_end|>")["input_ids"]
    with CountedPool(plan, workers=2, timeout_s=timeout_s, memory_mib=1024) as pool:
        chat = Chat(tokenizer, end_token_ids=end_ids(FAMILY))
        no_endpoint = lambda: pytest.fail("no agent runs by itself")  # noqa: E731
        environments = Environments(Agents(**agents), pool, chat, no_endpoint)
        dialogue = Trajectories(environments, SAMPLING, capacity=64, max_context=1000)
        queue = static_queue(num_prompts, replica=0, num_replicas=1)
        seeds = [seed_of(7, i) for i in range(num_prompts)]
        schedule = QueueSchedule(prompts, SAMPLING, seeds, queue=queue)
        VirtualEngine(pool, lambda request: turn).run(SampleSource(schedule, dialogue))
        dialogue.close()
    return [s for s in schedule.samples if s.end != "failed"], dialogue.counts, pool


@pytest.mark.parametrize("order", ["arrival", "waves"])
def test_a_prompt_that_ends_its_process_costs_only_itself(order):
    samples, counts, _ = generate("kills itself", on_failure="shrink", order=order)
    assert counts["dropped"] == 4 and counts["failures/lost"] == 4
    assert sorted({sample.prompt for sample in samples}) == [1, 2, 3, 4, 5]
    assert len(samples) == 20


def test_calls_that_time_out_start_no_further_workers():
    samples, counts, pool = generate("hangs", timeout_s=1.0, on_failure="refill")
    assert pool.most_workers <= 2
    assert counts["failures/time"] == 12 and len(samples) == 20


def test_a_traceback_of_each_kind_of_failure_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(pool_module, "_logged", set())
    samples, counts, _ = generate("raises", num_prompts=1, on_failure="refill")
    assert counts["failures/error"] == 12
    assert caplog.text.count("failed in step: RuntimeError: wrong answer") == 1
    assert caplog.text.count("Traceback") == 1
