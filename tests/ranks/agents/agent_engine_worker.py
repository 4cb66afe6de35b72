"""One rank of test_agent_engine.py: trajectories in the real engine, one replica of tp 2.

agent_engine_worker.py CHECKPOINT NUM_EVENTS DIRECTORY
"""

import sys

from rl.runtime.ranks import discover
from train_rl import prepare_environment

RANKS = discover()
prepare_environment(RANKS)

import random  # noqa: E402
from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

from rl.config.agents import Agents  # noqa: E402
from rl.config.schema import Config, Data, Model, Rollout, Training, resolve  # noqa: E402
from rl.engines.engines import build_policy  # noqa: E402
from rl.features.agents.chat import Chat  # noqa: E402
from rl.features.agents.dialogue import Trajectories  # noqa: E402
from rl.features.agents.environment import FinalScore, GameTurn  # noqa: E402
from rl.features.agents.replica_environments import Environments  # noqa: E402
from rl.features.agents.stored_log import CompletionRecorder, Replay, load, store  # noqa: E402
from rl.models import read_hf_config  # noqa: E402
from rl.refit.refit import refit  # noqa: E402
from rl.rollout.batches import batch_of  # noqa: E402
from rl.rollout.engine import RolloutEngine  # noqa: E402
from rl.rollout.exchange import exchange  # noqa: E402
from rl.rollout.queue import static_queue  # noqa: E402
from rl.rollout.queue_schedule import QueueSchedule  # noqa: E402
from rl.rollout.sampling import seed_of, train_sampling  # noqa: E402
from rl.rollout.source import SampleSource  # noqa: E402
from rl.rollout.vllm_model import ServedModel  # noqa: E402
from rl.runtime.collectives import gather_objects  # noqa: E402
from rl.runtime.session import session  # noqa: E402
from rl.training.grid import build_grid  # noqa: E402
from rl.training.micro_batch_plans import plan_minibatch  # noqa: E402
from tests import bounds  # noqa: E402
from tests.checkpoints import SIZES  # noqa: E402
from tests.virtual_engine import VirtualPool, prompts_of  # noqa: E402

TURNS = 5
"""Turns of a trajectory, each an event besides its reset and its score."""


class TimedTrajectories(Trajectories):
    """Trajectories of a pool that counts time in steps of the engine."""

    step = 0

    def advance(self, num_live: int, step: int) -> list:
        self._pool.now += step - self.step
        self.step = step
        return super().advance(num_live, step)


def answer(session: str, row: dict, action) -> dict:
    """Play a game of TURNS turns that answers with a part of the policy's text."""
    if isinstance(action, GameTurn):
        return {
            "messages": [{"role": "user", "content": f" {action.text[:3]} {len(action.text)} "}],
            "reward": 0.25,
        }
    if isinstance(action, FinalScore):
        return {}
    return {"messages": [{"role": "text", "content": row["prompt"]}], "drives": "step"}


