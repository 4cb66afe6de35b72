"""A dry run counts as many bytes as Megatron allocates on real ranks."""

import json
from pathlib import Path

import pytest

from rl.config.run_models import RunModel
from rl.config.schema import Config, Optimizer
from rl.dry_run.grids import Layout
from rl.dry_run.images import without_frozen_tower
from rl.dry_run.memory import model_state
from rl.dry_run.parameters import count_stages, group_parts
from rl.dry_run.shape import ModelShape
from rl.models import architecture, by_class, mtp, read_hf_config
from rl.models.adapters import adapters as adapters_of
from tests.checkpoints import save_tiny
from tests.ranks.dry_run.allocation_worker import optimizer_of
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "allocation_worker.py"
WORLD = 4
CASES = {
    "dense, untied": (
        lambda at: save_tiny("Qwen2ForCausalLM", at, seed=0),
        "bfloat16",
        ["2x2x1", "1x2x1", "2x1x1"],
    ),
    "dense, tied": (
        lambda at: save_tiny("Qwen3ForCausalLM", at, seed=0, tie=True),
        "float32",
        ["2x2x1", "1x1x1"],
    ),
    "smaller optimizers": (
        lambda at: save_tiny("Qwen2ForCausalLM", at, seed=0),
        "bfloat16",
        ["2x1x1+bfloat16", "1x2x1+bfloat16+0.5", "2x1x1+float32+1.0"],
    ),
    "experts": (
        lambda at: save_tiny("Qwen3MoeForCausalLM", at, seed=0),
        "bfloat16",
        ["1x2x2", "2x1x2", "2x2x1", "2x1x2+lora"],
    ),
    "a class of transformers": (
        lambda at: save_tiny("Gemma2ForCausalLM", at, seed=0, tie=True),
        "bfloat16",
        ["1x1x1+shard1", "1x1x1+shard2", "1x1x1+shard4"],
    ),
    "latent attention": (
        lambda at: save_tiny("DeepseekV3ForCausalLM", at, seed=0, num_nextn_predict_layers=1),
        "bfloat16",
        ["2x2x2", "1x1x4", "2x2x2+mtp"],
    ),
    "frozen tower": (
        lambda at: save_tiny("Qwen3VLForConditionalGeneration", at, seed=0),
        "bfloat16",
        ["2x2x1+tower", "1x1x1+tower"],
    ),
}


DEFAULT = ("dense, tied", "experts", "smaller optimizers", "a class of transformers")


@pytest.mark.parametrize(
    "case", [c if c in DEFAULT else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_counted_bytes_are_allocated_bytes(tmp_path, case):
    save, dtype, layouts = CASES[case]
    checkpoint = save(tmp_path / "model")
    hf = read_hf_config(checkpoint)
    hf = by_class.described(hf) if case == "a class of transformers" else hf
    weights = architecture(hf).weights(hf)
    model = ModelShape(
        RunModel("policy", "model.path", "", ""), hf, tuple(weights), tuple(group_parts(weights))
    )
    by_rank = [
        json.loads(out.strip().splitlines()[-1])
        for out in run_ranks(WORLD, WORKER, checkpoint, dtype, *layouts, timeout=300)
    ]
    itemsize = 2 if dtype == "bfloat16" else 4
    for number, text in enumerate(layouts):
        sizes, *options = text.split("+")
        adapters, is_head, sees = (options == [name] for name in ("lora", "mtp", "tower"))
        shard = int(options.pop().removeprefix("shard")) if "shard" in text else 1
        adam = Optimizer() if adapters or is_head or sees else optimizer_of(*options)
        per_parameter = (4 if itemsize == 2 else 0) + (4 if adam.moments == "bfloat16" else 8)
        tp, pp, ep = map(int, sizes.split("x"))
        etp = 1 if ep > 1 else tp
        layout = Layout(
            WORLD,
            WORLD,
            WORLD,
            tp,
            pp,
            1,
            ep,
            etp,
            rollout_tp=1,
            rollout_ep=1,
            sequence_parallel=True,
            shard=shard,
        )
        parts, frozen = without_frozen_tower(Config(), model)
        parts = group_parts(mtp.weights(hf)) if is_head else parts
        counts, tower = (count_stages(own, layout.placement(model)) for own in (parts, frozen))
        learned = counts
        if adapters:
            pairs = [weight for pair in adapters_of(weights, rank=4) for weight in pair.weights]
            learned = count_stages(group_parts(pairs), layout.placement(model))
        states = [
            model_state(
                count, layout, itemsize, adam, adapters=own if adapters else None, frozen=seen.parameters
            )
            for count, own, seen in zip(counts, learned, tower)
        ]
        found = [rank[number] for rank in by_rank]
        for rank, real in enumerate(found):
            stage = rank // (WORLD // pp)
            state = states[stage]
            assert real["stage"] == stage
            more = tower[stage].parameters + (learned[stage].parameters if adapters else 0)
            assert real["parameters"] == counts[stage].parameters + more, (text, rank)
            assert real["weights"] == state.weights - 4 * counts[stage].buffers, (text, rank)
            assert real["gradients"] == state.gradients, (text, rank)
            largest = per_parameter * max(learned[stage].shared, default=0)
            assert real["optimizer"] <= state.optimizer + (largest if 0 < adam.host_share < 1 else 0), (
                text,
                rank,
            )
            assert real["in host"] <= state.in_host <= real["in host"] + largest * (adam.host_share > 0), (
                text,
                rank,
            )
            assert real["in host"] + real["optimizer"] <= state.in_host + state.optimizer, (text, rank)
        # A rank's share of the optimizer ends within parameters; together the shares are all of them, and no
        # padding.
        for stage in range(pp):
            shared = sum(learned[stage].shared) + learned[stage].tied
            held = shared * layout.tp * shard + sum(learned[stage].experts) * layout.etp * layout.ep
            assert (
                sum(real["optimizer"] + real["in host"] for real in found if real["stage"] == stage)
                == per_parameter * held
            ), text
