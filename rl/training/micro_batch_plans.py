"""Split of a mini-batch over the data parallel ranks, and of each rank's samples into micro-batches.

The plan is plain data that every rank computes identically from the lengths and groups alone. All forward
passes of a step use the same plan. For example, the pass before the first update and the first update itself
compute the same packed rows, so their log-probs are bitwise equal.

The plan balances cost (`Cost`), not tokens. Samples of a group with equal prompts share one copy of the
prompt in a micro-batch (`training.shared_prefix`). For example, eight answers of 100 tokens to a prompt of
200 tokens take 1,000 tokens instead of 2,400. Samples that can share a prompt stay in one micro-batch, with
two exceptions: they exceed the tokens of a row (`training.micro_batch_tokens` x cp), or the cost of the ranks
would otherwise be uneven. Below, a "group" is the samples that can share a prompt (`contexts`).

`rl.phases.minibatches` divides the batch of a step into mini-batches first; `rl.training.packing` packs each
micro-batch into a row.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rl.data.batch import Batch
from rl.models.layout import VOCAB, Weight
from rl.models.sizes import attention_widths, num_experts

if TYPE_CHECKING:  # runs without images do not import it
    from rl.models.tower_cost import TowerCost

MicroBatches = list[list[int]]
"""Sample indices of each micro-batch of one data parallel rank; an empty one holds only padding."""
MicroBatchPlan = list[MicroBatches]
"""The micro-batches of each data parallel rank, [dp]."""

MIN_GAIN = 0.02
"""Minimum relative reduction of the busiest rank's cost that justifies dividing a group. The prompt of a
divided group is computed more than once."""
MAX_TRIES = 16
"""Maximum number of full micro-batches that are skipped for one part; it bounds the time of a plan."""


def samples_of(plan: MicroBatchPlan) -> list[int]:
    """Return the samples of a plan, ascending."""
    return sorted(i for micro_batches in plan for micro in micro_batches for i in micro)


@dataclass(frozen=True)
class Cost:
    """Estimated operations of a packed row: linear in its tokens, and per pair of tokens in attention.

    The coefficients follow from the shape of the model, not from a measurement. Measured values would differ
    between ranks, and the ranks would have to agree on one of them. They would also differ between starts, so
    that each start would have other plans and other rounding. Only the ratios of the coefficients matter, and
    backward passes and recomputation multiply all coefficients by about the same factor.
    """

    per_token: int = 1
    """Operations per token in all layers, without attention between tokens."""
    per_answer_token: int = 0
    """Operations of the head per answer token; the head reads only positions that predict one."""
    per_pair: int = 0
    """Operations of attention per pair of a token and itself or an earlier token, in all layers."""
    tower: "TowerCost | None" = None
    """Operations of images; None for a model that reads none."""

    @classmethod
    def of_model(cls, hf: dict, weights: Iterable[Weight]) -> "Cost":
        """Return the cost of a forward pass. hf: the model's config.json; weights: from `rl.models`."""
        weights, layers, routed, head, tower = list(weights), 0, 0, 0, None
        if "vision_config" in hf:
            from rl.models.tower_cost import TowerCost

            tower = TowerCost.of_model(hf, weights)
            weights = [weight for weight in weights if not weight.megatron.startswith("visual.")]
        for weight in weights:
            if weight.expert is not None:
                routed += weight.num_elements
            elif weight.cut is not VOCAB:
                layers += weight.num_elements
            elif not weight.first_stage or weight.tied_to_head:
                head += weight.num_elements
        if routed:
            layers += routed * hf["num_experts_per_tok"] // num_experts(hf)
        return cls(2 * layers, 2 * head, 2 * hf["num_hidden_layers"] * sum(attention_widths(hf)), tower)

    @property
    def of_images(self) -> "Cost":
        """The cost of images alone."""
        return Cost(0, 0, 0, self.tower)


