"""A causal language model that is described by its class in transformers instead of a file of this package.

It serves runs with `training.backend=transformers` (`described` marks their configs). Each rank of the
training engine then holds rows of the class's own parameters (`training.shard`). vLLM joins some of them; the
names below are those of its decoders, and the first refit compares them with what vLLM's loader does
(`rl.refit.refit`).
"""

import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from rl.models.boxes import Box, extent, index, moved, overlap, relative, whole
from rl.models.layout import REPLICATED, ROW, VOCAB, Cut, Piece, PieceFunction, Weight, rows_at, whole_of
from rl.models.sizes import head_dim, num_kv_heads

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

MARK = "described_by_class"
"""Key of a config of such a model."""
MODULE = "language_model."
"""Prefix of the parameters' names in the training engine."""
COMPLETED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("final_logit_softcapping", "attn_logit_softcapping"),
    *("head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings"),
)
"""Keys that config.json may leave to the class, or name otherwise."""
JOINED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Layer in transformers -> the layer of vLLM's decoders that it is a part of, and which part."""
LONGER_WINDOWS = ("cohere2",)
"""Types whose windows have one token more in vLLM, as in the models' training, than in transformers."""
BOUNDED_STEPS = ("nemotron_h", "zamba2")
"""Types whose states take time steps of at least time_step_min in transformers, but not in vLLM, nor in the
models' training."""
ACTIVATIONS = ("hidden_act", "hidden_activation")
WHOLE = 2**29
"""Largest number of parameters of a run's models with which `training.shard` is 1 by default."""
SPLIT_BY_COLUMNS = ("o_proj", "down_proj")


