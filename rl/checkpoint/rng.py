"""The states of a rank's random number generators: Python, numpy, torch (CPU, CUDA), Megatron's tracker."""

import random
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from torch import Tensor

from rl.checkpoint.shards import Shard, ShardReader


def rng_shards(rank: int) -> list[Shard]:
    """Return this rank's states as shards with the names `rng/<rank>/...`. Not collective."""
    shards = []
    for name, state in _states().items():
        flat = state.view(-1)
        shards.append(Shard(f"rng/{rank}/{name}", ((0, len(flat)),), flat))
    return shards


def restore_rng(reader: ShardReader, rank: int) -> None:
    """Restore the states that this rank wrote. Not collective.

    Requires the world and layout of the saved run.
    """

    def saved(name: str) -> Tensor:
        return reader.whole(f"rng/{rank}/{name}")

    version, *words = saved("python").tolist()
    gauss = float(saved("python_gauss"))
    random.setstate((version, tuple(words), None if np.isnan(gauss) else gauss))
    position, has_gauss, gauss = saved("numpy_place").tolist()
    np.random.set_state(
        ("MT19937", saved("numpy").numpy().astype(np.uint32), int(position), int(has_gauss), gauss)
    )
    torch.set_rng_state(saved("torch"))
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(saved("cuda"))
    tracker = get_cuda_rng_tracker()
    tracker.set_states({name: saved(f"megatron.{name}") for name in tracker.get_states()})


def reseed_rng(seed: int) -> None:
    """Seed the generators at the start of a run, or if the checkpoint has another world or layout.

    The states are identical on all ranks, except for Megatron's tracker. Not collective.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed % 2**31)


def _states() -> dict[str, Tensor]:
    version, words, python_gauss = random.getstate()
    numpy_state: Any = np.random.get_state()  # its annotation includes a dict, which numpy returns on request
    _, keys, position, has_gauss, gauss = numpy_state
    states = {
        "python": torch.tensor([version, *words]),
        "python_gauss": torch.tensor(
            [float("nan") if python_gauss is None else python_gauss], dtype=torch.float64
        ),
        "numpy": torch.from_numpy(keys.astype(np.int64)),
        "numpy_place": torch.tensor([position, has_gauss, gauss], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states | {f"megatron.{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}
