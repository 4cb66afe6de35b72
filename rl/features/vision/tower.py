"""Computes the vision tower in training. The tower is a part of the policy's first pipeline stage.

The tower comes from transformers. Every tensor parallel rank computes the whole tower, so that its gradient
needs no sum over the ranks. For example, with training.tp=4 each of the 4 ranks encodes every image. The
tower's outputs replace the embeddings of the images' tokens before the row is divided (sequence parallelism).
Positions are computed on every stage, from the prompts alone.

The samples of the engine come with the pixels that the engine saw. These pixels are a held column (uint8) on
ranks of the first stage. Each of these ranks compares them with the images of the prompt, which it reads
itself. Responses that come from the data have no such column; they use the pixels of the prompt.
"""

import functools
import importlib
import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rl.config.run_models import RunModel
from rl.config.schema import Config
from rl.data.batch import Batch
from rl.data.held import PIXELS, PLACES
from rl.data.images import ImageFormat, PromptImage, image_format
from rl.features.vision import deepstack
from rl.features.vision.positions import row_positions
from rl.features.vision.row_images import RowImages
from rl.models import architecture, read_hf_config
from rl.models.layout import TOWER
from rl.training.packing import MicroBatch
from rl.training.parts import TrainerPart

if TYPE_CHECKING:
    from rl.training.engine import TrainingEngine
    from rl.training.model import Packed


@dataclass(frozen=True, eq=False)
class GivenImage(PromptImage):
    """An image that an environment gave, without its file."""

    known_digest: int = -1

    @property
    def digest(self) -> int:  # type: ignore[override]
        return self.known_digest


class WrongImages(RuntimeError):
    """Raised if the images that came with a sample are not its prompt's images."""


class VisionTower(TrainerPart):
    """Lets a policy read images.

    learns: whether the tower is trained, too. recomputes: whether its backward pass computes each block's
    activations again. given: format of images that environments give; None: there are
    no environments.
    """

    needs = {PIXELS: lambda stage: slice(None) if stage == 0 else None}

    def __init__(self, *, learns: bool, recomputes: bool = False, given: ImageFormat | None = None):
        self.learns, self._recomputes, self._given = learns, recomputes, given
        if given is not None:
            self.needs = self.needs | {PLACES: lambda stage: slice(None)}
        self._tower: torch.nn.Module | None = None
        self._row: RowImages | None = None
        """Images of the present micro-batch."""

    def extend(self, hf: dict, chunks: list["Packed"]) -> None:
        """Build the tower on the first stage, and merge its outputs after the embedding."""
        [first, *_] = chunks
        if not first.pre_process:
            return
        with torch.random.fork_rng(devices=[]):
            tower: Any = _build(hf, first.config.params_dtype)
        first.visual = self._tower = tower
        tower.requires_grad_(self.learns)
        if self._recomputes:
            for block in tower.blocks:
                block.gradient_checkpointing = True
                block._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
        # The row is divided after the images are in it.
        embedding = first.embedding
        for module in (embedding, embedding.word_embeddings):
            module.reduce_scatter_embeddings = False
        embedding.scatter_to_sequence_parallel = False
        embedding.register_forward_hook(self._merge)
        first.register_forward_pre_hook(self._take_row, with_kwargs=True)
        deepstack.extend(hf, first)
        self._config, self._group = first.config, first.pg_collection.tp

    def attach(self, engine: "TrainingEngine") -> None:
        if self.learns:
            return
        whole = engine.weight_map
        text = [weight for weight in whole.weights if not weight.megatron.startswith(TOWER)]
        own = {name: tensor for name, tensor in whole.parameters.items() if TOWER not in name}
        self.learned_map = whole.over(text, own)

    def row(self, batch: Batch, row: MicroBatch, *, is_reference: bool) -> MicroBatch:
        """Return the row with the positions of its tokens and, on the first stage, its images."""
        if not batch.prompts:  # responses in the data, in a batch without images
            return row
        images = [self._seen(batch, sample) for sample in row.samples]
        if not any(images):
            return row
        assert row.starts is not None
        prompts, device = batch.prompt_lengths[row.samples].numpy(), row.tokens.device
        lengths = np.stack([prompts, batch.lengths[row.samples].numpy()])
        positions = row_positions(row.tokens.numel(), row.starts, lengths, images)
        row = replace(row, position_ids=torch.from_numpy(positions).to(device))
        if self._tower is None:
            return row
        return replace(row, extras=row.extras.plus(_images_of(batch, row, images)))

    def _seen(self, batch: Batch, sample: int) -> tuple[PromptImage, ...]:
        """Return the images of a sample: first the prompt's, then the environment's.

        Raises WrongImages if the engine had the prompt's images at other places. If an environment changed
        the prompt of the data, its images come from the environment, too.
        """
        prompt = batch.prompts[int(batch.groups[sample])]
        if self._given is None or PLACES not in batch.held:
            return prompt.images
        places, length = batch.held[PLACES].local[sample].reshape(-1, 4), len(batch.prompt_ids[sample])
        of_data = np.array_equal(batch.prompt_ids[sample], prompt.token_ids)
        own = [(i.offset, i.height, i.width, i.digest) for i in prompt.images] if of_data else []
        if of_data and not np.array_equal(places[places[:, 0] < length], np.reshape(own, (-1, 4))):
            raise WrongImages(f"image check: sample {sample} came with other images than its prompt has.")
        given = [
            GivenImage(b"", height, width, self._given, offset, known_digest=digest)
            for offset, height, width, digest in places[len(own) :].tolist()
        ]
        return *prompt.images[: len(own)], *given

    def _take_row(self, module: torch.nn.Module, args: tuple, options: dict[str, Any]) -> None:
        self._row = options["packed_seq_params"].extras.get(RowImages)

    def _merge(self, module: torch.nn.Module, args: tuple, out: Tensor) -> Tensor:
        """Return the embeddings [T, 1, H] with the tower's outputs, or this rank's part of them."""
        assert self._tower is not None
        row, self._row = self._row, None
        if row is not None:
            with torch.set_grad_enabled(self.learns and torch.is_grad_enabled()):
                patches, grids = (x.to(out.device) for x in (row.patches(), row.grids()))
                outputs = self._tower(patches, grid_thw=grids)
            merged = deepstack.take(row, outputs, len(out), self._divided)
            out = out.index_copy(0, row.places.to(out.device), merged.to(out.dtype)[:, None])
        elif self.learns and torch.is_grad_enabled():  # every parameter must have a gradient
            out = out + sum(parameter.sum() for parameter in self._tower.parameters()) * 0.0
        return self._divided(out)

    def _divided(self, x: Tensor) -> Tensor:
        """Return this rank's part of x [T, 1, H] with sequence parallelism, else x."""
        if not self._config.sequence_parallel:
            return x
        return tensor_parallel.scatter_to_sequence_parallel_region(x, group=self._group)


