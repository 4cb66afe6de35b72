"""One rank of test_invariance.py: gradients of mini-batches under random splits, and advantages of exchanged
samples.

    invariance_worker.py CASES.json OUT_DIR WORLD_SIZE [...]

CASES.json: {"losses": {name: overrides of the config}, "advantages": {name: overrides}}. What runs is the
code of a run, from `Phases` and the algorithms' own `step` down to the pure functions; only the engines are
toys. The ranks form a world of each size in turn, the first ranks alone where it is smaller: a process costs
seconds of imports, a world none. Each rank saves what it found to OUT_DIR/WORLD_SIZE.RANK.pt.

The toy model adds a table of the token before and a table of the place, row by row: the forward pass of a
token is bitwise the same in every micro-batch, and a parameter collects about ten tokens, too
few for float32 sums to depend on their order by more than 1e-7.
"""

import json
import os
import random
import re
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from rl.algorithms import load
from rl.config.schema import Config, load_config
from rl.data.batch import Batch
from rl.engines.engines import Engines
from rl.engines.memory import MemorySharing
from rl.faults.agreement import PhaseAgreement
from rl.faults.phase_tracker import PhaseTracker
from rl.objectives.rollout_correction import sequence_weights, token_weights
from rl.phases.minibatches import MinibatchPlan
from rl.phases.phases import Phases
from rl.phases.policy_gradient import policy_loss, token_selection
from rl.phases.step_record import StepRecord
from rl.rollout.batches import batch_of
from rl.rollout.exchange import exchange
from rl.rollout.samples import Sample, Segment
from rl.run_directory.progress import Progress
from rl.runtime.collectives import sum_over_world
from rl.runtime.device import Device
from rl.training.engine import UpdateResult
from rl.training.packing import MicroBatch, pack
from tests.records import MACHINE

