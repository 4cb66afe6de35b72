"""Write the policy's adapters as a directory that the package peft loads."""

import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from rl.models.peft import CONFIG, TENSORS, peft_config
from rl.training.engine import TrainingEngine
from rl.training.weights import full_weights


def export_peft(trainer: TrainingEngine, source: str, target: str) -> None:
    """Write the trainer's adapters, relative to the checkpoint `source`, to the directory `target`.

    Collective over the world; rank 0 writes, and needs memory for all adapters. The directory gets its name
    when it is complete.
    """
    assert trainer.adapter is not None and trainer.adapter_map is not None, "the model has no adapters"
    final, partial = Path(target), Path(target + ".partial")
    writes = dist.get_rank() == 0
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in full_weights(trainer.adapter_map):
        if writes:
            tensors[name] = tensor.cpu().contiguous()
    if writes:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(tensors, partial / TENSORS, metadata={"format": "pt"})
        config = peft_config(
            trainer.pairs,
            trainer.weight_map.weights,
            rank=trainer.adapter.rank,
            scale=trainer.adapter.scale,
            source=source,
        )
        (partial / CONFIG).write_text(json.dumps(config, indent=2))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    dist.barrier()
