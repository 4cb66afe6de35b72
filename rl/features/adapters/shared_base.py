"""A model that uses the frozen weights of another model, in the same memory."""

from torch import Tensor

from rl.training.engine import TrainingEngine
from rl.training.parts import TrainerPart
from rl.training.weights import WeightMap


class SharedBase(TrainerPart):
    """Uses the memory of `owner`'s weights, a model of the same layout with low-rank adapters.

    For example, a critic uses the policy's base, and all points of a sweep in one job use the first point's.
    """

    def __init__(self, owner: TrainingEngine):
        self._owner = owner

    def load(self, weight_map: WeightMap) -> bool:
        """Make this rank's parameters use the owner's memory. A value head becomes 0: the owner has none."""
        source = self._owner.weight_map.parameters
        for name, parameter in weight_map.parameters.items():
            if name in source:
                parameter.data = source[name].data
            else:
                parameter.data.zero_()
        return True

    def resident(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors that are not the owner's."""
        return [tensor for tensor in tensors if tensor.requires_grad]

    @property
    def has_weights(self) -> bool:
        return self._owner.has_weights
