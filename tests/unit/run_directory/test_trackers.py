"""Trackers follow metrics.jsonl: they miss nothing, repeat nothing, and cannot stop a run."""

import json
import logging
import os
import socket
import threading
import urllib.request
from pathlib import Path

import pytest

from rl.config.checks import check_trackers
from rl.config.options import ConfigError
from rl.config.schema import Config
from rl.run_directory import metric_log, trackers
from rl.run_directory.metric_log import MetricLog
from rl.run_directory.prometheus import Prometheus
from rl.run_directory.trackers import TrackerThread, followers, mlflow_name
from rl.runtime.strangers import most_strangers
from tests.stored_run import save_rollouts


class Recording:
    """A tracker that keeps what it gets, waits for `may_go`, and raises at the step `fails_at`."""

    name, package = "recording", "json"

    def __init__(self, *, cuts=False, fails_at=None):
        self.cuts, self.fails_at = cuts, fails_at
        self.got, self.shown, self.may_go, self.is_closed = [], [], threading.Event(), False
        self.may_go.set()

    def open(self, directory, state):
        state.setdefault("run", directory.name)

    def write(self, step, values):
        assert self.may_go.wait(60)
        if step == self.fails_at:
            raise OSError("no route to host")
        self.got.append((step, values["x"]))

    def show(self, step, rows):
        self.shown.append((step, rows))

    def close(self):
        self.is_closed = True


def log_steps(directory, steps, tracker, *, resume_step=None, scale=1.0):
    metrics = MetricLog(directory, resume_step=resume_step, followers=[TrackerThread(tracker)])
    for step in steps:
        metrics.write(step, {"x": scale * step, "nan": float("nan")})
    metrics.close()


def test_a_tracker_gets_every_step_once(tmp_path):
    tracker = Recording()
    log_steps(tmp_path, range(50), tracker)
    assert tracker.got == [(step, float(step)) for step in range(50)] and tracker.is_closed


def test_a_tracker_gets_samples_at_some_steps(tmp_path):
    tracker = Recording()
    save_rollouts(tmp_path, 12)
    log_steps(tmp_path, range(1, 20), tracker)
    assert [step for step, _ in tracker.shown] == [1, 11]
    assert [row[0] for row in tracker.shown[1][1]] == [11] * 6


@pytest.mark.parametrize("cuts", [True, False])
def test_a_resume_repeats_only_what_can_be_replaced(tmp_path, cuts):
    log_steps(tmp_path, range(5), Recording(cuts=cuts))
    tracker = Recording(cuts=cuts)
    log_steps(tmp_path, range(3, 7), tracker, resume_step=2, scale=10.0)
    steps = range(3, 7) if cuts else range(5, 7)
    assert tracker.got == [(step, 10.0 * step) for step in steps]


def test_a_failure_is_logged_once_and_made_up_for(tmp_path, caplog):
    failing, later = Recording(fails_at=2), Recording()
    with caplog.at_level(logging.WARNING):
        log_steps(tmp_path, range(5), failing)
    assert failing.got == [(0, 0.0), (1, 1.0)]
    warnings = [message for message in caplog.messages if message.startswith("recording")]
    assert len(warnings) == 1 and "failed after step 1" in warnings[0] and "no route to host" in warnings[0]
    log_steps(tmp_path, [5], later, resume_step=4)
    assert later.got == [(step, float(step)) for step in range(2, 6)]


def test_a_slow_tracker_falls_behind_and_is_named(tmp_path, caplog):
    tracker = Recording()
    tracker.may_go.clear()
    metrics = MetricLog(tmp_path, resume_step=None, followers=[TrackerThread(tracker)])
    with caplog.at_level(logging.WARNING):
        for step in range(2 * trackers.BEHIND + 1):  # returns although the tracker waits
            metrics.write(step, {"x": 0.0})
    assert sum("steps behind metrics.jsonl" in message for message in caplog.messages) >= 1
    tracker.may_go.set()
    metrics.close()
    assert len(tracker.got) == 2 * trackers.BEHIND + 1


def test_trackers_share_one_wait_at_the_end(tmp_path, caplog, monkeypatch):
    stuck = [Recording(), Recording()]
    for number, tracker in enumerate(stuck):
        tracker.name = f"recording {number}"
        tracker.may_go.clear()
    threads = [TrackerThread(tracker) for tracker in stuck]
    monkeypatch.setattr(metric_log, "CLOSE_S", 0.0)
    metrics = MetricLog(tmp_path, resume_step=None, followers=threads)
    with caplog.at_level(logging.WARNING):
        metrics.write(0, {"x": 0.0})
        metrics.close()
    assert sum("lacks the last 1 steps" in message for message in caplog.messages) == 2
    for tracker in stuck:  # a process that lives on, as for an export, still sends the rest
        tracker.may_go.set()
    for thread in threads:
        thread.wait(60)
    assert all(tracker.got == [(0, 0.0)] and tracker.is_closed for tracker in stuck)


def test_prometheus_has_the_last_value_of_every_metric(tmp_path):
    config = Config()
    config.run.name, config.logging.prometheus = 'a "b"', str(tmp_path / "textfile")
    tracker = Prometheus(config)
    metrics = MetricLog(tmp_path, resume_step=None, followers=[TrackerThread(tracker)])
    metrics.write(1, {"val-core/x/acc/mean@1": 0.25})
    metrics.write(2, {"critic/score/mean": 0.5})
    metrics.close()
    lines = (tmp_path / "textfile" / 'lockstep_a "b".prom').read_text().splitlines()
    run = 'run="a \\"b\\""'
    assert f"lockstep_step{{{run}}} 2" in lines
    assert f'lockstep_metric{{{run},name="critic/score/mean"}} 0.5' in lines
    assert f'lockstep_metric{{{run},name="val-core/x/acc/mean@1"}} 0.25' in lines
    # Another parser than this project's accepts it.
    parser = pytest.importorskip("prometheus_client.parser")
    families = {each.name: each for each in parser.text_string_to_metric_families("\n".join(lines) + "\n")}
    assert len(families["lockstep_metric"].samples) == 2


