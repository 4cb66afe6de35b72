"""Rows with images: anchors, limits, and the same patches as the image processor of transformers."""

import base64
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from rl.data.images import ImageFormat, ImageReader, PromptImage
from rl.data.patches_again import check_patches
from rl.data.prompts import load_prompts
from rl.data.rendering import check_rendering
from rl.features.vision.positions import image_positions, row_positions
from tools.make_image_toy import PREPROCESSOR, SPECIAL, build_image_tokenizer, image_tokens

TOKENIZER = build_image_tokenizer()
PAD = image_tokens(TOKENIZER)["image_token_id"]
FORMAT = ImageFormat(
    PAD,
    14,
    2,
    2,
    PREPROCESSOR["min_pixels"],
    PREPROCESSOR["max_pixels"],
    tuple(PREPROCESSOR["image_mean"]),
    tuple(PREPROCESSOR["image_std"]),
)


def png(height: int, width: int, seed: int = 0, mode: str = "RGB", **options) -> bytes:
    channels = {"RGB": 3, "RGBA": 4, "L": 1}[mode]
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, channels)).astype(np.uint8)
    return encoded(Pillow.fromarray(pixels.squeeze(), mode), "PNG", **options)


def encoded(image: Pillow.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def load(tmp_path, rows, **options):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    options = dict(prompt_key="prompt", max_prompt_tokens=200, overlong="error") | options
    return load_prompts([path], TOKENIZER, images=ImageReader("images", FORMAT), **options)


def row(content, images=None):
    return {"prompt": [{"role": "user", "content": content}], "images": images}


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("size", [(56, 56), (30, 75), (300, 200), (10, 11), (28, 90)])
def test_patches_are_those_of_transformers(size, mode):
    content = png(*size, mode=mode)
    image = PromptImage(content, *FORMAT.size(*size), FORMAT)
    limits = {"min_pixels": FORMAT.min_pixels, "max_pixels": FORMAT.max_pixels}
    processor = Qwen2VLImageProcessorPil(**limits)
    expected = processor(Pillow.open(io.BytesIO(content)), return_tensors="np")
    assert (1, *image.grid) == tuple(expected["image_grid_thw"][0])
    found = FORMAT.patches(image.pixels)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected["pixel_values"])


def test_patches_in_another_order_are_found(tmp_path, monkeypatch):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    [prompt] = load(tmp_path, [row("<image>", [{"bytes": png(84, 56)}])])
    check_patches([prompt], str(tmp_path), 0)
    patches = ImageFormat.patches
    monkeypatch.setattr(ImageFormat, "patches", lambda self, pixels: patches(self, pixels)[::-1])
    with pytest.raises(ValueError, match="image check: the first image of the data"):
        check_patches([prompt], str(tmp_path), 0)


def test_sizes_are_those_of_transformers():
    rng = np.random.default_rng(0)
    for height, width in rng.integers(8, 900, (300, 2)).tolist():
        expected = smart_resize(height, width, 28, FORMAT.min_pixels, FORMAT.max_pixels)
        assert FORMAT.size(height, width) == expected
    with pytest.raises(ValueError, match="ratio above 200"):
        FORMAT.size(4, 900)


def test_a_row_has_the_tokens_of_its_images(tmp_path):
    sizes = [(56, 84), (28, 28)]
    contents = [png(*size, seed=seed) for seed, size in enumerate(sizes)]
    (tmp_path / "b.png").write_bytes(contents[1])
    uri = "data:image/png;base64," + base64.b64encode(contents[1]).decode()
    for second in ({"bytes": None, "path": "b.png"}, {"bytes": None, "path": uri}):
        rows = [row("a <image> b<image>", [{"bytes": contents[0], "path": None}, second]), row("<image>?")]
        both, text = load(tmp_path, rows)
        start, end = TOKENIZER.convert_tokens_to_ids(list(SPECIAL[:2]))
        ids = both.token_ids.tolist()
        assert [ids.count(token) for token in (PAD, start, end)] == [7, 2, 2]
        for image, count in zip(both.images, (6, 1), strict=True):
            assert ids[image.offset - 1] == start and ids[image.offset + count] == end
            assert set(ids[image.offset : image.offset + count]) == {PAD} and image.num_tokens == count
        assert both.images[1].digest == PromptImage(contents[1], 28, 28, FORMAT).digest
        places, pixels = both.placed_pixels
        assert places[:, 1:3].tolist() == [[56, 84], [28, 28]] and len(pixels) == 56 * 84 * 3 + 28 * 28 * 3
        # Without images the anchor is text.
        assert "<image>" in text.text and not text.images and PAD not in text.token_ids
        assert text.placed_pixels is None
        check_rendering([both, text], TOKENIZER, key="data.train", max_prompt_tokens=200)


