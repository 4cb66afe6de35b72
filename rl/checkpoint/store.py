"""Checkpoints of a run: `<run.dir>/checkpoints/step_NNNNNN`, each complete or absent.

Weights, optimizer and run state are written by Megatron's distributed checkpointing in a layout-free format: a run may
continue on another world size or another tp and pp. A checkpoint is written beside its name and renamed when it is whole.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from rl.options import ConfigError
from rl.training.engine import TrainingEngine

# fully_reshardable: the optimizer's shards can be loaded in another layout. Megatron's default cannot even be saved.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "non_homogeneous_layers": True,
    "chained_optim_avoid_prefix": True,
}


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    step: int
    path: Path


class CheckpointStore:
    """The checkpoints of one run directory. Methods are collective over the world unless they say otherwise."""

    def __init__(self, run_dir: str, *, keep: int):
        self.directory = Path(run_dir, "checkpoints")
        self.keep = keep

    def save(self, step: int, models: dict[str, TrainingEngine], state: dict) -> None:
        """Write the checkpoint of a step, a directory per model; `state` is plain data, alike on every rank, and lies with
        the first model. Then remove the oldest."""
        final = self.directory / f"step_{step:06d}"
        partial = final.with_suffix(".partial")
        if dist.get_rank() == 0:
            for leftover in (partial, final):
                shutil.rmtree(leftover, ignore_errors=True)
            for name in models:
                (partial / name).mkdir(parents=True)
        dist.barrier()
        run = {"run": {"step": step, **state}}
        for name, model in models.items():
            dist_checkpointing.save(_sharded(model) | run, str(partial / name), ("torch_dist", 1))
            run = {}
        if dist.get_rank() == 0:
            partial.rename(final)
            for old in self.complete()[: -self.keep] if self.keep else []:
                shutil.rmtree(old.path)
        dist.barrier()

    def newest(self) -> Saved | None:
        """The newest complete checkpoint, as rank 0 sees it."""
        found = [self.complete()[-1:] if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found, src=0)
        return found[0][0] if found[0] else None

    def load(self, saved: Saved, models: dict[str, TrainingEngine]) -> dict:
        """Load weights and optimizer of each model; returns the run state with `step`.

        Raises ConfigError, on every rank alike, if the checkpoint lacks one of the models.
        """
        lacking = [[name for name in models if not (saved.path / name).is_dir()] if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(lacking, src=0)
        if lacking[0]:
            raise ConfigError(f"{saved.path} has no {lacking[0][0]}: it was written by another algorithm; use another run.dir.")
        run: dict = {"run": {}}
        state = {}
        for name, model in models.items():
            loaded = dist_checkpointing.load(_sharded(model, is_loading=True) | run, str(saved.path / name))
            model.model.load_state_dict(loaded["model"], strict=False)
            with torch.no_grad():
                model.optimizer.load_state_dict(loaded["optimizer"])
            state |= loaded.get("run", {})
            run = {}
        return state

    def load_weights(self, saved: Saved, name: str, model: TrainingEngine) -> None:
        """Load the weights of one model and nothing else; it needs no optimizer."""
        loaded = dist_checkpointing.load({"model": model.model.sharded_state_dict(metadata=_METADATA)}, str(saved.path / name))
        model.model.load_state_dict(loaded["model"], strict=False)

    def complete(self) -> list[Saved]:
        """The complete checkpoints as this rank sees them, oldest first. Not collective."""
        names = ((re.fullmatch(r"step_(\d+)", path.name), path) for path in self.directory.glob("step_*"))
        return sorted((Saved(int(match[1]), path) for match, path in names if match), key=lambda saved: saved.step)


def _sharded(trainer: TrainingEngine, is_loading: bool = False) -> dict:
    state = {"model": trainer.model.sharded_state_dict(metadata=_METADATA)}
    state["optimizer"] = trainer.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=_METADATA)
    return state
