"""Rotary embeddings by position equal Megatron's."""

from types import SimpleNamespace

import pytest
import torch

from rl.training import cpu_support

cpu_support.install()

from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding  # noqa: E402
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd  # noqa: E402

from rl.features.bitwise import layers  # noqa: E402
from rl.features.bitwise.engine import EngineRotary  # noqa: E402
from rl.models import rope  # noqa: E402
from rl.training import rotary  # noqa: E402
from rl.training.attention import PackedRow  # noqa: E402
from tests.checkpoints import tiny_config  # noqa: E402

DIM = 32
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 2, 3, 90]])
PLAIN = RotaryEmbedding(DIM, 1.0, rotary_base=10000, use_cpu_initialization=True)
HF = dict(head_dim=DIM, rope_theta=10000.0)
YARN_HF = HF | dict(
    kv_lora_rank=16,
    rope_scaling=dict(
        type="yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.5
    ),
)
YARN = YarnRotaryEmbedding(
    DIM,
    rotary_base=10000.0,
    scaling_factor=4.0,
    original_max_position_embeddings=64,
    mscale=1.0,
    mscale_all_dim=0.5,
    use_cpu_initialization=True,
)


@pytest.mark.parametrize("adjacent", [False, True], ids=["halves", "adjacent"])
@pytest.mark.parametrize("module, hf", [(PLAIN, HF), (YARN, YARN_HF)], ids=["plain", "yarn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_equals_megatrons_at_the_same_positions(module, hf, adjacent, dtype):
    row_rotary = rotary.RowRotary(hf, fused=False)
    row = PackedRow(rotation=row_rotary.of(POSITIONS))
    rotation, scale = row_rotary(row) if module is YARN else (row_rotary(row), 1.0)
    assert scale == 1.0  # already in the rotation
    emb, scale = module.get_emb(91) if module is YARN else (module.get_emb(91), 1.0)
    assert (scale != 1.0) == (module is YARN)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(10, 3, DIM, generator=generator).to(dtype).requires_grad_()
    upstream = torch.randn(10, 3, DIM, generator=generator).to(dtype)
    rotates = dict(apply_rope_fusion=False, rotate=rotary._Rotate.apply)
    found = rotary._apply(x, rotation, SimpleNamespace(multi_latent_attention=adjacent, **rotates))
    expected = _apply_rotary_pos_emb_bshd(
        x, emb[POSITIONS[0], 0], multi_latent_attention=adjacent, mscale=scale
    )
    # Both round each product and each sum at most once; a fused bfloat16 product-sum has one rounding less.
    close = dict(rtol=0, atol=4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(found, expected, **close)
    (gradient,), (wanted,) = (torch.autograd.grad(y, x, upstream) for y in (found, expected))
    torch.testing.assert_close(gradient, wanted, **close)


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "LlamaForCausalLM", "DeepseekV3ForCausalLM"])
def test_the_trainer_rotates_by_the_cpus_frequencies_on_every_device(name):
    """A GPU's power function rounds otherwise than the CPU's, with which the engine computes its table."""
    hf = tiny_config(name).to_dict()
    with torch.device("meta"):  # the device on which the trainer builds its model
        found = rotary.RowRotary(hf, fused=False).frequencies
    positions = rope.positions(hf)
    engines = SimpleNamespace(head_size=DIM, is_neox_style=True)
    expected = EngineRotary(engines, hf).table
    assert found.device.type == "cpu"
    assert torch.equal(layers.rotary_table(found, positions, rope.magnitude(hf)), expected)


def test_a_fused_model_beside_an_unfused_one_keeps_megatrons_kernels(monkeypatch):
    x, angles, config = (
        torch.ones(2, 1, DIM),
        torch.ones(2, 1, 1, DIM),
        SimpleNamespace(apply_rope_fusion=True),
    )
    monkeypatch.setattr(rotary, "_megatrons_apply", lambda *args, **options: (args, options))
    assert rotary._apply(x, angles, config, mscale=2.0) == ((x, angles, config), {"mscale": 2.0})


def test_fused_kernels_get_angles_or_cosines():
    angles = rotary.RowRotary(HF, fused=True).of(POSITIONS)
    assert torch.equal(angles, PLAIN.get_emb(91)[POSITIONS[0]])
    fused = rotary.RowRotary(YARN_HF, fused=True)
    row = PackedRow(rotation=fused.of(POSITIONS))
    emb, scale = YARN.get_emb(91)
    cos, sin = fused.get_cached_cos_sin(row, dtype=torch.float32, packed_seq=True)
    assert torch.equal(cos, (emb.cos() * scale)[POSITIONS[0]])
    assert torch.equal(sin, (emb.sin() * scale)[POSITIONS[0]])
