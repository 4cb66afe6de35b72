"""Asynchronous scheduling of the engine gives bitwise the samples of an engine without it, on two real ranks.

Half of the generations end at stop strings, the others at stop tokens. In turn they are streams of requests,
aborted by name, given other weights between two steps, preempted because the KV cache is full, interrupted,
or begun after a sleep; every one begins with other weights. Tokens, log-probs, versions and sampling masks
are compared, and the event log and all completions between the ranks of a replica. The overlap on a GPU is
not covered: a CPU computes a step when it is scheduled, but the schedule, the order of outputs and the
placeholders of tokens are the same as on CUDA.
"""

from pathlib import Path

import pytest

from tests.checkpoints import save_qwen2, save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "async_worker.py"
KINDS = ("stream", "abort", "weights", "preempt", "interrupt", "sleep")
"""Kinds of generations, in the worker's order."""


@pytest.mark.parametrize(
    "tp, generations",
    [
        (2, len(KINDS)),
        pytest.param(2, 50, marks=pytest.mark.slow),
        pytest.param(1, 50, marks=pytest.mark.slow),
    ],
)
def test_samples_are_those_of_steps_in_turn(tmp_path, tp, generations):
    checkpoint = save_qwen2(tmp_path / "model", seed=4)
    out = run_ranks(2, WORKER, checkpoint, tp, generations, timeout=120 + 20 * generations)
    assert all(text.startswith("equal") for text in out)


@pytest.mark.parametrize(
    "tp, generations",
    [(1, 5), pytest.param(1, 30, marks=pytest.mark.slow), pytest.param(2, 30, marks=pytest.mark.slow)],
)
def test_replicas_that_share_experts_sample_the_same(tmp_path, tp, generations):
    checkpoint = save_tiny("Qwen3MoeForCausalLM", tmp_path / "model", seed=4)
    ranks = 2 * tp
    out = run_ranks(ranks, WORKER, checkpoint, tp, generations, ranks, timeout=120 + 20 * generations)
    assert all(text.startswith("equal") for text in out)