def _build(hf: dict, dtype: torch.dtype) -> torch.nn.Module:
    """Return the tower of a model with random weights."""
    module, name = architecture(hf).tower_class(hf)
    kind = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    config = kind.config_class(**hf["vision_config"])
    return kind._from_config(config, dtype=dtype, attn_implementation="sdpa")


def _images_of(batch: Batch, row: MicroBatch, images: list[tuple[PromptImage, ...]]) -> RowImages:
    """Return the images of a row. Samples that share a prompt share its images."""
    assert row.starts is not None
    found: dict[int, tuple[PromptImage, np.ndarray]] = {}
    for sample, (start, answer), own in zip(row.samples, row.starts.T.tolist(), images, strict=True):
        length = len(batch.prompt_ids[sample])
        for image, pixels in zip(own, _pixels_of(batch, sample, own)):
            place = start if image.offset < length else answer - length
            before, _ = found.setdefault(place + image.offset, (image, pixels))
            if before is not image and before.digest != image.digest:
                raise WrongImages(
                    "image check: reset gave two samples the same prompt, but other images; give the samples "
                    "of a group the same ones, or set training.shared_prefix=false."
                )
    places = [np.arange(place, place + image.num_tokens) for place, (image, _) in found.items()]
    return RowImages(
        [image for image, _ in found.values()],
        [pixels for _, pixels in found.values()],
        torch.from_numpy(np.concatenate(places)),
    )


def _pixels_of(batch: Batch, sample: int, images: tuple[PromptImage, ...]) -> list[np.ndarray]:
    """Return the pixels of a sample's images. A sample of the engine came with its pixels.

    Raises WrongImages if the pixels are not the prompt's.
    """
    if PIXELS not in batch.held:
        return [image.pixels for image in images]
    values, sizes = batch.held[PIXELS].local[sample], [image.height * image.width * 3 for image in images]
    if len(values) != sum(sizes):
        raise WrongImages(
            f"image check: sample {sample} came with {len(values)} bytes of pixels, but the {len(images)} "
            f"images of its prompt have {sum(sizes)}: an image is missing, doubled, or of another size."
        )
    parts = np.split(values, np.cumsum(sizes)[:-1]) if images else []
    for number, (part, image) in enumerate(zip(parts, images), start=1):
        if zlib.crc32(part.data) != image.digest:
            raise WrongImages(
                f"image check: image {number} of sample {sample} has other pixels than the image "
                "of its prompt: images were exchanged on the way, or ranks decode the file differently."
            )
    return [part.reshape(image.height, image.width, 3) for part, image in zip(parts, images)]


def parts(config: Config, model: RunModel, base_of: "TrainingEngine | None") -> list[TrainerPart]:
    """Return the parts of a policy or a teacher that reads images."""
    path, given, is_policy = model.path, None, model.name == "policy"
    if not is_policy and "vision_config" not in read_hf_config(path):
        return []
    if config.agents.is_on:
        given = image_format(path, read_hf_config(path), max_pixels=config.data.max_pixels)
    learns, recomputes = is_policy and config.model.vision == "train", config.training.recompute == "full"
    return [VisionTower(learns=learns, recomputes=recomputes, given=given)]
