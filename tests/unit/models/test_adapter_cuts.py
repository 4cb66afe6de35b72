"""Where vLLM's ranks hold A and B: the rows of B are those of the layer, the columns of A its columns."""

import pytest

from rl.models import architecture
from rl.models.adapters import adapters, splits_columns
from tools.tiny_models import PUBLISHED, tiny_config


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "DeepseekV3ForCausalLM"])
def test_vllm_ranks_hold_the_adapters_of_their_rows(name, tp):
    hf = tiny_config(name).to_dict() | PUBLISHED.get(name, {})
    num_heads = hf["num_key_value_heads"]
    assert name != "Qwen2ForCausalLM" or num_heads == 2  # tp 4 holds each of them twice
    for pair in adapters(architecture(hf).weights(hf), rank=3):
        for rank in range(tp):
            (weight,) = (p for p in pair.base.vllm_pieces(tp, rank) if p.hf == pair.base.hf[pair.part])
            rows, columns = weight.hf_box
            (a,), (b,) = (part.vllm_pieces(tp, rank) for part in (pair.a, pair.b))
            assert a.hf_box == ((0, 3), columns) and b.hf_box == (rows, (0, 3)), pair.module
            assert b.local_box[0] == (0, rows[1] - rows[0]) and a.local_box[1] == (0, columns[1] - columns[0])
            assert splits_columns(pair.base) == (columns != (0, pair.base.shapes[0][1])) or tp == 1
