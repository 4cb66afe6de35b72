import importlib.util
import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rl.models import experts, qwen2
from rl.models.layout import COLUMN, REPLICATED, VOCAB, Weight, index
from rl.models.placement import RolloutPlacement, TrainingPlacement

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tools" / "plan_refit.py"
MEASURED = """
import resource, runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""
"""Program that runs a script and prints its peak memory in KiB to stderr."""
spec = importlib.util.spec_from_file_location("lockstep_plan_refit", SCRIPT)
plan_refit = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = plan_refit
spec.loader.exec_module(plan_refit)

DENSE = dict(
    architectures=["Qwen2ForCausalLM"],
    num_hidden_layers=4,
    hidden_size=16,
    intermediate_size=24,
    vocab_size=200,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=4,
    tie_word_embeddings=True,
)


def mixture(layers=4, num_experts=8, hidden=16, ffn=8):
    out = [Weight(("embed.weight",), ((150, hidden),), "embed", "embed", VOCAB, first_stage=True)]
    for layer in range(layers):
        name = f"layers.{layer}.q.weight"
        out.append(Weight((name,), ((32, hidden),), "q", name, COLUMN, layer))
        hf = dict(hidden_size=hidden, num_experts=num_experts, moe_intermediate_size=ffn)
        out += [experts.router(hf, layer, "mlp"), *experts.routed(hf, layer, "mlp")]
    return [*out, Weight(("norm.weight",), ((hidden,),), "norm", "norm", REPLICATED)]


def held(weights, pieces_of):
    """bool array over all elements of all tensors."""
    parts = []
    for weight in weights:
        masks = {name: np.zeros(shape, bool) for name, shape in zip(weight.hf, weight.shapes)}
        for piece in pieces_of(weight):
            masks[piece.hf][index(piece.hf_box)] = True
        parts += [mask.reshape(-1) for mask in masks.values()]
    return np.concatenate(parts)


@pytest.mark.parametrize(
    "model, world, train, rollout",
    [
        ("dense", 16, dict(tp=2, pp=2), 4),
        ("dense", 8, dict(tp=4, pp=1), 1),
        ("mixture", 16, dict(tp=2, pp=2, ep=4, etp=1), 4),
        ("mixture", 16, dict(tp=2, pp=2, ep=2, etp=2), 8),
    ],
)
def test_traffic_equals_a_count_of_elements(model, world, train, rollout):
    weights = qwen2.weights(DENSE) if model == "dense" else mixture()
    training = TrainingPlacement(world, num_layers=4, num_experts=8, **train)
    traffic = plan_refit.refit_traffic(
        weights,
        training,
        RolloutPlacement(world, rollout, 4),
        ranks_per_node=4,
        itemsize=2,
        buffer_bytes=1 << 20,
    )
    per_stage, etp, ep = world // train["pp"], train.get("etp", 1), train.get("ep", 1)

    def trained(rank):
        def pieces(weight):
            stage, local = divmod(rank, per_stage)
            stages = (
                {0, train["pp"] - 1}
                if weight.tied_to_head
                else {0}
                if weight.first_stage
                else {train["pp"] - 1}
            )
            if stage not in (stages if weight.layer is None else {weight.layer * train["pp"] // 4}):
                return []
            if weight.expert is None:
                return weight.megatron_pieces(train["tp"], local % train["tp"])
            return (
                weight.megatron_pieces(etp, local % etp)
                if local // etp % ep == weight.expert // (8 // ep)
                else []
            )

        return held(weights, pieces)

    have = [trained(rank) for rank in range(world)]
    on_node = [
        np.any([have[other] for other in range(world) if other // 4 == rank // 4], axis=0)
        for rank in range(world)
    ]
    for rank in range(world):
        need = held(weights, lambda weight, rank=rank: weight.vllm_pieces(rollout, rank % rollout))
        counts = [
            need & have[rank],
            need & ~have[rank] & on_node[rank],
            need & ~on_node[rank],
            need & ~have[rank],
            ~have[rank],
        ]
        found = [traffic.stays, traffic.near_in, traffic.far_in, traffic.lower_bound, traffic.gather]
        assert [int(values[rank]) for values in found] == [2 * int(mask.sum()) for mask in counts], rank
    assert traffic.near_out.sum() == traffic.near_in.sum() and traffic.far_out.sum() == traffic.far_in.sum()
    assert traffic.peak_buffer.max() <= 1 << 20


def test_the_table_of_a_published_model(capsys):
    plan_refit.main(
        [
            "--model",
            str(ROOT / "configs/models/qwen2.5-32b"),
            *"--train tp=8,pp=2 --rollout tp=4 --world-size 64".split(),
        ]
    )
    rows = {line[:28].strip(): line[28:].split() for line in capsys.readouterr().out.splitlines() if line}
    assert rows["received"] == rows["least possible"]
    parameters = 32.76e9
    assert float(rows["gathering every weight"][1]) == pytest.approx(
        parameters * 2 * 15 / 16 / 2**30, rel=0.001
    )
    # Each of 16 replicas of the engine is filled, by what stays and what comes.
    filled = float(rows["received"][3]) + float(rows["stays on the rank"][3])
    assert filled == pytest.approx(16 * parameters * 2 / 2**30, rel=0.001)
    assert 0 < float(rows["largest batch"][2]) <= 0.5
    assert float(rows["seconds, busiest rank"][0]) <= float(rows["seconds, batch by batch"][0])
    assert float(rows["seconds, gathering"][0]) == pytest.approx(8 * 61.43e9 / 400e9, rel=0.01)


def test_deepseek_on_a_thousand_ranks():
    options = "--train tp=8,pp=16,ep=32 --rollout tp=32 --world-size 1024".split()
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime  # of CPU time: other tests share the cores
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, SCRIPT, "--model", ROOT / "configs/models/deepseek-v3", *options],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 60
    assert int(done.stderr.split()[-1]) < 4 << 20  # KiB
    rows = {
        line[:28].strip(): [float(word) for word in line[28:].split()]
        for line in done.stdout.splitlines()[1:10]
    }
    assert rows["received"] == rows["least possible"]
    assert 671.0e9 * 2 / 2**30 == pytest.approx(rows["gathering every weight"][2], rel=0.01)
    assert (
        rows["received"][0] > 671.0e9 * 2 / 32 / 2**30 * 0.97
    )  # a rank's part of an engine, of which it trains next to nothing
    assert (
        rows["sent to other nodes"][2] < 1.5 * rows["sent to other nodes"][1]
        and rows["largest batch"][2] <= 0.5
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            "--train tp=3 --rollout tp=1 --world-size 8",
            "training.tp=3 times training.pp=1 is 3, which does not divide the world",
        ),
        ("--train tp=2 --rollout tp=16 --world-size 8", "rollout.tp=16 does not divide the world of 8 ranks"),
        ("--train tp=2 --rollout tp=3 --world-size 6", "rollout.tp=3 does not divide the model's"),
        ("--train tp=8 --rollout tp=1 --world-size 8", "training.tp=8 does not divide the model's"),
        ("--train tp=2,cp=2 --rollout tp=1 --world-size 8", "found cp=2, but it takes ep, etp, pp, tp"),
        ("--train tp=two --rollout tp=1 --world-size 8", "found tp=two"),
        ("--train tp=2,ep=2 --rollout tp=1 --world-size 8", "split experts, but no model"),
        ("--train pp=8 --rollout tp=1 --world-size 8", "training.pp=8 leaves stages without a layer"),
    ],
)
def test_invalid_layouts_are_refused_in_one_line(tmp_path, arguments, message, capsys):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    with pytest.raises(SystemExit, match=re.escape(message)):
        plan_refit.main(["--model", str(tmp_path / "config.json"), *arguments.split()])
