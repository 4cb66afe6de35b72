"""The shipped configurations: each reads, passes the checks without a warning, and its layout fits its model
and world."""

import json
import re
from pathlib import Path

import pytest

from rl.config.checks import check
from rl.config.declarations import shipped
from rl.config.layout_checks import check_layout
from rl.config.options import ConfigError
from rl.config.schema import load_config
from rl.models import SUPPORTED

ROOT = Path(__file__).resolve().parents[3]
FILES = [file for file in sorted((ROOT / "configs").rglob("*.yaml")) if file.parent.name != "expected"]
PRODUCTION = {
    "qwen2.5-0.5b_gsm8k_grpo_1gpu": ("qwen2.5-0.5b", 1),
    "qwen2.5-7b_gsm8k_grpo_8gpu": ("qwen2.5-7b", 8),
    "qwen2.5-32b_dapo_aime_16x8": ("qwen2.5-32b", 128),
    "qwen2.5-7b_gsm8k_sft_8gpu": ("qwen2.5-7b", 8),
    "qwen3-30b-a3b_math_grpo_4x8": ("qwen3-30b-a3b", 32),
    "qwen3-30b-a3b_math_grpo_64k_4x8": ("qwen3-30b-a3b-thinking-2507", 32),
    "glm-4.5-air_math_grpo_8x8": ("glm-4.5-air", 64),
    "gemma-3-1b_gsm8k_grpo_1gpu": ("gemma-3-1b", 1),
    "minimax-m2_math_grpo_16x8": ("minimax-m2", 128),
    "qwen3-next-80b-a3b_math_grpo_8x8": ("qwen3-next-80b-a3b", 64),
    "gpt-oss-20b_math_grpo_2x8": ("gpt-oss-20b", 16),
    "qwen3.5-35b-a3b_math_grpo_4x8": ("qwen3.5-35b-a3b", 32),
    "moonlight-16b-a3b_math_grpo_2x8": ("moonlight-16b-a3b", 16),
    "ppo_deepseek671b": ("deepseek-v3", 512),
    "deepseek-v3_math_grpo_64x8": ("deepseek-v3", 512),
    "deepseek-v3_math_grpo_lora_8x8": ("deepseek-v3", 64),
}
"""File -> the published shape it is for, and the number of ranks."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_every_shipped_config_passes_without_a_warning(path):
    assert check(load_config(path)) == []


@pytest.mark.parametrize("name", PRODUCTION)
def test_layouts_of_production_configs_fit(name):
    model, world_size = PRODUCTION[name]
    hf = json.loads((ROOT / "configs" / "models" / model / "config.json").read_text())
    check_layout(load_config(ROOT / "configs" / f"{name}.yaml"), world_size, hf, SUPPORTED)


def test_bitwise_numerics_refuses_layers_that_it_does_not_compute():
    config = load_config(ROOT / "configs" / "gemma-3-1b_gsm8k_grpo_1gpu.yaml", ["model.numerics=bitwise"])
    hf = json.loads((ROOT / "configs" / "models" / "gemma-3-1b" / "config.json").read_text())
    with pytest.raises(ConfigError, match="does not compute the layers of Gemma3ForCausalLM, only those of"):
        check_layout(config, 1, hf, SUPPORTED)


@pytest.mark.parametrize("setting", ["rollout.draft.path=small", "rollout.quantization=fp8"])
def test_an_engine_with_recurrent_states_refuses(setting):
    config = load_config(ROOT / "configs" / "qwen3-next-80b-a3b_math_grpo_8x8.yaml", [setting])
    hf = json.loads((ROOT / "configs" / "models" / "qwen3-next-80b-a3b" / "config.json").read_text())
    with pytest.raises(ConfigError, match=f"{setting} .*gated delta nets"):
        check_layout(config, 64, hf, SUPPORTED)


def test_no_production_config_is_left_out():
    elsewhere = {"quickstart", "quickstart_sft", "gsm8k_toy"}
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == PRODUCTION.keys() | elsewhere


def test_every_algorithm_has_a_config_on_the_toy_task():
    used = {load_config(path).algorithm for path in (ROOT / "configs" / "toy").glob("*.yaml")}
    assert used | {"sft"} == set(shipped())


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs" / "toy").glob("*.yaml")), ids=lambda path: path.stem
)
def test_a_toy_config_names_itself_in_its_command_and_run(path):
    assert f"--config configs/toy/{path.name}" in path.read_text()
    assert re.fullmatch(f"toy-{path.stem}", load_config(path).run.name)
