"""Adapters compute what peft's compute, in every layout, and only they learn."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from rl.models.adapters import PREFIX
from tests import bounds
from tests.checkpoints import SIZES, save_tiny
from tests.spawn import run_ranks
from tools.hf_reference import hf_gradient, hf_logprobs, random_batch

WORKER = Path(__file__).parent / "adapter_worker.py"
RANK, ALPHA = 4, 6.0
LOGPROB = bounds.of_logits(layers=3, width=SIZES["hidden_size"])
GRADIENT = bounds.of_gradient(3, SIZES["hidden_size"])
DENSE = {
    "tp2": "2x1x1;training.recompute=full",
    "tp2_whole": "2x1x1;training.sequence_parallel=false",
    "pp2": "1x2x1",
    "dora": "2x1x1;adapter.kind=dora",
    "dora_whole": "2x1x1;adapter.kind=dora;training.sequence_parallel=false",
    "some": "2x1x1;adapter.kind=rslora;adapter.targets=[v_proj, up_proj]",
    "some_dora": "1x1x1;adapter.kind=dora;adapter.targets=[v_proj, up_proj]",
    "pissa": "2x1x1;adapter.init=pissa",
    "class": "1x1x1;training.backend=transformers;training.shard=2",
}
EXPERTS = {
    "Qwen3MoeForCausalLM": {"ep2": "1x1x2"},
    "DeepseekV3ForCausalLM": {
        "tp2_ep2": "2x1x2",
        "pp2": "1x2x1",
        "no_experts": "1x1x2;adapter.targets=[q_b_proj, o_proj]",
        "experts_only": "1x1x2;adapter.targets=[experts.0.up_proj, experts.5.down_proj]",
    },
}
GRID = ["1x1x1", "2x1x1", "1x2x1", "1x1x2", "2x1x2", "1x1x2x2", "2x1x2x2", "1x2x2", "2x2x2"]
"""TP x PP x EP (x ETP) on four ranks, as in test_parity.py."""


def results(directory: Path, family: str, cases: dict[str, str], ranks: int = 2) -> tuple[str, dict]:
    """Return the checkpoint, and what the worker saves for each case."""
    checkpoint = save_tiny(family, directory / "model", seed=1)
    some = [f"{name}={how}" for name, how in cases.items()]
    run_ranks(ranks, WORKER, checkpoint, directory, *some, timeout=600)
    return checkpoint, {name: torch.load(directory / f"{name}.pt") for name in cases}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / (expected.double().norm() + 1e-3))


def by_the_chain_rule(checkpoint: str, found: dict) -> tuple[torch.Tensor, dict]:
    """Return the log-probs of transformers' model with the merged weights in float64, and the adapters'
    gradients, derived from the gradient of the merged weights.
    """
    adapters = {name: tensor.double().requires_grad_() for name, tensor in found["adapters"].items()}
    state = {name: tensor.double() for name, tensor in found["base"].items()}
    modules = [name.removesuffix(".lora_A.weight") for name in adapters if name.endswith(".lora_A.weight")]
    merged = {}
    for module in modules:
        a, b = (adapters[f"{module}.lora_{side}.weight"] for side in "AB")
        name = module.removeprefix(PREFIX) + ".weight"
        merged[name] = state[name] + ALPHA / RANK * b @ a
        if (magnitude := adapters.get(f"{module}.lora_magnitude_vector")) is not None:
            merged[name] = merged[name] * (magnitude / merged[name].detach().norm(dim=1))[:, None]
    directory = Path(checkpoint).with_name("merged")
    shutil.copytree(checkpoint, directory, dirs_exist_ok=True)
    state |= {name: tensor.detach() for name, tensor in merged.items()}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, experts_implementation="eager"
    )
    logprobs = hf_logprobs(model, random_batch(model.config.vocab_size))[0]
    of_weights = hf_gradient(model, -logprobs, Path(checkpoint).with_name("gradient"))
    torch.autograd.backward(list(merged.values()), [of_weights[name] for name in merged])
    return logprobs.detach(), {name: tensor.grad for name, tensor in adapters.items()}


def by_peft(checkpoint: str, found: dict, **options) -> tuple[torch.Tensor, dict]:
    """Return the same by the package peft in float32."""
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    batch = random_batch(model.config.vocab_size)
    targets = sorted({name.split(".")[-3] for name in found["adapters"] if ".lora_A." in name})
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, **options)
    model = peft.get_peft_model(model, config)
    peft.set_peft_model_state_dict(model, found["adapters"])
    logprobs = hf_logprobs(model, batch)[0]
    (-logprobs.sum()).backward()
    learned = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    renamed = {name.replace("vector.weight", "vector"): p.grad for name, p in learned.items()}
    return logprobs.detach(), renamed


def assert_equal(found: dict, logprobs: torch.Tensor, gradient: dict) -> None:
    assert relative(found["logprobs"], logprobs) <= LOGPROB
    assert found["gradient"].keys() == gradient.keys()
    worst = max((relative(found["gradient"][name], expected), name) for name, expected in gradient.items())
    print("log-probs", relative(found["logprobs"], logprobs), "gradient", worst)
    assert worst[0] <= GRADIENT, worst
    norm = torch.stack([tensor.norm() for tensor in gradient.values()]).norm()
    assert found["norm"] == pytest.approx(float(norm), rel=GRADIENT)


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> tuple[str, dict[str, dict]]:
    return results(tmp_path_factory.mktemp("dense"), "Qwen2ForCausalLM", DENSE)


def test_low_rank_adapters_are_those_of_peft(dense):
    checkpoint, found = dense
    expected = by_peft(checkpoint, found["tp2"])
    for name in ("tp2", "tp2_whole", "pp2", "class"):
        assert_equal(found[name], *expected)
    assert_equal(found["some"], *by_peft(checkpoint, found["some"], use_rslora=True))


def test_dora_is_that_of_peft(dense):
    checkpoint, found = dense
    expected = by_peft(checkpoint, found["dora"], use_dora=True)
    for name in ("dora", "dora_whole"):
        assert_equal(found[name], *expected)
    assert_equal(found["some_dora"], *by_peft(checkpoint, found["some_dora"], use_dora=True))


def test_principal_adapters_start_from_the_same_policy(dense):
    checkpoint, found = dense
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    logprobs = hf_logprobs(model, random_batch(model.config.vocab_size))[0].detach()
    options = dict(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", init_lora_weights="pissa")
    residual = peft.get_peft_model(model, peft.LoraConfig(**options)).state_dict()
    case = found["pissa"]
    for start in ("start", "reference"):
        assert relative(case[start], logprobs) <= LOGPROB
    for name, tensor in case["base"].items():
        expected = residual.get(f"{PREFIX}{name.removesuffix('.weight')}.base_layer.weight")
        if expected is not None:  # of sums of 128 squares, by another algorithm
            assert relative(tensor, expected) <= GRADIENT, name


def test_reference_and_merged_weights_and_memory(dense):
    checkpoint, found = dense
    original = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    case = found["tp2"]
    assert torch.equal(case["reference"], case["start"]) and not torch.equal(case["start"], case["logprobs"])
    state = original.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in case["base"].items())
    original.load_state_dict(case["merged"], strict=False)
    logprobs = hf_logprobs(original, random_batch(original.config.vocab_size))[0]
    assert relative(case["logprobs"], logprobs.detach()) <= LOGPROB
    # Main weights and two moments of what rank 0 updates: the replicated halves, A or B, on both ranks.
    learned = sum(tensor.numel() for tensor in case["adapters"].values())
    full = sum(parameter.numel() for parameter in original.parameters())
    assert case["state_bytes"] < 3 * 4 * learned < 3 * 4 * full / 5
    print(f"bytes of optimizer state on rank 0 of 2: {case['state_bytes']}, full {3 * 4 * full // 2}")


@pytest.mark.parametrize(
    "family", ["DeepseekV3ForCausalLM", pytest.param("Qwen3MoeForCausalLM", marks=pytest.mark.slow)]
)
def test_experts_are_the_chain_rule(tmp_path, family):
    checkpoint, found = results(tmp_path, family, EXPERTS[family])
    expected: dict = {}
    for case in found.values():
        learned = tuple(case["adapters"])
        if learned not in expected:
            expected[learned] = by_the_chain_rule(checkpoint, case)
        assert_equal(case, *expected[learned])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen2ForCausalLM", "LlamaForCausalLM", *EXPERTS])
def test_every_layout_of_adapters(tmp_path, family):
    grid = GRID if family in EXPERTS else [layout for layout in GRID if layout.endswith("x1")]
    dora = {
        f"dora {layout}": f"{layout};adapter.kind=dora" for layout in (grid[-1], "1x1x2x2")[: len(grid) // 4]
    }
    checkpoint, found = results(tmp_path, family, {layout: layout for layout in grid} | dora, ranks=4)
    expected = by_the_chain_rule(checkpoint, found["1x1x1"])
    for layout in grid:
        assert_equal(found[layout], *expected)
    for name in dora:
        assert_equal(found[name], *by_the_chain_rule(checkpoint, found[name]))
    if family not in EXPERTS:
        assert_equal(found["1x1x1"], *by_peft(checkpoint, found["1x1x1"]))


def test_a_resume_with_adapters(tmp_path):
    model, other = (
        save_tiny("Qwen2ForCausalLM", tmp_path / name, seed=seed) for seed, name in enumerate("ab")
    )
    run_ranks(2, WORKER, model, tmp_path, f"resume=resume;{other}", timeout=400)
    found = torch.load(tmp_path / "resume.pt")
    for dtype in ("bfloat16", "float32"):
        assert found[f"{dtype} 2x1"] == [0, 0, 0]  # bitwise in the same layout, after the next step too
        for layout in ("1x2", "1x1"):
            adapters, merged, _ = found[f"{dtype} {layout}"]
            # Ranks add up the squares of DoRA's rows in another order. The weights are smaller than 1.
            assert adapters == 0 and merged <= torch.finfo(getattr(torch, dtype)).eps
    step = bounds.of_adam_step(lr=1e-3, eps=1e-2, gradient=GRADIENT)
    assert max(found["float32 1x2"][2], found["float32 1x1"][2]) <= step
    assert found["scale"].startswith("ConfigError") and "adapter.alpha=6.0" in found["scale"]
    assert found["base"].startswith("WronglyLoaded") and "model.path" in found["base"]


@pytest.mark.slow  # a new interpreter, because Megatron looks for Transformer Engine at import
def test_adapters_on_layers_of_transformer_engine(tmp_path):
    model = save_tiny("Qwen3MoeForCausalLM", tmp_path / "model", seed=1)
    (out,) = run_ranks(1, WORKER.with_name("te_adapter_worker.py"), model, fresh=True, timeout=200)
    assert float(out.splitlines()[-1]) <= 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_of_all_experts_are_computed_together(tmp_path, kind):
    """Grouped experts: as close to float64 as one after the other, equal in each pass, fewer operations."""
    model = save_tiny("Qwen3MoeForCausalLM", tmp_path / "model", seed=1)
    worker = WORKER.with_name("te_experts_worker.py")
    (out,) = run_ranks(1, worker, model, kind, fresh=True, timeout=200)
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [layer["dtype"] for layer in found] == ["torch.bfloat16", "torch.float32"] * 2
    for layer in found:
        print(layer)
        together, one_by_one = layer["gaps"]
        assert together < 1.5 * one_by_one and layer["repeats"]
        fewer, more = layer["operations"]
        assert fewer < more
