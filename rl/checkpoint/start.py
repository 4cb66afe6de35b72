"""Comparison of the models before their first update with the weights and states that the run started from.

Between the load and the first update, the first refit, memory sharing, adapters and the reference access the
models. Without this comparison, nobody would notice if one of them changed a model, and the run would learn
from the changed model.
"""

import re
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from rl.checkpoint.contents import (
    buffer_checksums,
    describe,
    exported_checksums,
    in_words,
    summed,
    total_checksums,
)
from rl.models.files import TensorReader, tensor_files
from rl.runtime.checksum import placed_checksum
from rl.training.engine import TrainingEngine
from rl.training.weights import full_weights

ADAPTED = 2.0**-4
"""Maximum relative difference between a weight with a new adapter and the file, as for a base in FP8."""


class ChangedSinceStart(RuntimeError):
    """Raised on every rank if a model or a state differs from what the run started from."""


class Start:
    """Checksums of the models after all loads. Collective over the world.

    source: path of the checkpoint or model, for the message. saved: the checksums that were stored with the
    checkpoint. They take the place of the present ones, which the rest of the resume may have changed.
    """

    def __init__(self, source: str, models: Mapping[str, TrainingEngine], saved: Mapping[str, int] = {}):
        self._source, self._sums = source, total_checksums(models)
        self._sums |= {name: value for name, value in saved.items() if name in self._sums}
        self.digest = f"{zlib.crc32(repr(sorted(self._sums.items())).encode()):08x}"
        """Hash of all weights and optimizer states, equal in any layout."""
        self._steps = {name: describe(model)["optimizer_step"] for name, model in models.items()}

    def check(self, name: str, model: TrainingEngine) -> None:
        """Compare a model with its state at the start.

        Before the first update of this process, compare weights, optimizer and reference. Later, compare only
        the buffers, because no update changes them.

        Raises ChangedSinceStart on every rank. Collective over the world.
        """
        if model.num_updates:
            found = buffer_checksums(name, model)
            if wrong := [tensor for tensor, value in found.items() if self._sums.get(tensor) != value]:
                tensors, where = in_words(wrong, {name: model})
                raise ChangedSinceStart(
                    f"{tensors} of the {name} have changed since the run started, on {where}, but they must "
                    "not learn: an update or another part of the program writes to them."
                )
            return
        found = total_checksums({name: model})
        own = {tensor: value for tensor, value in self._sums.items() if tensor.startswith(f"{name}/")}
        if wrong := [tensor for tensor in own | found if own.get(tensor) != found.get(tensor)]:
            tensors, where = in_words(wrong, {name: model})
            raise ChangedSinceStart(
                f"before the first update of the {name}, {tensors} are not what they were when the run "
                f"started from {self._source}, on {where}: a refit, memory sharing or another part of the "
                "program wrote to them."
            )
        steps = describe(model)["optimizer_step"]
        if steps != self._steps[name]:
            raise ChangedSinceStart(
                f"before the first update of the {name}, its optimizer counts {steps} steps instead of "
                f"{self._steps[name]} of {self._source}; Adam's bias correction would be wrong."
            )


def check_loaded(name: str, model: TrainingEngine, *, is_new: bool = True) -> None:
    """Compare a model with the files that it was loaded from: one tensor of each kind.

    Engine and trainer have the same weights even if both are wrong, so no later check finds a wrong load. A
    kind is a name without the numbers of layer and expert, for example the q_proj of all layers. Quantised
    files and a frozen base are not compared. Raises ChangedSinceStart on every rank. Collective over the
    world.

    is_new: whether adapters are new. If so, the weights with them must be the files', up to rounding.
    """
    weights = model.weight_map
    if "quantization_config" in weights.hf or (model.has_frozen_weights and not is_new):
        return
    files = tensor_files(model.spec.path, weights.weights)
    expected, kinds = {}, dict[str, list[str]]()
    for weight in weights.weights:
        for tensor, shape in zip(weight.hf, weight.shapes):
            expected[tensor] = shape, torch.float32 if weight.float32 else weights.dtype
            if tensor in files:
                kinds.setdefault(re.sub(r"\d+", "*", tensor), []).append(tensor)
    chosen = [members[len(kinds) * 7 % len(members)] for members in kinds.values()]
    reader, mine = TensorReader(files, weights.weights), dict[str, int]()
    if model.has_frozen_weights:
        some = [weight for weight in weights.weights if set(weight.hf) & set(chosen)]
        found = full_weights(weights.over(some, weights.parameters), model.parts.merging())
        for tensor, value in found:
            exact = reader.read(tensor, tuple((0, n) for n in value.shape)).to(value.device).float()
            if not (value.float() - exact).norm() <= ADAPTED * exact.norm():
                raise ChangedSinceStart(
                    f"{tensor} of the {name} with its new adapter differs from {model.spec.path} by "
                    f"{float((value.float() - exact).norm() / exact.norm()):.3g} of its size: an adapter "
                    "must not change the model at the start, and a part that it takes over is subtracted."
                )
        return
    for tensor in chosen[dist.get_rank() :: dist.get_world_size()]:
        shape, dtype = expected[tensor]
        mine[tensor] = int(placed_checksum(reader.read(tensor, tuple((0, n) for n in shape)).to(dtype)))
    own = exported_checksums(model, weights, model.parts.merging())
    if wrong := [tensor for tensor, value in summed(mine).items() if own.get(tensor) != value]:
        raise ChangedSinceStart(
            f"{', '.join(wrong[:4])} of the {name} are not those in the files of {model.spec.path}, "
            f"{len(wrong)} of {len(chosen)} that were compared: the load or the layout in rl/models is wrong."
        )


def check_restored(source: str, saved: Mapping[str, Any], restored: Mapping[str, Any]) -> None:
    """Raise ChangedSinceStart if a restored state differs from the saved one. Not collective.

    restored: plain data, as the next checkpoint would store it; keys that `saved` lacks are not compared.
    """
    for key, value in restored.items():
        if key in saved and saved[key] != value:
            raise ChangedSinceStart(
                f"{key} of {source} is {str(saved[key])[:200]}, but {str(value)[:200]} after it was "
                "restored: the run would not continue where it stopped."
            )
