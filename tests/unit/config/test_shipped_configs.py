"""The shipped configurations: each reads and passes the checks without a warning.

tests/unit/dry_run/test_dry_run.py checks the layouts of the production configs."""

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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_every_shipped_config_passes_without_a_warning(path):
    assert check(load_config(path)) == []


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


def test_every_algorithm_has_a_config_on_the_toy_task():
    used = {load_config(path).algorithm for path in (ROOT / "configs" / "toy").glob("*.yaml")}
    assert used | {"sft"} == set(shipped())


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs" / "toy").glob("*.yaml")), ids=lambda path: path.stem
)
def test_a_toy_config_names_itself_in_its_command_and_run(path):
    assert f"--config configs/toy/{path.name}" in path.read_text()
    assert re.fullmatch(f"toy-{path.stem}", load_config(path).run.name)
