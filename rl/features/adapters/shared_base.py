"""Lets a model use the frozen weights of another model, in the same memory."""

from torch import Tensor

from rl.training.engine import TrainingEngine
from rl.training.parts import TrainerPart
from rl.training.weights import WeightMap


class SharedBase(TrainerPart):
    """Makes a model use the memory of the weights of `owner`, a model of the same layout with adapters.

    For example, a critic uses the base weights of the policy. All points of a sweep in one job use the base
    weights of the first point.
    """

    def __init__(self, owner: TrainingEngine):
        self._owner = owner

    def load(self, weight_map: WeightMap) -> bool:
        """Make this rank's parameters use the owner's memory. Returns True.

        A value head is set to 0, because the owner has none.
        """
        source = self._owner.weight_map.parameters
        for name, parameter in weight_map.parameters.items():
            if name in source:
                parameter.data = source[name].data
            else:
                parameter.data.zero_()
        return True

    def resident(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors that learn; all other tensors are the owner's."""
        return [tensor for tensor in tensors if tensor.requires_grad]

    @property
    def has_weights(self) -> bool:
        return self._owner.has_weights
