"""Serves an OpenAI-compatible API on a replica's leader, for agents that call the engine themselves.

    POST /v1/chat/completions      messages and tools; also logprobs, and return_token_ids as in vLLM
    POST /inference/v1/generate    token ids in, token ids and log-probs out, in vLLM's form

The server listens on loopback, in a thread of its own. Each trajectory has a random API key, and the server
uses the key to find the trajectory of a request. Every user of the node can connect. So the server checks the
key before it reads a body, and it limits connections without a key (`rl.runtime.strangers`). A client that
missed an answer can send its request again, and then receives the same turn.

An HTTP handler only puts a request into a queue. The source of the engine's events takes the request from the
queue and sets the result of its future:

    endpoint = Endpoint(tokenizer, context_tokens=4096, wake=pool.wake)
    key = endpoint.open("3.1")                    # the agent receives endpoint.base_url and key
    request = endpoint.requests.get_nowait()      # EndpointRequest(session="3.1", messages=[...], ...)
    request.reply.set_result(EndpointReply(...))  # or set_exception(Refused("why"))

The server ignores the sampling parameters of a request. For example, a temperature of 0 in a request changes
nothing: the run's temperature applies. `tool_choice: none` hides the tools; any other value means auto. With
`stream`, the whole turn is sent in one piece. Requests for several choices (n > 1) are refused.
"""

import asyncio
import contextlib
import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.web_protocol import RequestHandler
from transformers import PreTrainedTokenizerBase

from rl.data.messages import ALIASES
from rl.data.special_tokens import decode
from rl.features.agents.environment import Messages
from rl.features.agents.tool_calls import read_arguments
from rl.runtime.strangers import Strangers

NO_TRAJECTORY = "the API key belongs to no open trajectory"
MODEL = "policy"
"""Name of the model in replies. Requests may name any model."""
BODY_BYTES, BODY_BYTES_PER_TOKEN = 1 << 20, 64
"""Maximum size of a request's body: a number of bytes, plus a number of bytes per token of the engine's
context. For example, a context of 4,096 tokens allows 1.25 MiB. In JSON, a token takes about 4 characters of
at most 6 bytes each, or an id of 7 digits. The rest is for schemas of tools and keys of messages."""
KEY_S, BODY_S = 10.0, 60.0
"""KEY_S: seconds within which a new connection must show a key. BODY_S: seconds within which the body of a
request must arrive."""
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, OSError)
"""Exceptions that the reading of a malformed request may raise. For example, an unknown encoding raises
LookupError, and a client that has gone raises OSError."""
IGNORED = ("refusal", "audio", "annotations", "function_call")
"""Keys that client libraries add to messages of the assistant. The server ignores them."""


@dataclass(frozen=True)
class EndpointReply:
    """A sampled turn."""

    prompt_ids: np.ndarray
    """int32 [C]: the context that the engine continued."""
    token_ids: np.ndarray
    """int32 [R]: the sampled tokens."""
    logprobs: np.ndarray
    """float32 [R]: log-probabilities of the sampled tokens."""
    end: str
    """Why the turn ended, as in `Completion`."""
    message: dict
    """The turn as a message (`Chat.parse`)."""


@dataclass(frozen=True)
class EndpointRequest:
    """A request of an agent for a turn.

    Either `messages` or `token_ids` is given. Both are None if the body of the request is longer than any
    context.
    """

    session: str
    messages: Messages | None
    """The whole conversation. The arguments of its tool calls are parsed (`normalise`)."""
    token_ids: np.ndarray | None
    """int32 [C]: the whole context."""
    tools: list[dict] = field(default_factory=list)
    max_tokens: int | None = None
    """Maximum number of tokens of the turn. None: only the limits of the run apply."""
    is_learned: bool = True
    """Whether the turn belongs to the trajectory. A request with "store": false asks for a turn that does not
    belong to it, so the policy does not learn from this turn."""
    reply: "Future[EndpointReply]" = field(default_factory=Future)


class RefusedRequest(Exception):
    """The answer to a request that cannot be served; the client receives it as an error with status 400.

    is_spent: whether the limits of the trajectory are used up, the error's code.
    """

    def __init__(self, why: str, is_spent: bool = False) -> None:
        super().__init__(why)
        self.is_spent = is_spent


