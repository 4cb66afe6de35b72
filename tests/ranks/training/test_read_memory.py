"""Reading a checkpoint needs the memory of the rank's own part and a bounded buffer, for files of any
size."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from rl.models import architecture, read_hf_config
from rl.models.files import MAPPED_BYTES
from tests.spawn import run_ranks

WORKER = Path(__file__).parent / "read_memory_worker.py"
SIZES = dict(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=16,
    vocab_size=64000,
    tie_word_embeddings=False,
)
LAYERS_PER_FILE = 14


def save_large(directory: Path) -> int:
    """Two safetensors files in bfloat16; returns their bytes."""
    transformers.Qwen2Config(architectures=["Qwen2ForCausalLM"], **SIZES).save_pretrained(directory)
    hf = read_hf_config(str(directory))
    files: dict[int, dict[str, torch.Tensor]] = {}
    for weight in architecture(hf).weights(hf):
        for name, shape in zip(weight.hf, weight.shapes):
            files.setdefault((weight.layer or 0) // LAYERS_PER_FILE, {})[name] = torch.full(
                shape, 0.5, dtype=torch.bfloat16
            )
    for number in sorted(files):
        save_file(files.pop(number), directory / f"model-{number}.safetensors")
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


@pytest.mark.slow
def test_a_rank_holds_little_more_than_its_half(tmp_path):
    total = save_large(tmp_path)
    assert total > 4e9
    run_ranks(2, WORKER, tmp_path, tmp_path, timeout=300)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        print(
            f"rank {rank}: holds {found['held'] / 2**20:.0f} MiB, peak {found['peak'] / 2**20:.0f} MiB of "
            f"{total / 2**20:.0f} MiB"
        )
        assert found["held"] == pytest.approx(total / 2, rel=0.01)
        assert found["peak"] - found["held"] < MAPPED_BYTES + (256 << 20)  # the largest tensor, twice
