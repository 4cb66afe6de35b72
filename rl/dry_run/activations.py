"""Memory of the training passes of a model: activations, working memory, and the head's computation.

Activations are estimated from the widths of the layers: the elements that the backward pass of packed rows
needs, in the model's dtype. Under sequence parallelism a tensor parallel rank keeps T/tp of the T tokens of a
micro-batch between the tensor parallel regions. On CPUs the activations are those of unfused layers, and
glibc keeps a share of the freed memory.
"""

import json
import math
from dataclasses import dataclass

from rl.config.schema import Config
from rl.config.wing import door
from rl.dry_run.grids import Layout
from rl.dry_run.hardware import Hardware
from rl.dry_run.images import tower_bytes
from rl.dry_run.parameters import ITEMSIZE
from rl.dry_run.recompute import EVERYTHING, Kept, kept_and_computed_again, kept_parts
from rl.dry_run.rows import (
    longest_row,
    longest_sequence,
    micro_batches_in_flight,
    num_micro_batches,
    response_share,
)
from rl.dry_run.shape import ModelShape
from rl.models.layout import padded_vocab, vocab_multiple
from rl.models.placement import chunk_ranges
from rl.models.sizes import ffn_width, layer_kinds, num_kv_heads

RETAINED = 0.75
"""Freed memory that glibc can neither use for the next micro-batch nor return / activations of a micro-batch
(0.64 to 0.84 with SmolLM2-135M): small objects are between tensors, and blocks of aligned memory do not fit
again. The first micro-batches of a phase find none, because freed memory is returned between phases;
those of its later updates find little (with SmolLM2-135M and two updates 0.03 of the peak). The same share
stays of layers that the ranks of a copy gather."""
LARGE = 32 << 20
"""Bytes from which glibc always maps a block on its own and returns it when it is freed; activations on CPUs
are smaller, because rows are short there (`rl.models.sizes.cpu_row_tokens`)."""
HEAD_COPIES = 2
"""Number of arrays of a chunk's logits, in the weights' dtype, that coexist in rl.training.logprobs on CUDA:
the current chunk's, and the previous chunk's, which is still referenced."""


@dataclass(frozen=True)
class Passes:
    """Memory of the training passes of a model on a rank of one stage."""

    kept: float = 0.0
    """Bytes that all micro-batches in flight save for their backward passes."""
    retained: float = 0.0
    """Bytes that glibc still holds of earlier micro-batches (RETAINED)."""
    working: float = 0.0
    """Bytes that the computation of one layer needs."""
    head: float = 0.0
    """Bytes that the computation of the head needs. Layer and head do not compute at the same time."""
    returned: float = 0.0
    """Bytes of `head` in blocks that glibc returns to the system when they are freed (LARGE)."""

    @property
    def of_head(self) -> float:
        """The head's bytes if the peak is there, else 0."""
        return self.head if self.head > self.working else 0.0

    @property
    def peak(self) -> float:
        return self.kept + self.retained + max(self.working, self.head)


