"""A policy whose layers are those of a class of transformers, with the head of `rl.training.logprobs`."""

import math
import re
from functools import partial
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from rl.config.schema import Training
from rl.features.transformers_backend.attention import NAME
from rl.features.transformers_backend.shards import Shards
from rl.models import by_class
from rl.models.layout import padded_vocab, vocab_multiple
from rl.training.attention import PackedRow
from rl.training.grid import Grid
from rl.training.logprobs import OUTPUTS, linear_logprobs
from rl.training.model import HeadRequest, policy_outputs, transformer_config
from rl.training.packing import MicroBatch
from rl.training.rows import select_rows


class ClassModel(MegatronModule):
    """The layers of a class, and rows of all weights on each rank of a copy (`Shards`)."""

    pre_process = post_process = True
    model_type = ModelType.encoder_or_decoder
    share_embeddings_and_output_weights = False
    """False for Megatron's schedule: one stage holds embedding and head."""
    has_values = False
    """Whether a value head replaces the vocabulary's."""
    packs: bool
    """Whether a pass computes a packed row; if not, its sequences are the rows of a padded batch."""

    def __init__(self, hf: dict, training: Training, dtype: torch.dtype, grid: Grid) -> None:
        super().__init__(transformer_config(hf, training, dtype, te=False))
        self.hf, self.group = hf, grid.groups.tp
        config = by_class.class_config(hf)
        for key, value in config.to_dict().items():
            if re.search("drop|jitter", key) and isinstance(value, float):
                setattr(config, key, 0.0)
        self.packs = by_class.packs(hf)
        with no_init_weights():  # the memory of weights that are never written is not taken
            model = by_class.model_class(hf)._from_config(config, dtype=dtype)
        model.tie_weights()
        if self.has_values:
            model.set_output_embeddings(None)
            self.value_head = torch.nn.Linear(config.hidden_size, 1, bias=False, dtype=dtype)
        _freeze(model)
        weights = grid.with_shards()
        _pad_vocabulary(model, padded_vocab(hf["vocab_size"], vocab_multiple(weights.tp)))
        if training.recompute == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.language_model: Any = model
        for layer in self.layers:  # a layer within a layer is computed again with it
            for inner in layer.modules():
                if isinstance(inner, GradientCheckpointingLayer) and inner is not layer:
                    inner.gradient_checkpointing = False
        # vLLM decorates the classes of transformers that it serves itself, also for this model.
        self.body.do_not_compile = True
        self.attend()
        self.shards = Shards(self, weights.groups.tp)

    @property
    def layers(self) -> list[torch.nn.Module]:
        """The layers between embedding and head."""
        return [
            part for part in self.language_model.modules() if isinstance(part, GradientCheckpointingLayer)
        ]

    @property
    def embedding(self) -> torch.nn.Module:
        """The layer of the tokens' embedding."""
        layer: torch.nn.Module = self.language_model.get_input_embeddings()
        return layer

    @property
    def body(self) -> Any:
        """The class without its head."""
        own = self.language_model
        return own.model if own.base_model is own else own.base_model

    @property
    def shares_prompts(self) -> bool:
        """Whether rows may share prompts: the capped scores of a row are computed for whole sequences."""
        return self.packs and not self.hf.get("attn_logit_softcapping")

    def attend(self, name: str = "") -> None:
        """Select the function of attention by its name in the AttentionInterface; by default for `packs`."""
        own = "sdpa" if self.language_model._supports_sdpa else "eager"
        self.language_model.set_attn_implementation(name or (NAME if self.packs else own))

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Accept Megatron's call; there is no earlier stage."""

    def hidden(self, tokens: Tensor, row: PackedRow) -> Tensor:
        """Return the states before the head, [T, H]. tokens: int64 [1, T]."""
        if self.packs:
            out = self.body(input_ids=tokens, position_ids=row.position_ids, use_cache=False, row=row)
            states: Tensor = out.last_hidden_state[0]
            return states
        assert row.attention is not None and row.position_ids is not None
        lengths = row.attention.cu_seqlens_q.diff()
        numbers = torch.arange(len(lengths), device=tokens.device)
        at = numbers.repeat_interleave(lengths, output_size=tokens.shape[1]), row.position_ids[0]
        batch = tokens.new_zeros(len(lengths), row.attention.max_seqlen_q)
        batch[at] = tokens[0]  # a token sees nothing of the padding behind it
        states = self.body(input_ids=batch, use_cache=False).last_hidden_state[at]
        return states

    def run(self, micro: MicroBatch, temperature: float) -> tuple[Tensor, ...]:
        """Run the forward pass of one packed micro-batch; return the `outputs`, float32 [R] each."""
        row = PackedRow(attention=micro.attention, position_ids=micro.position_ids)
        with self.shards.released():
            hidden = select_rows(self.hidden(micro.tokens, row), micro.predict_at)
            return self.of_head(
                hidden, HeadRequest(micro.predict_at, micro.targets, temperature, micro.extras)
            )

    def of_head(self, hidden: Tensor, request: HeadRequest) -> tuple[Tensor, ...]:
        """Return the `outputs` of the head. hidden: [R, H]."""
        raise NotImplementedError


