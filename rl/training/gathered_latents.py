"""Latent attention (MLA) of context parallel ranks: latents are gathered instead of keys and values.

For each token, a latent and the rotary key that all heads share are gathered. They have kv_lora_rank +
qk_rope_head_dim elements, about a ninth of the keys and values of 16 heads (DeepSeek-V2, arXiv:2405.04434,
section 2.1). In exchange, every rank of the group projects the latents of the whole row to keys and values.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import multi_latent_attention
from torch import Tensor

from rl.training.attention import PackedRow
from rl.training.context_parallel import reorder
from rl.training.layer_spec import LatentAttention


class GatheredLatents(LatentAttention):
    """Megatron's latent attention for parts of rows (`rl.training.context_parallel`)."""

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None,
        position_ids: Tensor | None,
        packed_seq_params: PackedRow,
        **_: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return this rank's queries, the whole row's keys and values, and the two latents.

        hidden_states: [W/cp, 1, H], or [W/cp/tp, 1, H] under sequence parallelism. Result: queries [W/cp,
        heads/tp, d + rope], keys [W, heads/tp, d + rope], values [W, heads/tp, v]. Collective over the tensor
        and context parallel groups.
        """
        config, part = self.config, packed_seq_params.part
        assert part is not None and not config.apply_rope_fusion and not self.recompute_up_proj
        heads, nope, rope = (
            self.num_attention_heads_per_partition,
            config.qk_head_dim,
            config.qk_pos_emb_head_dim,
        )
        found = hidden_states
        if config.q_lora_rank is None:
            query, _ = self.linear_q_proj(found)
        else:
            found, _ = self.linear_q_down_proj(found)
            query, _ = self.linear_q_up_proj(self.q_layernorm(found))
        latents, rotary_key = self.linear_kv_down_proj(hidden_states)[0].split(
            [config.kv_lora_rank, rope], -1
        )
        if config.sequence_parallel:
            rotary_key = gather_from_sequence_parallel_region(rotary_key, group=self.tp_group)

        query = query.view(-1, heads, nope + rope)
        plain, rotated = query.split([nope, rope], -1)
        query = torch.cat([plain, self._rotate(rotated, packed_seq_params)], -1)
        rotary_key = part.row(self._rotate(rotary_key, packed_seq_params))

        # `part.gathered` gathers the tokens of the context parallel ranks. Under sequence parallelism
        # linear_kv_up_proj then gathers the tokens of the tensor parallel ranks.
        shards = self.tp_group.size() if config.sequence_parallel else 1
        both, _ = self.linear_kv_up_proj(part.gathered(self.kv_layernorm(latents)))
        both = reorder(both.view(-1, heads, nope + config.v_head_dim), part.order_of(shards))
        plain, value = both.split([nope, config.v_head_dim], -1)
        key = torch.cat([plain, rotary_key.expand(-1, heads, -1)], -1)
        return query, key, value.contiguous(), found, latents

    def _rotate(self, x: Tensor, row: PackedRow) -> Tensor:
        """Rotate x [W/cp, heads, rope] by the row's `rotation`."""
        rotate = multi_latent_attention.apply_rotary_pos_emb  # replaced by `rl.training.rotary`
        return rotate(x, row.rotation, config=self.config, cu_seqlens=row.cu_seqlens_q)
