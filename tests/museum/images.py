"""Exhibits: the engine and the trainer see different images, or see them differently."""

import numpy as np

from tests.museum.museum import Bug, caught_by, exhibit, replaces

SQUARES = (
    "data.train=[TOY/squares.parquet]",
    "data.image_key=images",
    "data.max_prompt_tokens=32",
    "model.vision=train",
)
IMAGES = dict(model="qwen2.5-vl", overrides=SQUARES)
GAP = "log-probs of engine and trainer"
DIFFER = r"LogprobMismatch: the engine's log-probs differ"


@exhibit("om-ai-lab/VLM-R1#263", **IMAGES)
@caught_by("images of samples", r"WrongImages: image check: image 1 of sample \d+ has other pixels")
@replaces("rl.features.vision.requests.ImageRequests.completion")
def images_of_another_sample(bug: Bug, completion, self, engine, internal_id, output):
    """Images and samples were in different orders, so the trainer saw other images than the engine."""
    held = completion(self, engine, internal_id, output)
    before, bug.held = getattr(bug, "held", held), held
    return before


@exhibit("microsoft/agent-lightning#559", **IMAGES)
@caught_by("images of samples", r"WrongImages: image check: sample \d+ came with 0 bytes of pixels")
@replaces("rl.features.vision.requests.ImageRequests.completion")
def images_lost_on_the_way(bug: Bug, completion, self, engine, internal_id, output):
    """The engine saw the images, but the samples came to the trainer without them."""
    return {name: values[:0] for name, values in completion(self, engine, internal_id, output).items()}


@exhibit("huggingface/trl#5461", **IMAGES)
@caught_by("images of samples", r"WrongImages: image check: sample \d+ came with \d+ bytes of pixels")
@replaces("rl.features.vision.requests.ImageRequests.completion")
def image_doubled_on_the_way(bug: Bug, completion, self, engine, internal_id, output):
    """Images were repeated for the samples of a prompt where they had been repeated before."""
    held = completion(self, engine, internal_id, output)
    return {name: np.concatenate([values, values]) for name, values in held.items()}


@exhibit("Blaizzy/mlx-vlm#1744", **IMAGES)
@caught_by(GAP, DIFFER)
@replaces("rl.features.vision.requests.image_input")
def wrong_grid_of_an_image(bug: Bug, image_input, format, token_ids, places, pixels):
    """The engine was told another number of rows and columns than the image has, with the same product."""
    wrong = places.copy()
    wrong[:, 1:3] = places[:, 1:3] * np.array([2, 1]) // np.array([1, 2])
    return image_input(format, token_ids, wrong, pixels)


@exhibit("huggingface/trl#7198 verl-project/verl#6523", **IMAGES)
@caught_by(GAP, DIFFER)
@replaces("rl.features.vision.requests.ImageRequests.weights_changed")
def stale_cache_of_the_encoder(bug: Bug, weights_changed, self, engine):
    """The engine used the outputs of the old tower for images that it had seen before."""


@exhibit("alibaba/ROLL#452", **IMAGES)
@caught_by(GAP, DIFFER)
@replaces("rl.features.vision.tower.row_positions")
def positions_without_rows_and_columns(bug: Bug, row_positions, num_tokens, starts, lengths, images):
    """The tokens of images had the positions of text, because positions were computed without the grids."""
    return row_positions(num_tokens, starts, lengths, [()] * len(images))


@exhibit("vllm-project/vime#106", **IMAGES)
@caught_by("weights of engine and trainer", r"RefitMismatch: .*visual\.")
@replaces("rl.engines.memory.refit")
def tower_left_out_of_the_refit(bug: Bug, refit, trainer, engine, **options):
    """The weights of the language model were sent to the engine, but not the vision tower's weights."""
    before = {name: w.detach().clone() for name, w in engine.weights().items() if name.startswith("visual.")}
    moved = refit(trainer, engine, **options)
    for name, weight in engine.weights().items():
        if name in before:
            weight.data.copy_(before[name])
    return moved