class ClassPolicy(ClassModel):
    """A whole language model for packed rows, with the methods of `rl.training.model.Policy`."""

    outputs: tuple[str, ...] = OUTPUTS

    def __init__(self, hf: dict, training: Training, dtype: torch.dtype, grid: Grid) -> None:
        super().__init__(hf, training, dtype, grid)
        self.real_vocab_size = hf["vocab_size"]
        self.head_chunk_tokens = training.head_chunk(padded_vocab(hf["vocab_size"], vocab_multiple(1)))
        cap = hf.get("final_logit_softcapping")
        self.head = partial(linear_logprobs, cap=cap) if cap else linear_logprobs
        self.scale = 1.0
        """Factor of the states before the head, see `find_scale`."""

    @property
    def head_weight(self) -> Tensor:
        """The rows of the head, [Vpad, H], or [Vpad, H + 1] with biases in the last column.

        Collective over the ranks of a copy, as its backward pass.
        """
        weight, *bias = self.shards.whole_of(self.language_model.get_output_embeddings())
        return torch.cat([weight, bias[0][:, None]], 1) if bias else weight

    def hidden(self, tokens: Tensor, row: PackedRow) -> Tensor:
        states = super().hidden(tokens, row)
        states = states * self.scale if self.scale != 1.0 else states
        if self.language_model.get_output_embeddings().bias is not None:
            states = torch.cat([states, states.new_ones(len(states), 1)], 1)
        return states

    @torch.no_grad()
    def find_scale(self, device: torch.device) -> None:
        """Set `scale` to what the class makes of states of 1 before its head, and of products of 1 after it.

        Collective over the ranks of a copy. A scale of capped logits is not found.
        """
        own, inputs = self.language_model, list[Tensor]()
        head = own.get_output_embeddings()

        def ones(_: Any, __: Any, out: Any) -> Any:
            out.last_hidden_state = torch.ones_like(out.last_hidden_state, dtype=torch.float32)
            return out

        def keep(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            inputs.append(args[0])
            return (args[0].to(module.weight.dtype),)

        hooks = [
            self.body.register_forward_hook(ones),
            head.register_forward_pre_hook(keep),
            head.register_forward_hook(lambda _, __, out: torch.ones_like(out, dtype=torch.float32)),
        ]
        self.attend("eager")
        try:
            out = own(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=False).logits
        finally:
            self.attend()
            for hook in hooks:
                hook.remove()
        found = [inputs[0].flatten(), *([] if self.hf.get("final_logit_softcapping") else [out.flatten()])]
        self.scale = math.prod(float(own[0]) for own in found if own.eq(own[0]).all())

    def of_head(self, hidden: Tensor, request: HeadRequest) -> tuple[Tensor, ...]:
        if self.outputs == ("hidden",):
            return (hidden,)
        options = dict(vocab_size=self.real_vocab_size, group=self.group, chunk=self.head_chunk_tokens)
        return policy_outputs(self.outputs, self.head, hidden, self.head_weight, request, **options)


class ClassValues(ClassModel):
    """A value model for packed rows, with the methods of `rl.training.model.ValueModel`."""

    has_values = True
    outputs: tuple[str, ...] = ("values",)

    def of_head(self, hidden: Tensor, request: HeadRequest) -> tuple[Tensor, ...]:
        return (self.value_head(hidden).squeeze(-1).float(),)


def _freeze(model: Any) -> None:
    """Hold numbers that never learn, such as biases of routers, as buffers in float32."""
    for part in model.modules():
        for name, own in [*part.named_parameters(recurse=False)]:
            if not own.requires_grad:
                delattr(part, name)
                part.register_buffer(name, own.data)
        for name, own in [*part.named_buffers(recurse=False)]:
            if own.is_floating_point() and name not in part._non_persistent_buffers_set:
                setattr(part, name, own.float())


def _pad_vocabulary(model: Any, rows: int) -> None:
    """Pad embedding and head to this number of rows, so that the layouts of `rl.models` hold."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and embedding.weight is head.weight
    for layer in (embedding, head) if head is not None else (embedding,):
        for name, own in [*layer.named_parameters(recurse=False)]:
            setattr(layer, name, torch.nn.Parameter(own.new_empty(rows, *own.shape[1:])))
    if is_tied:
        head.weight = embedding.weight
    for layer in model.modules():
        if isinstance(layer, torch.nn.Embedding):
            layer.padding_idx = None  # its row would not learn, but a policy may sample this token
