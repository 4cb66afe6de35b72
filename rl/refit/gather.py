"""Refit by gathering: every weight whole on every rank for a moment, and vLLM's own loader takes its shard of it.

Correct for any pair of layouts; moves the whole model to every rank.
"""

import torch
import torch.distributed as dist

from rl.models.layout import index
from rl.rollout.engine import RolloutEngine
from rl.training.engine import TrainingEngine


class RefitMismatch(RuntimeError):
    """The engine's weights are not the trainer's."""


def refit(trainer: TrainingEngine, engine: RolloutEngine) -> None:
    """Write the trainer's weights into the engine. Collective over the world."""
    engine.load_weights(trainer.full_weights())


@torch.no_grad()
def check_refit(trainer: TrainingEngine, engine: RolloutEngine) -> None:
    """Compare every element of this rank's engine weights with the trainer's. Collective over the world.

    Raises RefitMismatch on every rank, naming weights, ranks and the first element that differs.
    """
    held = dict(engine.model.named_parameters())
    pieces = {
        piece.hf: (weight.vllm, piece)
        for weight in trainer.weight_map.weights
        for piece in weight.vllm_pieces(engine.tp, engine.rank_in_replica)
    }
    unnamed = sorted(held.keys() - {weight.vllm for weight in trainer.weight_map.weights})
    mismatches = [f"{name} of the engine on rank {dist.get_rank()} is no weight of the trainer" for name in unnamed]
    for name, full in trainer.full_weights():
        if name not in pieces:
            continue
        vllm_name, piece = pieces[name]
        expected = full[index(piece.hf_box)]
        found = held[vllm_name][index(piece.local_box)]
        different = found.to(expected) != expected
        if different.any():
            first = tuple(different.nonzero()[0].tolist())
            element = tuple(start + i for (start, _), i in zip(piece.hf_box, first))
            mismatches.append(
                f"{name}{list(element)} on rank {dist.get_rank()}: engine {found[first].item():g}, "
                f"trainer {expected[first].item():g} ({int(different.sum())} of {different.numel()} differ)"
            )
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mismatches)
    if found := [text for texts in everyone for text in texts]:
        raise RefitMismatch(f"after the refit {len(found)} weights differ: " + "; ".join(found[:8]))
