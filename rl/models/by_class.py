"""A causal language model that is described by its class in transformers instead of a file of this package.

It serves runs with `training.backend=transformers` (`described` marks their configs). Each rank of the
training engine then holds rows of the class's own parameters (`training.shard`). vLLM joins some of them; the
names below are those of its decoders, and the first refit compares them with what vLLM's loader does
(`rl.refit.refit`).
"""

import functools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rl.models.layout import ROW, VOCAB, Cut, Piece, PieceFunction, Weight, rows_at, whole_of
from rl.models.sizes import head_dim, num_kv_heads

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MARK = "described_by_class"
"""Key of a config of such a model."""
MODULE = "language_model."
"""Prefix of the parameters' names in the training engine."""
COMPLETED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings"),
)
"""Keys that config.json may leave to the class."""
JOINED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
"""Layer in transformers -> the layer of vLLM's decoders that it is a part of, and which part."""
NOT_SUPPORTED = "not supported by training.backend=transformers"
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

    Raises ValueError if transformers has no such class.
    """
    config = class_config(hf)
    own = {key: value for key in COMPLETED if (value := getattr(config, key, None)) is not None}
    return {**own, **hf, MARK: True, "as_written": hf}


def class_config(hf: dict) -> "PreTrainedConfig":
    """Return transformers' config. Raises ValueError for an unknown type or invalid values."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = str(hf.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"model_type={kind} in config.json is not known to transformers; update it.")
    plain = {key: value for key, value in hf.items() if key not in (MARK, "as_written")}
    with _refusals():
        return CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(plain)))


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise ValueError for what transformers raises in the block; each class checks values in its own way."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"transformers refuses config.json ({type(error).__name__}: {error}).") from error


def model_class(hf: dict) -> "type[PreTrainedModel]":
    """Return the class. Raises ValueError if transformers has no causal language model of this name."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = hf["architectures"][0]
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise ValueError(
            f"transformers {transformers.__version__} has no causal language model {name}; use a model of "
            "its own classes (custom code of a checkpoint is not run)."
        )
    return getattr(transformers, name)


def is_trainable(hf: dict) -> bool:
    """Return whether `check` accepts the model."""
    try:
        check(described(hf))
    except (ImportError, ValueError):
        return False
    return True


def check(hf: dict) -> None:
    """Raise ValueError for a class that the training engine cannot compute on packed rows."""
    name = hf["architectures"][0]
    if not model_class(hf)._supports_attention_backend:
        raise ValueError(
            f"{name} of transformers does not call the functions of its AttentionInterface, so that it "
            "cannot train on packed rows; use another model."
        )
    if hf.get("attention_chunk_size"):
        raise ValueError(f"{name} attends within chunks; such models are {NOT_SUPPORTED}.")
    model = on_meta(hf)
    if joined := [name for name, weight in model.named_parameters() if weight.dim() > 2]:
        raise ValueError(
            f"{name} joins experts or channels in {joined[0]}, whose name in checkpoints differs; such "
            f"models are {NOT_SUPPORTED}."
        )
    if buffers := sorted(set(model.state_dict()) - {name for name, _ in model.named_parameters()} - TIED):
        raise ValueError(f"{name} keeps the buffer {buffers[0]}; such models are {NOT_SUPPORTED}.")
    head = model.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise ValueError(f"{name} has no head, or one with biases; such models are {NOT_SUPPORTED}.")


TIED = {"lm_head.weight"}
"""Names in a state dict for weights that are also under another name."""


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

    config = json.loads(hf)
    with torch.device("meta"), _refusals():
        return model_class(config)(class_config(config))


def weights(hf: dict) -> list[Weight]:
    """Return every parameter, in the class's order."""
    model = on_meta(hf)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    is_tied = embedding is head
    found = dict(model.named_parameters())
    out = []
    for name, parameter in found.items():
        shape, layer = tuple(parameter.shape), re.search(r"\.(\d+)\.", name)
        fields: dict[str, Any] = dict(hf=(name,), shapes=(shape,), megatron=MODULE + name, vllm=name)
        if parameter is embedding or parameter is head:
            first = parameter is embedding
            out.append(Weight(**fields, cut=VOCAB, first_stage=first, tied_to_head=first and is_tied))
            continue
        if layer is None:
            out.append(Weight(**fields, cut=ROWS))
            continue
        fields["megatron"] = f"{MODULE}{name[: layer.start(1)]}{{layer}}{name[layer.end(1) :]}"
        fields["vllm"], cut = _in_engine(hf, name, found)
        out.append(Weight(**fields, cut=cut, layer=int(layer[1])))
    return out


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
