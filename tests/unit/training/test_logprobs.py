"""Log-probs and entropy of the chunked head against torch's log_softmax and autograd in float64."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from rl.data.batch import Batch
from rl.data.held import SAMPLING_MASKS, HeldColumn
from rl.features.sampling_masks.engine import columns_of
from rl.features.sampling_masks.trainer import SamplingMasks, masks_of
from rl.rollout.samples import Sample, Segment
from rl.training.logprobs import Softmax, linear_logprobs
from tests import bounds

T, H, V = 13, 8, 50


@pytest.fixture(scope="module")
def group():
    """A tensor parallel group of one rank."""
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1)


def inputs(*, rows=V, tokens=T, vocab_size=V, scale=1.0, dtype=torch.float32, seed=0):
    """hidden [tokens, H], weight [rows, H], targets [tokens] and the gradients of both outputs."""
    generator = torch.Generator().manual_seed(seed)
    hidden = (scale * torch.randn(tokens, H, generator=generator)).to(dtype)
    weight = (0.5 * torch.randn(rows, H, generator=generator)).to(dtype)
    targets = torch.randint(vocab_size, (tokens,), generator=generator)
    upstream = torch.randn(2, tokens, generator=generator)
    return hidden, weight, targets, upstream


def reference(hidden, weight, targets, upstream, *, temperature, vocab_size, keeps=None, cap=None):
    """(logprobs, entropy, gradient of hidden, gradient of weight) in float64 from all logits at once.

    keeps: bool [tokens, vocab_size], the tokens of each position's sampling mask."""
    hidden, weight = (t.double().requires_grad_() for t in (hidden, weight))
    logits = hidden @ weight[:vocab_size].T
    logits = (cap * torch.tanh(logits / cap) if cap else logits) / temperature
    dropped = torch.zeros_like(logits, dtype=torch.bool) if keeps is None else ~keeps
    log_p = torch.log_softmax(logits.masked_fill(dropped, -torch.inf), dim=-1).masked_fill(dropped, 0.0)
    logprobs = log_p.gather(1, targets[:, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    torch.autograd.backward([logprobs, entropy], list(upstream.double()))
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


def chunked(hidden, weight, targets, upstream, *, keeps=None, cap=None, **softmax):
    """The same four of linear_logprobs."""
    hidden, weight = (t.clone().requires_grad_() for t in (hidden, weight))
    masks = None if keeps is None else sampling_masks(keeps)
    logprobs, entropy, _ = linear_logprobs(
        hidden, weight, targets, Softmax(**softmax), logits_filter=masks, cap=cap
    )
    torch.autograd.backward([logprobs, entropy], list(upstream))
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


def some_masks(targets, *, vocab_size, seed=0):
    """Return sampling masks of about a quarter of the vocabulary as bool [tokens, vocab_size].

    The first position keeps the whole vocabulary, the second only its target, the third only tokens below
    20."""
    keeps = torch.rand(len(targets), vocab_size, generator=torch.Generator().manual_seed(seed)) < 0.25
    keeps[0], keeps[1], keeps[2, 20:] = True, False, False
    targets[2] = targets[2] % 20
    return keeps.scatter(1, targets[:, None], True)


def sampling_masks(keeps):
    """Return bool [tokens, vocab_size] as SamplingMasks; the whole vocabulary is an empty set."""
    is_cut = ~keeps.all(1)
    ids = (keeps & is_cut[:, None]).nonzero()[:, 1].numpy().astype(np.uint16)
    return SamplingMasks(ids, (keeps.sum(1) * is_cut).numpy())


def error_of(hidden, weight, *, temperature, vocab_size):
    """Return the rounding bound of a log-prob: a sum of H products and a sum of `vocab_size` terms."""
    return bounds.of_product(hidden, weight[:vocab_size].T) / temperature + bounds.of_sum(vocab_size)


def assert_same(found, expected, error):
    """Equal but for an error in the log-probs. Gradients are linear in the probabilities, which it scales."""
    for name, mine, theirs in zip(
        ("logprobs", "entropy", "grad hidden", "grad weight"), found, expected, strict=True
    ):
        limit = error * max(1.0, float(theirs.abs().max()))
        difference = float((mine.double() - theirs).abs().max())
        assert difference <= limit, f"{name}: {difference:.1e}, at most {limit:.1e}"


# One rank ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, T, 1000])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_values_and_gradients_are_those_of_log_softmax(group, temperature, chunk, is_masked, cap):
    data = inputs(rows=64)
    data[1][V:] = 100.0  # padding rows, which would take all probability
    keeps = some_masks(data[2], vocab_size=V) if is_masked else None
    head = dict(temperature=temperature, vocab_size=V)
    expected, error = reference(*data, **head, keeps=keeps, cap=cap), error_of(*data[:2], **head)
    found = chunked(*data, **head, group=group, chunk=chunk, keeps=keeps, cap=cap)
    assert_same(found, expected, error)
    assert (found[3][V:] == 0).all()
    hidden, weight, targets, _ = data
    logits = hidden.double() @ weight[:V].double().T
    logits = (cap * torch.tanh(logits / cap) if cap else logits) / temperature
    masks = None
    if keeps is not None:
        assert found[0][1] == found[1][1] == 0  # a set of one token
        logits, masks = logits.masked_fill(~keeps, -torch.inf), sampling_masks(keeps)
    hidden.requires_grad_()
    softmax = Softmax(**head, group=group, chunk=chunk)
    squares = linear_logprobs(hidden, weight, targets, softmax, logits_filter=masks, cap=cap)[2]
    torch.testing.assert_close(squares.double(), logits.softmax(-1).square().sum(-1), rtol=2 * error, atol=0)
    assert not squares.requires_grad


def test_tokens_that_were_given_keep_the_whole_vocabulary():
    sampled = [np.array([3, 4], np.int32), np.array([5], np.int32)]
    held = [columns_of([[1, 3], [4]], 300), columns_of([[2, 5, 7]], 300)]
    first, last = (
        Segment(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), turn=turn, held=columns)
        for turn, (ids, columns) in enumerate(zip(sampled, held))
    )
    given = Segment.given(np.array([8, 9], np.int32), version=0, turn=1, source="tool")
    sample = Sample(0, 0, (first, given, last))
    batch = Batch([np.array([1])], [sample.token_ids], torch.zeros(1, dtype=torch.int64), torch.zeros(1))
    batch.turns = torch.from_numpy(sample.turns)
    for name in SAMPLING_MASKS:
        values = sample.held(name)
        batch.held[name] = HeldColumn({}, torch.zeros(1), torch.zeros(1), values.dtype, local={0: values})
    masks = masks_of(batch, [0])
    assert masks.counts.tolist() == [2, 1, 0, 0, 3] and masks.ids.tolist() == [1, 3, 4, 2, 5, 7]
    assert masks.ids.dtype == np.uint16


def test_a_target_outside_its_set_is_found():
    targets = torch.arange(5)
    keeps = some_masks(targets, vocab_size=V)
    sampling_masks(keeps).check(targets.numpy())
    keeps[3, targets[3]] = False
    with pytest.raises(RuntimeError, match=r"1 of 5 tokens .* first token 3 at position 3"):
        sampling_masks(keeps).check(targets.numpy())


@pytest.mark.parametrize("only", [0, 1], ids=["logprobs", "entropy"])
def test_gradient_of_one_output_alone(group, only):
    hidden, weight, targets, upstream = inputs()
    upstream[1 - only] = 0
    expected = reference(hidden, weight, targets, upstream, temperature=0.7, vocab_size=V)[2:]
    error = error_of(hidden, weight, temperature=0.7, vocab_size=V)
    hidden.requires_grad_(), weight.requires_grad_()
    outputs = linear_logprobs(hidden, weight, targets, Softmax(0.7, V, group, 4))
    found = torch.autograd.grad(outputs[only], (hidden, weight), upstream[only])
    for mine, theirs in zip(found, expected):
        assert (mine.double() - theirs).abs().max() <= error * max(1.0, theirs.abs().max())


@pytest.mark.parametrize("chunk", [1, 1000])
def test_no_tokens_give_empty_outputs_and_zero_gradients(group, chunk):
    found = chunked(*inputs(tokens=0), temperature=1.0, vocab_size=V, group=group, chunk=chunk)
    assert [tuple(t.shape) for t in found] == [(0,), (0,), (0, H), (V, H)]
    assert (found[3] == 0).all()


@pytest.mark.parametrize("chunk", [3, 1000])
def test_bfloat16_within_its_rounding_error(group, chunk):
    """The projection is computed in bfloat16 and its sums in float32: one rounding to 1/256 of a logit."""
    data = inputs(dtype=torch.bfloat16)
    expected = reference(*data, temperature=1.0, vocab_size=V)
    found = chunked(*data, temperature=1.0, vocab_size=V, group=group, chunk=chunk)
    assert [t.dtype for t in found] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    for mine, theirs in zip(found, expected):
        assert (mine.double() - theirs).norm() <= bounds.of_sum(1, torch.bfloat16) * theirs.norm()


def test_bfloat16_logits_are_normalised_in_float32(group):
    hidden, weight, targets, _ = inputs(dtype=torch.bfloat16)
    # Eighths: sums are exact in float32, so that any order of them rounds to the same bfloat16.
    hidden, weight = ((8 * tensor).round() / 8 for tensor in (hidden, weight))
    expected = torch.log_softmax((hidden @ weight.T).float() / 0.7, -1)
    error = bounds.of_sum(V) * float(expected.abs().max())
    logprobs, entropy, _ = linear_logprobs(hidden, weight, targets, Softmax(0.7, V, group, T))
    torch.testing.assert_close(logprobs, expected.gather(1, targets[:, None]).squeeze(1), rtol=0, atol=error)
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1), rtol=0, atol=error)


