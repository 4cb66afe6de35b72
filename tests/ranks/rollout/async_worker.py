"""One rank of test_async_scheduling.py: the same generations by two engines, one of them scheduled ahead.

async_worker.py CHECKPOINT TP GENERATIONS [EP]

EP: ranks that share experts (`rollout.dp_attention`). The rounding of a token then depends on the number of
tokens in a step, so all requests of a generation begin together, and end by their length or by an abort. Half
of the generations take a step without tokens as vLLM's runner for GPUs, which then computes nothing.
"""

import sys

from rl.runtime.ranks import discover
from train_rl import prepare_environment

RANKS = discover()
prepare_environment(RANKS)

from collections import Counter  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from contextlib import contextmanager  # noqa: E402
from dataclasses import replace  # noqa: E402
from unittest.mock import patch  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402

from rl.config.schema import Config, Data, Model, Rollout, Training, resolve  # noqa: E402
from rl.engines.engines import build_policy  # noqa: E402
from rl.features.bitwise.engine import BitwiseEngine  # noqa: E402
from rl.features.sampling_masks.engine import Masks  # noqa: E402
from rl.models import read_hf_config  # noqa: E402
from rl.refit.refit import refit  # noqa: E402
from rl.rollout import engine as rollout_engine  # noqa: E402
from rl.rollout.dp_attention import DataParallelAttention  # noqa: E402
from rl.rollout.engine import RolloutEngine  # noqa: E402
from rl.rollout.events import Abort, Add, Done, Event, Weights  # noqa: E402
from rl.rollout.parts import EnginePart  # noqa: E402
from rl.rollout.samples import Completion, Request  # noqa: E402
from rl.rollout.sampling import Sampling, seed_of  # noqa: E402
from rl.rollout.vllm_model import ServedModel  # noqa: E402
from rl.runtime.collectives import gather_objects  # noqa: E402
from rl.runtime.session import session  # noqa: E402
from rl.training.grid import build_grid  # noqa: E402

KINDS = ("stream", "abort", "weights", "preempt", "interrupt", "sleep")
TOGETHER = ("together", "abort", "weights", "interrupt", "sleep")
"""Kinds for replicas that share experts."""
CAPACITY = 7
PROMPTS = [np.roll(np.arange(6, 102, dtype=np.int32).repeat(2), 7 * i)[: 100 + 9 * i] for i in range(6)]
"""They fill blocks of the KV cache, which later requests find in the prefix cache."""
PLAIN = Sampling(1, 24, 1.5, 0.98)


class Script:
    """A source that decides by the number of the engine step alone (`rl.rollout.events.Source`)."""

    def __init__(self, requests: list[Request], events: dict[int, list[Event]]):
        self._waiting, self._events = list(requests), dict(events)
        self._num_left = len(requests)
        self.received: dict[str, tuple] = {}

    def next_events(self, num_live: int, step: int) -> list[Event]:
        if not self._num_left:  # a refit is a collective, also of replicas that have nothing left to do
            left = [e for events in self._events.values() for e in events if isinstance(e, Weights)]
            return [*left, Done()]
        new, self._waiting = self._waiting[: CAPACITY - num_live], self._waiting[CAPACITY - num_live :]
        return [*map(Add, new), *(e for e in self._events.pop(step, []) if self._is_due(e))]

    def _is_due(self, event: Event) -> bool:
        return not isinstance(event, Abort) or event.name not in self.received

    def receive(self, name: str, completion: Completion) -> None:
        c = completion
        assert name not in self.received
        values = (c.token_ids, c.logprobs, c.weight_versions, *c.held.values())
        self.received[name] = (c.end, [value.tobytes() for value in values])
        self._num_left -= 1


class NoEnds(EnginePart):
    def request(self, engine, request, call) -> None:
        call.params.ignore_eos = True