CPU = Device(torch.device("cpu"), "gloo")
VOCAB, PLACES = 23, 40
MINIBATCHES = ((1, 7, 3, 2, 3), (6, 4, 1, 5))
"""Sizes of the groups in each of two mini-batches, cut as `Phases` cuts nine groups: 16 samples each."""
LAYOUT = re.compile(f"{MACHINE.pattern}|global_seqlen/|training/(imbalance|micro_batch|empty)")
"""Metrics that may differ between splits: the machine's, and how evenly the ranks share the tokens."""
HF = {"hidden_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 1, "vocab_size": VOCAB}
"""Shape of a model, for the cost of a micro-batch and the bounds of the checks."""
NUM_PROMPTS, NUM_SAMPLES = 8, 4
"""Numbers of prompts and of samples per prompt of a generation phase."""


# Engines ----------------------------------------------------------------------------------------------------


class Tables(torch.nn.Module):
    """Outputs of every response token, float32 [R], from the token before it and its place in the
    sequence."""

    def __init__(self, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.by_token, self.by_place, self.value, self.value_by_place = (
            torch.nn.Parameter(torch.randn(shape, generator=generator))
            for shape in ((VOCAB, VOCAB), (PLACES, VOCAB), (VOCAB,), (PLACES,))
        )

    def run(self, micro: MicroBatch) -> None:
        before, place = micro.tokens[0, micro.predict_at], micro.position_ids[0, micro.predict_at]
        log_p = (self.by_token[before] + self.by_place[place]).log_softmax(-1)
        micro.outputs["logprobs"] = log_p.gather(1, micro.targets[:, None])[:, 0]
        micro.outputs["entropy"] = -(log_p.exp() * log_p).sum(-1)
        micro.outputs["sum_p_squared"] = log_p.exp().square().sum(-1)
        micro.outputs["values"] = self.value[before] + self.value_by_place[place]


class ToyEngine:
    """The methods of a training engine that `Phases` calls.

    An update keeps the gradient, summed over ranks, and takes no step.
    """

    device = CPU

    def __init__(self, optimizer):
        self.spec = SimpleNamespace(optimizer=optimizer, has_values=False)
        self.grid = SimpleNamespace(dp=dist.get_world_size(), reports_results=True)
        self.weight_map = SimpleNamespace(hf=HF, weights=[], dtype=torch.float32, local=list)
        self.learned_map = self.weight_map
        self.chunks, self.wrapped = [SimpleNamespace(modules=list, post_process=False)], []
        self.shares_prompts, self.has_frozen_weights = True, False
        self.model, self.reference = Tables(seed=1), Tables(seed=2)
        self.version = self.num_updates = 0
        self.optimizer = SimpleNamespace(param_groups=[{"lr": 0.0}])
        self.gradients: list[dict[str, torch.Tensor]] = []

    def micro_batches(self, batch, plan):
        for samples in plan[dist.get_rank()]:
            micro = pack(batch, samples, multiple=1, device=CPU.torch)
            self.model.run(micro)
            yield micro

    @torch.no_grad()
    def forward(self, batch, plans, names, progress=None):
        out = torch.zeros(len(names), int(batch.lengths.sum()))
        for plan in plans:
            for micro in self.micro_batches(batch, plan):
                for row, name in zip(out, names):
                    row[micro.column_index] = micro.output(name)
        return tuple(sum_over_world(out, CPU.torch))

    def reload(self):
        """They are never away."""

    @contextmanager
    def reference_weights(self):
        self.model, self.reference = self.reference, self.model
        yield
        self.model, self.reference = self.reference, self.model

    def update(self, batch, plan, loss, *, lr, outputs=None, progress=None):
        self.optimizer.param_groups[0]["lr"] = lr
        gradient = {name: torch.zeros_like(p) for name, p in self.model.named_parameters()}
        sums: dict[str, float] = {}
        self.model.zero_grad()
        for micro in self.micro_batches(batch, plan):
            value, terms = loss(micro)
            value.backward()  # of an empty micro-batch too: Megatron's schedule does
            for name, term in ({"loss": value} | terms).items():
                assert not name.endswith("loss") or term.dtype == torch.float32, f"{name} is {term.dtype}"
                sums[name] = sums.get(name, 0.0) + float(term.detach().double())
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                gradient[name] = parameter.grad.clone()
            dist.all_reduce(gradient[name])
        self.gradients.append(gradient)
        self.num_updates += 1
        total = sum_over_world(torch.tensor(list(sums.values()), dtype=torch.float64), CPU.torch).tolist()
        return UpdateResult(dict(zip(sums, total)), grad_norm=0.0, has_moved=True)


def new_phases(config: Config, kind: type[Phases] = Phases) -> Phases:
    config.agreement.weights_every = 0  # of weights that a toy has not
    config.agreement.logprob_slack = 0.0  # no engine sampled the tokens
    engine, nowhere = ToyEngine(config.training.optimizer), open(os.devnull, "w")
    engines = Engines(dict.fromkeys(("policy", "critic", "implicit_reward"), engine))
    phases = kind(
        config,
        step=StepRecord(
            device=CPU,
            progress=Progress(enabled=False),
            watchdog=SimpleNamespace(tracker=PhaseTracker(config.watchdog.limits, nowhere)),
            agreement=PhaseAgreement(config, "", dist.group.WORLD),
        ),
        engines=engines,
        memory=MemorySharing(config, CPU, engines),
        draw=None,
        sampler=None,
        scorer=None,
    )
    phases.step.begin(1)
    return phases


# Gradients --------------------------------------------------------------------------------------------------


def mini_batches(config: Config) -> Batch:
    """The samples of both mini-batches, with every column that a policy loss reads; NaN where the mask is
    0."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.tensor([size for sizes in MINIBATCHES for size in sizes])
    count = int(sizes.sum())
    lengths = torch.randint(2, 28, (count,), generator=generator)
    lengths[[0, 6, 7, 25]] = 0
    lengths[[1, 9, 23, 31]] = 1

    def tokens(length):
        return torch.randint(VOCAB, (int(length),), generator=generator).int().numpy()

    batch = Batch(
        prompt_ids=[tokens(1 + i % 5) for i in range(count)],
        response_ids=[tokens(length) for length in lengths],
        groups=torch.arange(len(sizes)).repeat_interleave(sizes),
        truncated=torch.zeros(count, dtype=torch.bool),
        mask=(torch.rand(int(lengths.sum()), generator=generator) > 0.2).float(),
    )
    start = int(batch.offsets[12])
    batch.mask[start : start + int(lengths[12])] = 0.0  # no token of this sample counts
    fill_columns(batch, config, generator)
    return batch


def fill_columns(batch: Batch, config: Config, generator: torch.Generator) -> None:
    """Fill in log-probs near the toy model's, and advantages at random."""

    def noise(scale):
        return (
            torch.randn(len(batch.mask), generator=generator)
            .mul(scale)
            .masked_fill(batch.mask == 0, float("nan"))
        )

    model = Tables(seed=1)
    micro = pack(batch, list(range(len(batch))), multiple=1, device=CPU.torch)
    with torch.no_grad():
        model.run(micro)
    batch.old_logprobs = (micro.logprobs + noise(0.3)).clamp(max=-1e-3)
    batch.ref_logprobs = (micro.logprobs + noise(0.3)).clamp(max=-1e-3)
    batch.advantages = noise(1.0)
    pair = batch.old_logprobs, batch.old_logprobs + noise(0.3)
    if upper := config.rollout_correction.truncate_tokens:
        batch.extra["loss_weights"] = token_weights(*pair, batch.mask, upper=upper)
    if upper := config.rollout_correction.truncate_samples:
        batch.extra["loss_weights"] = sequence_weights(*pair, batch.lengths, batch.mask, upper=upper)


def random_plan(samples: range, world_size: int, rng: random.Random) -> list:
    """Return the samples in any order, in 1 to 5 micro-batches per rank. One micro-batch is left empty."""
    per_rank = rng.randint(2 if world_size == 1 else 1, 5)
    micros = [[] for _ in range(per_rank * world_size)]
    filled = rng.sample(micros, len(micros) - 1)
    for sample in rng.sample(samples, len(samples)):
        rng.choice(filled).append(sample)
    return [micros[rank * per_rank : (rank + 1) * per_rank] for rank in range(world_size)]


def plans_of(how: str, name: str, batch: Batch) -> list:
    """Micro-batches of both mini-batches."""
    first = sum(MINIBATCHES[0])
    parts = range(first), range(first, len(batch))
    if how == "whole":
        return [[[list(part)]] for part in parts]
    rng = random.Random(f"{name} {dist.get_world_size()}")
    return [random_plan(part, dist.get_world_size(), rng) for part in parts]


def gradients(name: str, config: Config) -> dict:
    """{split: gradients of both updates, means of the metrics over them, micro-batches without a sample}.
    "whole" is what the
    others are held against: one rank and one micro-batch for each update."""
    splits = (["whole"] if dist.get_world_size() == 1 else []) + ["random", "planned"]
    found = {}
    for how in splits:
        phases, batch = new_phases(config), mini_batches(config)
        planner = phases.updates._planner
        if how != "planned":
            planner._batch = lambda batch=batch: batch
            planner._plans = [MinibatchPlan(plan) for plan in plans_of(how, name, batch)]
        phases.update(batch, policy_loss(config), select_tokens=token_selection(config))
        plans = [plan.micro_batches for plan in planner.plans(batch)]
        empty = sum(not micro for plan in plans for rank in plan for micro in rank)
        metrics = {key: value for key, value in phases.metrics.items() if not LAYOUT.match(key)}
        found[how] = {"gradients": phases.engines.policy.gradients, "metrics": metrics, "empty": empty}
    return found


# Advantages -------------------------------------------------------------------------------------------------


class SampledRun(Phases):
    """Phases that spread samples over the ranks at random, score them by their tokens, and keep them instead
    of learning from them."""

    direct = False
    """Lay the batch out here instead of exchanging it."""
    drawn = 0
    trained: Batch

    def draw_prompts(self, number=0):
        self.drawn += NUM_PROMPTS
        return list(range(self.drawn - NUM_PROMPTS, self.drawn))

    def generate(self, prompts, *, round=0):
        prompt_ids = [np.arange(1 + p % 4, dtype=np.int32) for p in prompts]
        samples = [
            sample_of(prompts, i, number) for i in range(len(prompts)) for number in range(NUM_SAMPLES)
        ]
        if self.direct:
            batch = Batch(
                prompt_ids=[prompt_ids[s.prompt] for s in samples],
                response_ids=[s.token_ids for s in samples],
                groups=torch.tensor([s.prompt for s in samples]),
                truncated=torch.tensor([s.truncated for s in samples]),
                rollout_logprobs=torch.from_numpy(np.concatenate([s.logprobs for s in samples])),
            )
        else:
            # Any rank may hold any sample, in any order; the last of four holds none.
            rng = random.Random(f"owners {round}")
            owners = [rng.randrange(min(dist.get_world_size(), 3)) for _ in samples]
            mine = [sample for sample, owner in zip(samples, owners) if owner == dist.get_rank()]
            batch = batch_of(
                exchange(rng.sample(mine, len(mine)), self.step.device),
                prompt_ids,
                samples_per_prompt=NUM_SAMPLES,
            )
        batch.mask = torch.from_numpy(np.concatenate(batch.response_ids) % 5 != 0).float()
        return batch

    def score_samples(self, batch):
        sums = torch.tensor([float(ids.sum()) for ids in batch.response_ids])
        batch.scores = sums % 3 / 2
        batch.rewards = batch.scores.clone()
        batch.score_details = {"short": (batch.lengths < 9).float(), "even": (sums % 2 == 0).float()}
        batch.score_details["failed"] = torch.zeros(len(batch))

    def greedy_rewards(self, prompts):
        return torch.tensor([p % 3 / 2 for p in prompts])

    def update(self, batch, loss, *, select_tokens=None):
        self.trained = batch

    def update_critic(self, batch):
        assert "returns" in batch.extra

    def update_implicit_reward(self, batch, loss):
        assert "labels" in batch.extra


def sample_of(prompts: list[int], i: int, number: int) -> Sample:
    """A response that depends on the prompt and the sample's number alone; every eleventh one is empty."""
    rng = np.random.default_rng((prompts[i], number))
    length = 0 if (prompts[i] * NUM_SAMPLES + number) % 11 == 5 else int(rng.integers(1, 25))
    logprobs = -rng.gamma(2.0, 1.0, length).astype(np.float32)
    token_ids = rng.integers(VOCAB, size=length).astype(np.int32)
    segment = Segment(token_ids, logprobs, np.zeros(length, np.int32))
    return Sample(i, number, (segment,), "length" if length > 20 else "stop")


def trained_batch(config: Config, *, direct: bool) -> dict:
    phases = new_phases(config, SampledRun)
    phases.direct = direct
    algorithm = load(config.algorithm)
    algorithm.learn(phases, algorithm.collect(phases))
    batch = phases.trained
    assert batch.advantages.dtype == torch.float32
    return {
        "tokens": torch.from_numpy(np.concatenate(batch.response_ids)),
        "lengths": batch.lengths,
        "truncated": batch.truncated,
        "mask": batch.mask,
        "rollout_logprobs": batch.rollout_logprobs,
        "advantages": batch.advantages,
        "returns": batch.extra.get("returns", torch.zeros(0)),
    }


def main(cases: str, out_dir: str, *world_sizes: str) -> None:
    rank, toy = int(os.environ["RANK"]), ["model.path=toy", "data.train=toy.jsonl"]
    losses, advantages = (
        {
            name: load_config(None, toy + keys)
            for name, keys in json.loads(Path(cases).read_text())[part].items()
        }
        for part in ("losses", "advantages")
    )
    for world_size in map(int, world_sizes):
        if rank >= world_size:
            continue
        # A file for a store: rank 0 leaves one world for the next while others may still be about to leave.
        dist.init_process_group(
            "gloo", init_method=f"file://{out_dir}/store.{world_size}", rank=rank, world_size=world_size
        )
        ways = [True, False] if world_size == 1 else [False]
        results = {
            "losses": {name: gradients(name, config) for name, config in losses.items()},
            "advantages": {
                name: {
                    ("direct" if direct else "exchanged"): trained_batch(config, direct=direct)
                    for direct in ways
                }
                for name, config in advantages.items()
            },
        }
        torch.save(results, Path(out_dir, f"{world_size}.{rank}.pt"))
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
