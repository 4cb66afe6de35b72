"""The models of the training grid: Megatron GPTModels whose heads compute the outputs for the algorithms.

`Policy`, a language model, returns log-probs of given tokens instead of logits. `ValueModel`, a critic or a
reward model, returns one value for each given token. Both run on packed micro-batches.

`build_model` is the one place that creates layers; the option `adapters` adds low-rank adapters to them. The
names of their weights for refit, checkpoints and export belong to `rl.training.weights.WeightMap`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from rl.config.schema import Training
from rl.models import architecture, form, rope
from rl.models.layout import padded_vocab, recomputed_layers, stage_layers, vocab_multiple
from rl.models.sizes import is_tied
from rl.training.attention import PackedRow
from rl.training.extras import Extras, HeadOutput, LogitsFilter
from rl.training.grid import Grid
from rl.training.layer_form import ACTIVATIONS, give_form
from rl.training.layer_spec import LatentAttention, block_spec, megatrons_names, replace_classes, use_te
from rl.training.logprobs import OUTPUTS, Softmax, linear_logprobs
from rl.training.packing import MicroBatch
from rl.training.rotary import RowRotary, rotate_by_row
from rl.training.rows import select_rows

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class HeadRequest:
    """Positions and outputs that the head computes; passed to GPTModel.forward as its labels.

    predict_at: int64 [R], positions in the packed row. targets: int64 [R], the token after each position.
    extras: the micro-batch's extras.
    """

    predict_at: Tensor
    targets: Tensor
    temperature: float
    extras: Extras

    def of(self, index: Tensor) -> "HeadRequest":
        """Return the request with the targets and extras of the tokens `index`.

        index: int64 [r], ascending, on the CPU, of R response tokens. `predict_at` already has r elements.
        """
        return replace(
            self, targets=self.targets[index.to(self.targets.device)], extras=self.extras.of(index)
        )


class Packed(GPTModel):
    """One pipeline stage of a model for packed rows, or with `training.vpp` one chunk of a stage.

    The last chunk returns a tensor float32 [R] for each name in `outputs`. The training engine sets `outputs`
    before a pass, for example to ("logprobs",).
    """

    outputs: tuple[str, ...]
    rotary: RowRotary

    @property
    def layers(self) -> Iterable[torch.nn.Module]:
        """The layers between embedding and head."""
        return self.decoder.layers

    def run(self, micro: MicroBatch, temperature: float) -> Any:
        """Run the forward pass of one packed micro-batch."""
        packed = PackedRow(
            qkv_format="thd",
            cu_seqlens_q=micro.bounds,
            cu_seqlens_kv=micro.bounds,
            max_seqlen_q=micro.tokens.numel(),
            max_seqlen_kv=micro.tokens.numel(),
            attention=micro.attention,
            rotation=self.rotary.of(micro.position_ids),
            local_rotation=self.rotary.local_of(micro.position_ids),
            position_ids=micro.position_ids,
            extras=micro.extras,
            part=micro.part,
            groups=micro.groups,
        )
        request = HeadRequest(micro.predict_at, micro.targets, temperature, micro.extras)
        if micro.part is not None:
            request = request.of(micro.part.own)
        out = self(micro.tokens, micro.position_ids, None, labels=request, packed_seq_params=packed)
        return micro.part.outputs(out) if micro.part is not None and self.post_process else out


class Policy(Packed):
    """A language model that returns statistics of its predictions at response tokens instead of logits.

    The statistics are the target's log-prob, the entropy and the sum of squared probabilities. A pass may
    also request a `HeadOutput`. In place of all these outputs it may request `hidden`, the last hidden
    states.
    """

    outputs = OUTPUTS
    head = staticmethod(linear_logprobs)

    def __init__(
        self,
        *args: Any,
        real_vocab_size: int,
        head_chunk_tokens: int,
        logits_scale: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.real_vocab_size, self.head_chunk_tokens = real_vocab_size, head_chunk_tokens
        self.logits_scale = logits_scale

    def _postprocess(
        self, hidden_states: Tensor, *, labels: HeadRequest, **_: Any
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute the head on the last stage; other stages return hidden_states.

        hidden_states: [T, 1, H], or [T/tp, 1, H] under sequence parallelism.
        """
        if not self.post_process:
            return hidden_states
        group = self.pg_collection.tp
        # In the backward pass, both functions sum the hidden states' gradient over the tensor parallel ranks.
        if self.config.sequence_parallel:
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(hidden_states, group=group)
        else:
            hidden_states = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states, group=group)
        hidden = select_rows(hidden_states[:, 0], labels.predict_at)
        if self.logits_scale != 1.0:
            hidden = hidden * self.logits_scale
        if self.outputs == ("hidden",):
            return (hidden,)
        options = dict(vocab_size=self.real_vocab_size, group=group, chunk=self.head_chunk_tokens)
        return policy_outputs(self.outputs, self.head, hidden, self.head_weight, labels, **options)

    @property
    def head_weight(self) -> Tensor:
        """The rank's rows of the head, [Vpad/tp, H], on the last stage."""
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight


