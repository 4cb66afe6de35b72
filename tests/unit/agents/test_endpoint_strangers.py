"""Attempts of another user of the node, who can connect to the endpoint and has no key."""

import contextlib
import json
import logging
import socket
import threading
import urllib.request

import pytest
from aiohttp.web_protocol import RequestHandler

from rl.features.agents import endpoint as module
from rl.runtime import strangers
from tests.unit.agents.test_endpoint import TURNS, Consumer

GUARD_S = 60.0
START = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
QUESTION = json.dumps({"messages": [{"role": "user", "content": "question"}]}).encode()


def connect(consumer, data=b""):
    port = int(consumer.endpoint.base_url.split(":")[2].split("/")[0])
    connection = socket.create_connection(("127.0.0.1", port), GUARD_S)
    with contextlib.suppress(OSError):  # it is closed before it has read everything
        connection.sendall(data)
    return connection


def read_to_the_end(connection):
    """Return what the server has sent until it closed the connection."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            received += data
    connection.close()
    return received


def ask(consumer, key):
    """Return the completion of a request with a key."""
    request = urllib.request.Request(
        f"{consumer.endpoint.base_url}/chat/completions", QUESTION, {"Authorization": f"Bearer {key}"}
    )
    with urllib.request.urlopen(request, timeout=GUARD_S) as answer:
        return json.load(answer)


def test_bodies_without_a_key_are_not_read(monkeypatch):
    """Six such bodies, when they were parsed, took 22.8 of the 26.6 s of a generation."""
    size, read = 42 << 20, []
    receive = RequestHandler.data_received
    monkeypatch.setattr(
        RequestHandler, "data_received", lambda self, data: (read.append(len(data)), receive(self, data))[1]
    )
    for key in (b"", b"Authorization: Bearer guessed\r\n"):
        with Consumer(TURNS[2:]) as consumer:
            data = START + key + b"Content-Length: %d\r\n\r\n" % size + b" " * size
            strangers = [
                threading.Thread(target=lambda: read_to_the_end(connect(consumer, data)))  # noqa: B023
                for _ in range(6)
            ]
            for stranger in strangers:
                stranger.start()
            answer = ask(consumer, consumer.endpoint.open("0.0"))
            for stranger in strangers:
                stranger.join(GUARD_S)
        assert answer["choices"][0]["message"]["content"] == "The answer is 42."
    assert sum(read) < 12 << 20  # of 504 MiB


def test_slow_senders_without_a_key_are_closed(monkeypatch):
    monkeypatch.setattr(module, "KEY_S", 0.2)
    with Consumer([]) as consumer:
        key = consumer.endpoint.open("0.0")
        with_key = connect(consumer, START + f"Authorization: Bearer {key}\r\n".encode())
        with_key.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(QUESTION), QUESTION))
        request = consumer.endpoint.requests.get(timeout=GUARD_S)
        for data in (b"", START, START + b"Authorization: Bearer a"):
            assert read_to_the_end(connect(consumer, data)) == b""
        request.reply.set_exception(module.RefusedRequest("the connection is open"))
        assert b"the connection is open" in with_key.recv(1 << 16)
        with_key.close()


def test_idle_connections_take_no_room(monkeypatch):
    monkeypatch.setattr(strangers, "MOST", 8)
    with Consumer(TURNS[2:]) as consumer:
        idle = [connect(consumer) for _ in range(24)]
        for connection in idle[:16]:
            assert read_to_the_end(connection) == b""
        assert ask(consumer, consumer.endpoint.open("0.0"))["usage"]["completion_tokens"]
        for connection in idle[16:]:
            connection.close()


def test_agents_that_connect_together_are_all_served(monkeypatch):
    """All agents of a call connect at its start; the connections of most were closed."""
    monkeypatch.setattr(strangers, "MOST", 128)
    with Consumer([]) as consumer:
        keys = [consumer.endpoint.open(f"{i}.0") for i in range(256)]
        connections = [connect(consumer) for _ in keys]
        for connection, key in zip(connections, keys, strict=True):
            head = START + f"Authorization: Bearer {key}\r\nContent-Length: {len(QUESTION)}\r\n\r\n".encode()
            connection.sendall(head + QUESTION)
        for _ in keys:
            consumer.endpoint.requests.get(timeout=GUARD_S).reply.set_exception(
                module.RefusedRequest("heard")
            )
        for connection in connections:
            assert b"heard" in connection.recv(1 << 16)
            connection.close()


ATTEMPTS = {
    "no HTTP": b"MARK\r\n\r\n",
    "no method": b"\x16\x03\x01MARK",
    "a long header": START + b"MARK: " + b"a" * 100_000 + b"\r\n\r\n",
    "many headers": START + b"MARK: a\r\n" * 10_000 + b"\r\n",
    "a key of another form": START + b"Authorization: Basic MARK\r\nContent-Length: 0\r\n\r\n",
    "an empty key": START + b"Authorization: Bearer \r\nContent-Length: 0\r\n\r\n",
    "a second request in the body": START
    + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /MARK HTTP/1.1\r\n\r\n",
    "endless chunks": START + b"Transfer-Encoding: chunked\r\n\r\n" + b"5\r\nMARK \r\n" * 100_000,
    "another address": b"GET /v1/MARK HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    "an upgrade": START + b"Connection: Upgrade\r\nUpgrade: MARK\r\n\r\n",
}


@pytest.mark.parametrize("data", ATTEMPTS.values(), ids=ATTEMPTS)
def test_a_stranger_gets_nothing_and_changes_nothing(data, caplog):
    with caplog.at_level(logging.INFO), Consumer(TURNS[2:]) as consumer:
        key = consumer.endpoint.open("0.0")
        connection = connect(consumer, data)
        connection.shutdown(socket.SHUT_WR)
        received = read_to_the_end(connection)
        assert received == b"" or received.startswith((b"HTTP/1.1 40", b"HTTP/1.0 40")), received
        assert b"0.0" not in received.partition(b"\r\n\r\n")[2] and consumer.endpoint.requests.empty()
        assert ask(consumer, key)["choices"][0]["message"]["content"] == "The answer is 42."
        assert len(consumer.seen) == 1
    assert "MARK" not in caplog.text and "Traceback" not in caplog.text


def test_a_request_longer_than_any_context_is_not_read():
    """The source counts the trajectory's limits as used up: a failure would leave the sample out."""
    with Consumer([]) as consumer:
        chunk = b"%x\r\n" % (4 << 20) + b" " * (4 << 20)
        rests = b"Content-Length: %d\r\n\r\n" % (4 << 20), b"Transfer-Encoding: chunked\r\n\r\n" + chunk
        for session, rest in enumerate(rests):
            key = consumer.endpoint.open(f"0.{session}")
            connection = connect(consumer, START + f"Authorization: Bearer {key}\r\n".encode() + rest)
            request = consumer.endpoint.requests.get(timeout=GUARD_S)
            assert request.messages is request.token_ids is None
            request.reply.set_exception(module.RefusedRequest("too long"))
            connection.close()
