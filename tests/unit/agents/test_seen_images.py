"""Images in the answers of environments: their parts of messages, their tokens and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image as Pillow

from rl.data.held import PIXELS, PLACES
from rl.data.images import ImageFormat
from rl.data.prompts import Prompt
from rl.features.agents.observations import content, image_part, is_observation, with_uris
from rl.features.agents.seen_images import SeenImages
from rl.features.agents.sight import Sight
from rl.features.vision.positions import row_positions
from rl.rollout.samples import Completion, Segment

FORMAT = ImageFormat(9, 14, 2, 2, 28 * 28, 28 * 28 * 16, (0.5,) * 3, (0.5,) * 3)
PROMPT = Prompt.of_tokens(np.array([1, 2, 3], np.int32))


def picture(height, width, value=7):
    return np.full((height, width, 3), value, np.uint8)


def answer(*images):
    return [{"role": "tool", "content": [*map(image_part, images), {"type": "text", "text": "see"}]}]


def test_only_dicts_of_verls_format_have_images():
    images = [picture(28, 28), Pillow.fromarray(picture(28, 28)), b"file", "data:image/png;base64,AA=="]
    assert all(is_observation({"text": "a", "image": [image]}) for image in images)
    none = [{"text": "a", "image": value} for value in ([], None)]
    assert all(is_observation(each) and content(each) == "a" for each in none)
    others = "text", {"image": []}, {"image": ["a.png"]}, {"image": images[3], "more": 1}, {"text": "a"}, None
    assert not any(map(is_observation, others))
    for wrong in ({"image": images, "more": 1}, {"text": "a", "image": images[0]}, {"image": ["a", b"b"]}):
        with pytest.raises(TypeError, match="a list of Pillow images"):
            is_observation(wrong)
    with pytest.raises(ValueError, match="data.image_key is empty"):
        Sight(PROMPT).take(answer(images[0]))


def test_images_of_answers_become_tokens_with_places_and_pixels():
    seen = SeenImages(FORMAT, PROMPT)
    seen.take([{"role": "user", "content": "go"}])
    assert seen.begin(PROMPT.token_ids) is PROMPT.token_ids and seen.placed is None
    taken = seen.take(answer(picture(28, 56, 3), picture(56, 56, 5)))
    kinds = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "see"}]
    assert taken == [{"role": "tool", "content": kinds}]
    given = np.array([4, 9, 5, 9, 6], np.int32)
    ids = seen.expand(given, 10)
    assert ids.tolist() == [4, 9, 9, 5, 9, 9, 9, 9, 6]
    assert seen.rendered(ids, 10).tolist() == given.tolist()
    places, pixels = seen.placed
    assert places[:, :3].tolist() == [[11, 28, 56], [14, 56, 56]]
    assert pixels.tolist() == [3] * (28 * 56 * 3) + [5] * (56 * 56 * 3)
    assert seen.expand(given, 30) is given  # text alone
    # A turn has the columns of the turns before it again; the log of a trajectory has each value once.
    empty = np.zeros(1, np.int32), np.zeros(1, np.float32), "stop", np.zeros(1, np.int32)
    first = Segment.of(Completion(*empty, held={PLACES: places[:1], PIXELS: pixels[:4704]}))
    second = Segment.of(Completion(*empty, held={PLACES: places, PIXELS: pixels}), 1, [first])
    assert np.array_equal(second.held[PLACES], places[1:]) and len(second.held[PIXELS]) == 56 * 56 * 3
    assert seen.agrees([first, second]) and not seen.agrees([first])


def test_messages_of_reset_may_have_images():
    """Their tokens are a prompt's; the row's tokens with other images would look like the row's own."""
    seen = SeenImages(FORMAT, PROMPT)
    text, image = {"type": "text", "text": "see"}, {"type": "image", "image": picture(28, 56)}
    message = with_uris({"role": "user", "content": [text, image, {"type": "image", "image": None}]})
    assert message["content"][0] == text and message["content"][1]["image"].startswith("data:image/png")
    seen.take([{**message, "content": message["content"][:2]}])
    ids = seen.begin(np.array([4, 9, 5], np.int32))
    assert ids.tolist() == [4, 9, 9, 5] and seen.placed[0][:, :3].tolist() == [[1, 28, 56]]
    same = replace(PROMPT, token_ids=ids, images=tuple(seen._images))
    for value in (7, 8):
        again = SeenImages(FORMAT, same)
        again.take(answer(picture(28, 56, value)))
        if value == 7:
            assert again.begin(np.array([4, 9, 5], np.int32)).tolist() == ids.tolist()
            continue
        with pytest.raises(ValueError, match="the row's messages with other images"):
            again.begin(np.array([4, 9, 5], np.int32))


def test_images_that_have_no_place_are_refused():
    seen = SeenImages(FORMAT, PROMPT)
    seen.take(answer(picture(28, 28)))
    with pytest.raises(ValueError, match="the environment's answer has 0 tokens 9 for 1 images"):
        seen.begin(PROMPT.token_ids)
    with pytest.raises(ValueError, match="reset must return the row's own messages"):
        SeenImages(FORMAT, PROMPT).begin(np.array([4, 9], np.int32))
    with pytest.raises(
        ValueError, match="must be one of Pillow, an array, bytes or a data URI, not '/etc/a.png'"
    ):
        with_uris({"role": "user", "content": [{"type": "image", "image": "/etc/a.png"}]})
    with pytest.raises(ValueError, match="the environment's answer has 2 tokens 9 for 1 images"):
        seen.expand(np.array([9, 9], np.int32), 3)
    with pytest.raises(ValueError, match="an image of the environment's answer cannot be read"):
        seen.take([{"role": "tool", "content": [image_part(b"no file")]}])


def test_positions_of_a_response_continue_after_its_images():
    """A prompt of three tokens, then a word, an image of 2 x 2 tokens at index 4, and a word."""
    seen = SeenImages(FORMAT, PROMPT)
    seen.take(answer(picture(56, 56)))
    seen.expand(np.array([9], np.int32), 4)
    images = [[replace(image) for image in seen._images]]
    found = row_positions(9, np.array([[0], [3]]), np.array([[3], [6]]), images)
    assert found.tolist() == [
        [0, 1, 2, 3, 4, 4, 4, 4, 6],
        [0, 1, 2, 3, 4, 4, 5, 5, 6],
        [0, 1, 2, 3, 4, 5, 4, 5, 6],
    ]
