"""Gradients with shared prompts equal the gradients without, and cost less."""

import json
from pathlib import Path

import pytest

from rl.config.objective import LOSSES
from tests import bounds
from tests.checkpoints import SIZES, save_qwen2, save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "prefix_worker.py"
CASES = {
    1: [
        "dense=QWEN:1x1:losses",
        "latents=DEEPSEEK:1x1",
        "values=QWEN:1x1:values",
        "windows=GEMMA:1x1",
        "sinks=OSS:1x1",
        "states=NEXT:1x1",
    ],
    2: ["tp2=QWEN:2x1", "tp2_plain=QWEN:2x1:plain", "pp2=QWEN:1x2", "latents_tp2=DEEPSEEK:2x1"],
}
LAYERS, WIDTH = 3, SIZES["hidden_size"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return (case, rank, loss) -> figures."""
    directory = tmp_path_factory.mktemp("shared_prefix")
    paths = {
        "QWEN": save_qwen2(directory / "qwen2", seed=2, tie=False),
        "DEEPSEEK": save_tiny("DeepseekV3ForCausalLM", directory / "deepseek", seed=1),
        "GEMMA": save_tiny("Gemma3ForCausalLM", directory / "gemma", seed=1),
        "OSS": save_tiny("GptOssForCausalLM", directory / "oss", seed=1),
        "NEXT": save_tiny("Qwen3NextForCausalLM", directory / "next", seed=1),
    }
    found = {}
    for world_size, cases in CASES.items():
        for name, path in paths.items():
            cases = [case.replace(name, str(path)) for case in cases]
        run_ranks(world_size, WORKER, directory, *cases, timeout=300)
        for rank in range(world_size):
            for case, losses in json.loads((directory / f"{rank}.json").read_text()).items():
                found |= {(case, rank, loss): figures for loss, figures in losses.items()}
    return found


def test_gradients_equal_those_of_whole_sequences(results):
    assert {loss for case, _, loss in results if case == "dense"} >= {*LOSSES, "pairs"}
    for where, figures in results.items():
        assert figures["norm"] > 0.1, where
        # Of the whole gradient's norm; chunks of delta nets begin at other tokens.
        limit = 4e-6 if where[0] == "states" else 1e-6
        assert figures["gradient"] <= limit, (where, figures["worst"])
        assert figures["outputs"] <= 8 * bounds.of_logits(LAYERS, WIDTH), where  # logits are of size 8
        if figures["plain"]["tokens"] and where[2] != "singles":  # the last stage counts
            assert figures["shared"]["tokens"] < figures["plain"]["tokens"] - 100, where


def test_samples_without_a_common_prompt_are_bitwise_unchanged(results):
    figures = results["dense", 0, "singles"]
    assert figures["gradient"] == figures["outputs"] == 0
    assert figures["shared"] == figures["plain"]


def test_sixteen_answers_as_long_as_their_prompt_cost_half(results):
    figures = results["dense", 0, "equal"]
    assert figures["plain"]["flops"] > 1.8 * figures["shared"]["flops"] > 0
