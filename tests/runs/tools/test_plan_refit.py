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
from tests.tables import rows

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tools" / "plan_refit.py"
MEASURED = """
import resource, runpy, sys
from tests.tables import rows
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""
"""Program that runs a script and prints its peak memory in KiB to stderr."""
spec = importlib.util.spec_from_file_location("lockstep_plan_refit", SCRIPT)
plan_refit = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = plan_refit
spec.loader.exec_module(plan_refit)

DENSE = dict(architectures=["Qwen2ForCausalLM"], tie_word_embeddings=True, vocab_size=200, head_dim=4)
DENSE |= dict(num_hidden_layers=4, hidden_size=16, intermediate_size=24)
DENSE |= dict(num_attention_heads=8, num_key_value_heads=4)


def mixture(layers=4, num_experts=8, hidden=16, ffn=8):
    out = [Weight(("embed.weight",), ((150, hidden),), "embed", "embed", VOCAB, first_stage=True)]
    for layer in range(layers):
        name = f"layers.{layer}.q.weight"
        out.append(Weight((name,), ((32, hidden),), "q", name, COLUMN, layer))
        names = ("gate", "up", "down")
        options = dict(block="mlp", num_experts=num_experts, ffn=ffn, names=names)
        out += experts.routed(dict(hidden_size=hidden), layer, **options)
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
def test_the_survey_is_what_counting_elements_gives(model, world, train, rollout):
    weights = qwen2.weights(DENSE) if model == "dense" else mixture()
    training = TrainingPlacement(world, num_layers=4, num_experts=8, **train)
    options = dict(ranks_per_node=4, itemsize=2, buffer_bytes=1 << 20)
    survey = plan_refit.survey_refit(weights, training, RolloutPlacement(world, rollout, 4), **options)
    per_stage, etp, ep = world // train["pp"], train.get("etp", 1), train.get("ep", 1)
    last = train["pp"] - 1

    def trained(rank):
        def pieces(weight):
            stage, local = divmod(rank, per_stage)
            if weight.layer is not None:
                stages = {weight.layer * train["pp"] // 4}
            else:
                stages = {0, last} if weight.tied_to_head else {0} if weight.first_stage else {last}
            if stage not in stages:
                return []
            if weight.expert is None:
                return weight.megatron_pieces(train["tp"], local % train["tp"])
            has_expert = local // etp % ep == weight.expert // (8 // ep)
            return weight.megatron_pieces(etp, local % etp) if has_expert else []

        return held(weights, pieces)

    have = [trained(rank) for rank in range(world)]
    on_node = [np.any(have[rank // 4 * 4 :][:4], axis=0) for rank in range(world)]
    for rank in range(world):
        need = held(weights, lambda weight, rank=rank: weight.vllm_pieces(rollout, rank % rollout))
        missing = need & ~have[rank]
        counts = [need & have[rank], missing & on_node[rank], need & ~on_node[rank], missing, ~have[rank]]
        found = [survey.stays, survey.near_in, survey.far_in, survey.lower_bound, survey.gather]
        assert [int(values[rank]) for values in found] == [2 * int(mask.sum()) for mask in counts], rank
    assert survey.near_out.sum() == survey.near_in.sum() and survey.far_out.sum() == survey.far_in.sum()
    assert survey.peak_buffer.max() <= 1 << 20


def test_the_table_of_a_published_model(capsys):
    options = "--train tp=8,pp=2 --rollout tp=4 --world-size 64".split()
    plan_refit.main(["--model", str(ROOT / "configs/models/qwen2.5-32b"), *options])
    rows = {line[:28].strip(): line[28:].split() for line in capsys.readouterr().out.splitlines() if line}
    assert rows["received"] == rows["least possible"]
    parameters = 32.76e9
    gathered = float(rows["gathering every weight"][1])
    assert gathered == pytest.approx(parameters * 2 * 15 / 16 / 2**30, rel=0.001)
    # Each of 16 replicas of the engine is filled, by what stays and what comes.
    filled = float(rows["received"][3]) + float(rows["stays on the rank"][3])
    assert filled == pytest.approx(16 * parameters * 2 / 2**30, rel=0.001)
    assert 0 < float(rows["largest batch"][2]) <= 0.5
    assert float(rows["seconds, busiest rank"][0]) <= float(rows["seconds, batch by batch"][0])
    assert float(rows["seconds, gathering"][0]) == pytest.approx(8 * 61.43e9 / 400e9, rel=0.01)


def test_deepseek_on_a_thousand_ranks():
    options = "--train tp=8,pp=16,ep=32 --rollout tp=32 --world-size 1024".split()
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime  # of CPU time: other tests share the cores
    command = [sys.executable, "-c", MEASURED, SCRIPT, "--model", ROOT / "configs/models/deepseek-v3"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 60
    assert int(done.stderr.split()[-1]) < 4 << 20  # KiB
    lines = done.stdout.splitlines()[1:10]
    rows = {line[:28].strip(): [float(word) for word in line[28:].split()] for line in lines}
    assert rows["received"] == rows["least possible"]
    assert 671.0e9 * 2 / 2**30 == pytest.approx(rows["gathering every weight"][2], rel=0.01)
    # A rank's part of an engine, of which it trains next to nothing.
    assert rows["received"][0] > 671.0e9 * 2 / 32 / 2**30 * 0.97
    sent = rows["sent to other nodes"]
    assert sent[2] < 1.5 * sent[1] and rows["largest batch"][2] <= 0.5


@pytest.mark.parametrize(
    "arguments, message",
    rows("""
        --train tp=3 --rollout tp=1 --world-size 8 =>
        training.tp=3 times training.pp=1 is 3, which does not divide the world ;;
        --train tp=2 --rollout tp=16 --world-size 8 => rollout.tp=16 does not divide the world of 8 ranks ;;
        --train tp=2 --rollout tp=3 --world-size 6 => rollout.tp=3 does not divide the model's ;;
        --train tp=8 --rollout tp=1 --world-size 8 => training.tp=8 does not divide the model's ;;
        --train tp=2,cp=2 --rollout tp=1 --world-size 8 => found cp=2, but it takes ep, etp, pp, tp ;;
        --train tp=two --rollout tp=1 --world-size 8 => found tp=two ;;
        --train tp=2,ep=2 --rollout tp=1 --world-size 8 => split experts, but the model has none ;;
        --train pp=8 --rollout tp=1 --world-size 8 => training.pp=8 leaves stages without a layer
        """),
)
def test_invalid_layouts_are_refused_in_one_line(tmp_path, arguments, message, capsys):
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    with pytest.raises(SystemExit, match=re.escape(message)):
        plan_refit.main(["--model", str(tmp_path / "config.json"), *arguments.split()])