def policy_outputs(
    names: tuple[str, ...],
    head: Callable[..., tuple[Tensor, ...]],
    hidden: Tensor,
    weight: Tensor,
    labels: HeadRequest,
    *,
    vocab_size: int,
    group: Any,
    chunk: int,
) -> tuple[Tensor, ...]:
    """Return the named outputs of a policy, float32 [R] each.

    head: `linear_logprobs`, or a function with its arguments. hidden: [R, H], the states before the
    head. weight: the rank's rows of the head. Others: as in `Softmax`.
    """
    softmax = Softmax(labels.temperature, vocab_size, group, chunk)
    own = tuple(name for name in names if name in OUTPUTS)
    found: tuple[Tensor, ...] = ()
    if own:
        kept = labels.extras.get(LogitsFilter)
        found = head(hidden, weight, labels.targets, softmax, outputs=own, logits_filter=kept)
    if own == names:
        return found
    further = labels.extras.get(HeadOutput)
    assert further is not None, names
    results = dict(zip(own, found))
    # For each token, a HeadOutput needs several times the float32 memory that log-probs need.
    results[further.name] = further(hidden, weight, replace(softmax, chunk=max(1, chunk // 4)))
    return tuple(results[name] for name in names)


class ValueModel(Packed):
    """A language model with a value head instead of the vocabulary's head.

    Values are read at the position before each response token, so a critic rates the state before the token
    was sampled. For example, the value of the first response token is read at the prompt's last token.
    """

    outputs = ("values",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process:
            self.output_layer = None  # GPTModel always creates one
            hidden, dtype = self.config.hidden_size, self.config.params_dtype
            self.value_head = torch.nn.Linear(hidden, 1, bias=False, dtype=dtype)

    def _postprocess(
        self, hidden_states: Tensor, *, labels: HeadRequest, **_: Any
    ) -> Tensor | tuple[Tensor, ...]:
        """Compute the head on the last stage; other stages return hidden_states.

        hidden_states: [T, 1, H], or [T/tp, 1, H] under sequence parallelism.
        """
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            # Every tensor parallel rank computes the whole head, so its gradient is complete and not summed.
            hidden_states = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return (self.value_head(select_rows(hidden_states[:, 0], labels.predict_at)).squeeze(-1).float(),)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Bypass LanguageModule's method, which requires an output layer."""
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)


def transformer_config(hf: dict, training: Training, dtype: torch.dtype, *, te: bool) -> TransformerConfig:
    """Return Megatron's config for a model and the training section. te: with Transformer Engine's layers."""
    on_cuda = torch.cuda.is_available()
    of_model = architecture(hf).megatron_config(hf)
    activation = form(hf).activation
    has_experts = "num_moe_experts" in of_model  # training.ep may be for another model of the run
    latent = of_model.get("multi_latent_attention", False)
    # TE's kernel for whole heads cannot scale the rotation. Megatron's kernel for MLA requires YaRN, and the
    # latents of the whole row on this rank.
    fuses_rotation = rope.magnitude(hf) == 1.0
    if latent:
        fuses_rotation = of_model["rope_type"] == "yarn" and training.cp == 1
    kind = MLATransformerConfig if latent else TransformerConfig
    layout = _pipeline_layout(of_model["num_layers"], training.pp * training.vpp) if training.pp > 1 else None
    return kind(
        **of_model,
        transformer_impl="transformer_engine" if te else "local",
        expert_model_parallel_size=training.ep if has_experts else 1,
        expert_tensor_parallel_size=training.expert_tp if has_experts else training.tp,
        moe_grouped_gemm=has_experts and te,
        tensor_model_parallel_size=training.tp,
        pipeline_model_parallel_size=training.pp,
        pipeline_model_parallel_layout=layout,
        sequence_parallel=training.sequence_parallel and training.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        activation_func=ACTIVATIONS[activation],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        # The checkpoint overwrites every weight, so initialisers do nothing. perform_initialization=False
        # would omit the parameters' tensor parallel attributes, which the gradient norm requires.
        init_method=_leave,
        output_layer_init_method=_leave,
        use_cpu_initialization=not on_cuda,
        # Loss terms contain their global denominator: no division by micro-batches or data parallel size.
        calculate_per_token_loss=True,
        variable_seq_lengths=training.pp > 1,  # see `rl.training.pipeline`
        # variable_seq_lengths raises with the default 'allgather', even for dense models.
        moe_token_dispatcher_type="alltoall",
        # With pp=2 and chunks, and with gloo, batched p2p pairs sends with the wrong receives. With gloo,
        # overlapped p2p reads buffers that are freed already.
        batch_p2p_comm=on_cuda and not (training.pp == 2 and training.vpp > 1),
        # True would wait for the device after each transfer, because of a race in torch before version 2.
        batch_p2p_sync=False,
        overlap_p2p_comm=False,
        deallocate_pipeline_outputs=on_cuda,
        bias_activation_fusion=te and activation == "silu",
        bias_dropout_fusion=te and not of_model["add_bias_linear"],
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=te and fuses_rotation,
        moe_permute_fusion=has_experts and te,
        # The fused router does not use replayed experts.
        moe_router_fusion=has_experts and te and training.router_replay == "none",
        **_recompute(training, of_model["num_layers"], te=te),
    )


def _recompute(training: Training, num_layers: int, *, te: bool) -> dict[str, Any]:
    """Return Megatron's settings for `training.recompute`. Raises ValueError for modules that only TE has."""
    if training.recompute == "none":
        return {}
    if training.recompute == "selective":
        modules = list(training.recompute_modules)
        if not te and (missing := [name for name in modules if name in ("layernorm", "moe_act")]):
            raise ValueError(
                f"training.recompute_modules={missing[0]} requires Transformer Engine's layers (on CUDA, "
                "with model.dtype=bfloat16); leave it out."
            )
        return dict(recompute_granularity="selective", recompute_modules=modules)
    # Megatron's "block" recomputes the first layers of a stage. Their backward passes come last, when the
    # activations of the other layers are free.
    most = max(stage_layers(num_layers, training.pp * training.vpp))
    number = recomputed_layers(most, training.recompute_every)
    return dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=number)


def _pipeline_layout(num_layers: int, num_parts: int) -> list[list[str]]:
    """Return the layer types of each part of the model; parts may have different numbers of layers."""
    stages = [["decoder"] * count for count in stage_layers(num_layers, num_parts)]
    return [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]


def _leave(weight: Tensor) -> Tensor:
    return weight


def build_model(
    hf: dict,
    training: Training,
    dtype: torch.dtype,
    grid: Grid,
    *,
    values: bool,
    uses_te: bool = True,
    fuses_norms: bool = True,
) -> list[Packed]:
    """Build this rank's chunks of a policy or a value model, with uninitialised weights.

    hf: for a value model, the result of `rl.models.value_model`. uses_te: use Transformer Engine's layers if
    they support the dtype. fuses_norms: see `TrainerPart.fuses_norms`. Collective over the world (Megatron's
    tied embeddings).
    """
    config = transformer_config(hf, training, dtype, te=uses_te and use_te(dtype))
    return [
        _chunk(hf, training, config, grid, chunk, values=values, fuses_norms=fuses_norms)
        for chunk in range(grid.vpp)
    ]


def _chunk(
    hf: dict,
    training: Training,
    config: TransformerConfig,
    grid: Grid,
    chunk: int,
    *,
    values: bool,
    fuses_norms: bool,
) -> Packed:
    vp_stage = chunk if grid.vpp > 1 else None
    layers = block_spec(config, fuses_norms=fuses_norms, vp_stage=vp_stage)
    if config.multi_latent_attention and training.cp > 1:
        from rl.training.gathered_latents import GatheredLatents

        layers = replace_classes(layers, {LatentAttention: GatheredLatents})
    options = dict(
        vocab_size=padded_vocab(hf["vocab_size"], vocab_multiple(grid.tp)),
        max_sequence_length=rope.positions(hf),
        pre_process=grid.is_first_stage and chunk == 0,
        post_process=grid.is_last_stage and chunk == grid.vpp - 1,
        position_embedding_type="rope",
        rotary_base=rope.rope_theta(hf),
        pg_collection=grid.groups,
        vp_stage=vp_stage,
    )
    with megatrons_names(config):
        if values:
            model = ValueModel(config, layers, **options)
        else:
            model = Policy(
                config,
                layers,
                share_embeddings_and_output_weights=is_tied(hf),
                real_vocab_size=hf["vocab_size"],
                head_chunk_tokens=training.head_chunk(options["vocab_size"] // grid.tp),
                logits_scale=form(hf).logits_scale,
                **options,
            )
        give_form(model, form(hf))
    model.rotary = rotate_by_row(model, hf, fused=config.apply_rope_fusion)
    return model
