"""Metrics for Prometheus: a text file for node_exporter's textfile collector, and a port on rank 0.

    lockstep_metric{run="grpo", name="critic/score/mean"} 0.53
    lockstep_step{run="grpo"} 12
    lockstep_time_seconds{run="grpo"} 1763770000.0

A metric keeps its name as a label. One that some steps lack, such as those of validation, keeps its last
value. tools/grafana.json is a dashboard of these series.

Other users of a node reach its ports, so a request must have the token of `<run.dir>/prometheus_token`, which
only the run's user can read: the header `Authorization: Bearer TOKEN`.
"""

import hmac
import os
import secrets
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rl.config.schema import Config

SERIES = {
    "lockstep_metric": "Last value of a metric of docs/metrics.md.",
    "lockstep_step": "Last complete step.",
    "lockstep_time_seconds": "Unix time of the end of that step.",
}


class Prometheus:
    name, package, cuts = "prometheus", "http.server", True

    def __init__(self, config: Config):
        self._run, self._port = config.run.name, config.logging.prometheus_port
        self._host = config.logging.prometheus_host
        place = config.logging.prometheus
        self._file = Path(place, f"lockstep_{config.run.name}.prom") if place else None
        self._values: dict[str, float] = {}
        self._server: ThreadingHTTPServer | None = None
        self.text = ""

    def open(self, directory: Path, state: dict[str, Any]) -> None:
        state["step"] = -1  # the file or page begins with what the run has logged so far
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
        if self._port:
            self.serve(self._port, _token(directory / "prometheus_token"))

    def serve(self, port: int, token: str) -> int:
        """Answer requests with the token on the port, 0 for any free one; return its number."""
        self._server = ThreadingHTTPServer((self._host, port), _page_of(self, token))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()
        return self._server.server_port

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
            partial.write_text(self.text)
            partial.replace(self._file)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def _token(path: Path) -> str:
    """Return the token in the file, which is written, readable by its owner only, if it is missing."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:  # of the run that this one continues
        return path.read_text()
    with os.fdopen(descriptor, "w") as file:
        file.write(token := secrets.token_urlsafe(32))
    return token


def _page_of(source: Prometheus, token: str) -> type[BaseHTTPRequestHandler]:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            given = self.headers.get("Authorization", "").encode()
            status, body = 200, source.text.encode()
            if not hmac.compare_digest(given, f"Bearer {token}".encode()):
                status, body = 401, b"the token is in prometheus_token of the run's directory\n"
            elif self.path.partition("?")[0] != "/metrics":
                status, body = 404, b"the metrics are at /metrics\n"
            self.send_response(status)
            if status == 401:
                self.send_header("WWW-Authenticate", "Bearer")
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Write nothing to the run's log."""

    return Page


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
