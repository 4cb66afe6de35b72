"""The parts of the models on the training grid, chosen by the options of the run."""

from rl.config import wing
from rl.config.run_models import RunModel
from rl.config.schema import Config
from rl.training.engine import TrainingEngine
from rl.training.parts import TrainerPart


def training_parts(
    config: Config, model: RunModel, *, base_of: TrainingEngine | None = None
) -> list[TrainerPart]:
    """Return the parts of a model, in the order of their hooks.

    base_of: a model with the same frozen weights; the new model uses its memory.
    """
    return [part for parts_of in wing.doors(config, "trainer") for part in parts_of(config, model, base_of)]