def test_prometheus_answers_those_who_can_read_the_token(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = Config()
    config.logging.prometheus_port = port
    tracker = Prometheus(config)
    tracker.open(tmp_path, {})
    tracker.write(3, {"time": 5.0, "critic/score/mean": 0.5})
    path = tmp_path / "prometheus_token"
    assert path.stat().st_mode & 0o077 == 0

    def get(page: str, token: str) -> str:
        headers = {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{page}", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.read().decode()

    assert 'name="critic/score/mean"} 0.5' in get("metrics", path.read_text())
    for page, token, status in (
        ("other", path.read_text(), 404),
        ("metrics", "", 401),
        ("metrics", "x", 401),
    ):
        with pytest.raises(urllib.error.HTTPError) as error:
            get(page, token)
        assert error.value.code == status
    tracker.close()


def test_a_token_that_others_could_read_is_refused(tmp_path):
    path, config = tmp_path / "prometheus_token", Config()
    path.write_text("planted")
    path.chmod(0o644)
    config.logging.prometheus_port = 1
    with pytest.raises(ValueError, match="prometheus_token has owner=.* mode=0644; it must be this user's"):
        Prometheus(config).open(tmp_path, {})


def test_idle_connections_do_not_take_the_ranks_files_or_its_page(tmp_path):
    """4,300 of them ended a run: each had a thread and an open file on rank 0."""
    tracker = Prometheus(Config())
    port = tracker.serve(0, "token")
    before, idle = len(os.listdir("/proc/self/fd")), []
    try:
        for number in range(most_strangers() + 50):
            idle.append(socket.create_connection(("127.0.0.1", port)))
            if number % 2:
                idle[-1].sendall(b"GET /metrics HTTP/1.1\r\nAuthorization: Be")
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/metrics", headers={"Authorization": "Bearer token"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert reply.status == 200
        assert idle[0].recv(1) == b""  # the oldest was closed
        num_served = len(os.listdir("/proc/self/fd")) - before - len(idle)
        assert num_served <= most_strangers() + 3, "the page's own side of the connections"
        assert [thread.name for thread in threading.enumerate()].count("prometheus") == 1
    finally:
        for connection in idle:
            connection.close()
        tracker.close()


def test_a_missing_package_is_refused(monkeypatch):
    config = Config()
    config.logging.wandb = "offline"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="requires the package wandb.* pip install wandb"):
        check_trackers(config)


def real_run(tmp_path, config):
    """Log five steps, then continue after step 2 until step 7."""
    config.run.name, config.logging.tensorboard = "toy", False
    save_rollouts(tmp_path / "run", 1)
    for steps, resume_step, scale in ((range(5), None, 1.0), (range(3, 8), 2, 10.0)):
        metrics = MetricLog(tmp_path / "run", resume_step=resume_step, followers=followers(config))
        for step in steps:
            metrics.write(step, {"val-core/a b/acc/mean@4": scale * step})
        metrics.close()


EXPECTED = [(step, float(step)) for step in range(5)] + [(step, 10.0 * step) for step in range(5, 8)]


def wandb_records(path):
    """Yield the records of a .wandb file: a header of 7 bytes, then LevelDB's log format."""
    data, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:  # the rest of a block is too small for a header
            place += left
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record = (record if kind in (3, 4) else b"") + data[place + 7 : place + 7 + size]
        if kind in (1, 4):  # whole, or the last part
            yield record
        place += 7 + size


def test_wandb_offline_has_each_step_once(tmp_path):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    config = Config()
    config.logging.wandb = "offline"
    real_run(tmp_path, config)
    found, names, tables = [], set(), set()
    for path in (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"):
        names.add(path.stem)
        for record in map(wandb_internal_pb2.Record.FromString, wandb_records(path)):
            if record.HasField("history"):
                tables.add(
                    "samples" in {i.nested_key[0] if i.nested_key else i.key for i in record.history.item}
                )
                row = {i.nested_key[0] if i.nested_key else i.key: i.value_json for i in record.history.item}
                found.append((int(row["_step"]), float(row["val-core/a b/acc/mean@4"])))
    assert sorted(found) == EXPECTED and len(names) == 1 and tables == {True, False}


def test_mlflow_has_each_step_once(tmp_path):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    config = Config()
    config.logging.mlflow = f"file:{tmp_path}/mlruns"
    real_run(tmp_path, config)
    state = json.loads((tmp_path / "run" / "trackers" / "mlflow.json").read_text())
    client = MlflowClient(tracking_uri=config.logging.mlflow)
    history = client.get_metric_history(state["run"], mlflow_name("val-core/a b/acc/mean@4"))
    assert [(each.step, each.value) for each in history] == EXPECTED
    assert client.get_run(state["run"]).data.params["run.name"] == "toy"
    table = json.loads(Path(client.download_artifacts(state["run"], "samples.json")).read_text())
    assert len(table["data"]) == 6


def test_trackio_has_each_step_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    config = Config()
    config.logging.trackio = True
    real_run(tmp_path, config)
    state = json.loads((tmp_path / "run" / "trackers" / "trackio.json").read_text())
    rows = SQLiteStorage.get_logs(config.logging.project, state["run"])
    assert [(row["step"], row["val-core/a b/acc/mean@4"]) for row in rows if "samples" not in row] == EXPECTED
    assert sum("samples" in row for row in rows) == 1
