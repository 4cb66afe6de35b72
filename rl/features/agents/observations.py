"""Converts the answers of environments and tools to the content of messages, in the process of the
environment.

An answer may be a text, an object that JSON can hold, content parts (as in OpenAI, Anthropic or MCP), a
result of MCP, or a dict in verl's format {"text": ..., "image": [...]}. An image may be a Pillow image, an
array uint8 [H, W, 3], the bytes of a file, or a data URI. Any other value raises TypeError. Otherwise it
would be lost, or become a text such as <object at 0x7f...>.
"""

import base64
import dataclasses
import io
import json
from collections.abc import Callable, Collection, Mapping
from types import FunctionType
from typing import Any

from pydantic import BaseModel

PARTS = {
    "text": ("text",),
    "input_text": ("text",),
    "output_text": ("text",),
    "image_url": ("image_url",),
    "input_image": ("image_url",),
    "image": ("image", "data", "source"),
    "resource": ("resource",),
    "resource_link": ("uri",),
    "audio": ("data",),
    "input_audio": ("input_audio",),
}
"""Type of a content part -> keys. A part of this type has one of these keys."""
BESIDE = {"type", "annotations", "_meta", "meta", "cache_control", "detail", "mimeType", "mime_type"}
"""Further keys that a content part may have; the policy does not see them. A dict with any other key is not a
part but an object, and becomes JSON. For example, {"type": "text", "text": "a", "score": 1} is an object."""
RESULT = {"content", "isError", "is_error", "structuredContent", "structured_content"}
"""Keys of a result of MCP. A result has the key "content" and at least one more of these keys."""


def parts_of(answer: Any) -> list[dict[str, Any]]:
    """Return an answer as a list of parts {type: text, text} and {type: image, image}. Images are data URIs.

    Raises ValueError, with a message for the policy, if a result of MCP is an error, and TypeError if a part
    of the answer is neither text nor an image.
    """
    answer = _as_object(answer)
    if type(answer).__module__.startswith("PIL."):
        return [image_part(answer)]
    if is_observation(answer):
        text = text_of(answer.get("text"))
        images = [image_part(image) for image in answer["image"] or []]
        return images + ([_text(text)] if text else [])
    if isinstance(answer, Mapping) and "content" in answer and len(RESULT & answer.keys()) > 1:
        return _of_result(answer)
    found = list(map(_as_object, answer if isinstance(answer, (list, tuple)) else [answer]))
    if found and all(map(_is_part, found)):
        return [part for one in found for part in _of_part(one)]
    return [_text(text_of(answer))]


def text_of(value: Any) -> str:
    """Return a value as text. A text stays unchanged, None becomes "", and any other value becomes JSON.

    Raises TypeError if JSON cannot hold the value.
    """
    value = _plain(value) if isinstance(value, (bytes, bytearray)) else value
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=_plain)


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _as_object(value: Any) -> Any:
    """Return a model of pydantic or a dataclass as a dict."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value


def _plain(value: Any) -> Any:
    """Return a value in a form that JSON can hold. Raises TypeError if there is no such form."""
    if (known := _as_object(value)) is not value:
        return known
    if isinstance(value, (bytes, bytearray)):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise TypeError(
                "an answer has bytes that are not UTF-8 text; return a text, or an image in "
                '{"text": ..., "image": [...]}'
            ) from error
    is_image = type(value).__module__.startswith("PIL.")
    if hasattr(value, "__array_interface__") and not is_image:
        return value.tolist()  # numpy's text of a long array leaves out most of its values
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Collection):
        return sorted(value, key=repr) if isinstance(value, (set, frozenset)) else list(value)
    has_text = type(value).__str__ is not object.__str__ or isinstance(type(value).__repr__, FunctionType)
    if has_text and not is_image:
        return str(value)
    raise TypeError(
        f"an answer has an object of type {type(value).__qualname__}, which is not text; return a text, an "
        'object of JSON, content parts, or {"text": ..., "image": [...]}'
    )


def _is_part(value: Any, *, is_block: bool = False) -> bool:
    """Return whether a value is a content part. is_block: whether the part may have keys beyond BESIDE."""
    if not isinstance(value, Mapping) or not isinstance(kind := value.get("type"), str):
        return False
    keys = PARTS.get(kind, ())
    has_others = not is_block and kind != "resource_link" and bool(value.keys() - {*keys, *BESIDE})
    return any(value.get(key) is not None for key in keys) and not has_others


def _of_part(part: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a content part of OpenAI, Anthropic, MCP or transformers as a list of parts (see `parts_of`).

    Raises TypeError if it is neither text nor an image.
    """
    kind = part["type"]
    held = next(part[key] for key in PARTS[kind] if part.get(key) is not None)
    if kind == "resource_link":
        return [_text(text_of({key: value for key, value in part.items() if value is not None}))]
    inner = held if isinstance(held, Mapping) else part
    if isinstance(text := held if "text" in PARTS[kind] else inner.get("text"), str):
        return [_text(text)]
    media = inner.get("mimeType") or inner.get("mime_type") or inner.get("media_type") or ""
    data, image = inner.get("data") or inner.get("blob"), inner.get("url") if inner is held else held
    if isinstance(data, str) and media.startswith("image/"):
        image = f"data:{media};base64,{data}"
    if image is None or not _is_image(image):
        where = f" ({media})" if media else ""
        raise TypeError(
            f"an answer has a content part of type {kind}{where}, which is neither text nor an image in it; "
            "let the tool return text, or the image itself"
        )
    return [image_part(image)]