class Checks:
    def __init__(self, checkpoint: str, num_events: int, directory: str, device):
        self.num_events, self.directory, self.device = num_events, Path(directory), device
        self.config = resolve(
            Config(
                model=Model(path=checkpoint, dtype="float32"),
                data=Data(max_prompt_tokens=64),
                training=Training(micro_batch_tokens=2048),
                rollout=Rollout(
                    tp=2,
                    samples_per_prompt=4,
                    max_response_tokens=96,
                    max_concurrent_samples=32,
                    cpu_kv_cache_mib=4,
                ),
            )
        )
        self.trainer = build_policy(
            self.config, read_hf_config(checkpoint), build_grid(tp=1, pp=1, seed=1), device
        )
        model = ServedModel(checkpoint, "float32", max_tokens=160)
        self.engine = RolloutEngine(model, self.config.rollout, seed=1, device=device)
        refit(self.trainer, self.engine)
        self.tokenizer = self.engine.llm.get_tokenizer()
        self.sampling = train_sampling(self.config)

    def generate(self, num_prompts: int):
        """Return (prompts, samples, counts, recorder); the last two are None on rank 1. Delays are random."""
        prompts = prompts_of([f"question {i % 7}" for i in range(num_prompts)], self.tokenizer)
        delays = random.SystemRandom()
        samples, counts, recorder = [], None, None
        if self.engine.leads:
            agents = Agents(environment="-", max_turns=TURNS, max_tokens_per_turn=6)
            pool = VirtualPool(answer, lambda: delays.lognormvariate(2, 1))
            environments = Environments(agents, pool, Chat(self.tokenizer), lambda: None)
            dialogue = TimedTrajectories(environments, self.sampling, capacity=32, max_context=160)
            seeds = [seed_of("agents", i) for i in range(num_prompts)]
            queue = static_queue(num_prompts, replica=0, num_replicas=1)
            schedule = QueueSchedule(prompts, self.sampling, seeds, queue=queue)
            recorder = CompletionRecorder(SampleSource(schedule, dialogue))
            samples, counts = schedule.samples, dialogue.counts
        self.engine.llm.reset_prefix_cache()
        assert self.engine.run(recorder, self.sampling)
        digests = gather_objects(self.engine.events.digest)
        assert digests[0] == digests[1], "the ranks have different event logs"
        return prompts, samples, counts, recorder

    def check_turns_equal_one_forward_pass(self):
        prompts, samples, _, _ = self.generate(3)
        ids = [prompt.token_ids for prompt in prompts]
        batch = batch_of(exchange(samples, self.device), ids, turns=True)
        assert len(batch) == 12 and batch.turns.max() == TURNS
        if samples:  # the requests of a trajectory are prefixes of its row
            for event in [event for _, events in self.engine.events.records for event in events]:
                if request := getattr(event, "request", None):
                    prompt, number, _ = map(int, request.name.split("."))
                    row = 4 * prompt + number
                    whole = np.concatenate([batch.prompt_ids[row], batch.response_ids[row]])
                    assert np.array_equal(whole[: len(request.token_ids)], request.token_ids)
            sample = samples[0]
            parts = [s.token_ids for s in sample.segments]
            assert np.array_equal(np.concatenate(parts), sample.token_ids)
        assert torch.equal(batch.mask > 0, batch.turns > 0) and 0 < batch.mask.mean() < 1
        rewards = torch.tensor([0.25 * TURNS] * 12)
        assert torch.allclose(
            torch.stack([r.sum() for r in batch.extra["turn_rewards"].split(batch.lengths.tolist())]), rewards
        )
        assert torch.equal(batch.score_details["score"], rewards)
        plan = plan_minibatch(batch, list(range(12)), dp=self.trainer.grid.dp, max_tokens=2048)
        (logprobs,) = self.trainer.forward(batch, [plan], ("logprobs",))
        gap = (logprobs - batch.rollout_logprobs)[batch.mask > 0].abs().max()
        assert gap <= 1e-4, gap
        assert gap <= 40 * bounds.of_logits(SIZES["num_hidden_layers"], SIZES["hidden_size"]), gap

    def check_random_answers_and_their_replay(self):
        per_trajectory = TURNS + 2
        num_prompts = max(1, self.num_events // (4 * per_trajectory))
        _, _, counts, recorder = self.generate(num_prompts)
        path = self.directory / "log.events"
        if counts is not None:
            assert counts["trajectories"] == 4 * num_prompts
            is_async = self.engine.config.async_scheduling
            store(path, self.sampling, self.engine.events.records, recorder.completions, is_async)
            log = load(path)
            turns = len(log.completions)
            assert turns == TURNS * 4 * num_prompts
            tokens = sum(len(c.token_ids) for c in log.completions.values())
            assert (path.stat().st_size - 8 * tokens) / turns < 1024
        digest, num_records = self.engine.events.digest, len(self.engine.events.records)
        replay = Replay(load(path)) if counts is not None else None
        self.engine.llm.reset_prefix_cache()
        assert self.engine.run(replay, self.sampling)
        assert self.engine.events.digest and digest
        if replay is not None:
            assert replay.different == [] and replay.num_tokens == tokens > 0
            assert len(self.engine.events.records) == num_records
            # A log-prob that differs in one bit is found.
            name, completion = next(iter(log.completions.items()))
            wrong = replace(completion, logprobs=np.nextafter(completion.logprobs, np.float32(1)))
            replay.receive(name, wrong)
            assert replay.different == [name]


def main(checkpoint: str, num_events: str, directory: str) -> None:
    with session(RANKS) as device:
        checks = Checks(checkpoint, int(num_events), directory, device)
        for name in [name for name in vars(Checks) if name.startswith("check_")]:
            getattr(checks, name)()
            print(name, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
