"""A policy whose layers are those of a class of transformers, with the head of `rl.training.logprobs`."""

import re
from functools import partial
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from rl.config.schema import Training
from rl.features.transformers_backend.attention import NAME
from rl.features.transformers_backend.shards import Shards
from rl.models import by_class
from rl.models.layout import padded_vocab, vocab_multiple
from rl.training.attention import PackedRow
from rl.training.extras import LogitsFilter
from rl.training.grid import Grid
from rl.training.logprobs import OUTPUTS, linear_logprobs
from rl.training.model import HeadRequest, policy_outputs, transformer_config
from rl.training.packing import MicroBatch
from rl.training.rows import select_rows


class ClassModel(MegatronModule):
    """The layers of a class, and rows of all weights on each rank of a copy (`Shards`).

    values: replace the vocabulary's head by a value head.
    """

    pre_process = post_process = True
    model_type = ModelType.encoder_or_decoder
    share_embeddings_and_output_weights = False
    """False for Megatron's schedule: one stage holds embedding and head."""

    def __init__(
        self, hf: dict, training: Training, dtype: torch.dtype, grid: Grid, *, values: bool = False
    ) -> None:
        super().__init__(transformer_config(hf, training, dtype, te=False))
        self.hf, self.group = hf, grid.groups.tp
        config = by_class.class_config(hf)
        for key, value in config.to_dict().items():
            if re.search("dropout|pdrop", key) and isinstance(value, float):
                setattr(config, key, 0.0)
        with no_init_weights():  # the memory of weights that are never written is not taken
            model = by_class.model_class(hf)._from_config(config, attn_implementation=NAME, dtype=dtype)
        model.tie_weights()
        if values:
            model.set_output_embeddings(None)
            self.value_head = torch.nn.Linear(config.hidden_size, 1, bias=False, dtype=dtype)
        weights = grid.with_shards()
        _pad_vocabulary(model, padded_vocab(hf["vocab_size"], vocab_multiple(weights.tp)))
        if training.recompute == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        # vLLM decorates the classes of transformers that it serves itself, also for this model.
        model.base_model.do_not_compile = True
        self.language_model: Any = model
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
    def caps_scores(self) -> bool:
        """Whether attention caps its scores, so that rows cannot share prompts."""
        return bool(self.hf.get("attn_logit_softcapping"))

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Accept Megatron's call; there is no earlier stage."""

    def hidden(self, tokens: Tensor, row: PackedRow) -> Tensor:
        """Return the states before the head, [T, H]. tokens: int64 [1, T]."""
        body = self.language_model.base_model
        out = body(input_ids=tokens, position_ids=row.position_ids, use_cache=False, row=row)
        states: Tensor = out.last_hidden_state[0]
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
        self.chunk = training.head_chunk(padded_vocab(hf["vocab_size"], vocab_multiple(1)))
        self.scale = (hf.get("logit_scale") or 1.0) / (hf.get("logits_scaling") or 1.0)
        cap = hf.get("final_logit_softcapping")
        self.head = partial(capped_logprobs, cap=cap) if cap else linear_logprobs

    @property
    def head_weight(self) -> Tensor:
        """The rows of the head, [Vpad, H]. Collective over the ranks of a copy, as its backward pass."""
        [weight] = self.shards.whole_of(self.language_model.get_output_embeddings())
        return weight

    def hidden(self, tokens: Tensor, row: PackedRow) -> Tensor:
        states = super().hidden(tokens, row)
        return states * self.scale if self.scale != 1.0 else states

    def of_head(self, hidden: Tensor, request: HeadRequest) -> tuple[Tensor, ...]:
        options = dict(vocab_size=self.real_vocab_size, group=self.group, chunk=self.chunk)
        return policy_outputs(self.outputs, self.head, hidden, self.head_weight, request, **options)


class ClassValues(ClassModel):
    """A value model for packed rows, with the methods of `rl.training.model.ValueModel`."""

    outputs: tuple[str, ...] = ("values",)

    def of_head(self, hidden: Tensor, request: HeadRequest) -> tuple[Tensor, ...]:
        return (self.value_head(hidden).squeeze(-1).float(),)


def _pad_vocabulary(model: Any, rows: int) -> None:
    """Pad embedding and head to this number of rows, so that the layouts of `rl.models` hold."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and embedding.weight is head.weight
    for layer in (embedding, head) if head is not None else (embedding,):
        layer.weight = torch.nn.Parameter(layer.weight.new_empty(rows, layer.weight.shape[1]))
    if is_tied:
        head.weight = embedding.weight
    embedding.padding_idx = None  # its row would not learn, but a policy may sample this token


def capped_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    cap: float,
    temperature: float,
    vocab_size: int,
    group: Any,
    chunk: int,
    outputs: tuple[str, ...] = OUTPUTS,
    logits_filter: LogitsFilter | None = None,
) -> tuple[Tensor, ...]:
    """Return what `linear_logprobs` returns, for logits cap * tanh(logits / cap), on one rank.

    The backward pass computes the logits of each chunk again.
    """
    local = None if logits_filter is None else logits_filter.on_rows(0, vocab_size, hidden.device)

    def of(hidden: Tensor, weight: Tensor, start: int) -> Tensor:
        part = slice(start, start + len(hidden))
        logits = cap * torch.tanh(hidden @ weight[:vocab_size].T / cap)
        if local is not None:
            local.restrict(logits, part)
        logits = (logits.float() / temperature).log_softmax(-1)
        probs = logits.exp()
        found = {
            "logprobs": lambda: logits.gather(1, targets[part, None])[:, 0],
            "entropy": lambda: -(probs * logits).sum(-1),
            "sum_p_squared": lambda: probs.detach().square().sum(-1),
        }
        return torch.stack([found[name]() for name in outputs])

    starts = range(0, max(1, len(targets)), chunk)  # a row without responses has a backward pass too
    parts = [checkpoint(of, hidden[s : s + chunk], weight, s, use_reentrant=False) for s in starts]
    return tuple(torch.cat(parts, 1))