def test_many_chunks_of_bfloat16_are_summed_in_float32(group):
    """4096 tokens of equal gradient; a bfloat16 sum would stop at 256 of them."""
    hidden = torch.ones(4096, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16)
    targets, upstream = (
        torch.zeros(4096, dtype=torch.int64),
        torch.stack([torch.ones(4096), torch.zeros(4096)]),
    )
    found = chunked(hidden, weight, targets, upstream, temperature=1.0, vocab_size=2, group=group, chunk=8)
    assert found[3].flatten().tolist() == [2048.0, -2048.0]


def test_logits_of_thousands_stay_finite(group):
    data = inputs(scale=1000.0)
    expected = reference(*data, temperature=1.0, vocab_size=V)
    assert expected[0].min() < -1000
    found = chunked(*data, temperature=1.0, vocab_size=V, group=group, chunk=4)
    assert all(t.isfinite().all() for t in found)
    error = error_of(*data[:2], temperature=1.0, vocab_size=V)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=0, atol=error)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=0, atol=error)


# Memory -----------------------------------------------------------------------------------------------------


class Results(TorchDispatchMode):
    """Records the number of elements of every tensor that an operation returns in this mode."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = out if isinstance(out, (tuple, list)) else (out,)
        self.sizes += [tensor.numel() for tensor in tensors if isinstance(tensor, torch.Tensor)]
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_exist_for_one_chunk_at_a_time(group, dtype):
    tokens, vocab_size, chunk = 512, 50_000, 64
    hidden, weight, targets, upstream = inputs(
        rows=vocab_size, tokens=tokens, vocab_size=vocab_size, dtype=dtype
    )
    hidden.requires_grad_(), weight.requires_grad_()
    with Results() as forward:
        outputs = linear_logprobs(hidden, weight, targets, Softmax(1.0, vocab_size, group, chunk))
    with Results() as backward:
        torch.autograd.backward(outputs[:2], list(upstream))
    assert weight.grad.abs().sum() > 0
    # Equality shows that the mode sees the logits.
    assert max(forward.sizes) == max(backward.sizes) == chunk * vocab_size


@pytest.mark.parametrize("chunk", [63, 64])
def test_logits_are_kept_only_for_a_single_chunk(group, chunk):
    tokens, vocab_size = 64, 5_000
    hidden, weight, targets, _ = inputs(rows=vocab_size, tokens=tokens, vocab_size=vocab_size)
    hidden.requires_grad_(), weight.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        linear_logprobs(hidden, weight, targets, Softmax(1.0, vocab_size, group, chunk))
    logits = [tokens * vocab_size] if chunk >= tokens else []
    assert sorted(kept) == sorted([hidden.numel(), weight.numel(), *[tokens] * 3, *logits])


def test_outputs_that_nothing_reads_are_not_computed(group):
    """Count operations on all logits, with and without entropy and sum of squares."""
    tokens, vocab_size = 16, 5_000
    hidden, weight, targets, upstream = inputs(rows=vocab_size, tokens=tokens, vocab_size=vocab_size)
    hidden.requires_grad_(), weight.requires_grad_()

    def count(outputs, num_used):
        softmax = Softmax(1.0, vocab_size, group, tokens)
        with Results() as forward:
            found = linear_logprobs(hidden, weight, targets, softmax, outputs=outputs)
        assert len(found) == len(outputs)
        with Results() as backward:
            torch.autograd.backward(found[:num_used], list(upstream)[:num_used])
        return tuple(mode.sizes.count(tokens * vocab_size) for mode in (forward, backward))

    # Forward: the product, minus the maximum, exp. Backward: the kept product, minus lse, exp, times the
    # gradient, the target.
    assert count(("logprobs",), 1) == (3, 5)
    # Forward also: the product with the logits. The loss uses log-probs only.
    assert count(("logprobs", "entropy"), 1) == (4, 5)
    assert count(("logprobs", "entropy"), 2) > (4, 5)
