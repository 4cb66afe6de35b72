"""Plans of micro-batches: balanced by cost, groups together, equal counts on all ranks."""

import random

import pytest
import torch

from rl.models import architecture
from rl.training.micro_batch_plans import Cost, Workload, plan_micro_batches
from tests import timing
from tests.checkpoints import SIZES

TOKENS = Cost()
SQUARE = Cost(per_token=10, per_answer_token=3, per_pair=1)


def work_of(prompts, answers, groups=None, cost=TOKENS, shared=True):
    groups = range(len(prompts)) if groups is None else groups
    return Workload(*map(torch.tensor, (prompts, answers, list(groups))), cost=cost, shared_prefix=shared)


def trials(size=1, count=200):
    """Yield (workload, indices to plan, options): random units, some much longer than a micro-batch."""
    rng = random.Random(f"units of {size}")
    for number in range(count):
        max_tokens = rng.randint(1, 200)
        longest = rng.choice((1, max_tokens // (2 + size) + 1, max_tokens, 3 * max_tokens))
        prompts, answers, groups = [], [], []
        for group in range(rng.randint(1, 30 // size)):
            prompt = rng.randint(1, longest)
            for _ in range(size * rng.randint(1, 5)):
                prompts.append(prompt)
                answers.append(rng.randint(0, longest))
                groups.append(group)
        units = range(0, len(prompts), size)
        drawn = rng.sample(units, rng.randint(1, len(units)))
        indices = [i for first in drawn for i in range(first, first + size)]
        options = dict(dp=rng.randint(1, 9), max_tokens=max_tokens)
        yield work_of(prompts, answers, groups, SQUARE, number % 4 > 0), indices, options


@pytest.mark.parametrize("size", [1, 2, 3])
def test_properties_of_every_plan(size):
    exceeding = several = empty = divided = 0
    for work, indices, options in trials(size):
        plan = plan_micro_batches(work, indices=indices, samples_per_unit=size, **options)
        assert len(plan) == options["dp"] and len({len(rank) for rank in plan}) == 1
        # The busiest rank exceeds the mean by at most one group.
        costs = [[work.cost(micro) for micro in rank] for rank in plan]
        members = {}
        for i in indices:
            members.setdefault(work.groups[i // size * size], []).append(i)
        most = max(work.cost(samples) for samples in members.values())
        assert max(map(sum, costs)) <= sum(map(sum, costs)) / len(plan) + most
        assert all(of_rank == sorted(of_rank, reverse=True) for of_rank in costs)
        found = []
        for micro in (micro for rank in plan for micro in rank):
            # Groups are adjacent, because their numbers ascend with the samples'; units are whole.
            assert micro == sorted(micro) and len(micro) % size == 0
            starts = micro[::size]
            assert micro == [i for start in starts for i in range(start, start + size)]
            assert all(start % size == 0 for start in starts)
            tokens = work.tokens(micro)
            assert tokens <= options["max_tokens"] or len(micro) == size
            exceeding += tokens > options["max_tokens"]
            several += len(micro) > size
            empty += not micro
            found += micro
        assert sorted(found) == sorted(indices)
        divided += sum(
            len(plan) > 1 and not any(set(s) <= set(m) for r in plan for m in r) for s in members.values()
        )
    assert min(exceeding, several, empty, divided) > 50  # every case occurs


def test_a_plan_depends_on_its_samples_alone():
    rng = random.Random(5)
    for work, indices, options in trials(count=50):
        expected = plan_micro_batches(work, indices=indices, **options)
        assert plan_micro_batches(work, indices=rng.sample(indices, len(indices)), **options) == expected
        for i in set(range(len(work.groups))) - set(indices):
            work.own_cost[i] += 17
            work.own_tokens[i] += 17
        assert plan_micro_batches(work, indices=indices, **options) == expected


def plan(answers, dp, max_tokens, prompts=None, groups=None, unit=1, multiple=1, preferred=0, **options):
    work = work_of(prompts or [0] * len(answers), answers, groups, **options)
    limits = dict(max_tokens=max_tokens, preferred_tokens=preferred, samples_per_unit=unit, multiple=multiple)
    return plan_micro_batches(work, indices=range(len(answers)), dp=dp, **limits)


def test_plans_by_hand():
    # A rank with a long sample gets fewer other samples.
    assert plan([12, 4, 3, 5], 2, 100) == [[[0]], [[1, 2, 3]]]
    # With more ranks than samples some ranks have an empty micro-batch.
    assert plan([5, 9], 4, 10) == [[[1]], [[0]], [[]], [[]]]
    # A multiple of micro-batches: samples are divided further, and what is missing is empty.
    assert plan([12, 4, 3, 5], 1, 100, multiple=3) == [[[0], [1, 2], [3]]]
    assert [len(rank) for rank in plan([9, 3, 2], 2, 9, multiple=4)] == [4, 4]
    # Equal samples are distributed evenly.
    sizes = [[len(micro) for micro in rank] for rank in plan([10] * 8, 2, 20)]
    assert sizes == [[2, 2], [2, 2]]
    # A rank's micro-batches are about equally long; best-fit alone gives 20 and 4 tokens.
    [rank] = plan([4] * 6, 1, 20)
    assert [len(micro) for micro in rank] == [3, 3]
    # An even split gives 3 + 2 + 2 and 3 + 2, which exceeds 6; best-fit gives 3 + 3 and 2 + 2 + 2.
    assert plan([3, 3, 2, 2, 2], 1, 6) == [[[0, 1], [2, 3, 4]]]
    # By cost, not by tokens: an answer of 8 tokens has 36 pairs, 24 answers of 1 have 24.
    assert plan([8, *[1] * 8], 2, 100) == [[[0]], [[1, 2, 3, 4, 5, 6, 7, 8]]]
    assert plan([8, *[1] * 24], 2, 100, cost=Cost(1, 0, 1)) == [[[0, 23]], [[*range(1, 23), 24]]]


def test_a_group_shares_its_prompt_where_it_fits():
    two_groups = dict(prompts=[50] * 8, groups=[0] * 4 + [1] * 4)
    # 50 + 4 * 10 tokens each: groups stay together, although 4 * 60 would exceed the limit.
    assert plan([10] * 8, 2, 90, **two_groups) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    # With fewer preferred tokens a rank has more micro-batches, but a group still shares its prompt.
    assert plan([10] * 8, 1, 500, **two_groups) == [[[0, 1, 2, 3, 4, 5, 6, 7]]]
    assert plan([10] * 8, 1, 500, **two_groups, preferred=60) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    # One token too many: each group is divided evenly.
    assert plan([10] * 8, 2, 89, **two_groups) == [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]
    # With a prompt per sample, one sample of 60 tokens fits.
    assert [len(micro) for micro in plan([10] * 8, 2, 90, **two_groups, shared=False)[0]] == [1] * 4
    # A group is divided if other ranks would be idle otherwise.
    assert plan([10] * 4, 2, 1000, prompts=[5] * 4, groups=[7] * 4) == [[[0, 3]], [[1, 2]]]
    # It is not divided if its prompt has nearly all of the cost.
    assert plan([1] * 4, 2, 1000, prompts=[500] * 4, groups=[7] * 4) == [[[0, 1, 2, 3]], [[]]]


@pytest.mark.parametrize("indices", [[0, 1, 2], [1, 2], [0, 2, 3]])
def test_part_of_a_pair_is_refused(indices):
    with pytest.raises(AssertionError, match="whole units"):
        plan_micro_batches(
            work_of([0] * 6, [5] * 6), indices=indices, dp=1, max_tokens=100, samples_per_unit=2
        )


def test_plan_takes_linear_time_in_ranks_and_samples():
    def make(dp):
        rng = random.Random(dp)
        groups = [k // 8 for k in range(4 * dp)]
        prompts = [10 + g % 50 for g in groups]
        return dp, work_of(prompts, [int(400 * rng.random() ** 3) + 1 for _ in groups], groups, SQUARE)

    def call(made):
        dp, work = made
        plan_micro_batches(work, indices=range(4 * dp), dp=dp, max_tokens=500)
        plan_micro_batches(work, indices=range(4 * dp), dp=1, max_tokens=500)

    timing.assert_linear(call, make, 4096)


def test_cost_follows_the_shape_of_the_model():
    hf = SIZES | {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 64, "tie_word_embeddings": True}
    weights = architecture(hf).weights(hf)
    cost = Cost.of_model(hf, weights)
    total = sum(weight.num_elements for weight in weights)
    embedding = hf["vocab_size"] * hf["hidden_size"]
    assert cost.per_answer_token == 2 * embedding and cost.per_token == 2 * (total - embedding)
    width = hf["num_attention_heads"] * (hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])
    assert cost.per_pair == 4 * hf["num_hidden_layers"] * width
    untied = hf | {"tie_word_embeddings": False}
    assert Cost.of_model(untied, architecture(untied).weights(untied)) == cost
