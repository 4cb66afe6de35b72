"""Names of the supported architectures, and their configs: tiny and published."""

import json
from pathlib import Path

from rl.models import read_hf_config
from tests.checkpoints import PUBLISHED, tiny_config

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "models"
DENSE = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM")
QWEN2, QWEN3, LLAMA, MISTRAL = DENSE
V3, V2 = "DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM"
GEMMA, PHI, GRANITE, SEED, SMOL = (
    f"{name}ForCausalLM" for name in ("Gemma3", "Phi3", "Granite", "SeedOss", "SmolLM3")
)
GRANITE4 = "GraniteMoeHybridForCausalLM"
OSS, MINIMAX = "GptOssForCausalLM", "MiniMaxM2ForCausalLM"
NEXT, QWEN35, QWEN35_MOE = "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
GLM, GLM_LITE = "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"
YARN = {"type": "yarn", "factor": 4.0}


def config(name: str, **options) -> dict:
    """config.json as transformers writes it, with the keys of published configs."""
    return json.loads(tiny_config(name, **options).to_json_string(use_diff=False)) | PUBLISHED.get(name, {})


def published(model: str) -> dict:
    return read_hf_config(str(CONFIGS / model))
