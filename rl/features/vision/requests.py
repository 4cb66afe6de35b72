"""Images in the generation engine: vLLM encodes the pixels that the trainer will read.

vLLM is given the patches of `rl.data.images` instead of files. This way, vLLM and the trainer compute with
the same numbers, and neither vLLM's processor nor torchvision is needed. Each rank of a replica holds the
whole tower.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rl.config.adapter import Adapter
from rl.config.schema import Config
from rl.data.held import PIXELS, PLACES
from rl.data.images import ImageFormat, image_format
from rl.models import read_hf_config
from rl.rollout.calls import EngineCall
from rl.rollout.parts import EnginePart
from rl.rollout.samples import Request
from rl.rollout.vllm_model import allow_no_torchvision

if TYPE_CHECKING:
    from vllm.inputs.engine import MultiModalInput
    from vllm.outputs import CompletionOutput

    from rl.rollout.engine import RolloutEngine

MAX_IMAGES = 1024
"""Maximum number of images of a prompt; data.max_prompt_tokens limits their tokens, too."""


class ImageRequests(EnginePart):
    """Gives requests their images, and completions the held column PIXELS on the replica's leader.

    several_turns: whether environments give images; completions then have the column PLACES, too.
    """

    def __init__(self, format: ImageFormat, *, several_turns: bool = False):
        self.format, self._columns = format, (PIXELS, PLACES) if several_turns else (PIXELS,)
        self._held: dict[str, dict[str, np.ndarray]] = {}
        """Values of running requests, by name."""

    def options(self, engine: "RolloutEngine") -> dict:
        _replace_processor(engine.hf["architectures"][0], self.format)
        return dict(
            limit_mm_per_prompt={"image": MAX_IMAGES},
            mm_encoder_tp_mode="data",
            mm_device_do_normalize=False,  # the patches are normalised
            mm_processor_cache_gb=0,
            skip_mm_profiling=True,
        )

    def begin(self, engine: "RolloutEngine") -> None:
        self._held.clear()

    def request(self, engine: "RolloutEngine", request: Request, call: EngineCall) -> None:
        places, pixels = request.images or (np.zeros((0, 4), np.int64), np.zeros(0, np.uint8))
        values = {PIXELS: pixels, PLACES: places}
        self._held[request.name] = {name: values[name] for name in self._columns}
        if len(places):
            call.prompt |= image_input(self.format, call.prompt["prompt_token_ids"], places, pixels)

    def completion(
        self, engine: "RolloutEngine", internal_id: str, output: "CompletionOutput"
    ) -> dict[str, np.ndarray]:
        held = self._held.pop(internal_id.rpartition("-")[0])
        return held if engine.leads else {}

    def weights_changed(self, engine: "RolloutEngine") -> None:
        engine.llm.llm_engine.reset_mm_cache()
        engine.llm.llm_engine.reset_encoder_cache()


def image_input(
    format: ImageFormat, token_ids: list[int], places: np.ndarray, pixels: np.ndarray
) -> "MultiModalInput":
    """Return vLLM's input of a prompt with images.

    places, pixels: results of `rl.data.images.placed_pixels`.
    """
    from transformers import BatchFeature
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

    sizes = [height * width * 3 for _, height, width, _ in places.tolist()]
    parts = np.split(pixels, np.cumsum(sizes)[:-1])
    patches, grids, hashes, ranges = [], [], [], []
    for (offset, height, width, _), part in zip(places.tolist(), parts, strict=True):
        patches.append(format.patches(part.reshape(height, width, 3)))
        grids.append((1, height // format.patch, width // format.patch))
        hashes.append(
            hashlib.blake2b(part.tobytes(), digest_size=16, salt=b"%dx%d" % (height, width)).hexdigest()
        )
        ranges.append(PlaceholderRange(offset=offset, length=height * width // format.unit**2))
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes(
            "image", torch.tensor([len(p) for p in patches])
        ),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    values = BatchFeature(
        {"pixel_values": torch.from_numpy(np.concatenate(patches)), "image_grid_thw": torch.tensor(grids)}
    )
    items = MultiModalKwargsItems.from_hf_inputs(values, fields)
    return mm_input(token_ids, items, {"image": hashes}, {"image": ranges})


def _replace_processor(architecture: str, format: ImageFormat) -> None:
    """Let vLLM build the model without its processor, which needs torchvision; `image_input` replaces it."""
    from vllm import ModelRegistry
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo

    allow_no_torchvision()
    side = max(1, int((format.max_pixels**0.5) // format.unit))  # side of the largest square image, in tokens

    class Info(BaseProcessingInfo):
        def get_supported_mm_limits(self) -> Mapping[str, int | None]:
            return {"image": None}

        def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> dict[str, int]:
            return {"image": min(format.max_pixels // format.unit**2, seq_len)}

    class Dummy(BaseDummyInputsBuilder):
        get_dummy_text = get_dummy_mm_data = _not_called

    class Processor(BaseMultiModalProcessor):
        def get_dummy_mm_inputs(
            self, mm_counts: Mapping[str, int], *, cache: Any = None, scheduler_config: Any = None
        ) -> "MultiModalInput":
            """Return a prompt of one image of the largest size, for vLLM's estimate of the memory of
            images."""
            height = width = side * format.unit
            tokens = [format.token_id] * side**2
            pixels = np.zeros(height * width * 3, np.uint8)
            return image_input(format, tokens, np.array([(0, height, width, 0)]), pixels)

        _get_mm_fields_config = _get_prompt_updates = _not_called

    model = ModelRegistry.models[architecture].load_model_cls()
    if "_processor_factory" in vars(model):
        delattr(model, "_processor_factory")
    MULTIMODAL_REGISTRY.register_processor(Processor, info=Info, dummy_inputs=Dummy)(model)


def _not_called(self: Any, *args: Any, **options: Any) -> Any:
    """Replace a method that vLLM calls only for other prompts than an `image_input`."""
    raise AssertionError("vLLM tried to process a prompt's images, which `image_input` has done")


def parts(config: Config, adapters: Sequence[Adapter]) -> list[EnginePart]:
    """Return the parts of an engine."""
    path = config.model.path
    format = image_format(path, read_hf_config(path), max_pixels=config.data.max_pixels)
    return [ImageRequests(format, several_turns=config.agents.is_on)]