class Workload:
    """Cost and tokens of the samples of a batch.

    Args:
        prompts, answers: number of tokens of each sample's prompt and answer, int64 [N].
        groups: samples with the same number have the same prompt, int64 [N] (`contexts`).
        images: operations of the images of each sample's prompt, int64 [N]; None: there are none.
        shared_prefix: whether a micro-batch contains the prompt of a group once instead of once per sample.
    """

    def __init__(
        self,
        prompts: Tensor,
        answers: Tensor,
        groups: Tensor,
        *,
        cost: Cost,
        shared_prefix: bool = True,
        images: Tensor | None = None,
    ):
        own = (cost.per_token + cost.per_answer_token) * answers
        own = own + cost.per_pair * (answers * prompts + answers * (answers + 1) // 2)
        shared = cost.per_token * prompts + cost.per_pair * (prompts * (prompts + 1) // 2)
        shared = shared if images is None else shared + images
        if not shared_prefix:
            own, answers, groups = own + shared, answers + prompts, torch.arange(len(groups))
            shared, prompts = torch.zeros_like(own), torch.zeros_like(prompts)
        self.own_cost: list[int] = own.tolist()
        """Cost of each sample, without its prompt if prompts are shared."""
        self.own_tokens: list[int] = answers.tolist()
        self.prompt_cost: list[int] = shared.tolist()
        """Cost of each sample's prompt, once per group and micro-batch; 0 if prompts are not shared."""
        self.prompt_tokens: list[int] = prompts.tolist()
        self.groups: list[int] = groups.tolist()

    @classmethod
    def of_batch(cls, batch: Batch, *, cost: Cost, shared_prefix: bool) -> "Workload":
        images = None
        if cost.tower is not None and batch.prompts:
            per_prompt = [
                sum(cost.tower.operations(image.num_tokens) for image in prompt.images)
                for prompt in batch.prompts
            ]
            images = torch.tensor([per_prompt[group] for group in batch.groups.tolist()])
        return cls(
            batch.prompt_lengths,
            batch.lengths,
            contexts(batch),
            cost=cost,
            shared_prefix=shared_prefix,
            images=images,
        )

    def cost(self, samples: Sequence[int]) -> int:
        """Return the cost of a micro-batch."""
        prompts = {self.groups[i]: self.prompt_cost[i] for i in samples}
        return sum(self.own_cost[i] for i in samples) + sum(prompts.values())

    def tokens(self, samples: Sequence[int]) -> int:
        """Return the number of tokens of a micro-batch."""
        prompts = {self.groups[i]: self.prompt_tokens[i] for i in samples}
        return sum(self.own_tokens[i] for i in samples) + sum(prompts.values())


def contexts(batch: Batch) -> Tensor:
    """Return a number for each sample, int64 [N], equal for samples that share a copy of their prompt.

    Samples share a copy if they have the same group and equal prompts. A group may have several prompts: for
    example rows of a trajectory, or a self-taught policy with feedback. Numbers are in the order of the
    groups.
    """
    firsts: dict[tuple[int, bytes], int] = {}
    keys = [
        (group, firsts.setdefault((group, prompt.tobytes()), i))
        for i, (group, prompt) in enumerate(zip(batch.groups.tolist(), batch.prompt_ids))
    ]
    numbers = {key: number for number, key in enumerate(sorted(set(keys)))}
    return torch.tensor([numbers[key] for key in keys], dtype=torch.int64)


class _Unit(NamedTuple):
    """Consecutive samples that stay together. Cost and tokens are without the prompt that a group shares."""

    first: int
    group: int
    cost: int
    tokens: int
    prompt_cost: int
    prompt_tokens: int


class _GroupPart(NamedTuple):
    """Units of one group in one micro-batch, with their prompt."""

    cost: int
    tokens: int
    units: list[_Unit]


def plan_micro_batches(
    work: Workload,
    *,
    indices: Sequence[int],
    dp: int,
    max_tokens: int,
    preferred_tokens: int = 0,
    samples_per_unit: int = 1,
    multiple: int = 1,
) -> MicroBatchPlan:
    """Return the micro-batches of each of `dp` ranks for the samples `indices`.

    preferred_tokens: a micro-batch has more tokens only if a group's samples and their prompt do; 0: no
    preference. samples_per_unit: number of consecutive samples of a group kept in one micro-batch, in order;
    `indices` must contain whole units. multiple: the number of micro-batches is a multiple of this number
    (`Grid.micro_batch_multiple`). To reach it, micro-batches are divided further; if this is not enough,
    empty ones are added.

    Groups, or parts of them, are assigned in descending order of cost, each to the rank with the least cost
    so far. A rank gets as few micro-batches as best-fit packing finds. They have about equal cost, and at
    most `max_tokens` tokens unless one unit has more. Every rank has the same number of micro-batches, as
    pipeline and expert parallel schedules require. Each rank runs its micro-batches in descending order of
    cost, so that micro-batches that run at the same time on different ranks have similar costs. Samples of a
    group are adjacent.

    Takes O(N log N) for N samples.
    """
    units = _units(work, indices, samples_per_unit)
    ranks = [_by_group(members) for members in _spread_over_ranks(units, dp)]
    parts = [_parts(groups, max_tokens) for groups in ranks]
    if preferred_tokens:
        largest = max((part.tokens for of_rank in parts for part in of_rank), default=0)
        max_tokens = min(max_tokens, max(preferred_tokens, largest))
    count = next_multiple(max(len(_best_fit(of_rank, max_tokens)) for of_rank in parts), multiple)
    plan = [
        [_samples(micro, samples_per_unit) for micro in _micro_batches(of_rank, count, max_tokens)]
        for of_rank in parts
    ]
    return [sorted(rank, key=work.cost, reverse=True) for rank in plan]


def plan_minibatch(
    batch: Batch,
    samples: list[int],
    *,
    dp: int,
    max_tokens: int,
    shared_prefix: bool = True,
    multiple: int = 1,
) -> MicroBatchPlan:
    """Return `plan_micro_batches` for these samples of a batch."""
    work = Workload.of_batch(batch, cost=Cost(), shared_prefix=shared_prefix)
    return plan_micro_batches(
        work,
        indices=samples,
        dp=dp,
        max_tokens=max_tokens,
        samples_per_unit=batch.samples_per_unit,
        multiple=multiple,
    )


def next_multiple(count: int, multiple: int) -> int:
    """Return the smallest multiple that is not below `count`."""
    return -(-count // multiple) * multiple


def _units(work: Workload, indices: Sequence[int], size: int) -> list[_Unit]:
    if size == 1:
        firsts = sorted(indices)
        costs, tokens = work.own_cost, work.own_tokens
    else:
        firsts = sorted({i // size * size for i in indices})
        assert len(firsts) * size == len(indices), "a mini-batch holds whole units"
        costs, tokens = ([0] * len(work.groups) for _ in range(2))
        for first in firsts:
            costs[first] = sum(work.own_cost[first : first + size])
            tokens[first] = sum(work.own_tokens[first : first + size])
    return [
        _Unit(i, work.groups[i], costs[i], tokens[i], work.prompt_cost[i], work.prompt_tokens[i])
        for i in firsts
    ]


def _by_group(units: Iterable[_Unit]) -> list[list[_Unit]]:
    found: dict[int, list[_Unit]] = {}
    for unit in units:
        found.setdefault(unit.group, []).append(unit)
    return list(found.values())


def _spread_over_ranks(units: list[_Unit], dp: int) -> list[list[_Unit]]:
    """Return the units of each rank.

    Groups are divided into parts of at most a rank's mean cost, then half and a quarter of it, then into
    units. Each division is used only if it reduces the cost of the busiest rank by MIN_GAIN.
    """
    groups = _by_group(units)
    parts = _parts(groups)
    mean = sum(part.cost for part in parts) / dp
    chosen, least = _spread(parts, dp)
    for limit in (mean, mean / 2, mean / 4, 0.0):
        if all(part.cost <= limit or len(part.units) == 1 for part in parts):
            continue
        parts = _parts(groups, max_cost=limit)
        if sum(part.cost for part in parts) / dp > (1 - MIN_GAIN) * least:
            break  # even a perfect balance of these or smaller parts would gain too little
        spread, largest = _spread(parts, dp)
        if largest < (1 - MIN_GAIN) * least:
            chosen, least = spread, largest
    return [[unit for part in rank for unit in part.units] for rank in chosen]


def _parts(
    groups: list[list[_Unit]], max_tokens: float = math.inf, max_cost: float = math.inf
) -> list[_GroupPart]:
    """Return the parts of each group: as few as the limits allow, of about equal cost."""
    parts = []
    for members in groups:
        if len(members) == 1:
            [unit] = members
            parts.append(_GroupPart(unit.prompt_cost + unit.cost, unit.prompt_tokens + unit.tokens, members))
            continue
        cost, tokens = sum(unit.cost for unit in members), sum(unit.tokens for unit in members)
        prompt_cost, prompt_tokens = members[0].prompt_cost, members[0].prompt_tokens
        number = max(_ratio(tokens, max_tokens - prompt_tokens), _ratio(cost, max_cost - prompt_cost))
        if number <= 1:
            parts.append(_GroupPart(prompt_cost + cost, prompt_tokens + tokens, members))
            continue
        number, alone = int(min(number, len(members))), [_GroupPart(u.cost, u.tokens, [u]) for u in members]
        while True:
            pieces, _ = _spread(alone, number)
            sizes = [sum(part.tokens for part in piece) + prompt_tokens for piece in pieces]
            if max(sizes) <= max_tokens or number == len(members):
                break
            number += 1
        parts += [
            _GroupPart(
                prompt_cost + sum(part.cost for part in piece), size, [part.units[0] for part in piece]
            )
            for piece, size in zip(pieces, sizes)
        ]
    return parts


def _ratio(amount: float, room: float) -> float:
    """Return amount / room, rounded up; infinity if there is no room."""
    return math.ceil(amount / room) if room > 0 else math.inf


def _most_costly_first(parts: Iterable[_GroupPart]) -> list[_GroupPart]:
    return sorted(parts, key=lambda part: (-part.cost, part.units[0].first))


def _spread(parts: Iterable[_GroupPart], bins: int) -> tuple[list[list[_GroupPart]], int]:
    """Assign the parts greedily to bins of about equal cost; return the bins and the largest cost.

    Ties go to the bin with fewer parts.
    """
    out: list[list[_GroupPart]] = [[] for _ in range(bins)]
    heap = [(0, 0, b) for b in range(bins)]
    for part in _most_costly_first(parts):
        cost, count, b = heap[0]
        out[b].append(part)
        heapq.heapreplace(heap, (cost + part.cost, count + 1, b))
    return out, max(heap)[0]


def _best_fit(parts: list[_GroupPart], max_tokens: int) -> list[list[_GroupPart]]:
    """Return the bins of at most `max_tokens` that best-fit finds; a larger part has its own bin."""
    if sum(part.tokens for part in parts) <= max_tokens:
        return [parts]
    bins: list[list[_GroupPart]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for part in sorted(parts, key=lambda part: (-part.tokens, part.units[0].first)):
        at = bisect_left(rooms, (part.tokens, -1))
        if at < len(rooms):
            room, b = rooms.pop(at)
        else:
            room, b = max_tokens, len(bins)
            bins.append([])
        bins[b].append(part)
        insort(rooms, (room - part.tokens, b))
    return bins


def _micro_batches(parts: list[_GroupPart], count: int, max_tokens: int) -> list[list[_GroupPart]]:
    """Return `count` micro-batches, of about equal cost if `max_tokens` allows it."""
    bins = _evenly(parts, count, max_tokens) or _best_fit(parts, max_tokens)
    while len(bins) < count and len(fullest := max(bins, key=len, default=[])) > 1:
        bins.remove(fullest)
        bins += _spread(fullest, 2)[0]
    return bins + [[] for _ in range(count - len(bins))]


def _evenly(parts: list[_GroupPart], count: int, max_tokens: int) -> list[list[_GroupPart]] | None:
    """Assign each part to the least costly bin with room for it; return None if a part has no such bin."""
    if count == 1:
        return [parts]
    bins: list[list[_GroupPart]] = [[] for _ in range(count)]
    heap = [(0, 0, b) for b in range(count)]  # (cost, tokens, bin)
    for part in _most_costly_first(parts):
        full = []
        while heap and bins[heap[0][2]] and heap[0][1] + part.tokens > max_tokens:
            full.append(heapq.heappop(heap))
            if not heap or len(full) > MAX_TRIES:
                return None
        cost, tokens, b = heap[0]
        bins[b].append(part)
        heapq.heapreplace(heap, (cost + part.cost, tokens + part.tokens, b))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def _samples(micro: list[_GroupPart], size: int) -> list[int]:
    units = sorted((unit.group, unit.first) for part in micro for unit in part.units)
    return [i for _, first in units for i in range(first, first + size)]
