"""Comparison of the models before their first update with what the run started from."""

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rl.checkpoint.contents import (
    WEIGHT,
    describe,
    exported_checksums,
    in_words,
    model_shards,
    summed,
    total_checksums,
)
from rl.models.boxes import whole
from rl.models.files import TensorReader, tensor_files
from rl.models.layout import FP8_BLOCK
from rl.runtime.checksum import placed_checksum
from rl.runtime.names import listed, one_of_each_kind
from rl.training.engine import TrainingEngine
from rl.training.optimizer import MASTER, main_weights
from rl.training.weights import full_weights


class ChangedSinceStart(RuntimeError):
    """Raised on every rank if a model or a state differs from what the run started from."""


class WronglySaved(RuntimeError):
    """Raised on every rank if a checkpoint would not have everything that the run has changed."""


class Start:
    """Checksums of the models after all loads. Collective over the world.

    source: path of the checkpoint or model, for the message. saved: the checkpoint's checksums. They replace
    the present ones, which the rest of the resume may have changed.
    """

    def __init__(self, source: str, models: Mapping[str, TrainingEngine], saved: Mapping[str, int] = {}):
        self._source, self._sums = source, total_checksums(models)
        self._sums |= {name: value for name, value in saved.items() if name in self._sums}
        self.digest = f"{zlib.crc32(repr(sorted(self._sums.items())).encode()):08x}"
        """Hash of all weights and optimizer states, equal in any layout."""
        self._steps = {name: describe(model)["optimizer_step"] for name, model in models.items()}

    def check(self, name: str, model: TrainingEngine) -> None:
        """Compare a model's weights, optimizer and reference with the start, before its first update.

        Raises ChangedSinceStart on every rank. Collective over the world.
        """
        if name not in self._steps:
            known = listed([*self._steps])
            text = f"{name} learns, but checkpoints have only {known}: a resumed run would lose it."
            raise ChangedSinceStart(text)
        if model.num_updates:
            return
        found = total_checksums(models := {name: model})
        own = [tensor for tensor in self._sums if tensor.startswith(f"{name}/")]
        if wrong := [key for key in dict.fromkeys((*own, *found)) if self._sums.get(key) != found.get(key)]:
            tensors, where = in_words(wrong, models)
            raise ChangedSinceStart(
                f"before the first update of the {name}, {tensors} are not what they were when the run "
                f"started from {self._source}, on {where}: a part of the program wrote to them."
            )
        if (steps := describe(model)["optimizer_step"]) != self._steps[name]:
            raise ChangedSinceStart(
                f"before the first update of the {name}, its optimizer counts {steps} steps instead of "
                f"{self._steps[name]} of {self._source}."
            )


def check_loaded(name: str, model: TrainingEngine, *, is_new: bool = True) -> None:
    """Compare a tensor of each kind of name with the files that a model was loaded from.

    is_new: whether adapters are new, so that the weights with them must be the files'; otherwise the frozen
    weights without them must. Raises ChangedSinceStart on every rank. Collective over the world.
    """
    weights = model.weight_map
    files = tensor_files(model.spec.path, weights.weights)
    tensors = [(tensor, shape, w) for w in weights.weights for tensor, shape in zip(w.hf, w.shapes)]
    chosen = one_of_each_kind([each for each in tensors if each[0] in files], lambda each: each[0])
    reader, mine = TensorReader(files, weights.weights), dict[str, int]()
    if model.has_frozen_weights:
        some = list({weight.hf: weight for _, _, weight in chosen}.values())
        of = model.parts.merging() if is_new else model.parts.value
        allowed = max(part.start_error for part in model.parts)
        for tensor, value in full_weights(weights.over(some, weights.parameters), of):
            exact = _read(reader, tensor, value.shape).to(value).float()
            gap = float((value.float() - exact).norm() / exact.norm().clamp(min=1e-30))
            if not gap <= allowed:
                raise ChangedSinceStart(
                    f"{tensor} of the {name} {'with its new' if is_new else 'without its'} adapter differs "
                    f"from {model.spec.path} by {gap:.3g} of its size, but must not at the start."
                )
        return
    for tensor, shape, weight in chosen[dist.get_rank() :: dist.get_world_size()]:
        dtype = torch.float32 if weight.float32 else weights.dtype
        mine[tensor] = int(placed_checksum(_read(reader, tensor, shape).to(dtype)))
    own = exported_checksums(model, weights, model.parts.merging())
    if wrong := [tensor for tensor, value in summed(mine).items() if own.get(tensor) != value]:
        raise ChangedSinceStart(
            f"{listed(wrong)} of the {name} are not those in the files of {model.spec.path}, {len(wrong)} of "
            f"{len(chosen)} that were compared: the load or the layout in rl/models is wrong."
        )