def passes_of(
    config: Config,
    layout: Layout,
    model: ModelShape,
    stage: int,
    hardware: Hardware,
    predictor: ModelShape | None,
) -> Passes:
    """Return the bytes of the training passes of one stage.

    The peak is in the backward pass of a layer or of a head: the head for log-probs, or the policy's head for
    multi-token prediction (`predictor`), which computes after the last layer's forward pass.
    """
    itemsize, row = ITEMSIZE[config.model.dtype], longest_row(config, layout)
    tokens = math.ceil(row / layout.cp)
    kept_tokens = tokens / layout.tp if layout.sequence_parallel else tokens
    number = num_micro_batches(config, layout, longest_sequence(config))
    in_flight = micro_batches_in_flight(layout, stage, number)
    hidden, imbalance = model.hf["hidden_size"], hardware.expert_imbalance
    chunks = chunk_ranges(model.num_layers, layout.pp, layout.vpp)[stage]
    own = [layer for first, stop in chunks for layer in range(first, stop)]

    def elements(parts: Kept) -> list[float]:
        more = unfused_elements if hardware.is_cpu else lambda *_: 0.0
        return [
            layer_elements(model, layer, layout, tokens, imbalance, parts)
            + more(model, layer, layout, tokens, itemsize, parts)
            for layer in own
        ]

    saved, working, kept_keys = kept_and_computed_again(
        config.training, elements(EVERYTHING), elements(kept_parts(config.training)), hidden * kept_tokens
    )
    saved, working = saved * itemsize, working * itemsize
    # The gathered input of a tensor parallel region and the gradient of the widest activation.
    working += (hidden + max(_widest(model, layout), hidden / layout.tp)) * tokens * itemsize
    if stage == 0:
        of_images, while_encoding = tower_bytes(config, model, row, itemsize)
        saved, working = saved + of_images, max(working, while_encoding)
    keys = _key_elements(model) / layout.tp * row * itemsize
    if model.hf.get("kv_lora_rank"):
        working += keys  # with the rotary part, and values of the width of keys
    if layout.cp > 1:
        # Keys and values of the whole row for the backward pass, and a copy in another order.
        saved += keys * max(1, kept_keys)
        working += keys
    head = returned = 0.0
    if stage == layout.pp - 1:
        if hardware.is_cpu and model.has_head:
            block = head_rows(layout.tp, model) * hidden * itemsize
            one_chunk = tokens <= config.training.head_chunk(head_rows(layout.tp, model))
            returned = _head_gradient(layout, model, itemsize, one_chunk) if block >= LARGE else 0.0
        head = _head(config, layout, model, tokens, itemsize, is_cpu=hardware.is_cpu)
        if predictor is not None and predictor.run.learns and model.run.name == "policy":
            head = max(head, _prediction(config, layout, predictor, tokens, imbalance, itemsize))
    gathered = 0.0
    if (own_bytes := door(config, "pass_bytes")) is not None:
        found = own_bytes(
            json.dumps(model.hf, sort_keys=True),
            config.training.recompute,
            config.model.dtype,
            values=not model.has_head,
            rank=config.adapter.rank if model.adapters else 0,
            shard=layout.shard,
            tokens=tokens,
            length=min(tokens, longest_sequence(config)),
            is_cpu=hardware.is_cpu,
            targets=tuple(config.adapter.targets),
        )
        saved, working = found or (saved, working)
        if layout.shard > 1:  # the whole head
            head += itemsize * head_rows(layout.tp, model) * hidden
            layers = itemsize * sum(part.elements for part in model.parts if part.weight.layer is not None)
            # The forward and the backward pass gather every layer.
            gathered = 2 * layers if layers / model.num_layers < LARGE else 0.0
    retained = RETAINED * (saved * in_flight * (number > in_flight) + gathered) * hardware.is_cpu
    return Passes(saved * in_flight, retained, working, head, returned)