class Endpoint:
    """Serves requests of agents from a thread, until `shutdown`.

    Args:
        context_tokens: number of tokens of the engine's longest context; it limits the size of request
        bodies.
        wake: function that the server's thread calls after it has put a request into `requests`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        context_tokens: int,
        wake: Callable[[], None] = lambda: None,
    ):
        self._tokenizer, self._wake = tokenizer, wake
        self._max_body = BODY_BYTES + BODY_BYTES_PER_TOKEN * context_tokens
        self.requests: queue.SimpleQueue[EndpointRequest] = queue.SimpleQueue()
        self._sessions: dict[str, str] = {}
        """API key -> session."""
        self._turns: dict[str, dict[str, Future]] = {}
        """Session -> content of a request -> future of its reply. It holds the last request of a session and
        all its requests without a reply."""
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        started: Future[int] = Future()
        self._thread = threading.Thread(target=self._serve, args=(started,), name="endpoint", daemon=True)
        self._thread.start()
        self.base_url = f"http://127.0.0.1:{started.result()}/v1"

    def open(self, session: str) -> str:
        """Return the API key of a new session."""
        key = secrets.token_urlsafe(24)
        with self._lock:
            self._sessions[key], self._turns[session] = session, {}
        return key

    def close(self, session: str) -> None:
        """Refuse the session's unanswered and later requests."""
        with self._lock:
            self._sessions = {key: name for key, name in self._sessions.items() if name != session}
            turns = self._turns.pop(session, {})
        for reply in turns.values():
            with contextlib.suppress(InvalidStateError):  # the request is answered, or the client has gone
                reply.set_exception(RefusedRequest("the trajectory has ended"))

    def shutdown(self) -> None:
        """Close all sessions and end the server."""
        for session in list(self._turns):
            self.close(session)
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    # The server's thread ----------------------------------------------------------------------------------

    def _serve(self, started: "Future[int]") -> None:
        async def run() -> None:
            self._stop = asyncio.Event()
            # Close a connection only in a later turn of the loop: its handler may not have started yet.
            self._strangers = Strangers[RequestHandler](lambda c: self._loop.call_soon(c.force_close), KEY_S)
            app = web.Application(client_max_size=self._max_body)
            app.router.add_post("/v1/chat/completions", self._answer(_read_chat, self._write_chat))
            app.router.add_post("/inference/v1/generate", self._answer(self._read_tokens, self._write_tokens))
            runner = web.AppRunner(
                app,
                access_log=None,
                handle_signals=False,
                shutdown_timeout=1.0,
                logger=_http_log,
                lingering_time=0,  # the body of a refused request is not read
                auto_decompress=False,
            )
            await runner.setup()
            server = runner.server
            assert server is not None
            listener = await self._loop.create_server(lambda: self._admit(server()), "127.0.0.1", 0)
            started.set_result(listener.sockets[0].getsockname()[1])
            await self._stop.wait()
            listener.close()
            await runner.cleanup()

        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(run())
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)  # otherwise the constructor would wait forever for the port
        finally:
            self._loop.close()

    def _admit(self, connection: RequestHandler) -> RequestHandler:
        """Count a new connection as a stranger until it shows a key. All agents may connect at once."""
        self._strangers.admit(connection, beside=len(self._sessions))
        return connection

    def _answer(
        self, read: Callable[[dict], dict], write: Callable[[dict, EndpointReply], dict]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Return a handler that reads a request, waits for its reply and writes it."""

        async def handle(http: web.Request) -> web.Response:
            session = self._sessions.get(http.headers.get("Authorization", "").removeprefix("Bearer "))
            if session is None:
                return _error(401, NO_TRAJECTORY)
            self._strangers.forget(http.protocol)
            try:
                body = await self._read_body(http)
                fields = read(body) if body else {"messages": None, "token_ids": None}
            except TimeoutError:
                return _error(408, f"the body of the request took longer than {BODY_S:g} s")
            except MALFORMED as error:
                return _error(400, f"malformed request: {type(error).__name__}: {error}")
            except RefusedRequest as error:
                return _error(400, str(error))
            reply = self._ask(EndpointRequest(session, **fields, is_learned=body.get("store") is not False))
            if reply is None:
                return _error(401, NO_TRAJECTORY)
            try:
                # Shielded from the end of this connection, because a repeated request may wait for the same
                # reply.
                written = write(body, await asyncio.shield(asyncio.wrap_future(reply)))
            except RefusedRequest as error:
                return _error(400, str(error), "limits_used_up" if error.is_spent else None)
            return _stream(written, body) if body.get("stream") else web.json_response(written)

        return handle

    async def _read_body(self, http: web.Request) -> dict:
        """Return the body of a request; {} if it is longer than any context."""
        if (http.content_length or 0) > self._max_body:
            return {}
        try:
            async with asyncio.timeout(BODY_S):
                body = await http.json()
        except web.HTTPRequestEntityTooLarge:  # the body came in chunks, so its length was not known
            return {}
        if not body or not isinstance(body, dict):
            raise ValueError("the body must be an object")
        # JSON may hold a lone surrogate such as "\ud800", but no tokenizer takes it. It becomes "?".
        return json.loads(json.dumps(body, ensure_ascii=False).encode(errors="replace"))

    def _ask(self, request: EndpointRequest) -> "Future[EndpointReply] | None":
        """Return the future reply of the request, or of an equal earlier request.

        Returns None if the trajectory has ended. A request with "store": false never counts as a repetition,
        because the agent may want another sample.
        """
        asked = [request.messages, request.token_ids, request.tools, request.max_tokens]
        name = json.dumps(asked, default=np.ndarray.tolist) if request.is_learned else secrets.token_hex(8)
        with self._lock:
            turns = self._turns.get(request.session)
            if turns is None:
                return None
            if name in turns:
                return turns[name]
            for old in [old for old, reply in turns.items() if reply.done()]:
                del turns[old]
            turns[name] = request.reply
        self.requests.put(request)
        self._wake()
        return request.reply

    def _write_chat(self, body: dict, reply: EndpointReply) -> dict:
        message = dict(reply.message)
        if calls := message.get("tool_calls"):
            message["content"] = message["content"] or None
            message["tool_calls"] = [
                {
                    **call,
                    "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])},
                }
                for call in calls
            ]
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": _finish_reason(reply, calls),
            "logprobs": None,
        }
        if body.get("logprobs"):
            texts = [decode([id], self._tokenizer) for id in reply.token_ids.tolist()]
            choice["logprobs"] = {
                "content": [
                    {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                    for text, logprob in zip(texts, reply.logprobs.tolist(), strict=True)
                ]
            }
        if body.get("return_token_ids"):
            choice["token_ids"] = reply.token_ids.tolist()
        prompt, completion = len(reply.prompt_ids), len(reply.token_ids)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        return {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.get("model", MODEL),
            "choices": [choice],
            "usage": usage,
            "prompt_token_ids": reply.prompt_ids.tolist() if body.get("return_token_ids") else None,
        }

    def _read_tokens(self, body: dict) -> dict:
        """Return the fields of an `EndpointRequest` from a request to /inference/v1/generate."""
        if body.get("stream"):
            raise RefusedRequest("stream is not supported by this address")
        if not all(type(id) is int for id in body["token_ids"]):
            raise ValueError("token_ids must be integers, not numbers such as 1.5 or true")
        token_ids, size = np.asarray(body["token_ids"], np.int32), len(self._tokenizer)
        if token_ids.ndim != 1 or not len(token_ids) or token_ids.min() < 0 or token_ids.max() >= size:
            raise ValueError(f"token_ids must be a list of integers from 0 to {size - 1}")
        max_tokens = _max_tokens((body.get("sampling_params") or {}).get("max_tokens"))
        return {"messages": None, "token_ids": token_ids, "max_tokens": max_tokens}

    def _write_tokens(self, body: dict, reply: EndpointReply) -> dict:
        token_ids = reply.token_ids.tolist()
        content = [
            {"token_id": id, "logprob": logprob}
            for id, logprob in zip(token_ids, reply.logprobs.tolist(), strict=True)
        ]
        choice = {"index": 0, "token_ids": token_ids, "logprobs": {"content": content}}
        choice["finish_reason"] = _finish_reason(reply, None)
        return {"request_id": secrets.token_hex(8), "choices": [choice]}


def _read_chat(body: dict) -> dict:
    """Return the fields of an `EndpointRequest` from a request to /v1/chat/completions."""
    if body.get("n", 1) not in (1, None):
        raise RefusedRequest("n > 1 is not supported by this address")
    messages = normalise(body["messages"])
    if not messages:
        raise ValueError("messages is empty")
    tools = body.get("tools") or []
    if not isinstance(body.get("stream_options") or {}, dict):
        raise ValueError("stream_options must be an object")
    if not all(isinstance(tool["function"]["name"], str) for tool in tools):
        raise ValueError("tools must be a list of functions with a name")
    return {
        "messages": messages,
        "token_ids": None,
        "tools": [] if body.get("tool_choice") == "none" else tools,
        "max_tokens": _max_tokens(body.get("max_completion_tokens") or body.get("max_tokens")),
    }


def _max_tokens(value: Any) -> int | None:
    """Return the token limit of a request, or None. Some clients write -1 for no limit."""
    if value is not None and type(value) is not int:
        raise ValueError(f"max_tokens={value!r:.80} must be an integer")
    return value if value and value > 0 else None


def normalise(messages: Messages) -> Messages:
    """Return a client's messages in the form that templates and `new_messages` take.

    In this form, contents are texts, arguments of tool calls are objects, and keys without a value are
    absent.
    """
    normal = []
    for message in messages:
        message = {k: v for k, v in message.items() if v is not None and k not in IGNORED}
        content = message.get("content", "")
        if not isinstance(content, str):
            if any(part.get("type") != "text" for part in content):
                raise RefusedRequest("only messages of text are supported")
            content = "".join(part["text"] for part in content)
        message["content"] = content
        message["role"] = ALIASES.get(str(message["role"]), message["role"])
        if calls := message.pop("tool_calls", None):
            message["tool_calls"] = [_normal_call(call) for call in calls]
        normal.append(message)
    return normal


def _normal_call(call: dict) -> dict:
    function = call.get("function", call)
    name, arguments = function.get("name"), function.get("arguments", function.get("parameters"))
    if not isinstance(name, str) or not isinstance(call.get("id"), str):
        raise RefusedRequest(
            f"a call in tool_calls is {json.dumps(call):.200}; it must be {{id, type: function, function: "
            "{name, arguments}}"
        )
    arguments = read_arguments(arguments) if isinstance(arguments, str) else arguments or {}
    return {"id": call["id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def new_messages(known: Messages, received: Messages) -> Messages | None:
    """Return the messages that follow a known conversation; None if the agent has changed the conversation.

    Only role, content and tool calls are compared, because clients lose other keys (for example
    reasoning_content).
    """

    def view(message: dict) -> tuple[Any, ...]:
        calls = [(c["id"], c["function"]) for c in message.get("tool_calls", [])]
        return message["role"], message.get("content") or "", calls

    if len(received) < len(known) or any(view(a) != view(b) for a, b in zip(known, received)):
        return None
    return received[len(known) :]


def _stream(completion: dict, body: dict) -> web.Response:
    """Return a completion as server-sent events."""
    common = {key: completion[key] for key in ("id", "created", "model")} | {
        "object": "chat.completion.chunk"
    }
    choice = dict(completion["choices"][0])
    delta = choice.pop("message")
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    chunks: list[dict] = [{**common, "choices": [{**choice, "delta": delta}]}]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({**common, "choices": [], "usage": completion["usage"]})
    lines = [*map(json.dumps, chunks), "[DONE]"]
    return web.Response(text="".join(f"data: {line}\n\n" for line in lines), content_type="text/event-stream")


def _finish_reason(reply: EndpointReply, calls: list | None) -> str:
    if reply.end == "length":
        return "length"
    return "tool_calls" if calls else "stop"


def _as_text(arguments: dict | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _error(status: int, message: str, code: str | None = None) -> web.Response:
    kind = "authentication_error" if status == 401 else "invalid_request_error"
    error = {"message": message, "type": kind} | ({"code": code} if code else {})
    response = web.json_response({"error": error}, status=status)
    if status != 400:
        response.force_close()
    return response


def _is_no_refusal(record: logging.LogRecord) -> bool:
    """Return whether to log a record.

    Input that is not HTTP is not logged, because its text would then be in the log.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_http_log = logging.getLogger(f"{__name__}.http")
_http_log.addFilter(_is_no_refusal)
