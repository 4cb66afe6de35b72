"""Refits between roles that send only changed elements. The ranks run changed_only_worker.py."""

import json
from pathlib import Path

from tests.checkpoints import save_tiny
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "changed_only_worker.py"


def test_what_changed_gives_the_same_engine_as_everything(tmp_path):
    # Its router biases are float32, beside bfloat16 in the same messages.
    checkpoint = save_tiny("DeepseekV3ForCausalLM", tmp_path / "model", seed=1)
    run_ranks(4, WORKER, checkpoint, tmp_path / "out", timeout=300)
    trained, generated = (
        [json.loads((tmp_path / f"out.{rank}").read_text()) for rank in ranks] for ranks in ((0, 1), (2, 3))
    )
    assert [rank["apart"] for rank in generated] == [[[]] * 5] * 2
    sums = {
        name: [sum(rank["changed"][v][name] for rank in trained) for v in range(5)]
        for name in ("moved", "unabridged")
    }
    assert sums["unabridged"] == [sum(rank["whole"][v]["moved"] for rank in trained) for v in range(5)]
    assert sums["moved"] == [sum(rank["changed"][v]["moved"] for rank in generated) for v in range(5)]
    first, some, none, everything, again = (m / u for m, u in zip(sums["moved"], sums["unabridged"]))
    assert 1 <= first == everything < 1.01  # the headers
    # 4 bytes of position and 2 of value per element in 50 of 2 bytes.
    assert all(0.9 < share / (6 / 2 / 50) < 1.1 for share in (some, again))
    assert none < 0.01
