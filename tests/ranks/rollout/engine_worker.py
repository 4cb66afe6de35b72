"""One rank of test_engine.py: each check is a function; prints the names of passed checks.

engine_worker.py CHECKPOINT        two ranks, one replica of tp 2 and then nothing else in the process
"""

import sys

from rl.runtime.ranks import discover
from train_rl import prepare_environment

RANKS = discover()
prepare_environment(RANKS)

import itertools  # noqa: E402
import json  # noqa: E402
from collections import Counter  # noqa: E402
from dataclasses import replace  # noqa: E402
from types import SimpleNamespace  # noqa: E402
from unittest.mock import patch  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from rl.config.schema import Config, Data, Model, Rollout, Training, resolve  # noqa: E402
from rl.data.prompts import Prompt  # noqa: E402
from rl.engines.engines import build_policy  # noqa: E402
from rl.features.carry_over.quota_schedule import QuotaSchedule, extend  # noqa: E402
from rl.features.sampling_masks.engine import Masks  # noqa: E402
from rl.models import read_hf_config  # noqa: E402
from rl.refit.gather import RefitMismatch  # noqa: E402
from rl.refit.refit import check_refit, refit  # noqa: E402
from rl.rollout import engine as rollout_engine  # noqa: E402
from rl.rollout.engine import RolloutEngine  # noqa: E402
from rl.rollout.events import Add, Done, Event  # noqa: E402
from rl.rollout.exchange import exchange  # noqa: E402
from rl.rollout.queue import static_queue  # noqa: E402
from rl.rollout.sampled_group import SampledGroup  # noqa: E402
from rl.rollout.samples import Completion, Request, Sample, Segment  # noqa: E402
from rl.rollout.sampling import Sampling, seed_of  # noqa: E402
from rl.rollout.single_turn import SingleTurn  # noqa: E402
from rl.rollout.source import SampleSource  # noqa: E402
from rl.rollout.vllm_model import ServedModel  # noqa: E402
from rl.runtime.collectives import broadcast_object, gather_objects  # noqa: E402
from rl.runtime.session import session  # noqa: E402
from rl.training.grid import build_grid  # noqa: E402
from tests import bounds  # noqa: E402
from tests.checkpoints import SIZES  # noqa: E402

PLAIN = Sampling(3, 10, temperature=0.9)
PROMPTS = [np.arange(10, 10 + n, dtype=np.int32) for n in (3, 20, 7, 1)]
LONG_PROMPTS = [
    np.roll(np.arange(6, 102, dtype=np.int32).repeat(2), 7 * i)[: 130 + 5 * (i % 8)] for i in range(24)
]
"""Each fills four or five blocks of the KV cache, which the prefix cache keeps until they are evicted."""


