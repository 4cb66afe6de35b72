"""Split of a mini-batch over the data parallel ranks, and of each rank's samples into micro-batches.

The plan is plain data that every rank computes identically from the lengths alone. All forward passes of a
step use the same plan. The log-probs before and in the first update therefore come from the same packed rows
and are bitwise equal.
"""

from rl.data.batch import Batch

MicroBatches = list[list[int]]
"""Sample indices of each micro-batch of one data parallel rank; an empty one holds only padding."""
MicroBatchPlan = list[MicroBatches]
"""The micro-batches of each data parallel rank, [dp]."""


def plan_micro_batches(
    lengths: list[int], *, indices: list[int], dp: int, max_tokens: int, samples_per_unit: int = 1
) -> MicroBatchPlan:
    """Return the micro-batches of each of `dp` ranks for the samples `indices`.

    lengths: tokens of each sample, prompt included. samples_per_unit: number of consecutive samples kept in
    one micro-batch, in order; `indices` must contain whole units.

    Samples are assigned longest first, each to the rank with the fewest tokens so far. A rank's samples form
    as few micro-batches of at most `max_tokens` as first-fit gives. Every rank has the same number of
    micro-batches, which pipeline and expert parallel schedules require.
    """
    if samples_per_unit > 1:
        size = samples_per_unit
        units = sorted({i // size for i in indices})
        assert len(units) * size == len(indices), "a mini-batch holds whole units"
        totals = [sum(lengths[k * size : (k + 1) * size]) for k in range(len(lengths) // size)]
        plan = plan_micro_batches(totals, indices=units, dp=dp, max_tokens=max_tokens)
        return [
            [[i for k in micro for i in range(k * size, (k + 1) * size)] for micro in rank] for rank in plan
        ]
    longest_first = sorted(indices, key=lambda i: (-lengths[i], i))
    ranks = _spread(longest_first, lengths, dp)
    count = max(len(_first_fit(samples, lengths, max_tokens)) for samples in ranks)
    # An even distribution over `count` micro-batches may exceed max_tokens where first-fit does not.
    return [_even_or_first_fit(samples, lengths, count, max_tokens) for samples in ranks]


def plan_minibatch(batch: Batch, samples: list[int], *, dp: int, max_tokens: int) -> MicroBatchPlan:
    """Return `plan_micro_batches` for these samples of a batch."""
    lengths, size = (batch.prompt_lengths + batch.lengths).tolist(), batch.samples_per_unit
    return plan_micro_batches(lengths, indices=samples, dp=dp, max_tokens=max_tokens, samples_per_unit=size)


def _spread(longest_first, lengths, bins):
    """Assign samples greedily to bins of about equal tokens; ties go to the bin with fewer samples."""
    loads, out = [(0, 0, b) for b in range(bins)], [[] for _ in range(bins)]
    for i in longest_first:
        tokens, count, b = min(loads)
        out[b].append(i)
        loads[b] = (tokens + lengths[i], count + 1, b)
    return out


def _first_fit(longest_first, lengths, max_tokens):
    bins: list[list[int]] = []
    room: list[int] = []
    for i in longest_first:
        b = next((b for b, free in enumerate(room) if lengths[i] <= free), len(bins))
        if b == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[b].append(i)
        room[b] -= lengths[i]
    return bins


def _even_or_first_fit(longest_first, lengths, count, max_tokens):
    even = _spread(longest_first, lengths, count)
    fits = all(sum(lengths[i] for i in b) <= max_tokens or len(b) == 1 for b in even)
    chosen = even if fits else _first_fit(longest_first, lengths, max_tokens)
    return [sorted(b) for b in chosen] + [[] for _ in range(count - len(chosen))]
