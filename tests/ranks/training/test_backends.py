"""A family that both backends know has the same log-probs and gradients in both, on two ranks."""

import json
from pathlib import Path

import pytest

from tests.checkpoints import PARTICULAR, save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "backends_worker.py"
TIED = ("SmolLM3ForCausalLM", "GraniteForCausalLM", "GraniteMoeHybridForCausalLM", "Gemma3ForCausalLM")
OUTPUT, GRADIENT = 1e-5, 1e-6
"""Largest difference of a log-prob, an entropy or a sum of squares; of a gradient, relative in the 2-norm.
It may also differ by twice as much as Megatron's gradient from itself if the samples are packed otherwise."""


@pytest.mark.slow
@pytest.mark.parametrize("family", PARTICULAR)
def test_both_backends_compute_the_same(tmp_path, family):
    checkpoint = save_tiny(family, tmp_path / "tiny", seed=1, tie=family in TIED)
    run_ranks(2, WORKER, checkpoint, tmp_path, timeout=600)
    results = json.loads((tmp_path / "out.json").read_text())
    print(family, results)
    noise = results.pop("packed otherwise")
    for case, found in results.items():
        assert found["outputs"] <= max(OUTPUT, 2 * noise["outputs"]), (case, found, noise)
        assert found["gradient"] <= max(GRADIENT, 2 * noise["gradient"]), (case, found, noise)
