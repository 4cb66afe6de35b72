"""A model whose frozen weights are those of another model, in the same memory."""

from torch import Tensor

from rl.training.engine import TrainingEngine
from rl.training.parts import Part
from rl.training.weights import WeightMap


class SharedBase(Part):
    """Uses the memory of `owner`'s weights, a model of the same layout with low-rank adapters.

    A critic shares the policy's base so, and all points of a sweep in one job share that of the first.
    """

    def __init__(self, owner: TrainingEngine):
        self._owner = owner

    def load(self, weight_map: WeightMap) -> bool:
        """Make this rank's parameters use the owner's memory. A value head, which it lacks, becomes 0."""
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
