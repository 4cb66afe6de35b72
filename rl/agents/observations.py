"""Images in the answers of environments, in the process of the environment: {"text": ..., "image": [...]}.

It is verl's format. An image is one of Pillow, an array uint8 [H, W, 3], the bytes of a file or a data URI.
"""

import base64
import io
from typing import Any


def is_observation(answer: Any) -> bool:
    """Return whether an answer is a dict of verl's format; with a text it may have no image.

    Raises TypeError for images in another form, which would become a text about Python's objects.
    """
    if not isinstance(answer, dict) or "image" not in answer:
        return False
    images = [] if answer["image"] is None else answer["image"]
    is_list = isinstance(images, list) and all(map(_is_image, images))
    if is_list and answer.keys() <= {"text", "image"} and (images or "text" in answer):
        return True
    each = images if isinstance(images, list) else [images]
    if any(_is_image(image) and not isinstance(image, str) for image in each):
        raise TypeError(
            'an answer with images must be {"text": ..., "image": [...]}: a list of Pillow images, arrays, '
            "bytes or data URIs, and no other keys"
        )
    return False


def content(answer: dict[str, Any], text: str) -> str | list[dict[str, str]]:
    """Return the content of a message: the images of an answer, then a text unless it is empty."""
    if not answer["image"]:
        return text
    return [*map(image_part, answer["image"]), *([{"type": "text", "text": text}] if text else [])]


def with_uris(message: dict) -> dict:
    """Return a message with the images of its content as data URIs. Raises ValueError for another object."""
    if not isinstance(parts := message.get("content"), list):
        return message
    given = [part.get("image") for part in parts]
    if odd := [image for image in given if image is not None and not _is_image(image)]:
        raise ValueError(
            f"an image of a message must be one of Pillow, an array, bytes or a data URI, not {odd[0]!r:.80}"
        )
    found = [part if image is None else image_part(image) for part, image in zip(parts, given)]
    return {**message, "content": found}


def _is_image(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith("data:image/")
    return isinstance(value, bytes) or hasattr(value, "__array_interface__")  # numpy's and Pillow's


def image_part(value: Any) -> dict[str, str]:
    """Return the part {type, image} of a message's content, with the image as a data URI."""
    if isinstance(value, str):
        return {"type": "image", "image": value}
    if not isinstance(value, bytes):
        from PIL import Image

        file = io.BytesIO()
        picture = value if isinstance(value, Image.Image) else Image.fromarray(value)
        picture.save(file, "PNG")
        value = file.getvalue()
    return {"type": "image", "image": f"data:image/png;base64,{base64.b64encode(value).decode()}"}
