"""The section of the configuration for training."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rl.config.ranges import AT_LEAST_ONE, BELOW_ONE, FRACTION, NOT_NEGATIVE, POSITIVE


@dataclass
class Optimizer:
    lr: Annotated[float, NOT_NEGATIVE] = 1e-6
    """Peak learning rate of Adam. 1e-6 is what RL on 7B and larger models uses; toy models need about
    1e-3."""
    min_lr: Annotated[float, NOT_NEGATIVE] = 0.0
    """Learning rate that the decay reaches one step after the last."""
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Steps of linear warm-up of the learning rate, from 0 to `lr`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay from `lr` to `min_lr` over `run.max_steps`, after the warm-up."""
    beta1: Annotated[float, BELOW_ONE] = 0.9
    """Adam's decay of the first moment."""
    beta2: Annotated[float, BELOW_ONE] = 0.999
    """Adam's decay of the second moment."""
    eps: Annotated[float, POSITIVE] = 1e-8
    """Added to Adam's denominator."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    """Decoupled weight decay; not applied to norms and biases. RL keeps it at 0: the reference policy is the
    regulariser."""
    clip_grad: Annotated[float, NOT_NEGATIVE] = 1.0
    """Maximum L2 norm of the whole gradient. 0: no clipping."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """dtype of Adam's two moments. bfloat16 saves 4 of 12 bytes per parameter; they are rounded
    stochastically, because with beta2=0.999 rounding to nearest would keep the second from decreasing."""
    host_share: Annotated[float, FRACTION] = 0.0
    """Share of the parameters whose master weights and moments always stay in host memory. The CPU updates
    them there while the GPU updates the others."""


@dataclass
class Mtp:
    head_lr: Annotated[float, NOT_NEGATIVE] = 0.0
    """Learning rate of the checkpoint's head for multi-token prediction, constant; it learns the policy's own
    distribution, and the policy learns as without it. 0: it does not learn."""


Recomputed = Literal["core_attn", "mla_up_proj", "mlp", "moe", "shared_experts", "layernorm", "moe_act"]
"""Parts of a layer that can recompute their activations."""


@dataclass
class Training:
    backend: Literal["auto", "megatron", "transformers"] = "auto"
    """Layers of the model in training: Megatron's, or those of its class in transformers. auto: Megatron's
    for the architectures that docs/models.md lists, else the class."""
    shard: Annotated[int, NOT_NEGATIVE] = 0
    """backend=transformers: ranks that together hold one copy of weights, gradients and optimizer state. With
    several, a layer is whole only while it computes. 0: 1 if the run's models have at most 0.54 billion
    parameters, else all ranks of a node."""
    tp: Annotated[int, AT_LEAST_ONE] = 1
    """Tensor parallel size of the training grid."""
    pp: Annotated[int, AT_LEAST_ONE] = 1
    """Pipeline parallel size of the training grid. Data parallel size is world / (tp * cp * pp)."""
    vpp: Annotated[int, AT_LEAST_ONE] = 1
    """Chunks into which the layers of a pipeline stage are divided (interleaved schedule). A pipeline then
    waits vpp times less while it fills and drains; its ranks exchange vpp times as many activations."""
    cp: Annotated[int, AT_LEAST_ONE] = 1
    """Context parallel size: number of ranks that share the tokens of each sequence, for long contexts."""
    ep: Annotated[int, AT_LEAST_ONE] = 1
    """Expert parallel size: the routed experts of a layer lie on this many ranks of a stage. It applies to
    the run's models with experts; 1 if none has experts."""
    etp: Annotated[int, NOT_NEGATIVE] = 0
    """Tensor parallel size of the routed experts. 0: 1 with ep > 1, which avoids communication within an
    expert, else `training.tp`."""
    sequence_parallel: bool = True
    """Shard activations between the tensor parallel regions along the sequence; no effect with tp 1."""
    micro_batch_tokens: Annotated[int, AT_LEAST_ONE] = 16384
    """Maximum tokens (prompts and responses) of one micro-batch on one rank; the cp ranks that share a
    micro-batch hold cp times as many. A prompt that samples share counts once. A longer sequence forms a
    micro-batch of its own. On a CPU micro-batches are smaller, because its caches hold only 2 MiB of hidden
    states, for example 1,024 tokens of 512 channels in float32; only the samples of a prompt may need
    more."""
    prompts_per_minibatch: Annotated[int, NOT_NEGATIVE] = 0
    """Prompts (with all their samples) per optimizer step. 0: the whole batch of `data.prompts_per_step`."""
    epochs: Annotated[int, AT_LEAST_ONE] = 1
    """Passes over the batch of a step."""
    shared_prefix: bool = True
    """Compute a prompt once for all of its samples in a micro-batch. Results agree up to rounding. No effect
    on groups of one sample, nor on CUDA in float32."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass computes again instead of keeping them: none; in parts of a layer
    (selective); all but the inputs of layers (full). Gradients are bitwise the same."""
    recompute_modules: list[Recomputed] = field(default_factory=lambda: ["mlp", "moe"])
    """selective: parts of a layer, by Megatron's names. core_attn: the attention between queries and keys;
    with `training.cp` its gathered keys and values. mla_up_proj: MLA's projections from the latents. mlp: the
    MLP of a dense layer. moe: router and experts. shared_experts. With Transformer Engine also layernorm (the
    norms) and moe_act (the experts' activation)."""
    recompute_every: Annotated[int, AT_LEAST_ONE] = 1
    """full: one of every n layers is recomputed, the first ones of each pipeline stage."""
    overlap_gradients: Literal["auto", "on", "off"] = "auto"
    """Reduce gradients over the data parallel ranks during the backward pass. auto: on CUDA."""
    router_replay: Literal["none", "old_policy", "engine"] = "none"
    """Mixtures of experts: the experts that the policy's passes use for a token, instead of the present
    router's choice. old_policy: the choice in the pass for the old log-probs. engine: the choice when the
    token was generated (docs/fidelity.md)."""
    head_chunk_tokens: Annotated[int, NOT_NEGATIVE] = 0
    """Maximum number of tokens in a chunk: logits are computed for one chunk at a time. 0: as many as fit in
    1 GiB of float32 logits. A micro-batch with at most this many tokens keeps its logits for the backward
    pass; a larger one recomputes them there."""
    offload: Literal["auto", "none", "optimizer", "all"] = "auto"
    """State of the training models that moves to host memory while the engine generates: none, gradients and
    optimizer state, or also the weights (all). auto: all on CUDA, none on CPU."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    mtp: Mtp = field(default_factory=Mtp)

    @property
    def expert_tp(self) -> int:
        """Return `etp` with its default resolved."""
        return self.etp or (self.tp if self.ep == 1 else 1)

    @property
    def row_tokens(self) -> int:
        """Return the maximum number of tokens of a micro-batch."""
        return self.micro_batch_tokens * self.cp

    @property
    def micro_batch_multiple(self) -> int:
        """Divisor of the number of micro-batches in each pass (`rl.training.interleaved`)."""
        return self.pp if self.vpp > 1 else 1

    def head_chunk(self, rows: int) -> int:
        """Return `head_chunk_tokens` with 0 resolved. rows: vocabulary rows of the head on this rank."""
        return self.head_chunk_tokens or max(1, 2**30 // (4 * rows))
