"""The dry run's pass on the meta device counts what a class of transformers allocates on real ranks."""

import json
from pathlib import Path

import pytest

from rl.features.transformers_backend.memory import pass_bytes
from rl.models import by_class, read_hf_config
from tests.checkpoints import save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "context_worker.py"
TOKENS = 2048
CASES = {
    ("LlamaForCausalLM", 1): ["1x1x1x1", "1x1x1x1+full"],
    ("OlmoeForCausalLM", 2): ["1x1x1x2", "1x1x1x2+full"],
    ("LlamaForCausalLM", 4): ["1x1x1x4", "1x1x1x4+full"],
    ("Gemma2ForCausalLM", 1): ["1x1x1x1"],
    ("NemotronHForCausalLM", 2): ["1x1x1x2"],
}


@pytest.mark.parametrize(
    "case", [case if case[1] == 2 else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_counted_bytes_of_a_class_are_allocated(tmp_path, case):
    family, world_size = case
    checkpoint = save_tiny(family, tmp_path / "tiny", seed=1)
    run_ranks(world_size, WORKER, checkpoint, tmp_path, TOKENS, *CASES[case], timeout=300)
    hf = by_class.described(read_hf_config(checkpoint))
    for name in CASES[case]:
        kept, added = pass_bytes(
            json.dumps(hf, sort_keys=True),
            "full" if name.endswith("full") else "none",
            "float32",
            values=False,
            rank=0,
            shard=world_size,
            tokens=TOKENS,
            length=TOKENS,
            is_cpu=False,  # gloo's own copies are not tensors of torch
        )
        for rank in range(world_size):
            found = json.loads((tmp_path / f"{name}.{rank}.json").read_text())["peak"]
            assert kept + added == pytest.approx(found, rel=0.1), (name, rank)
