"""Images of prompts: reading them from rows, resizing, decoding, and cutting into a vision tower's patches.

A row has its images in a column such as `images`. In its messages, one anchor `<image>` stands for each
image, in the order of the column (verl's format). In a row without images, `<image>` is plain text. Every
rank reads the encoded images. Pixels are decoded only when a request or a micro-batch needs them. Resizing
and patches are bitwise equal to transformers' Qwen2VLImageProcessorPil (tests/unit/data/test_images.py). One
thing differs: transparent pixels are white here, as in vLLM and qwen_vl_utils. transformers shows the colours
under the transparent pixels, which are often black.
"""

import base64
import binascii
import functools
import io
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pillow
from PIL import ImageOps

from rl.data.reading import FileRow, describe, first_line

ANCHOR = "<image>"
MAX_RATIO = 200
"""Maximum ratio of an image's sides, as in transformers."""


@dataclass(frozen=True)
class ImageFormat:
    """Input format of a vision tower, read from config.json and preprocessor_config.json."""

    token_id: int
    """Id of the token that stands in the prompt for one output of the tower."""
    patch: int
    """Side of a patch, in pixels."""
    merge: int
    """Side, in patches, of the square that becomes one token."""
    frames: int
    """Number of frames in a patch. A still image is repeated in each frame."""
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def unit(self) -> int:
        """Side, in pixels, of the square that becomes one token."""
        return self.patch * self.merge

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) of a resized image: multiples of `unit` within the limits.

        The result equals `smart_resize` of transformers. For example, with a unit of 28, 100 x 90 pixels
        become 112 x 84.
        """
        if max(height, width) > MAX_RATIO * min(height, width):
            raise ValueError(f"an image of {width} x {height} pixels has a ratio above {MAX_RATIO}")
        unit = self.unit
        rows, columns = round(height / unit) * unit, round(width / unit) * unit
        if rows * columns > self.max_pixels:
            factor = math.sqrt(height * width / self.max_pixels)
            rows, columns = (max(unit, math.floor(n / factor / unit) * unit) for n in (height, width))
        elif rows * columns < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(n * factor / unit) * unit for n in (height, width))
        return rows, columns

    def patches(self, pixels: np.ndarray) -> np.ndarray:
        """Return the normalised patches of an image, float32 [patches, 3 * frames * patch**2].

        pixels: uint8 [H, W, 3]. In the result, the patches that become one token are adjacent.
        """
        height, width, channels = pixels.shape
        # As in transformers: scale by 1 / 255, round to float32, then normalise.
        scaled: np.ndarray = (pixels.astype(np.float64) * (1 / 255)).astype(np.float32)
        scaled = (scaled - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        merge, patch = self.merge, self.patch
        parts = scaled.reshape(height // self.unit, merge, patch, width // self.unit, merge, patch, channels)
        parts = parts.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
        shape = (*parts.shape[:5], self.frames, patch, patch)
        return np.broadcast_to(parts, shape).reshape(height * width // patch**2, -1)


def image_format(directory: str, hf: dict, *, max_pixels: int = 0) -> ImageFormat:
    """Return the format of the images that a checkpoint takes.

    hf: the content of its config.json. max_pixels: maximum number of pixels of an image; 0 uses the limit of
    the checkpoint.

    Raises ValueError for a model without preprocessor_config.json, and for a limit that is too small.
    """
    path = Path(directory, "preprocessor_config.json")
    if not path.is_file():
        raise ValueError(
            f"{directory} has no preprocessor_config.json, which says how images are resized and normalised; "
            "copy it from the published checkpoint."
        )
    own, vision = json.loads(path.read_text()), hf["vision_config"]
    size = own.get("size") or {}
    smallest = own.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    largest = own.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    found = ImageFormat(
        hf["image_token_id"],
        vision["patch_size"],
        vision["spatial_merge_size"],
        vision["temporal_patch_size"],
        smallest,
        max_pixels or largest,
        tuple(own["image_mean"]),
        tuple(own["image_std"]),
    )
    if found.max_pixels < (minimum := max(found.min_pixels, found.unit**2)):
        raise ValueError(
            f"data.max_pixels={found.max_pixels} is less than the {minimum} pixels to which the model "
            "enlarges small images; use a larger number."
        )
    return found


@dataclass(frozen=True, eq=False)
class PromptImage:
    """One image of a prompt."""

    content: bytes = field(repr=False)
    """The encoded file."""
    height: int
    """Height and, in `width`, width after resizing, in pixels."""
    width: int
    format: ImageFormat
    offset: int = -1
    """Index of its first token in the prompt."""

    @property
    def num_tokens(self) -> int:
        return self.height * self.width // self.format.unit**2

    @property
    def grid(self) -> tuple[int, int]:
        """Number of rows and number of columns of patches."""
        return self.height // self.format.patch, self.width // self.format.patch

    @property
    def pixels(self) -> np.ndarray:
        """The decoded and resized image, uint8 [height, width, 3]."""
        return _decoded(self)

    @functools.cached_property
    def digest(self) -> int:
        """32-bit hash of `pixels`."""
        return zlib.crc32(self.pixels.data)


def upright(image: PromptImage) -> Pillow.Image:
    """Return the decoded image in RGB, as a viewer shows it, not resized."""
    with Pillow.open(io.BytesIO(image.content)) as opened:
        return _without_transparency(ImageOps.exif_transpose(opened))


@functools.lru_cache(maxsize=128)
def _decoded(image: PromptImage) -> np.ndarray:
    pixels = np.asarray(upright(image).resize((image.width, image.height), Pillow.Resampling.BICUBIC)).copy()
    pixels.setflags(write=False)
    return pixels


def _without_transparency(image: Pillow.Image) -> Pillow.Image:
    """Return an image in RGB, put on a white background."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Pillow.new("RGB", image.size, (255, 255, 255))
    white.paste(image, mask=image.getchannel("A"))
    return white