def _rows(names: Sequence[str], shapes: Sequence[tuple[int, ...]], tp: int, rank: int) -> list[Piece]:
    """Give each training rank an equal number of rows, of which the last ranks may have fewer or none."""
    [name], [shape] = names, shapes
    size = -(-shape[0] // tp)
    start, stop = min(rank * size, shape[0]), min((rank + 1) * size, shape[0])
    return [rows_at(name, shape, start, stop, 0)] if start < stop else []


ROWS = Cut(_rows, whole_of, sharded=True)
"""Rows on each of the training ranks that share a copy; whole on each rank of the engine."""


def described(hf: dict) -> dict:
    """Return a config with the keys that this program reads, marked for this file.

    Raises ValueError if transformers has no such class, or it is not a model of text.
    """
    if "vision_config" in hf or "audio_config" in hf:
        raise refusal(hf, "it reads images or sounds, but classes train on text alone")
    if "num_hidden_layers" not in hf:
        raise refusal(hf, "it has no num_hidden_layers there, which generation reads")
    config = class_config(hf)
    with _refusals():
        own = {
            key: value for key in COMPLETED if isinstance(value := getattr(config, key, None), int | float)
        }
        absent = dict(
            num_attention_heads=1, max_position_embeddings=2**20, intermediate_size=4 * own["hidden_size"]
        )
    return {**absent, **own, **hf, MARK: True, "as_written": hf}


def class_config(hf: dict) -> "PreTrainedConfig":
    """Return transformers' config. Raises ValueError for an unknown type or invalid values."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = str(hf.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise ValueError(
            f"model_type={kind} in config.json is not known to this transformers; update transformers, or "
            "use another model."
        )
    added = {MARK, "as_written", *({*COMPLETED[:-1]} - {*hf.get("as_written", hf)})}
    plain = {key: value for key, value in hf.items() if key not in added}
    kind_of_config = CONFIG_MAPPING[kind]
    with _refusals():
        plain = kind_of_config._decode_special_floats(json.loads(json.dumps(plain)))
        config = kind_of_config.from_dict(plain)
    correct(config)
    return config


def correct(config: Any) -> None:
    """Change a config of transformers so that its class computes what vLLM does."""
    if config.model_type in LONGER_WINDOWS and config.sliding_window:
        config.sliding_window += 1
    if config.model_type in BOUNDED_STEPS:
        config.time_step_min = 1e-30  # transformers takes its logarithm when it initialises weights


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise ValueError for what transformers raises in the block; each class checks values in its own way."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"transformers refuses config.json ({type(error).__name__}: {error}); correct config.json, or "
            "use another model."
        ) from error


def model_class(hf: dict) -> "type[PreTrainedModel]":
    """Return the class. Raises ValueError if transformers has no causal language model of this name."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = hf["architectures"][0]
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        version = transformers.__version__
        raise refusal(
            hf, f"transformers {version} has no such causal language model, and runs no code of checkpoints"
        )
    return getattr(transformers, name)


def refusal(hf: dict, constraint: str, tensor: str = "") -> ValueError:
    """Return an error about a class that cannot train: a setting of config.json, the constraint, a remedy.

    The setting is the class, or the one that gives the class the weight `tensor`, if there is one.
    """
    from rl.models import SUPPORTED

    name, remedy = hf["architectures"][0], "use another model (docs/models.md)"
    setting = f"architectures={name}"
    if tensor and (found := _setting_of(hf, tensor)):
        key, value, other = found
        setting, remedy = f"{key}={json.dumps(value)}", f"use a model with {key}={json.dumps(other)}"
    if name in SUPPORTED:
        remedy = "use training.backend=megatron"
    return ValueError(f"training.backend=transformers with {setting} in config.json: {constraint}; {remedy}.")


def _setting_of(hf: dict, tensor: str) -> tuple[str, Any, Any] | None:
    """Return the key of config.json that gives the class a weight, its value, and one that does not."""

    def has(changed: dict) -> bool:
        model = on_meta(changed)
        return tensor in dict((*model.named_parameters(), *model.named_buffers()))

    if has(hf):
        for key, value in class_config(hf).to_dict().items():
            other = not value if isinstance(value, bool) else "silu"
            if isinstance(value, bool) or (key in ACTIVATIONS and value != other):
                with suppress(ValueError):  # a value that transformers refuses
                    if not has(hf | {key: other}):
                        return key, value, other
    return None


def objection(hf: dict) -> str:
    """Return why `check` refuses the model; "" if it does not."""
    try:
        check(described(hf))
    except (ImportError, ValueError) as error:
        return str(error)
    return ""


def check(hf: dict) -> None:
    """Raise ValueError for a class that the training engine cannot compute."""
    model = on_meta(hf)
    if model.get_output_embeddings() is None:
        raise refusal(hf, "it has no head over the vocabulary")
    if scalars := [name for name, tensor in model.state_dict().items() if not tensor.dim()]:
        raise refusal(hf, f"{scalars[0]} is a single number, which ranks cannot divide", scalars[0])
    places(hf)
    if moving := _rotations(model.config) & {"dynamic", "longrope"}:
        raise ValueError(
            f"{hf['architectures'][0]} rotates by rope_type={moving.pop()}, with angles that depend on the "
            "length that a sequence has reached, so that trainer and engine would differ; use a model, or a "
            "copy of its config.json, with rope_type default, linear, llama3 or yarn."
        )


def _rotations(config: "PreTrainedConfig") -> set[str]:
    """Return the kinds of rotary embeddings of a model; a constant `alpha` makes a dynamic one static."""
    given = getattr(config, "rope_parameters", None) or {}
    tables = [given, *(own for own in given.values() if isinstance(own, dict))]
    return {str(table.get("rope_type")) for table in tables if not table.get("alpha")}


def packs(hf: dict) -> bool:
    """Return whether the class can compute a packed row: tokens meet only in attention that it calls by name.

    Layers that mix tokens in another way, with states or convolutions, have weights of three dimensions.
    """
    model = on_meta(hf)
    kinds = {*(getattr(model.config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
    mixes = any(tensor.dim() > 2 and ".experts." not in name for name, tensor in model.named_parameters())
    return model._supports_attention_backend and not (kinds or mixes or hf.get("attention_chunk_size"))


def ranks_per_copy(shard: int, models: Iterable[tuple[dict, bool]], together: int) -> int:
    """Return how many ranks hold one copy of the weights of models that their classes compute.

    shard: `training.shard`. models: config of each of the run's models, and whether it is a value model.
    together: training ranks of a node.
    """
    sizes = (_size(json.dumps(hf, sort_keys=True), values) for hf, values in models if MARK in hf)
    return shard or (1 if sum(sizes) <= WHOLE else together)


@functools.lru_cache(maxsize=32)
def _size(text: str, values: bool) -> int:
    """Return the number of parameters; a value model has no head over the vocabulary."""
    from rl.models import value_model

    hf = json.loads(text)
    model = on_meta(value_model(hf) if values else hf)
    own = {*model.parameters()}
    if values:
        own -= {*model.get_output_embeddings().parameters()} - {*model.get_input_embeddings().parameters()}
    return sum(tensor.numel() for tensor in own)


def megatron_config(hf: dict) -> dict:
    """Return the fields of Megatron's TransformerConfig that its optimizer and schedule read."""
    return dict(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"],
        kv_channels=head_dim(hf),
        add_bias_linear=False,
    )


def on_meta(hf: dict) -> "PreTrainedModel":
    """Return the model without values."""
    return _on_meta(json.dumps(hf, sort_keys=True))


@functools.lru_cache(maxsize=4)
def _on_meta(hf: str) -> "PreTrainedModel":
    import torch

    own = json.loads(hf)
    kind, config = model_class(own), class_config(own)
    with torch.device("meta"), _refusals():
        return kind(config)


def weights(hf: dict) -> list[Weight]:
    """Return every parameter, in the class's order, and the buffers of its checkpoints."""
    import torch

    model = on_meta(hf)
    linear = {f"{name}.weight" for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    embedding, [*head] = model.get_input_embeddings().weight, model.get_output_embeddings().parameters()
    found = places(hf)
    plain = {own[0].name: tensor for tensor, own in found.values() if len(own) == 1}
    out = []
    for name, (tensor, own) in found.items():
        layer, first = re.search(r"\.(\d+)\.", name), tensor is embedding
        fields: dict[str, Any] = dict(
            hf=tuple(place.name for place in own),
            shapes=tuple(place.shape for place in own),
            megatron=MODULE + name,
            vllm=own[0].name,
            cut=ROWS,
            modules=(name.removesuffix(".weight"),) if name in linear else (),
        )
        if layer is not None:
            fields["layer"] = int(layer[1])
            fields["megatron"] = f"{MODULE}{name[: layer.start(1)]}{{layer}}{name[layer.end(1) :]}"
        if not tensor.requires_grad:
            fields |= dict(cut=REPLICATED, float32=True)
        elif first or any(tensor is row for row in head):
            fields |= dict(cut=VOCAB, first_stage=first, tied_to_head=first and head[0] is embedding)
        elif len(own) > 1 or ".experts." in name:
            fields |= _joining(name, tuple(tensor.shape), tuple(own))
        elif layer is not None:
            fields["vllm"], fields["cut"] = _in_engine(hf, own[0].name, plain)
        out.append(Weight(**fields))
    return out


class FilePart(NamedTuple):
    """The place of a tensor of the files in a parameter of the class."""

    name: str
    box: Box
    num_dims: int
    """Number of dimensions of the tensor: the last ones of the box."""

    @property
    def shape(self) -> tuple[int, ...]:
        return extent(self.box)[len(self.box) - self.num_dims :]


UNIT = 12
"""Length of a dimension in `_places`, so that 2, 3 or 4 tensors may be joined in it."""


def places(hf: dict) -> "dict[str, tuple[Tensor, list[FilePart]]]":
    """Return for each parameter, and each buffer of checkpoints, the tensors of checkpoints that it joins.

    transformers itself converts small tensors that hold their elements' places. Raises ValueError if a tensor
    is a part of several parameters, or has its elements in another order.
    """
    return _places(json.dumps(hf, sort_keys=True))


@functools.lru_cache(maxsize=4)
def _places(text: str) -> "dict[str, tuple[Tensor, list[FilePart]]]":
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    hf = json.loads(text)
    model = on_meta(hf)
    found = dict(model.named_parameters())
    found |= {k: v for k, v in model.state_dict(keep_vars=True).items() if not v.requires_grad}
    small = {}
    for number, (name, tensor) in enumerate(found.items()):
        shape = [UNIT, 2, 2, 2][: tensor.dim()]
        if tensor.dim() > 2 or ".experts." in name:
            shape = [len(tensor), *shape[:-1]]
        size = math.prod(shape)
        small[name] = torch.arange(number << 32, (number << 32) + size).view(shape)
    out: dict[str, tuple[Tensor, list[FilePart]]] = {name: (tensor, []) for name, tensor in found.items()}
    with _refusals():
        converted = revert_weight_conversion(model, dict(small))
    for name, own in converted.items():
        values = own.flatten()
        owner = [*found][int(values[0]) >> 32]
        here = torch.isin(small[owner], values).nonzero()
        box = tuple(zip(here.amin(0).tolist(), (here.amax(0) + 1).tolist(), strict=True))
        if not small[owner][index(box)].flatten().equal(values):
            raise refusal(hf, f"its {owner} holds {name} of checkpoints in several parts, or reordered")
        sizes = zip(box, small[owner].shape, found[owner].shape, strict=True)
        scaled = tuple((start * size // unit, stop * size // unit) for (start, stop), unit, size in sizes)
        out[owner][1].append(FilePart(name, scaled, own.dim()))
    return out


def _joining(name: str, shape: tuple[int, ...], own: tuple[FilePart, ...]) -> dict[str, Any]:
    """Return the cut of a parameter that joins tensors, and its name in vLLM. shape: that of the class."""
    *path, kind = name.split(".")
    boxes, dims, vllm = tuple(place.box for place in own), own[0].num_dims, own[0].name
    if path[-1] == "experts":
        block = vllm.partition(".experts.")[0]
        if block == vllm:  # the files join the experts, in a layer of the block
            block = ".".join(vllm.split(".")[: len(path) - 1])
        engine = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}.get(kind, kind)
        vllm = f"{block}.experts.routed_experts.{engine}"
    cut = Cut(_joined_rows(boxes, dims, shape), _expert_parts(boxes, dims, shape, kind), sharded=True)
    return dict(vllm=vllm, cut=cut)


def _through(names: Sequence[str], boxes: Sequence[Box], dims: int, source: Box, target: Box) -> list[Piece]:
    """Return the pieces of tensors at `boxes` of a parameter whose box `source` is at `target`."""
    out = []
    for name, box in zip(names, boxes, strict=True):
        if both := overlap(box, source):
            out.append(Piece(name, relative(both, box)[len(box) - dims :], moved(both, source, target)))
    return out


@functools.cache
def _joined_rows(boxes: tuple[Box, ...], dims: int, shape: tuple[int, ...]) -> PieceFunction:
    """Return the function that gives each training rank an equal number of rows, or experts, as `_rows`."""

    def pieces(names: Any, shapes: Any, tp: int, rank: int) -> list[Piece]:
        found = _rows(["all"], [shape], tp, rank)
        return [piece for own in found for piece in _through(names, boxes, dims, own.hf_box, own.local_box)]

    return pieces


@functools.cache
def _expert_parts(boxes: tuple[Box, ...], dims: int, shape: tuple[int, ...], kind: str) -> PieceFunction:
    """Return the function of vLLM's pieces: rows of gate and of up, columns of down, of every expert."""

    def pieces(names: Any, shapes: Any, tp: int, rank: int) -> list[Piece]:
        experts, *rest = whole(shape)
        axis, parts = (0, 2) if kind == "gate_up_proj" else (len(rest) - 1, 1)
        width = shape[1 + axis] // parts
        size, out = width // tp, []
        for part in range(parts):
            source, target = [experts, *rest], [experts, *rest]
            first = part * width + rank * size
            source[1 + axis], target[1 + axis] = (first, first + size), (part * size, (part + 1) * size)
            out += _through(names, boxes, dims, tuple(source), tuple(target))
        return out

    return pieces


def _in_engine(hf: dict, name: str, found: dict) -> tuple[str, Cut]:
    """Return the name of a layer's parameter in vLLM, and its cut."""
    *path, module, kind = name.split(".")
    if module in SPLIT_BY_COLUMNS and kind == "weight":
        return name, Cut(_rows, ROW.vllm, sharded=True)
    joined, number = JOINED.get(module, ("", 0))
    parts = [part for part, (layer, _) in JOINED.items() if layer == joined]
    shapes = [found[whole].shape for part in parts if (whole := ".".join((*path, part, kind))) in found]
    if not joined or len(shapes) < len(parts):
        return name, ROWS
    rows = tuple(shape[0] for shape in shapes)
    groups = num_kv_heads(hf) if joined == "qkv_proj" else 0
    return ".".join((*path, joined, kind)), Cut(_rows, _part(rows, number, groups), sharded=True)


@functools.cache
def _part(rows: tuple[int, ...], number: int, kv_heads: int) -> PieceFunction:
    """Return the function of vLLM's pieces of a tensor that is part `number` of a joined parameter.

    rows: rows of each part. kv_heads: number of KV heads of parts 1 and 2, which several ranks may hold; 0:
    the ranks divide all rows.
    """

    def pieces(names: Any, shapes: Any, tp: int, rank: int) -> list:
        sizes = [size // tp for size in rows]
        if kv_heads and tp > kv_heads:
            sizes[1:] = [size // kv_heads for size in rows[1:]]
        shared = kv_heads and tp > kv_heads and number
        first = (rank * kv_heads // tp if shared else rank) * sizes[number]
        return [rows_at(names[0], shapes[0], first, first + sizes[number], sum(sizes[:number]))]

    return pieces
