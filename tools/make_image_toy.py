"""Make a task that needs images, and a model with a vision tower that learns it on a laptop CPU in minutes.

    lockstep data image-toy --out toy

The task is to name the colour of a square: an image of 56 x 56 pixels is grey, with a coloured square in one
of its quarters. The script writes

    OUT/train.parquet      rows in verl's format: prompt with an anchor <image>, images {bytes}, ground truth
    OUT/test.parquet       held-out rows
    OUT/shuffled.parquet   the training rows with the images of other rows: nothing to learn from them
    OUT/model/             a Qwen2.5-VL with random weights, and a tokenizer of printable ASCII characters

Equal arguments give equal files; nothing is downloaded.
"""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import transformers
from PIL import Image

from rl.config.command_line import make_parser
from tools.make_toy import INITIALIZER_RANGE, MAX_LENGTH, build_tokenizer, draw, save, special_keys

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 70, 220), "yellow": (230, 210, 50)}
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<assistant>{% else %}<user>{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PREPROCESSOR = dict(
    image_mean=[0.48145466, 0.4578275, 0.40821073],
    image_std=[0.26862954, 0.26130258, 0.27577711],
    min_pixels=28 * 28,
    max_pixels=28 * 28 * 16,
)
"""The file preprocessor_config.json: the published normalisation, with smaller limits."""


def build_image_tokenizer() -> transformers.Qwen2Tokenizer:
    """Return the toy's tokenizer with the special tokens around images."""
    return build_tokenizer(special=SPECIAL, chat_template=CHAT_TEMPLATE)


def image_tokens(tokenizer: transformers.Qwen2Tokenizer) -> dict[str, Any]:
    """Return the keys of config.json that name the special tokens around images."""
    ids = dict(zip(SPECIAL, map(tokenizer.convert_tokens_to_ids, SPECIAL)))
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return dict(zip(names, ids.values()))


def build_model(
    tokenizer: transformers.Qwen2Tokenizer,
    *,
    seed: int = 0,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
) -> transformers.PreTrainedModel:
    """Return a Qwen2.5-VL in float32 with weights drawn from `seed`."""
    special, pairs = special_keys(tokenizer), hidden // heads // 2
    named: dict[str, Any] = {**image_tokens(tokenizer), **special}
    config = transformers.Qwen2_5_VLConfig(
        text_config=dict(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=2,
            max_position_embeddings=MAX_LENGTH,
            initializer_range=INITIALIZER_RANGE,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=1e4,
                mrope_section=[pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
            ),
            **special,
        ),
        vision_config=dict(
            depth=2,
            hidden_size=64,
            intermediate_size=128,
            num_heads=2,
            out_hidden_size=hidden,
            window_size=56,
            fullatt_block_indexes=[1],
            initializer_range=INITIALIZER_RANGE,
        ),
        tie_word_embeddings=False,
        dtype="float32",
        **named,
    )
    return draw(transformers.Qwen2_5_VLForConditionalGeneration, config, special, seed)


def square(colour: str, quarter: int, rng: np.random.Generator) -> bytes:
    """Return a PNG of a noisy grey image with a coloured square in one of its quarters."""
    pixels = rng.integers(90, 140, (56, 56, 3))
    top, left = (28 * index + int(rng.integers(0, 9)) for index in divmod(quarter, 2))
    pixels[top : top + 20, left : left + 20] = COLOURS[colour]
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def rows_of(split: str, count: int, seed: int) -> list[dict]:
    """Return rows with verl's columns."""
    rng = np.random.default_rng([seed, split == "test"])
    rows = []
    for index in range(count):
        colour = list(COLOURS)[int(rng.integers(len(COLOURS)))]
        image = {"bytes": square(colour, int(rng.integers(4)), rng), "path": None}
        rows.append(
            {
                "data_source": "squares",
                "prompt": [{"role": "user", "content": "<image>colour?"}],
                "images": [image],
                "reward_model": {"style": "rule", "ground_truth": colour},
                "extra_info": {"split": split, "index": index},
            }
        )
    return rows


def make_image_toy(out: str | Path, *, seed: int = 0, rows: int = 2000, hidden: int = 128) -> Path:
    """Write the data and the model to `out` (created if needed) and return `out`."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    train = rows_of("train", rows, seed)
    others = np.random.default_rng([seed, 2]).permutation(rows)
    shuffled = [{**row, "images": train[other]["images"]} for row, other in zip(train, others)]
    for name, content in (("train", train), ("test", rows_of("test", 200, seed)), ("shuffled", shuffled)):
        pq.write_table(pa.Table.from_pylist(content), out / f"{name}.parquet")
    tokenizer = build_image_tokenizer()
    save(build_model(tokenizer, seed=seed, hidden=hidden), tokenizer, out / "model")
    (out / "model" / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return out


def main(argv: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--out", required=True, help="directory to write to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the images and the weights")
    parser.add_argument("--rows", type=int, default=2000, help="training rows")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size")
    arguments = vars(parser.parse_args(argv))
    out = make_image_toy(arguments.pop("out"), **arguments)
    print(f"wrote {out}/train.parquet, test.parquet, shuffled.parquet and model")


if __name__ == "__main__":
    main()
