"""The check that the adapters of a model learn, and nothing else."""

from typing import TYPE_CHECKING

from rl.runtime.checksum import placed_checksum
from rl.runtime.collectives import gather_objects

if TYPE_CHECKING:
    from rl.training.engine import TrainingEngine


class WrongLearning(RuntimeError):
    """Raised on every rank if frozen weights have changed, or the optimizer does not own an adapter."""


def check_learning(name: str, model: "TrainingEngine", first: dict[str, int]) -> None:
    """Compare the frozen weights with those of the first call, and the adapters with the gradient buffers.

    The optimizer updates what has a gradient buffer. Collective over the world. name: of the model, for the
    message. first: checksums of the first call, which fills it. Raises WrongLearning on every rank.
    """
    learned = model.learned_map.parameters
    own = {id(parameter) for parameter in learned.values()}
    frozen = {w.hf[0]: (w, p) for w, p in model.weight_map.local() if id(p) not in own}
    sums = {name: int(placed_checksum(model.parts.value(*found))) for name, found in frozen.items()}
    if not first:
        first.update(sums)
    moved = [key for key, value in sums.items() if value != first[key]]
    owned = model.wrapped.param_to_bucket_group
    absent = [key for key, parameter in learned.items() if parameter not in owned]
    found = gather_objects((moved, absent))
    for number, what in enumerate(("frozen weights that have changed", "adapters that the optimizer lacks")):
        ranks = [rank for rank, lists in enumerate(found) if lists[number]]
        if ranks:
            names = found[ranks[0]][number]
            raise WrongLearning(
                f"adapter check: rank {', '.join(map(str, ranks))} of the {name} has {what}: "
                f"{', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}."
            )