@dataclass(frozen=True)
class ImageReader:
    """Reads the images of rows from `column`, the column that data.image_key names."""

    column: str
    format: ImageFormat

    def of(self, row: FileRow) -> list[PromptImage]:
        """Return the images of a row, [] if it has none. Raises ValueError for an unreadable image."""
        value = row.values.get(self.column)
        if value is None:
            return []
        items = value if isinstance(value, list) else [value]
        return [self._read(item, row, number) for number, item in enumerate(items, start=1)]

    def _read(self, item: Any, row: FileRow, number: int) -> PromptImage:
        owner = f"{row.place}: image {number} of column {self.column!r}"
        return read_image(item, self.format, owner, directory=row.path.parent)

    def anchored(
        self, prompt: list[dict] | str, images: Sequence[PromptImage], row: FileRow
    ) -> list[dict] | str:
        """Return the messages with a part {type: image} in place of each anchor.

        Without images the messages stay unchanged. Raises ValueError if the number of anchors differs from
        the number of images, and for parts that are neither text nor an image.
        """
        if isinstance(prompt, str) and images:
            raise ValueError(
                f"{row.place}: a prompt with images must be a list of messages, because the chat template "
                "writes the tokens around an image."
            )
        if isinstance(prompt, str):
            return prompt
        if not images and not any(isinstance(message.get("content"), list) for message in prompt):
            return prompt
        split = ANCHOR if images else None
        found = [{**message, "content": _parts(message.get("content"), split, row)} for message in prompt]
        count = sum(part["type"] == "image" for message in found for part in message["content"])
        if count != len(images):
            raise ValueError(
                f"{row.place}: the prompt has {count} anchors {ANCHOR}, but column {self.column!r} has "
                f"{len(images)} images; they must agree."
            )
        return found

    def expanded(
        self, token_ids: np.ndarray, images: Sequence[PromptImage], row: FileRow
    ) -> tuple[np.ndarray, tuple[PromptImage, ...]]:
        """Return the prompt with the tokens of its images, int32 [P], and the images with their offsets.

        token_ids: prompt with one image token for each image. Raises ValueError if the text of the prompt
            contains the image token, too.
        """
        if not images:
            return token_ids, ()
        return expand(token_ids, images, f"{row.place}: the rendered prompt")


