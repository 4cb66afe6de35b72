"""Adapters of models with a vision tower: peft, Megatron in all layouts and vLLM after a refit agree."""

import json
from pathlib import Path

import pytest

from tests.checkpoints import save_tiny
from tests.ranks.vision.test_vision import GRADIENT, LOGPROB
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "adapter_worker.py"
DENSE, DEEP, EXPERTS = (f"{name}ForConditionalGeneration" for name in ("Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe"))
ATTENTION = "q_proj,k_proj,v_proj,o_proj"
ALL = f"{ATTENTION},gate_proj,up_proj,down_proj"  # gate_proj is also a name in the tower of DENSE


def run_adapters(directory: Path, family: str, engine: str, in_engine: str, kind: str, *layouts: str) -> None:
    pytest.importorskip("peft")
    checkpoint = save_tiny(family, directory / "model", seed=1)
    how = (engine, in_engine, kind, ATTENTION if family == EXPERTS else ALL)  # peft has no DoRA for experts
    run_ranks(2, WORKER, checkpoint, directory, *how, *layouts, timeout=400)
    results = json.loads((directory / "out.json").read_text())
    print(family, in_engine, kind, json.dumps(results, indent=1))
    assert results.pop("base") > 100 * LOGPROB
    assert results.pop("merged") < LOGPROB
    assert results.keys() == set(layouts)
    for layout, found in results.items():
        assert max(found["megatron"], found["gap"]) < LOGPROB, layout
        assert found["gradient"] < GRADIENT, layout


def test_adapters_beside_weights_leave_the_tower_alone(tmp_path):
    run_adapters(tmp_path, DENSE, "2x1", "adapter", "lora", "2x1x1")


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, engine, in_engine, kind, layouts",
    [
        (DENSE, "1x1", "merged", "dora", ["1x1x1", "2x1x1", "1x2x1"]),
        (DEEP, "2x1", "adapter", "rslora", ["2x1x1", "1x1x1", "1x2x1"]),
        (EXPERTS, "1x1", "adapter", "lora", ["1x1x2", "2x1x1", "1x2x1"]),
        (EXPERTS, "2x2", "merged", "dora", ["2x1x1", "1x1x2"]),
    ],
)
def test_adapters_are_those_of_peft(tmp_path, family, engine, in_engine, kind, layouts):
    run_adapters(tmp_path, family, engine, in_engine, kind, *layouts)
