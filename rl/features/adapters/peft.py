"""Writes the policy's adapters to a directory that the package peft can load."""

import json
from collections.abc import Callable

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rl.checkpoint.contents import exported_checksums
from rl.checkpoint.hf import NewDirectory, differing, raise_problem
from rl.features.adapters.trainer import Adapters
from rl.models.adapters import adapters as pairs_of
from rl.models.files import save_tensors
from rl.models.layout import Weight
from rl.models.peft import CONFIG, TENSORS, check_peft, peft_config
from rl.runtime.checksum import placed_checksum
from rl.training.engine import TrainingEngine
from rl.training.weights import full_weights


def export_peft(
    trainer: TrainingEngine, source: str, target: str, *, fence: Callable[[], None] = lambda: None
) -> None:
    """Write the trainer's adapters to the directory `target`. `source` is the checkpoint that they adapt.

    With PiSSA the model's W is the original W minus scale * B0 A0, where A0 and B0 are the initial adapters.
    The written adapters must belong to the original W. Therefore they have twice the rank: [B, -B0] [A; A0].

    Collective over the world. Rank 0 writes, and needs memory for all adapters. The directory gets its final
    name only when it is complete and every tensor in its file equals the tensor of the model. If a tensor
    differs, every rank raises WronglyExported. fence: as in `export_hf`.
    """
    adapters = trainer.parts.get(Adapters)
    assert adapters is not None, "the model has no adapters"
    writes, initial = dist.get_rank() == 0, adapters.initial_map
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in full_weights(adapters.learned_map):
        if writes:
            tensors[name] = tensor.cpu().contiguous()
    for name, tensor in full_weights(initial) if initial is not None else ():
        if writes and ".lora_A." in name:
            tensors[name] = torch.cat((tensors[name], tensor.cpu()))
        elif writes and ".lora_B." in name:
            tensors[name] = torch.cat((tensors[name], -tensor.cpu()), dim=1)
    expected = exported_checksums(trainer, adapters.learned_map)
    own, rank = adapters.config, adapters.config.rank
    if initial is not None:

        def negated(weight: Weight, parameter: torch.Tensor) -> torch.Tensor:
            return -parameter if ".lora_B." in weight.hf[0] else parameter

        def behind(name: str) -> list[int]:
            return [rank, 0] if ".lora_A." in name else [0, rank]

        for name, more in exported_checksums(trainer, initial, negated, behind).items():
            expected[name] = (expected[name] + more) % 2**64
    directory = NewDirectory(target, fence)
    file = directory.partial / TENSORS

    def write() -> str:
        save_tensors(tensors, file)
        weights, stated = trainer.weight_map.weights, rank * (1 if initial is None else 2)
        config = peft_config(adapters.pairs, weights, rank=stated, scale=own.scale, source=source)
        (directory.partial / CONFIG).write_text(json.dumps(config, indent=2))
        pairs = pairs_of(weights, rank=stated, targets=own.targets, dora=own.kind == "dora")
        try:
            check_peft(str(directory.partial), pairs, kind=own.kind, rank=stated, scale=own.scale)
        except ValueError as error:
            return f"the files are not those of the policy's adapters: {error}"
        written = {n: int(placed_checksum(t)) % 2**64 for n, t in load_file(file).items()}
        return differing([name for name in expected | written if written.get(name) != expected.get(name)])

    problem = directory.attempt(write)
    directory.agree()
    raise_problem(directory.partial, problem)
    directory.finish()