def test_transparent_pixels_are_white():
    """A drawing in black before nothing would be black everywhere."""
    for mode, colour in (("RGBA", (0, 0, 0, 0)), ("LA", (0, 0)), ("P", 0)):
        options = {"transparency": 0} if mode == "P" else {}
        content = encoded(Pillow.new(mode, (56, 56), colour), "PNG", **options)
        assert (PromptImage(content, 56, 56, FORMAT).pixels == 255).all()
    half = png(56, 56, mode="RGBA")
    pixels = np.asarray(Pillow.open(io.BytesIO(half))).astype(int)
    expected = 255 + (pixels[..., :3] - 255) * pixels[..., 3:] / 255
    assert np.abs(PromptImage(half, 56, 56, FORMAT).pixels - expected).max() <= 1


def test_a_turned_photo_is_upright():
    exif = Pillow.Exif()
    exif[0x0112] = 6
    reader = ImageReader("images", FORMAT)
    turned = reader._read(png(56, 28, exif=exif), _row(), 1)
    assert (turned.height, turned.width) == (28, 56)
    plain = reader._read(png(56, 28), _row(), 1)
    np.testing.assert_array_equal(turned.pixels, np.rot90(plain.pixels, -1))


def _row():
    from pathlib import Path

    from rl.data.reading import FileRow

    return FileRow({}, Path("rows.parquet"), 3, 0)


IMAGE = {"bytes": png(56, 56), "path": None}
CUT = encoded(Pillow.effect_noise((56, 56), 50), "JPEG")[:-100]
DEEP = encoded(Pillow.fromarray(np.arange(400, dtype=np.uint16).reshape(20, 20)), "PNG")
INVALID = [
    (row("<image> <image>", [IMAGE]), "row 1: the prompt has 2 anchors <image>, but column 'images' has 1"),
    (row("none", [IMAGE]), "row 1: the prompt has 0 anchors"),
    (row("<image>", [{"bytes": b"no image", "path": None}]), "row 1: image 1 of column 'images' cannot be"),
    (row("<image>", [{"bytes": png(56, 56)[:-20], "path": None}]), "row 1: image 1"),
    (row("<image>", [{"bytes": CUT, "path": None}]), "row 1: image 1 .*truncated"),
    (row("<image>", [{"bytes": DEEP, "path": None}]), "row 1: image 1 .*mode I;16, not 8 bits per channel"),
    (row([{"type": "image"}]), "row 1: the prompt has 1 anchors <image>, but column 'images' has 0"),
    (row([{"type": "audio", "text": "<image>"}], [IMAGE]), "row 1: .* has a part of type 'audio'"),
    (row([{"type": "image_url", "image_url": "a.png"}]), "row 1: .* has a part of type 'image_url'"),
    (row("<image>", [{"bytes": None, "path": "absent.png"}]), "row 1: image 1 .*absent.png"),
    (row("<image>", [{"bytes": None, "path": "https://a/b.png"}]), "bytes, a path or a data URI, not str"),
    (row("<image>", [{"bytes": None, "path": "data:image/png;base64,?"}]), "is not base64"),
    ({"prompt": "<image>", "images": [IMAGE]}, "row 1: a prompt with images must be a list of messages"),
]


@pytest.mark.parametrize(("invalid", "said"), INVALID)
def test_a_wrong_row_is_refused_with_its_number(tmp_path, invalid, said):
    with pytest.raises(ValueError, match=said):
        load(tmp_path, [invalid])


def test_a_literal_special_token_in_a_text_row_is_text(tmp_path):
    alone, beside = load(tmp_path, [row("<|image_pad|>"), row("<image><|image_pad|>", [IMAGE])])
    assert PAD not in alone.token_ids and not alone.images
    assert (beside.token_ids == PAD).sum() == beside.images[0].num_tokens
    assert beside.text.count("<|image_pad|>") == 2


def placed(offset: int, rows: int, columns: int) -> PromptImage:
    return PromptImage(b"", rows * 28, columns * 28, FORMAT, offset)


def test_positions_have_time_row_and_column():
    found, after = image_positions(9, [placed(2, 2, 2), placed(7, 1, 1)])
    # text, text, image of 2 x 2, text, image of 1 x 1, text
    assert found.tolist() == [
        [0, 1, 2, 2, 2, 2, 4, 5, 6],
        [0, 1, 2, 2, 3, 3, 4, 5, 6],
        [0, 1, 2, 3, 2, 3, 4, 5, 6],
    ]
    assert after == 7


def test_answers_continue_the_positions_of_a_shared_prompt():
    images = [placed(1, 1, 3)]
    # [prompt of 5, answer of 2, answer of 1], a text of 2 + 1, padding of 2
    starts, lengths = np.array([[0, 0, 8], [5, 7, 10]]), np.array([[5, 5, 2], [2, 1, 1]])
    found = row_positions(13, starts, lengths, [images, images, []])
    assert found[2].tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 0, 1, 2, 0, 0]
    assert found[0].tolist() == [0, 1, 1, 1, 4, 5, 6, 5, 0, 1, 2, 0, 0]