def expand(
    token_ids: np.ndarray, images: Sequence[PromptImage], owner: str, *, first: int = 0
) -> tuple[np.ndarray, tuple[PromptImage, ...]]:
    """Repeat the token of each image to the image's number of tokens. Return tokens and images with offsets.

    For example, [5, I, 6] becomes [5, I, I, I, 6] for an image of 3 tokens; the image gets the offset 1.

    token_ids: int32 [S], with one image token for each image. images: at least one. owner: the subject of the
    ValueError if the number of image tokens differs from the number of images. first: number of tokens of the
    sequence before `token_ids`; it is added to the offsets.
    """
    [token_id] = {image.format.token_id for image in images}
    places = np.flatnonzero(token_ids == token_id)
    if len(places) != len(images):
        raise ValueError(
            f"{owner} has {len(places)} tokens {token_id} for {len(images)} images; remove the "
            "images' special token from the text, or use the chat template of a vision-language model."
        )
    counts = np.ones(len(token_ids), np.int64)
    counts[places] = [image.num_tokens for image in images]
    offsets = (counts.cumsum() - counts)[places].tolist()
    placed = tuple(replace(image, offset=first + offset) for image, offset in zip(images, offsets))
    return token_ids.repeat(counts), placed


def placed_pixels(images: Sequence[PromptImage]) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of images, int64 [images, 4], and their pixels, end to end, uint8.

    A place has four numbers: the index of the image's first token, height, width and `PromptImage.digest`.

    images: at least one.
    """
    places = [(image.offset, image.height, image.width, image.digest) for image in images]
    return np.array(places, np.int64), np.concatenate([image.pixels.ravel() for image in images])


def read_image(item: Any, format: ImageFormat, owner: str, *, directory: Path = Path()) -> PromptImage:
    """Return the image that `item` holds or names: {bytes, path}, a path, a data URI, or bytes.

    owner: the subject of the ValueError for an unreadable image. directory: base of relative paths.
    """
    try:
        content = _content(item, directory)
        with Pillow.open(io.BytesIO(content)) as opened:
            mode = opened.mode
            _check_whole(opened, content)
        if mode in ("I", "F") or mode.startswith("I;16"):
            raise ValueError(f"its pixels have mode {mode}, not 8 bits per channel; convert it to RGB")
        with Pillow.open(io.BytesIO(content)) as opened:
            width, height = opened.size
            if opened.getexif().get(0x0112, 1) >= 5:  # turned by 90 degrees
                width, height = height, width
        return PromptImage(content, *format.size(height, width), format)
    except Pillow.UnidentifiedImageError as error:
        raise ValueError(f"{owner} cannot be read: Pillow does not know its format.") from error
    except (ValueError, OSError, SyntaxError, Pillow.DecompressionBombError) as error:
        raise ValueError(f"{owner} cannot be read: {first_line(error)[:200]}.") from error


def _check_whole(opened: Pillow.Image, content: bytes) -> None:
    """Raise OSError or SyntaxError if the file of an image is damaged or incomplete.

    Few files must be decoded to find out: a PNG has checksums, and most complete JPEGs end with the end
    marker.
    """
    if opened.format == "PNG":
        opened.verify()
    elif opened.format != "JPEG" or not content.endswith(b"\xff\xd9"):
        opened.load()


def _parts(content: Any, anchor: str | None, row: FileRow) -> list[dict]:
    """Return the content of a message as a list of parts, without keys that are None.

    anchor: the text that stands for an image if the content is a string. Raises ValueError for a part that is
        neither text nor an image.
    """
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") not in ("text", "image"):
                raise ValueError(
                    f"{row.place}: a part of a message must be {{type: text, text: ...}} or {{type: image}}, "
                    f"not {describe(part)}."
                )
        return [{key: value for key, value in part.items() if value is not None} for part in content]
    parts: list[dict] = []
    whole = str(content or "")
    for number, text in enumerate(whole.split(anchor) if anchor else [whole]):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def _content(item: Any, directory: Path) -> bytes:
    """Return the encoded file that `item` holds or names: {bytes, path}, {image: ...}, a path, a data URI, or
    bytes.

    directory: base of relative paths.
    """
    if isinstance(item, dict):
        item = next((item[key] for key in ("bytes", "path", "image") if item.get(key) is not None), None)
    if isinstance(item, bytes):
        return item
    if not isinstance(item, str) or item.startswith(("http:", "https:")):
        raise ValueError(f"it must be bytes, a path or a data URI, not {describe(item)}")
    if item.startswith("data:"):
        try:
            return base64.b64decode(item.partition(";base64,")[2], validate=True)
        except binascii.Error as error:
            raise ValueError(f"its data URI is not base64: {error}") from error
    return Path(directory, item.removeprefix("file://")).read_bytes()