def _of_result(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a result of MCP. Raises the errors of `parts_of`."""
    blocks = list(map(_as_object, result["content"] or []))
    if odd := [block for block in blocks if not _is_part(block, is_block=True)]:
        raise TypeError(f"a result of MCP has a block that is not a content part: {odd[0]!r:.200}")
    parts = [part for block in blocks for part in _of_part(block)]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    structured = result.get("structuredContent", result.get("structured_content"))
    if structured is not None and not any(_has_value(text, structured) for text in texts):
        parts.append(_text(text_of(structured)))
        texts.append(parts[-1]["text"])
    if result.get("isError", result.get("is_error")):
        raise ValueError("\n".join(texts) or "the tool reports an error without a text")
    return parts


def _has_value(text: str, structured: Any) -> bool:
    """Return whether a text is the JSON of a structured result, or of the value that the result wraps.

    For example, {"result": 3} wraps 3.
    """
    wrapped = structured.get("result") if isinstance(structured, Mapping) and len(structured) == 1 else None
    try:
        return json.loads(text) in (structured, wrapped)
    except ValueError:
        return text == wrapped


def is_observation(answer: Any) -> bool:
    """Return whether an answer is a dict in verl's format. Such a dict may have no images if it has a text.

    Raises TypeError for images in another form, because they would become a text about Python objects.
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


def content(answer: Any, shown: Callable[[str], str] = str) -> str | list[dict[str, Any]]:
    """Return an answer as the content of a message: a text, or parts if it has images.

    shown: function that returns the text of a part as the policy reads it (for example, cut off at a limit).
    Raises the same errors as `parts_of`.
    """
    parts = parts_of(answer)
    if all(part["type"] == "text" for part in parts):
        return shown("\n".join(part["text"] for part in parts))
    return [part if part["type"] == "image" else _text(shown(part["text"])) for part in parts]


def with_uris(message: dict) -> dict:
    """Return a message with its content parts in the form of `parts_of`.

    A part that only marks the place of an image stays unchanged.

    Raises ValueError for an image in another form.
    """
    if not isinstance(parts := message.get("content"), list):
        return message
    found = []
    for part in parts:
        if isinstance(part, dict) and part.get("image") is not None:
            found.append(image_part(part["image"]))
        else:
            found += _of_part(part) if _is_part(part) else [part]
    return {**message, "content": found}


def _is_image(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith("data:image/")
    return isinstance(value, bytes) or hasattr(value, "__array_interface__")  # numpy's and Pillow's


def image_part(value: Any) -> dict[str, str]:
    """Return the part {type, image} of a message's content, with the image as a data URI.

    Raises ValueError for a value that is not an image.
    """
    if not _is_image(value):
        raise ValueError(
            f"an image of a message must be one of Pillow, an array, bytes or a data URI, not {value!r:.80}"
        )
    if isinstance(value, str):
        return {"type": "image", "image": value}
    if not isinstance(value, bytes):
        from PIL import Image

        file = io.BytesIO()
        picture = value if isinstance(value, Image.Image) else Image.fromarray(value)
        picture.save(file, "PNG")
        value = file.getvalue()
    return {"type": "image", "image": f"data:image/png;base64,{base64.b64encode(value).decode()}"}
