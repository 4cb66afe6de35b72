"""Results of environments and tools become the content that the policy reads."""

import asyncio
import dataclasses
import json
import threading
from collections import deque
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow
from pydantic import BaseModel

from rl.features.agents.observations import parts_of

PNG = "data:image/png;base64,AA=="
TEXT = {"type": "text", "text": "see"}


class Model(BaseModel):
    a: int


@dataclasses.dataclass
class Data:
    a: int
    more: bytes = b"b"


class Shown:
    def __repr__(self):
        return "shown"


def mcp(*blocks, **more):
    return {"content": list(blocks), "isError": False, **more}


TEXTS = [
    ("text", "text"),
    ("", ""),
    (None, ""),
    (0, "0"),
    (False, "false"),
    (1.5, "1.5"),
    (b"caf\xc3\xa9", "caf\u00e9"),
    ({"a": None, "b": b"x"}, '{"a": null, "b": "x"}'),
    ([1, "a", None], '[1, "a", null]'),
    ([], "[]"),
    ((1, {2}, deque([3])), "[1, [2], [3]]"),
    (np.arange(2000), json.dumps(list(range(2000)))),
    ({"n": np.float32(0.5)}, '{"n": 0.5}'),
    (Model(a=1), '{"a": 1}'),
    ([Model(a=1)], '[{"a": 1}]'),
    (Data(1), '{"a": 1, "more": "b"}'),
    (
        {"at": date(2026, 1, 2), "in": Path("/a"), "own": Shown()},
        '{"at": "2026-01-02", "in": "/a", "own": "shown"}',
    ),
    (TEXT, "see"),
    ([TEXT, {"type": "output_text", "text": "more"}], "see\nmore"),
    ([{"type": "cat", "text": "a"}], '[{"type": "cat", "text": "a"}]'),
    ([{**TEXT, "id": 3}], '[{"type": "text", "text": "see", "id": 3}]'),
    ([TEXT, "a"], '[{"type": "text", "text": "see"}, "a"]'),
    ({"text": "see", "image": []}, "see"),
    ({"content": "a"}, '{"content": "a"}'),
    (mcp(TEXT, {**TEXT, "annotations": {"priority": 1}, "id": 3}), "see\nsee"),
    (mcp(), ""),
    (mcp(structuredContent={"a": 1}), '{"a": 1}'),
    (mcp({"type": "text", "text": '{ "a": 1 }'}, structuredContent={"a": 1}), '{ "a": 1 }'),
    (mcp({"type": "text", "text": "see"}, structuredContent={"result": "see"}), "see"),
    (mcp(TEXT, structured_content={"a": 1}), 'see\n{"a": 1}'),
    (mcp({"type": "resource", "resource": {"uri": "a:b", "text": "inside"}}), "inside"),
    (
        mcp({"type": "resource_link", "uri": "a:b", "name": "n"}),
        '{"type": "resource_link", "uri": "a:b", "name": "n"}',
    ),
]


@pytest.mark.parametrize(("answer", "text"), TEXTS, ids=range(len(TEXTS)))
def test_every_answer_with_a_text_reaches_the_policy(answer, text):
    parts = parts_of(answer)
    assert {part["type"] for part in parts} <= {"text"} and "\n".join(p["text"] for p in parts) == text


PICTURES = [
    Pillow.new("RGB", (2, 2)),
    {"text": "", "image": [np.zeros((2, 2, 3), np.uint8)]},
    {"type": "image", "image": PNG},
    {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}},
    {"type": "input_image", "image_url": PNG},
    {"type": "image", "data": "AA==", "mimeType": "image/png"},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
    {"type": "resource", "resource": {"uri": "a:b", "blob": "AA==", "mimeType": "image/png"}},
]


@pytest.mark.parametrize("picture", PICTURES, ids=range(len(PICTURES)))
def test_images_reach_the_policy_in_their_place(picture):
    [part] = parts_of(picture)
    assert part["type"] == "image" and part["image"].startswith("data:image/png;base64,")
    if "type" in (picture if isinstance(picture, dict) else {}):
        assert parts_of(mcp(TEXT, picture, TEXT)) == [TEXT, part, TEXT] == parts_of([TEXT, picture, TEXT])


LOST = [
    b"\xff\xfe",
    {"a": b"\xff"},
    object(),
    {"a": threading.Lock()},
    (i for i in "ab"),
    {"a": Pillow.new("RGB", (2, 2))},
    [{"type": "audio", "data": "AA==", "mimeType": "audio/wav"}],
    {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
    {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}},
    mcp({"type": "resource", "resource": {"uri": "a:b", "blob": "AA==", "mimeType": "application/pdf"}}),
    mcp({"type": "video", "data": "AA=="}),
    mcp("text"),
]


@pytest.mark.parametrize("answer", LOST, ids=range(len(LOST)))
def test_what_the_policy_cannot_read_fails(answer):
    with pytest.raises(TypeError, match="an answer has|a result of MCP has"):
        parts_of(answer)


def test_an_error_of_a_server_is_given_to_the_policy():
    for result, text in (
        (mcp(TEXT, isError=True), "see"),
        (mcp(isError=True, structuredContent={"code": 3}), '{"code": 3}'),
        ({"content": [], "is_error": True}, "the tool reports an error without a text"),
    ):
        with pytest.raises(ValueError) as error:
            parts_of(result)
        assert str(error.value) == text


@pytest.mark.parametrize(
    ("name", "text"), [("text", "see"), ("image", None), ("structured", '{"a": 1}'), ("link", "a:b")]
)
def test_a_result_of_an_mcp_client_is_read_whole(name, text):
    types = pytest.importorskip("mcp_types")
    from rl.features.agents.integrations.mcp import Mcp

    results = {
        "text": types.CallToolResult(content=[types.TextContent(text="see")]),
        "image": types.CallToolResult(content=[types.ImageContent(data="AA==", mime_type="image/png")]),
        "structured": types.CallToolResult(content=[], structured_content={"a": 1}),
        "link": types.CallToolResult(content=[types.ResourceLink(uri="a:b", name="n")]),
    }

    class Client:
        async def call_tool(self, name, arguments):
            return results[name]

    environment = Mcp(url="http://a")
    environment._client = Client()
    [part] = parts_of(asyncio.run(environment.call_tool(name, {})))
    assert part == {"type": "image", "image": PNG} if text is None else text in part["text"]
