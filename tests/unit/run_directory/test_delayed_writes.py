"""A disk that is full for a while ends no run, leaves no half line, and what is missing is named."""

import json
import logging

import pyarrow as pa

from rl.run_directory.consumed import ConsumedLog
from rl.run_directory.metric_log import STEP, MetricLog, read_records
from rl.run_directory.rollout_files import RolloutLog, read, stored_steps
from rl.run_directory.status import FILE_NAME, Status
from tests.full_disk import full_disk


def test_metrics_of_a_full_disk_are_lost_or_cut(tmp_path, caplog):
    metrics = MetricLog(tmp_path, resume_step=None)
    metrics.write(1, {"loss": 1.0})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    with full_disk(size + 10):  # a part of the line fits
        metrics.write(2, {"loss": 2.0})
        metrics.write(3, {"loss": 3.0})
        assert [record[STEP] for record in read_records(tmp_path / "metrics.jsonl")] == [1]
        assert (tmp_path / "metrics.jsonl").stat().st_size == size
    [warning] = caplog.messages
    assert (
        f"{tmp_path}/metrics.jsonl: step 2, " in warning
        and " bytes cannot be written (File too large; " in warning
    )
    metrics.write(4, {"loss": 4.0})
    assert [record["loss"] for record in read_records(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 3.0, 4.0]
    assert caplog.messages[1:] == [f"{tmp_path}/metrics.jsonl is written again"]
    with full_disk(size):
        metrics.write(5, {"loss": 5.0})
        metrics.close()
    assert caplog.messages[-1] == f"{tmp_path}/metrics.jsonl lacks step 5, which could not be written"


def test_a_full_disk_ends_the_record_of_prompts(tmp_path, caplog):
    record = ConsumedLog(tmp_path)
    for step in (1, 2):
        with full_disk():
            record.append(step, num_drawn=step, consumed=[(0, step)], dropped=[], waiting=[])
    assert (tmp_path / "consumed.jsonl").read_text() == "" and len(caplog.messages) == 1
    record.append(3, num_drawn=3, consumed=[], dropped=[], waiting=[])
    lines = (tmp_path / "consumed.jsonl").read_text().splitlines()
    assert [json.loads(line)["drawn"] for line in lines] == [1, 2, 3]


def test_a_full_disk_ends_the_log_of_rollouts(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    rollouts = RolloutLog(tmp_path, {"score": "float32"}, kind="all", token_texts=lambda: ["a", "b"])
    rollouts.flush()
    with full_disk():
        for step in (1, 2, 3):
            rollouts.write(step, lambda step=step: {"score": [float(step)]})
        rollouts.flush()
    assert stored_steps(tmp_path) == {} and not list((tmp_path / "rollouts").iterdir())
    rollouts.write(4, lambda: {"score": [4.0]})
    rollouts.close()
    assert list(stored_steps(tmp_path)) == [2, 3, 4]  # two steps wait, which bounds the memory
    assert read(stored_steps(tmp_path)[3]).equals(pa.table({"score": pa.array([3.0], pa.float32())}))
    assert f"{tmp_path}/rollouts is written again and lacks step 1" in caplog.messages
    assert caplog.messages[-1] == f"{tmp_path}/rollouts lacks step 1, which could not be written"


def test_a_full_disk_ends_the_status(tmp_path, capsys):
    status = Status(str(tmp_path), max_steps=9, leads=True)
    status.write(step=1)
    with full_disk():
        status.write(step=2)
        status.write(step=3)
    assert json.loads((tmp_path / FILE_NAME).read_text())["step"] == 1
    assert capsys.readouterr().err.count("cannot be written: [Errno 27] File too large") == 1
    status.write(checkpoint_step=3)
    found = json.loads((tmp_path / FILE_NAME).read_text())
    assert (found["step"], found["checkpoint_step"]) == (3, 3)
