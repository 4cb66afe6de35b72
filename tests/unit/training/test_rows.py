"""Both descriptions of a row give each token the same keys."""

import random

import numpy as np
import torch

from rl.training.rows import MASKED_TOKENS, RowGroup, SelectRows, ranges, row_attention, segments, select_rows

CPU = torch.device("cpu")


def rows(count=60):
    """Yield rows of random groups of all sizes, ordered as in `pack`."""
    rng = random.Random(7)
    for _ in range(count):
        longest = rng.choice((3, 20, 150))
        sizes = [[rng.randint(1, longest)] for _ in range(rng.randint(0, 4))]
        for _ in range(rng.randint(0 if sizes else 1, 5)):
            sizes.append([rng.randint(1, longest) for _ in range(rng.randint(2, 5))])
        sizes.sort(key=lambda lengths: (len(lengths) > 1, sum(lengths)))
        groups, end = [], 0
        for prompt, *answers in sizes:
            groups.append(RowGroup(end, prompt, tuple(sorted(answers))))
            end = groups[-1].end
        yield groups, end


def expected_mask(groups, end):
    """Return bool [T, T]: whether a query attends to a key."""
    mask = np.zeros((end, end), bool)
    for group in groups:
        for start, length in zip(group.starts, group.segments):
            own = slice(start, start + length)
            mask[own, group.start : group.start + group.prompt] = True
            mask[own, own] = np.tril(np.ones((length, length)))
    return mask


def test_runs_and_shared_prompts_cover_the_mask_once():
    masked = shared = several = 0
    for groups, end in rows():
        found = np.zeros((end, end), int)
        keys = {name: torch.from_numpy(array) for name, array in segments(groups).items()}
        row = row_attention(groups, keys, CPU)
        for run in row.runs:
            for k in range(run.count):
                part = slice(run.start + k * run.length, run.start + (k + 1) * run.length)
                if run.mask is None:
                    found[part, part] += np.tril(np.ones((run.length, run.length), int))
                else:
                    found[part, part] += run.mask[k, 0].numpy() == 0
                    assert run.length <= MASKED_TOKENS
        for part in row.prefixes:
            found[part.start : part.end, part.first : part.last] += 1
        assert np.array_equal(found, expected_mask(groups, end))
        masked += sum(run.mask is not None for run in row.runs)
        several += sum(run.count > 1 for run in row.runs)
        shared += len(row.prefixes)
    assert min(masked, shared, several) > 10  # every case occurs


def test_segments_aligned_at_the_bottom_right_give_the_mask():
    for groups, end in rows():
        arrays = segments(groups)
        index = arrays["kv_index"] if len(arrays["kv_index"]) else np.arange(end)
        found = np.zeros((end, end), int)
        bounds = zip(
            *(np.stack([arrays[n][:-1], arrays[n][1:]], 1) for n in ("cu_seqlens_q", "cu_seqlens_kv"))
        )
        for (q, q_end), (k, k_end) in bounds:
            keys = k_end - k
            for query in range(q_end - q):
                seen = keys - (q_end - q) + query + 1
                np.add.at(found[q + query], index[k : k + seen], 1)
        assert np.array_equal(found, expected_mask(groups, end))
        row = row_attention(groups, {name: torch.from_numpy(array) for name, array in arrays.items()}, CPU)
        assert (row.kv_index is None) == (not any(group.answers for group in groups))
        assert row.max_seqlen_q == np.diff(arrays["cu_seqlens_q"]).max()
        assert row.max_seqlen_kv == np.diff(arrays["cu_seqlens_kv"]).max()


def test_on_cuda_no_group_is_computed_with_a_mask():
    groups = [RowGroup(0, 3, (2, 2)), RowGroup(7, 4, (1, 2))]
    keys = {name: torch.from_numpy(array) for name, array in segments(groups).items()}
    assert len(row_attention(groups, keys, CPU).runs) == 1
    row = row_attention(groups, keys, torch.device("cuda"))
    assert [(run.start, run.count, run.length) for run in row.runs] == [
        (0, 1, 3),
        (3, 2, 2),
        (7, 1, 4),
        (11, 1, 1),
        (12, 1, 2),
    ]
    assert len(row.prefixes) == 2


def test_ranges_are_concatenated():
    assert ranges(np.array([5, 0, 2]), np.array([2, 0, 3])).tolist() == [5, 6, 2, 3, 4]
    assert ranges(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []


def test_gradients_of_selected_rows_are_added_in_order_and_rounded_once():
    generator = torch.Generator().manual_seed(1)
    index = torch.randint(0, 9, (200,), generator=generator)  # of 11 elements: two are never selected
    upstream = torch.randn(200, 3, 4, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(11, 3, 4, generator=generator).to(dtype).requires_grad_()
        found = SelectRows.apply(x, index)
        assert torch.equal(found, x[index])
        (gradient,) = torch.autograd.grad(found, x, upstream.to(dtype))
        sums = torch.zeros(11, 3, 4)
        for place, grad in zip(index.tolist(), upstream.to(dtype).float()):
            sums[place] += grad
        assert torch.equal(gradient, sums.to(dtype))


def test_rows_on_a_gpu_have_this_gradient():
    """The rehearsal refuses torch's index_select there (tests/rehearsal/cuda_stand_in.py)."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    x = torch.ones(4, 2, requires_grad=True)
    selected = select_rows(x.as_subclass(OnGpu), torch.zeros(3, dtype=torch.int64))
    assert type(selected.grad_fn).__name__ == "SelectRowsBackward"