class EngineSteps:
    """Records what the engine did, one list per engine step, while the block runs.

    Entries: ("add", request), ("preempt", request), ("schedule", request, tokens in this step, tokens before
    it) and, in the order of freed KV blocks, ("free", request, status, response tokens).
    """

    def __init__(self, engine: RolloutEngine):
        self.scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
        self.steps: list[list[tuple]] = [[]]

    def __enter__(self) -> list[list[tuple]]:
        names = ("add_request", "schedule", "_free_request")
        self.originals = {name: getattr(self.scheduler, name) for name in names}
        for name in self.originals:
            setattr(self.scheduler, name, getattr(self, name.strip("_")))
        return self.steps

    def __exit__(self, *_):
        for name in self.originals:
            delattr(self.scheduler, name)

    def add_request(self, request):
        self.steps[-1].append(("add", _external(request.request_id)))
        return self.originals["add_request"](request)

    def schedule(self, *args):
        computed = {id: request.num_computed_tokens for id, request in self.scheduler.requests.items()}
        plan = self.originals["schedule"](*args)
        hits = {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
        record: list[tuple] = [("preempt", _external(id)) for id in sorted(plan.preempted_req_ids or ())]
        for id, tokens in plan.num_scheduled_tokens.items():
            record.append(("schedule", _external(id), tokens, hits.get(id, computed[id])))
        self.steps.append(record)
        return plan

    def free_request(self, request, *args, **options):
        self.steps[-1].append(
            ("free", _external(request.request_id), request.status.name, request.num_output_tokens)
        )
        return self.originals["_free_request"](request, *args, **options)


class Fixed:
    """A source of given requests."""

    def __init__(self, requests: list[Request]):
        self.requests, self.received = requests, {}

    def next_events(self, num_live: int, step: int) -> list[Event]:
        if len(self.received) == len(self.requests):
            return [Done()]
        return [Add(request) for request in self.requests] if step == 0 else []

    def receive(self, name: str, completion: Completion) -> None:
        self.received[name] = completion


def _external(request_id: str) -> str:
    """Drop the random suffix that vLLM adds to a request's id on each rank."""
    return request_id.rpartition("-")[0]


class Checks:
    def __init__(self, checkpoint: str, device):
        self.config = resolve(
            Config(
                model=Model(path=checkpoint, dtype="float32"),
                data=Data(max_prompt_tokens=64),
                training=Training(),
                # A KV cache of 16 blocks, so that cached prefixes are evicted.
                rollout=Rollout(tp=2, max_response_tokens=64, max_concurrent_samples=12, cpu_kv_cache_mib=1),
            )
        )
        hf = read_hf_config(checkpoint)
        self.reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.trainer = build_policy(self.config, hf, build_grid(tp=1, pp=1, seed=1), device)
        model = ServedModel(checkpoint, "float32", max_tokens=256)
        self.engine = RolloutEngine(model, self.config.rollout, seed=1, device=device, parts=[Masks()])
        refit(self.trainer, self.engine)

    def samples(self, sampling: Sampling, seed: int = 0) -> dict:
        out = self.engine.generate(PROMPTS, sampling, [seed_of(seed, i) for i in range(len(PROMPTS))])
        return {(s.prompt, s.number): s for s in broadcast_object(out, types=(Sample, Segment))}

    @torch.no_grad()
    def logits(self, sample) -> torch.Tensor:
        """float32 [R, V] that the tokens of a sample were drawn from, before temperature."""
        prompt = PROMPTS[sample.prompt]
        ids = torch.tensor([[*prompt.tolist(), *sample.token_ids.tolist()]])
        return self.reference(ids).logits[0, len(prompt) - 1 : -1]

    def check_every_prompt_has_its_samples_and_they_differ(self):
        samples = self.samples(PLAIN)
        assert samples.keys() == {(p, n) for p in range(4) for n in range(3)}
        assert len({tuple(s.token_ids) for s in samples.values()}) > 8
        assert all(
            1 <= len(s.token_ids) <= 10 and len(s.logprobs) == len(s.token_ids) for s in samples.values()
        )

    def check_samples_do_not_depend_on_global_random_state_or_sleep(self):
        first = self.samples(PLAIN)
        torch.manual_seed(100 + RANKS.rank)
        self.engine.sleep()
        storages = [storage for storage, _ in self.engine.platform.cache.storages]
        assert storages and all(storage.nbytes() == 0 for storage in storages)
        self.engine.wake_weights()
        self.engine.wake_cache()
        assert sum(storage.nbytes() for storage in storages) > 1 << 19
        again, other = self.samples(PLAIN), self.samples(PLAIN, seed=1)
        assert all(np.array_equal(first[k].token_ids, again[k].token_ids) for k in first)
        assert any(not np.array_equal(first[k].token_ids, other[k].token_ids) for k in first)

    def check_samples_depend_neither_on_the_batch_nor_on_chunks(self):
        sampling = replace(PLAIN, top_p=0.95)
        first = self.samples(sampling)
        scheduler = self.engine.llm.llm_engine.engine_core.engine_core.scheduler
        for name, value in (("max_num_scheduled_tokens", 8), ("max_num_active_reqs", 2)):
            with patch.object(scheduler, name, value), EngineSteps(self.engine) as steps:
                again = self.samples(sampling)
            assert all(np.array_equal(first[k].token_ids, again[k].token_ids) for k in first), name
            sets = ([s[k].held("kept_ids") for k in first] for s in (first, again))
            assert all(map(np.array_equal, *sets)), name
            most = [sum(event[2] for event in step if event[0] == "schedule") for step in steps]
            assert max(most) <= (8 if name == "max_num_scheduled_tokens" else 40), most

    def check_logprobs_are_those_of_the_sampling_distribution(self):
        for sampling in (
            PLAIN,
            replace(PLAIN, top_k=5),
            replace(PLAIN, top_p=0.6),
            replace(PLAIN, min_p=0.1),
        ):
            for sample in self.samples(sampling).values():
                logits = self.logits(sample) / sampling.temperature
                probs = logits.softmax(-1)
                if sampling.top_k:
                    kept = logits >= logits.topk(sampling.top_k).values[:, -1:]
                elif sampling.top_p < 1:
                    ordered, order = probs.sort(descending=True)
                    kept = torch.zeros_like(probs, dtype=torch.bool).scatter(
                        1, order, ordered.cumsum(1) - ordered < sampling.top_p
                    )
                else:
                    kept = probs >= sampling.min_p * probs.amax(1, keepdim=True)
                expected = logits.masked_fill(~kept, float("-inf")).log_softmax(-1)
                found = expected[range(len(sample.token_ids)), sample.token_ids.astype(int)]
                error = bounds.of_logits(SIZES["num_hidden_layers"], SIZES["hidden_size"])
                difference = (found - torch.from_numpy(sample.logprobs)).abs().max()
                assert difference <= error * logits.abs().max(), sampling
                assert sample.held("kept_counts").tolist() == kept.sum(1).tolist(), sampling
                assert sample.held("kept_ids").tolist() == kept.nonzero()[:, 1].tolist(), sampling

    def check_greedy_takes_the_most_probable_token(self):
        for sample in self.samples(replace(PLAIN, temperature=0.0, samples_per_prompt=1)).values():
            assert self.logits(sample).argmax(-1).tolist() == sample.token_ids.tolist()

    def check_stops(self):
        long = self.samples(replace(PLAIN, temperature=0.0, samples_per_prompt=1))[0, 0]
        assert long.truncated == (len(long.token_ids) == 10 and long.token_ids[-1] != 1)
        third = int(long.token_ids[2])
        first_at = long.token_ids.tolist().index(third)
        stopped = self.samples(
            replace(PLAIN, temperature=0.0, samples_per_prompt=1, stop_token_ids=(third,))
        )[0, 0]
        assert stopped.token_ids.tolist() == long.token_ids[: first_at + 1].tolist() and not stopped.truncated
        tokenizer = self.engine.llm.get_tokenizer()
        text = tokenizer.decode([third])
        by_text = self.samples(replace(PLAIN, temperature=0.0, samples_per_prompt=1, stop=(text,)))[0, 0]
        assert by_text.token_ids.tolist() == stopped.token_ids.tolist() and not by_text.truncated

    def check_steps_are_scheduled_one_ahead(self):
        core = self.engine.llm.llm_engine.engine_core.engine_core
        assert core.step_fn == core.step_with_batch_queue and self.engine.runner.use_async_scheduling
        process, in_flight = core.scheduler.update_from_output, []

        def update_from_output(*args):
            in_flight.append(len(core.batch_queue))
            return process(*args)

        with patch.object(core.scheduler, "update_from_output", update_from_output):
            self.samples(PLAIN)
        assert in_flight.count(1) > 0.8 * len(in_flight) and not core.batch_queue

    def check_ranks_finish_and_abort_in_the_same_step(self):
        # Two of three generations are interrupted by the leader at a random record.
        # Responses end at a stop string, a stop token or their length.
        random = np.random.default_rng(7)
        ends = dict(max_tokens=16, stop=tuple("aeiou"), stop_token_ids=(50, 51))
        sampling = replace(PLAIN, temperature=2.0, **ends)
        interrupted, steps_of_all = [], []
        for number in range(24):
            prompts = [LONG_PROMPTS[i] for i in random.integers(0, len(LONG_PROMPTS), 6)]
            interrupt = _interrupt_at(random.integers(1, 20)) if number % 3 else None
            seeds = [seed_of("same step", number, i) for i in range(len(prompts))]
            with EngineSteps(self.engine) as steps, patch.object(rollout_engine, "INTERVAL", 1):
                out = self.engine.generate(prompts, sampling, seeds, interrupt=interrupt)
            records = gather_objects((steps, self.engine.events.digest, out is None))
            for step, (first, second) in enumerate(zip(records[0][0], records[1][0])):
                assert first == second, f"generation={number} step={step}: rank 0 {first}, rank 1 {second}"
            assert records[0] == records[1], f"generation {number}: {records}"
            interrupted.append(out is None)
            steps_of_all += steps
        # The comparison covered every kind of end, several aborts in one step, prefix hits and evictions.
        assert sum(interrupted) >= 8, interrupted
        events = [event for step in steps_of_all for event in step]
        freed = Counter(event[2] for event in events if event[0] == "free")
        assert min(freed[f"FINISHED_{end}"] for end in ("STOPPED", "LENGTH_CAPPED", "ABORTED")) >= 3, freed
        starts = Counter(event[3] for event in events if event[0] == "schedule" and event[2] > 1)
        assert starts[0] > len(LONG_PROMPTS) and starts[128] > len(LONG_PROMPTS), starts

    def check_a_grammar_holds_for_its_requests_only(self):
        properties = {"key": {"type": "string", "maxLength": 3}, "count": {"type": "integer", "maximum": 99}}
        schema = {"type": "object", "properties": properties, "required": ["key", "count"]}
        schema |= {"additionalProperties": False}
        tag = json.dumps({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}})
        sampling, received = replace(PLAIN, temperature=2.0), []
        for num_bound in (4, 0):
            bound = [Request(f"bound {i}", PROMPTS[1], i, 60, tag) for i in range(num_bound)]
            source = Fixed([*bound, *(Request(f"free {i}", PROMPTS[1], i, 20 + i) for i in range(4))])
            assert self.engine.run(source if self.engine.leads else None, sampling)
            digests = gather_objects(self.engine.events.digest)
            assert digests[0] == digests[1]
            received.append(broadcast_object({n: c.token_ids.tolist() for n, c in source.received.items()}))
        tokenizer, eos = self.engine.llm.get_tokenizer(), 1
        for name, ids in received[0].items():
            if name.startswith("free"):
                assert received[1][name] == ids
            elif ids[-1] == eos:
                value = json.loads(tokenizer.decode(ids[:-1]))
                assert set(value) == {"key", "count"} and value["count"] <= 99 and len(value["key"]) <= 3
        ends = [ids[-1] for name, ids in received[0].items() if name.startswith("bound")]
        assert eos in ends, received[0]
        # A turn that was aborted continues in its middle, with the tokens of the whole one.
        name = next(n for n, ids in received[0].items() if n.startswith("bound") and ids[-1] == eos)
        ids, begun = np.array(received[0][name], np.int32), 5
        context = np.concatenate([PROMPTS[1], ids[:begun]])
        rest = Request("rest", context, int(name.split()[1]), 60 - begun, tag, num_begun=begun)
        source = Fixed([rest])
        assert self.engine.run(source if self.engine.leads else None, sampling)
        if self.engine.leads:
            assert np.array_equal(source.received["rest"].token_ids, ids[begun:])

    def check_a_carried_sample_is_the_uninterrupted_one(self):
        whole = self.samples(PLAIN)
        groups = [SampledGroup.of(prompt_of(ids), PLAIN.samples_per_prompt) for ids in PROMPTS]
        polls = itertools.count()
        with patch.object(rollout_engine, "INTERVAL", 1):
            begun = self.carried(groups, is_met=lambda: next(polls) >= 4)
        lengths = [len(sample.token_ids) for group in begun for sample in group.samples]
        assert sum(len(group.unfinished) for group in begun) > 6 and 0 < min(lengths) <= 4
        ended = self.carried(begun, is_met=lambda: False)
        for place, group in enumerate(ended):
            for number, sample in enumerate(group.samples):
                expected = whole[place, number]
                assert np.array_equal(sample.token_ids, expected.token_ids)
                assert (sample.end == "length") == expected.truncated
                # The tokens so far are computed at once, not one by one.
                error = bounds.of_logits(SIZES["num_hidden_layers"], SIZES["hidden_size"])
                np.testing.assert_allclose(sample.logprobs, expected.logprobs, rtol=0, atol=8 * error)

    def carried(self, groups, is_met) -> list:
        """Return the groups after a generation that ends when `is_met` returns true on the leader."""
        schedule = QuotaSchedule(
            groups,
            set(),
            PLAIN,
            [seed_of(0, i) for i in range(len(groups))],
            queue=static_queue(len(groups), replica=0, num_replicas=1),
            quota=SimpleNamespace(is_met=is_met, note_complete=lambda *, is_due: None),
        )
        source = SampleSource(schedule, SingleTurn(PLAIN, capacity=12))
        assert self.engine.run(source if self.engine.leads else None, PLAIN)
        return extend(groups, exchange(schedule.samples, self.engine.device))

    def check_a_kept_cache_serves_carried_samples_only(self):
        engine, ids = self.engine, LONG_PROMPTS[0]
        with patch.object(engine, "keeps_cache", True), EngineSteps(engine) as steps:
            engine.weights_version = 5
            self.complete(Request("first", ids, 1, 4))
            engine.sleep()
            engine.wake_weights()
            engine.weights_changed()
            engine.weights_version = 6
            engine.wake_cache()
            self.complete(Request("carried", ids, 1, 4, first_version=5), Request("fresh", ids, 1, 4))
        engine.weights_version = -1
        starts = {e[1]: e[3] for step in steps for e in step if e[0] == "schedule" and e[2] > 1}
        assert starts == {"first": 0, "carried": 128, "fresh": 0}

    def complete(self, *requests):
        """Generate requests to their ends."""
        assert self.engine.run(Fixed(list(requests)) if self.engine.leads else None, PLAIN)

    def check_a_wrong_element_is_found_on_every_rank(self):
        check_refit(self.trainer, self.engine)
        weight = dict(self.engine.model.named_parameters())["model.layers.1.self_attn.qkv_proj.weight"]
        if RANKS.rank == 1:
            weight.data[3, 5] += 1e-6
        try:
            check_refit(self.trainer, self.engine)
            raise AssertionError("not found")
        except RefitMismatch as mismatch:
            # Row 3 of rank 1's queries: heads 2 and 3 of four are there, 32 channels each.
            assert "model.layers.1.self_attn.q_proj.weight[67, 5] on rank 1" in str(mismatch), mismatch
        refit(self.trainer, self.engine)
        check_refit(self.trainer, self.engine)

    def check_a_prompt_that_was_cached_is_computed_anew_after_a_refit(self):
        self.samples(PLAIN)
        with torch.no_grad():
            for parameter in [*self.trainer.model.parameters(), *self.reference.parameters()]:
                parameter.mul_(1.1)
        refit(self.trainer, self.engine)
        self.check_logprobs_are_those_of_the_sampling_distribution()


def prompt_of(token_ids: np.ndarray) -> Prompt:
    return Prompt(0, token_ids, "", "toy", None, {})


def _interrupt_at(record: int):
    """An interrupt that is true from this record on."""
    records = itertools.count()
    return lambda: next(records) >= record


def main(checkpoint: str) -> None:
    with session(RANKS) as device:
        checks = Checks(checkpoint, device)
        for name in [name for name in vars(Checks) if name.startswith("check_")]:
            getattr(checks, name)()
            print(name, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