def _read(reader: TensorReader, tensor: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a whole tensor of the files; a matrix in FP8 with one factor per block is dequantised."""
    values = reader.read(tensor, whole(shape))
    if values.dtype is torch.float8_e4m3fn:
        factors = reader.read(f"{tensor}_scale_inv", ()).float()
        blocks = torch.kron(factors, torch.ones(FP8_BLOCK, FP8_BLOCK))
        values = values.float() * blocks[: shape[0], : shape[1]]
    return values


def check_complete(models: Mapping[str, TrainingEngine]) -> None:
    """Raise WronglySaved unless a checkpoint of the models has each number of each of their parts once.

    The parts are the weights and what the optimizer keeps for them. Collective over the world.
    """
    mine, sizes, zeros = Counter[str](), dict[str, int](), dict[str, int]()
    for name, model in models.items():
        shapes = describe(model)["tensors"]
        sizes |= {f"{name}/{hf}": math.prod(shape) for hf, shape in shapes.items()}
        zeros |= {f"{name}/{WEIGHT}/{hf}": 0 for hf in shapes}  # equal on all ranks, so not sent
        mains = [] if model.optimizer is None else [*main_weights(model.optimizer)]
        parts = {p: [MASTER] * (main.dtype is not p.dtype) + [*state] for p, main, state in mains}
        for weight, parameter in model.learned_map.local():
            names = {*parts.get(parameter, ())} - {"step"}
            mine.update({f"{name}/{part}/{hf}": 0 for part in names for hf in weight.hf})
        for shard in model_shards(name, model):
            mine[shard.name] += shard.tensor.numel()
    for key, number in (zeros | summed(mine)).items():
        name, part, hf = key.split("/", 2)
        if number != sizes[f"{name}/{hf}"]:
            raise WronglySaved(
                f"a checkpoint would have {number} of {sizes[f'{name}/{hf}']} numbers of {key}."
            )


def check_controllers(state: Mapping[str, Any], parts: Iterable[Any]) -> None:
    """Raise WronglySaved unless a checkpoint's state has each controller as it is. parts: the phases."""
    saved = [value for value in state.values() if isinstance(value, dict)]
    everything = {id(own): own for part in parts for own in getattr(part, "__dict__", {}).values()}
    for own in everything.values():
        if hasattr(own, "update") and hasattr(own, "state_dict"):
            present = {key: getattr(own, key, value) for key, value in own.state_dict().items()}
            if present not in saved:
                raise WronglySaved(f"a checkpoint would lack {present} of {type(own).__name__}.")
            saved.remove(present)  # an equal state of another controller must be there too


def check_restored(source: str, saved: Mapping[str, Any], restored: Mapping[str, Any]) -> None:
    """Raise ChangedSinceStart if a key of a restored state differs from the saved one. Not collective."""
    for key, value in restored.items():
        if key in saved and not _is_same(saved[key], value):
            raise ChangedSinceStart(
                f"{key} of {source} is {str(saved[key])[:200]}, but {str(value)[:200]} after it was "
                "restored: the run would not continue where it stopped."
            )


def _is_same(saved: Any, restored: Any) -> bool:
    """Return whether plain data with arrays are equal; values of held columns are not compared."""
    if isinstance(restored, Mapping):
        keys = restored.keys() - {"held"}
        return all(key in saved and _is_same(saved[key], restored[key]) for key in keys)
    if isinstance(restored, list | tuple):
        return len(saved) == len(restored) and all(map(_is_same, saved, restored))
    return bool(np.array_equal(saved, restored)) if isinstance(restored, np.ndarray) else saved == restored
