"""The features that take part in a model of the training grid, and their order. Only this file lists them."""

from dataclasses import replace

from rl.config.adapter import Adapter
from rl.config.run_models import RunModel
from rl.config.schema import Config, Training, has_prediction_head, needs_sampling_masks, uses_teacher
from rl.training.adapter import Adapters
from rl.training.divergence import TeacherTargets
from rl.training.engine import TrainingEngine
from rl.training.fp8_base import Fp8Base
from rl.training.parts import Part
from rl.training.router_replay import RouterReplay
from rl.training.sampling_masks import MaskedSampling
from rl.training.shared_base import SharedBase


def training_parts(config: Config, model: RunModel, *, base_of: TrainingEngine | None = None) -> list[Part]:
    """Return the parts of a model.

    base_of: a model with the same frozen weights, whose memory this one uses.
    """
    parts: list[Part] = []
    if config.model.numerics == "bitwise":
        # Imports rl.numerics, which a run with model.numerics=fast does not.
        from rl.training.bitwise_numerics import BitwiseNumerics

        parts.append(BitwiseNumerics())
    if base_of is not None:
        assert config.adapter.init != "pissa", "PiSSA changes the weights of another model"
        parts.append(SharedBase(base_of))
    if needs_sampling_masks(config) and (model.name == "policy" or model.is_teacher):
        parts.append(MaskedSampling())
    if model.name == "policy":
        if config.training.router_replay != "none":
            parts.append(RouterReplay(config.training.router_replay))
        if uses_teacher(config):
            parts.append(TeacherTargets())
    if model.has_adapters:
        adapter = config.adapter if model.name == "policy" else replace(config.adapter, path="")
        in_weights = config.model.numerics == "bitwise" and model.name == "policy"
        parts += adapter_parts(adapter, seed=config.run.seed, in_weights=in_weights)
    if model.name == "policy":
        parts += prediction_parts(config, config.training, lr=config.training.mtp.head_lr)
        parts += vision_parts(config)
    return parts


def vision_parts(config: Config) -> list[Part]:
    """Return the part of a policy that lets it read images, if it does. See `VisionTower`."""
    if not config.data.image_key:
        return []
    from rl.data.images import image_format
    from rl.models import read_hf_config
    from rl.vision.tower import VisionTower  # imports transformers' model

    learns = config.model.vision == "train"
    path, given = config.model.path, None
    if config.agents.is_on:
        given = image_format(path, read_hf_config(path), max_pixels=config.data.max_pixels)
    recomputes = config.training.recompute == "full"
    return [VisionTower(learns=learns, recomputes=recomputes, given=given)]


def prediction_parts(config: Config, training: Training, *, lr: float) -> list[Part]:
    """Return the part of a policy that holds its head for multi-token prediction, if it does. See `Mtp`."""
    if not has_prediction_head(config):
        return []
    from rl.training.mtp import Mtp

    return [Mtp(training, lr=lr, is_served=config.rollout.draft.method == "mtp")]


def adapter_parts(adapter: Adapter, *, seed: int, in_weights: bool = False) -> list[Part]:
    """Return the parts of a model with low-rank adapters. See `Adapters`."""
    if not adapter.is_on:
        return []
    return [
        Adapters(adapter, seed=seed, in_weights=in_weights),
        *([Fp8Base()] if adapter.base == "fp8" else []),
    ]
