"""The gated delta rule in chunks against its recurrence, token by token."""

import pytest
import torch

from rl.models.delta_rule import CHUNK, Chunks, gated_delta_rule, normed
from tests import bounds

HEADS, KEY, VALUE = 2, 8, 4
LENGTHS = [3, CHUNK, 2 * CHUNK + 5, 1, CHUNK + 1]


def inputs(lengths: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys, values, decays, betas and initial states that require gradients."""
    generator, tokens = torch.Generator().manual_seed(0), sum(lengths)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    q, k = normed(random(tokens, HEADS, KEY)), normed(random(tokens, HEADS, KEY))
    v, g, beta = random(tokens, HEADS, VALUE), -random(tokens, HEADS).exp(), random(tokens, HEADS).sigmoid()
    initial = random(len(lengths), HEADS, KEY, VALUE)
    return [x.requires_grad_() for x in (q, k, v, g, beta, initial)]


def recurrence(q, k, v, g, beta, initial):
    """The formula of the module's docstring for one sequence; shapes without the sequences."""
    state, out = initial, []
    for t in range(len(q)):
        state = g[t].exp()[:, None, None] * state
        correction = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][..., None] * correction[:, None]
        out.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(out), state


def of_each(lengths, tensors, function):
    """Outputs and last states of the sequences, one after another."""
    *tokens, initial = tensors
    parts = zip(*(x.split(lengths) for x in tokens), initial)
    outputs, states = zip(*(function(*part) for part in parts))
    return torch.cat(outputs), torch.stack(states)


def gradients(tensors, results) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    total = sum((x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum() for x in results)
    return list(torch.autograd.grad(total, tensors))


def relative(found, expected) -> float:
    return max(
        float((a - b).detach().norm() / b.detach().norm()) for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("lengths", [LENGTHS, [7], [1, 1]])
def test_outputs_states_and_gradients_are_those_of_the_recurrence(lengths):
    tensors = inputs(lengths, torch.float64)
    *tokens, initial = tensors
    found = gated_delta_rule(*tokens, Chunks.of(lengths, torch.device("cpu")), initial)
    expected = of_each(lengths, tensors, recurrence)
    bound = bounds.of_sum(max(lengths) * KEY, torch.float64)
    assert relative(found, expected) <= bound
    assert relative(gradients(tensors, found), gradients(tensors, expected)) <= bound


def test_packed_sequences_do_not_see_each_other():
    """In float32, as in training: packed equals one call per sequence, with gradients."""
    tensors = inputs(LENGTHS, torch.float32)
    *tokens, initial = tensors
    packed = gated_delta_rule(*tokens, Chunks.of(LENGTHS, torch.device("cpu")), initial)

    def alone(q, k, v, g, beta, state):
        out, final = gated_delta_rule(q, k, v, g, beta, Chunks.of([len(q)], q.device), state[None])
        return out, final[0]

    expected = of_each(LENGTHS, tensors, alone)
    bound = bounds.of_sum(max(LENGTHS) * KEY, torch.float32)
    assert relative(packed, expected) <= bound
    assert relative(gradients(tensors, packed), gradients(tensors, expected)) <= bound


def test_a_sequence_continues_from_the_state_of_its_beginning():
    tensors = [x.detach() for x in inputs([CHUNK + 9], torch.float64)]
    *tokens, initial = tensors
    device = torch.device("cpu")
    whole, last = gated_delta_rule(*tokens, Chunks.of([CHUNK + 9], device), initial)
    first, state = gated_delta_rule(*(x[:20] for x in tokens), Chunks.of([20], device), initial)
    rest, final = gated_delta_rule(*(x[20:] for x in tokens), Chunks.of([CHUNK - 11], device), state)
    torch.testing.assert_close(torch.cat([first, rest]), whole)
    torch.testing.assert_close(final, last)