class Pair:
    def __init__(self, checkpoint: str, tp: int, device, ep: int):
        self.kinds = TOGETHER if ep > 1 else KINDS
        # 16 blocks on each rank: enough for the requests that begin together, not for all cached prefixes.
        rollout = Rollout(
            tp=tp, max_response_tokens=64, max_concurrent_samples=CAPACITY, cpu_kv_cache_mib=2 // tp
        )
        if ep > 1:
            rollout = replace(rollout, ep=ep, dp_attention=True, cpu_kv_cache_mib=16)
        model = Model(path=checkpoint, dtype="float32")
        data = Data(max_prompt_tokens=192)
        self.config = resolve(Config(model=model, data=data, training=Training(), rollout=rollout))
        self.trainer = build_policy(
            self.config, read_hf_config(checkpoint), build_grid(tp=1, pp=1, seed=1), device
        )
        self.weights = [parameter.detach().clone() for parameter in self.trainer.model.parameters()]
        served = ServedModel(checkpoint, "float32", max_tokens=256)
        self.engines = [
            RolloutEngine(
                served,
                replace(rollout, async_scheduling=is_async),
                seed=1,
                device=device,
                name=f"async-{is_async}",
                parts=[Masks(), NoEnds(), DataParallelAttention()] if ep > 1 else [Masks(), BitwiseEngine()],
            )
            for is_async in (True, False)
        ]
        cores = [engine.llm.llm_engine.engine_core.engine_core for engine in self.engines]
        assert [core.batch_queue is not None for core in cores] == [True, False]
        self.seen: Counter[str] = Counter()

    @torch.no_grad()
    def give_weights(self, engine, version: int) -> None:
        for parameter, first in zip(self.trainer.model.parameters(), self.weights):
            parameter.copy_(first * (1 + 0.03 * (version % 7)))
        refit(self.trainer, engine)

    def compare(self, number: int) -> None:
        """Run a generation on both engines; the samples, and on every rank the log, must be equal."""
        kind = self.kinds[number % len(self.kinds)]
        random = np.random.default_rng(number)
        replica, together = self.engines[0].replica, self.kinds is TOGETHER
        size = CAPACITY if together or kind in ("abort", "weights") else 3 * CAPACITY
        size -= together and replica % 2  # replicas with different numbers of tokens
        is_text = (number + number // len(KINDS)) % 2  # each kind in turn with both
        stops = dict(stop=tuple("aeiou")) if is_text else dict(stop_token_ids=tuple(range(40, 60)))
        # Without stops requests decode until they need a second block of the KV cache.
        sampling = PLAIN if together or kind == "preempt" else replace(PLAIN, **stops)
        requests = [
            Request(
                f"{i}",
                PROMPTS[int(random.integers(6))],
                seed_of(number, i, replica),
                int(random.integers(10, 40) if together else random.integers(4, 40)),
            )
            for i in range(size)
        ]
        events: dict[int, list[Event]] = {}
        if kind == "abort":
            for i in range(size):
                events.setdefault(int(random.integers(1, 8)), []).append(Abort(f"{i}"))
        if kind == "weights":  # at the same steps on all replicas, because a refit is a collective
            events = {step: [Weights(100 + step)] for step in sorted({2, 3 + number % 5})}
        stop_at = int(random.integers(2, 12)) if kind == "interrupt" else 10**9
        results = [
            self.generate(engine, number, requests, events, sampling, stop_at) for engine in self.engines
        ]
        if kind != "interrupt":
            assert results[0] == results[1], f"generation {number}, {kind}"
            self.seen.update(end for end, _ in results[0].values())

    def generate(self, engine, number, requests, events, sampling, stop_at) -> dict:
        self.give_weights(engine, number)
        kind = self.kinds[number % len(self.kinds)]
        if kind == "sleep":
            engine.sleep()
            engine.wake_weights()
            engine.wake_cache()
        core = engine.llm.llm_engine.engine_core.engine_core
        pool, taken = core.scheduler.kv_cache_manager.block_pool, []
        if kind == "preempt":
            taken = pool.get_new_blocks(9)  # the others do not suffice for all requests
        script, records = Script(requests, events), iter(range(10**9))
        with (
            patch.object(rollout_engine, "INTERVAL", 1),
            _empty_steps(engine, computed=number % 2 == 0),
            _one_message_per_pass(engine),
        ):
            is_complete = engine.run(
                script if engine.leads else None,
                sampling,
                interrupt=lambda: next(records) >= stop_at,
                take_weights=lambda version: self.give_weights(engine, version),
            )
        pool.free_blocks(taken)
        assert not core.batch_queue and not core.scheduler.requests
        digests = gather_objects((engine.replica, engine.events.digest, is_complete))
        assert len({digest for digest in digests if digest[0] == engine.replica}) == 1
        return script.received


@contextmanager
def _empty_steps(engine: RolloutEngine, *, computed: bool) -> Iterator[None]:
    """Make a step without tokens compute a dummy token, or nothing as on CUDA."""
    execute, together = engine.runner.execute_model, engine.parts[-1]
    if computed or not isinstance(together, DataParallelAttention):
        yield
        return

    def execute_model(plan, *args):
        if plan.total_num_scheduled_tokens:
            return execute(plan, *args)
        with patch.object(engine.runner, "_dummy_run"):
            return execute(plan, *args)

    with patch.object(engine.runner, "execute_model", execute_model):
        together._computes_empty_steps = False
        yield
        together._computes_empty_steps = True


@contextmanager
def _one_message_per_pass(engine: RolloutEngine) -> Iterator[None]:
    """Compare the messages between replicas that share experts with the forward passes of this rank."""
    if not isinstance(engine.parts[-1], DataParallelAttention):
        yield
        return
    backend = engine.parts[-1]._group._get_backend(torch.device("cpu"))
    name, before = "_determine_batch_execution_and_padding", backend._get_sequence_number_for_group()
    with patch.object(engine.runner, name, side_effect=getattr(engine.runner, name)) as passes:
        yield
    messages = backend._get_sequence_number_for_group() - before
    # Others: before the first pass, and after the last one, where a replica may end later than another.
    assert 0 < messages <= passes.call_count + 4, (messages, passes.call_count)


def main(checkpoint: str, tp: str, generations: str, ep: str = "1") -> None:
    with session(RANKS) as device:
        pair = Pair(checkpoint, int(tp), device, int(ep))
        for number in range(int(generations)):
            pair.compare(number)
        if pair.engines[0].leads:
            ends = ("length", "abort", "stop")[: 2 if pair.kinds is TOGETHER else 3]
            assert all(pair.seen[end] >= 3 for end in ends), pair.seen
        print("equal", dict(pair.seen), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