def layer_elements(
    model: ModelShape,
    layer: int | None,
    layout: Layout,
    tokens: float,
    imbalance: float,
    parts: Kept = EVERYTHING,
) -> float:
    """Return the number of elements that the backward pass of a layer needs on one rank.

    These are input and output of every matrix product, and queries and keys after the rotary embedding, or
    what a gated delta net computes from.
    parts: the parts that keep their activations. Of an MLP, of experts and of up-projections that are
    computed again, the input is kept; queries and keys are the attention's own copies.
    """
    tp, shared, experts = layout.tp, 0.0, 0.0
    cut_in = tp if layout.sequence_parallel else 1
    for weight in model.matrices.get(layer, ()):
        rows, columns = sum(shape[0] for shape in weight.shapes), weight.shapes[0][-1]
        if not parts.holds(weight):
            is_input = "linear_fc1" in weight.megatron and columns == model.hf["hidden_size"]
            if weight.expert is None and (is_input or "_up_proj." in weight.megatron):
                shared += columns / cut_in
            continue
        if weight.expert is not None:
            # Whole experts, or with etp a part of each for the tokens of etp ranks.
            is_down = "linear_fc2" in weight.megatron
            inner, outer = (columns, rows) if is_down else (rows, columns)
            experts += outer * layout.etp + inner
        elif weight.is_routed and model.num_experts:
            experts += weight.num_elements / columns / model.num_experts + columns
        elif not weight.cut.split:
            shared += (rows + columns) / cut_in
        elif len(weight.shapes) == 1 and rows == model.hf["hidden_size"]:
            shared += columns / tp + rows / cut_in
        else:
            shared += columns / cut_in + rows / tp
    query, value = model.heads_width
    rotated = (query + num_kv_heads(model.hf) * query // model.hf["num_attention_heads"]) / tp
    if model.num_recurrent and layer is not None and layer_kinds(model.hf)[layer] == "linear_attention":
        # Of the whole row: normed queries and keys per value head, values, a chunk's scores, outputs.
        heads, keys, values = model.recurrence
        rotated = heads * (2 * keys + 2 * values + 64) / tp * layout.cp
    per_rank = tokens / tp if layout.sequence_parallel else tokens
    # Inputs of the norms: the residual stream before the attention and before the MLP.
    norms = 2 * model.hf["hidden_size"] / cut_in
    return (shared + rotated + norms) * tokens + experts * model.experts_per_token * per_rank * imbalance


def unfused_elements(
    model: ModelShape, layer: int | None, layout: Layout, tokens: float, itemsize: int, parts: Kept
) -> float:
    """Return the elements that a dense layer keeps on a CPU beyond `layer_elements`.

    A gated MLP also keeps the activated gate and a copy of its other half. A norm also keeps its normalised
    input; with 16 bits it keeps this and its input in float32 instead of the input. The outputs of the last
    products of the attention and of the MLP are not kept.
    """
    cut_in, hidden = layout.tp if layout.sequence_parallel else 1, model.hf["hidden_size"]
    found = (2 if itemsize == 4 else 6) * hidden / cut_in
    for weight in filter(parts.holds, model.matrices.get(layer, ())):
        rows = sum(shape[0] for shape in weight.shapes)
        if "linear_fc1" in weight.megatron and len(weight.shapes) == 2:
            found += rows / layout.tp * (1 if weight.expert is None else model.experts_per_token)
        elif weight.expert is None and len(weight.shapes) == 1 and rows == hidden:
            found -= rows / cut_in
    return found * tokens


def _key_elements(model: ModelShape) -> float:
    """Return the elements of keys and values per token and layer, over all heads (MLA: after projection)."""
    heads = num_kv_heads(model.hf) / model.hf["num_attention_heads"]
    return sum(model.heads_width) * (1 if model.hf.get("kv_lora_rank") else heads)


def gathered_elements(model: ModelShape, layout: Layout) -> float:
    """Return the elements per token and layer that context parallel ranks gather.

    These are keys and values, for MLA the latent and the rotary key (`rl.training.gathered_latents`).
    """
    hf, tp = model.hf, layout.tp
    if not hf.get("kv_lora_rank"):
        return _key_elements(model) / tp
    return hf["kv_lora_rank"] / (tp if layout.sequence_parallel else 1) + hf["qk_rope_head_dim"]


def gathered_bytes(model: ModelShape, layout: Layout, tokens: float, itemsize: int) -> float:
    """Return the bytes that a rank receives in the attention of one layer in one pass of a row of tokens."""
    return tokens * (layout.cp - 1) / layout.cp * gathered_elements(model, layout) * itemsize


def _widest(model: ModelShape, layout: Layout) -> float:
    """Return the number of elements per token of the widest activation of a dense layer."""
    query, _ = model.heads_width
    return max(2 * ffn_width(model.hf), 3 * query) / layout.tp


def _head(
    config: Config, layout: Layout, model: ModelShape, tokens: int, itemsize: int, *, is_cpu: bool
) -> float:
    """Return the bytes of the head's computation on the last stage.

    These are the hidden states of all tokens, gathered and selected, and their gradient. Log-probs add a
    chunk's logits and the gradient of the head's weights, unless they are frozen. On CPUs, whose rows are
    small, only responses have logits.
    """
    hidden = model.hf["hidden_size"]
    states = 3 * hidden * tokens * itemsize
    if not model.has_head:
        return states
    rows = head_rows(layout.tp, model)
    most = config.training.head_chunk(rows)
    chunk, gradient = min(most, tokens), _head_gradient(layout, model, itemsize, tokens <= most)
    if is_cpu:  # logits, a copy relative to the largest one and its exponentials, both in float32
        chunk = min(most, math.ceil(response_share(config) * tokens))
        return states + max((itemsize + 8) * chunk * rows, 8 * chunk * rows + gradient)
    return states + HEAD_COPIES * itemsize * chunk * rows + gradient


def _prediction(
    config: Config, layout: Layout, head: ModelShape, tokens: int, imbalance: float, itemsize: int
) -> float:
    """Return the bytes of the forward and backward pass of the head for multi-token prediction.

    These are its layer's activations, the embedding that it received, and six arrays of a quarter of a
    chunk's logits in float32.
    """
    hidden, rows = head.hf["hidden_size"], head_rows(layout.tp, head)
    layer = layer_elements(head, None, layout, tokens, imbalance)
    embedding = rows * hidden if layout.pp > 1 else 0
    chunk = min(config.training.head_chunk(rows) // 4, tokens)
    return itemsize * (layer + 3 * hidden * tokens + embedding) + 6 * 4 * chunk * rows


def _head_gradient(layout: Layout, model: ModelShape, itemsize: int, one_chunk: bool) -> int:
    """Return the bytes of the gradient of the head's weights, in their dtype; several chunks are summed in
    float32 before."""
    sums = 0 if one_chunk or itemsize == 4 else 4
    return 0 if model.adapters else (sums + itemsize) * head_rows(layout.tp, model) * model.hf["hidden_size"]


def head_rows(tp: int, model: ModelShape) -> int:
    """Return the number of rows of an output head on a rank."""
    return padded_vocab(model.hf["vocab_size"], vocab_multiple(tp)) // tp
