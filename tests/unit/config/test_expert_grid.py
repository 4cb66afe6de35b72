"""Expert parallel layouts that a config may have."""

import json
from pathlib import Path

import pytest

from rl.config.checks import check
from rl.config.layout_checks import check_has_experts, check_layout
from rl.config.options import ConfigError
from rl.config.schema import Training, load_config

ROOT = Path(__file__).resolve().parents[3]
MOE = dict(
    architectures=["Qwen3MoeForCausalLM"],
    num_hidden_layers=4,
    hidden_size=64,
    intermediate_size=96,
    vocab_size=128,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=4096,
    num_experts=6,
    moe_intermediate_size=24,
)


def accept(world_size, *overrides, **hf):
    config = load_config(
        None, ["model.path=/models/toy", "data.train=train.jsonl", "data.prompts_per_step=64", *overrides]
    )
    check(config)
    check_layout(
        config, world_size, {k: v for k, v in (MOE | hf).items() if v is not None}, ["Qwen3MoeForCausalLM"]
    )


def refuse(world_size, *overrides, **hf):
    with pytest.raises(ConfigError) as caught:
        accept(world_size, *overrides, **hf)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (2, ["training.ep=2"]),
        (4, ["training.tp=2", "training.ep=2"]),
        (8, ["training.tp=2", "training.pp=2", "training.ep=2"]),
        (8, ["training.tp=4", "training.ep=2", "training.etp=4"]),
        (4, ["training.tp=2"]),
        (12, ["training.tp=4", "training.ep=3", "training.pp=1", "rollout.tp=4"]),
        (4, ["rollout.tp=2", "rollout.ep=2"]),
    ],
)
def test_layouts_whose_experts_fit_are_accepted(world_size, overrides):
    accept(world_size, *overrides)


def test_experts_that_do_not_split_are_rejected():
    assert refuse(4, "training.ep=4").startswith(
        "training.ep=4 does not divide the model's 6 experts; use 1 or 2."
    )


def test_an_expert_grid_that_does_not_fill_the_world_is_refused():
    said = refuse(8, "training.ep=3", "training.pp=2")
    assert "ep=3 x etp=1 x training.pp=2 is 6, which does not divide the world of 8 ranks" in said


def test_sizes_of_experts_require_a_model_with_experts():
    accept(2, "training.ep=2", num_experts=None)  # such as a dense critic of a mixture
    config = load_config(None, ["model.path=/models/toy", "data.train=train.jsonl", "training.ep=2"])
    dense = MOE | {"num_experts": 0}
    check_has_experts(config, [dense, MOE])
    with pytest.raises(ConfigError, match="training.ep=2 .* has any; leave them out"):
        check_has_experts(config, [dense, dense])


def test_an_engine_of_whole_experts_needs_ranks_that_divide_them():
    assert refuse(4, "rollout.tp=4", "rollout.ep=4") == (
        "rollout.ep=4 does not divide the model's 6 experts; use 1 or 2."
    )
    assert refuse(4, "rollout.tp=4", "rollout.ep=2") == (
        "rollout.ep=2 must be 1 or rollout.tp=4, the ranks of a replica, without rollout.dp_attention; use "
        "rollout.tp=1 rollout.ep=1 or rollout.tp=2 rollout.ep=2."
    )
    assert refuse(2, "rollout.tp=2", "rollout.ep=2", num_experts=None) == (
        "rollout.ep=2 spreads experts over the ranks of a replica, but the model has none; leave it out."
    )
    accept(16, "rollout.tp=16", "rollout.ep=16", num_attention_heads=16, num_experts=16, vocab_size=64)


def test_etp_other_than_tp_requires_ep():
    assert "training.etp=1 differs from training.tp=2" in refuse(2, "training.tp=2", "training.etp=1")


def test_experts_with_biases_are_whole():
    hf = json.loads((ROOT / "configs" / "models" / "gpt-oss-20b" / "config.json").read_text())
    config = ["model.path=/models/toy", "data.train=train.jsonl", "data.prompts_per_step=64", "training.tp=2"]
    text = r"training.etp=2 \(training.tp=2, training.ep=1\) splits experts, whose biases"
    with pytest.raises(ConfigError, match=text):
        check_layout(load_config(None, config), 4, hf, hf["architectures"])
    check_layout(load_config(None, [*config, "training.ep=2"]), 4, hf, hf["architectures"])


def test_tensor_parallel_experts_need_sequence_parallelism():
    assert "training.sequence_parallel=false" in refuse(
        2, "training.tp=2", "training.sequence_parallel=false"
    )
    accept(2, "training.ep=2", "training.sequence_parallel=false")


def test_too_narrow_experts_are_rejected():
    assert "experts' intermediate size of 24" in refuse(
        16, "training.tp=4", "training.ep=2", "training.etp=16"
    )
    assert "rollout.tp=16" in refuse(16, "rollout.tp=16", num_attention_heads=16)


def test_the_default_of_etp():
    assert [Training(tp=4, ep=ep, etp=etp).expert_tp for ep, etp in ((1, 0), (2, 0), (2, 2), (1, 4))] == [
        4,
        1,
        2,
        4,
    ]


def test_a_dense_model_has_no_experts_to_replay():
    accept(4, "training.router_replay=engine")
    message = refuse(4, "training.router_replay=engine", num_experts=None)
    assert message.startswith("training.router_replay=engine") and message.endswith("leave it out.")


def test_an_engine_in_fp8_cuts_no_block():
    wide = dict(hidden_size=512, intermediate_size=512, num_key_value_heads=8, moe_intermediate_size=256)
    wide |= dict(num_experts=8, head_dim=64)
    fp8 = "rollout.quantization=fp8"
    accept(4, fp8, "rollout.tp=2", **wide)
    text = refuse(4, fp8, "rollout.tp=4", **wide)
    assert (
        "rollout.tp=4 a rank holds a part of one of model.layers." in text and "use rollout.tp=1 or 2" in text
    )
    accept(4, fp8, "rollout.tp=2", "rollout.ep=2", "training.ep=4", **wide | dict(moe_intermediate_size=384))
    text = refuse(4, fp8, "rollout.tp=2", **wide | dict(moe_intermediate_size=384))
    assert "rollout.tp=2 a rank holds a part of one of model.layers.0.mlp.experts" in text
    text = refuse(4, fp8, "training.tp=4", "training.ep=2", **wide | dict(num_key_value_heads=4))
    assert "training.tp=4" in text and "use training.tp=1 or 2" in text
    text = refuse(1, fp8, **wide | dict(num_key_value_heads=1))
    assert "training.tp=1 a rank holds" not in text and text.endswith("; use rollout.quantization=none.")


def test_experts_with_biases_are_not_quantised():
    hf = json.loads((ROOT / "configs" / "models" / "gpt-oss-20b" / "config.json").read_text())
    config = load_config(None, ["model.path=m", "data.train=t.jsonl", "rollout.quantization=fp8"])
    with pytest.raises(ConfigError, match="^rollout.quantization=fp8 .* with biases .*quantization=none.$"):
        check_layout(config, 1, hf, hf["architectures"])
