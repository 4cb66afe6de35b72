"""Metrics for Prometheus: a text file for node_exporter's textfile collector, and a port on rank 0.

    lockstep_metric{run="grpo", name="critic/score/mean"} 0.53
    lockstep_step{run="grpo"} 12
    lockstep_time_seconds{run="grpo"} 1763770000.0

A metric keeps its name as a label. A metric that some steps lack, for example of validation, keeps its last
value. tools/grafana.json is a dashboard of these series.

Other users of a node reach its ports, so a request must have the token of `<run.dir>/prometheus_token`, which
only the run's user can read: the header `Authorization: Bearer TOKEN`. Connections that send no request are
limited (`rl.runtime.strangers`).
"""

import asyncio
import hmac
import os
import secrets
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.config.schema import Config
from rl.runtime.strangers import Strangers
from rl.sandbox.private_directory import read_private

SERIES = {
    "lockstep_metric": "Last value of a metric of docs/metrics.md.",
    "lockstep_step": "Last complete step.",
    "lockstep_time_seconds": "Unix time of the end of that step.",
}

REQUEST_S, MAX_HEAD = 10.0, 8192
"""Seconds until a connection must have sent its request, and the maximum length of the request in bytes."""


class Prometheus:
    name, package, cuts = "prometheus", "asyncio", True

    def __init__(self, config: Config):
        self._run, self._port = config.run.name, config.logging.prometheus_port
        self._host = config.logging.prometheus_host
        place = config.logging.prometheus
        self._file = Path(place, f"lockstep_{config.run.name}.prom") if place else None
        self._values: dict[str, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.text = ""

    def open(self, directory: Path, state: dict[str, Any]) -> None:
        state["step"] = -1  # the file or page begins with what the run has logged so far
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
        if self._port:
            self.serve(self._port, _token(directory / "prometheus_token"))

    def serve(self, port: int, token: str) -> int:
        """Answer requests with the token on the port, 0 for any free one; return its number."""
        listener = socket.create_server((self._host, port))
        self._loop = asyncio.new_event_loop()
        threading.Thread(
            target=self._answer, args=(self._loop, listener, token), name="prometheus", daemon=True
        ).start()
        return listener.getsockname()[1]

    def _answer(self, loop: asyncio.AbstractEventLoop, listener: socket.socket, token: str) -> None:
        strangers: Strangers[_Page] = Strangers(lambda page: page.end(), REQUEST_S)
        made = loop.create_server(lambda: _Page(self, token, strangers), sock=listener)
        server = loop.run_until_complete(made)
        loop.run_forever()
        server.close()
        loop.close()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._values |= values
        time = self._values.pop("time")
        run = f'run="{_escaped(self._run)}"'
        rows = {"lockstep_step": [f"{{{run}}} {step}"], "lockstep_time_seconds": [f"{{{run}}} {time}"]}
        rows["lockstep_metric"] = [
            f'{{{run},name="{_escaped(name)}"}} {value}' for name, value in sorted(self._values.items())
        ]
        lines = []
        for series, text in SERIES.items():
            lines += [f"# HELP {series} {text}", f"# TYPE {series} gauge"]
            lines += [series + row for row in rows[series]]
        self.text = "\n".join(lines) + "\n"
        if self._file is not None:
            partial = self._file.with_suffix(".partial")  # the collector reads only *.prom
            partial.unlink(missing_ok=True)
            with open(partial, "x") as file:  # never through a link that another user of the directory made
                file.write(self.text)
            partial.replace(self._file)

    def show(self, step: int, rows: object) -> None:
        """Do nothing: Prometheus has only numbers."""

    def close(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


def _token(path: Path) -> str:
    """Return the token in the file, which is written, readable by its owner only, if it is missing."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:  # of the run that this one continues
        return read_private(path, limit=200, remedy="set logging.prometheus_port=0").decode()
    with os.fdopen(descriptor, "w") as file:
        file.write(token := secrets.token_urlsafe(32))
    return token


class _Page(asyncio.Protocol):
    """A connection: reads one request and answers it."""

    _transport: asyncio.Transport

    def __init__(self, source: Prometheus, token: str, strangers: Strangers["_Page"]):
        self._source, self._expected, self._strangers = source, f"Bearer {token}".encode(), strangers
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._strangers.admit(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._strangers.forget(self)

    def end(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, _ = self._received.partition(b"\r\n\r\n")
        if not end and len(self._received) <= MAX_HEAD:
            return
        request, *lines = head.split(b"\r\n")
        fields = {
            name.strip().lower(): value.strip() for name, _, value in (li.partition(b":") for li in lines)
        }
        status, body = "200 OK", self._source.text
        if not hmac.compare_digest(fields.get(b"authorization", b""), self._expected):
            status = "401 Unauthorized\r\nWWW-Authenticate: Bearer"
            body = "the token is in prometheus_token of the run's directory\n"
        elif not request.startswith((b"GET /metrics ", b"GET /metrics?")):
            status, body = "404 Not Found", "the metrics are at /metrics\n"
        answer = (
            f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
            f"Content-Length: {len(body.encode())}\r\nConnection: close\r\n\r\n"
        )
        self._transport.write((answer + body).encode())
        self._transport.close()


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
