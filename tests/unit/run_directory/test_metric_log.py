import json
import logging

import pytest

from rl.config.schema import Config
from rl.run_directory.metric_log import MAX_COLUMNS, MetricLog, accuracies, read_records, step_line
from rl.run_directory.trackers import TensorBoard, TrackerThread
from tests.stored_run import save_rollouts

FULL = {
    "critic/score/mean": 0.53125,
    "critic/rewards/mean": 0.5,
    "response_length/mean": 213.4,
    "perf/throughput": 5234.6,
    "actor/grad_norm": 0.1234,
    "actor/pg_loss": -0.00123,
    "actor/entropy": 0.9,
    "timing_s/gen": 12.3,
    "timing_s/reward": 0.14,
    "timing_s/old_log_prob": 2.0,
    "timing_s/adv": 0.01,
    "timing_s/update_actor": 30.1,
    "timing_s/update_weights": 1.2,
    "timing_s/step": 45.6,
}


def steps(directory):
    return [record["training/global_step"] for record in read_records(directory / "metrics.jsonl")]


def test_each_step_is_one_strict_json_line_at_once(tmp_path):
    metrics = MetricLog(tmp_path / "new" / "run", resume_step=None)
    path = tmp_path / "new" / "run" / "metrics.jsonl"
    assert path.read_text() == ""
    metrics.write(1, {"b/x": 0.1, "a/y": 2, "training/global_step": 99})
    (line,) = path.read_text().splitlines()  # not closed, not flushed by us
    assert list(json.loads(line)) == ["training/global_step", "time", "a/y", "b/x"]
    assert line.startswith('{"training/global_step": 1, "time": ') and '"a/y": 2, "b/x": 0.1}' in line
    metrics.write(2, {})
    assert steps(path.parent) == [1, 2]


def test_not_finite_is_null_and_logged_once_per_metric(tmp_path, caplog):
    metrics = MetricLog(tmp_path, resume_step=None)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            metrics.write(step, {"a": float("nan"), "b": -float("inf"), "c": 1.0})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert all(
        (r["a"], r["b"], r["c"]) == (None, None, 1.0) for r in read_records(tmp_path / "metrics.jsonl")
    )
    assert [message.split()[:5] for message in caplog.messages] == [
        ["a", "is", "nan", "at", "step"],
        ["b", "is", "-inf", "at", "step"],
    ]


def test_resume_drops_later_steps_and_incomplete_lines(tmp_path):
    metrics = MetricLog(tmp_path, resume_step=None)
    for step in range(6):
        metrics.write(step, {"x": float(step)})
    metrics.close()
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"training/global_step": 2, "x"')
    metrics = MetricLog(tmp_path, resume_step=3)
    assert steps(tmp_path) == [0, 1, 2, 3]
    metrics.write(4, {"x": 40.0})
    after = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert after[:4] == before[:4] and json.loads(after[4])["x"] == 40.0 and len(after) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_logs_and_drops_a_broken_line_and_a_new_run_all(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_text(
        '{"training/global_step": 1}\n\0\0\0\n{"training/global_step": 2}\n'
    )
    MetricLog(tmp_path, resume_step=5)
    assert steps(tmp_path) == [1, 2]
    assert "line 2" in caplog.text
    MetricLog(tmp_path, resume_step=None).write(0, {})
    assert steps(tmp_path) == [0]


def test_a_job_killed_during_the_rewrite_leaves_the_old_file(tmp_path, monkeypatch):
    MetricLog(tmp_path, resume_step=None).write(7, {})

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        MetricLog(tmp_path, resume_step=1)
    assert steps(tmp_path) == [7]


@pytest.mark.parametrize("bad", ["{", "[1]", '{"x": 1}', '{"training/global_step": null}'])
def test_reader_names_the_line_that_is_no_record(tmp_path, bad, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"training/global_step": 1}\n' + bad)  # incomplete, which is left out
    assert read_records(path) == [{"training/global_step": 1}]
    path.write_text('{"training/global_step": 1}\n' + bad + '\n{"training/global_step": 2, "x": NaN}\n')
    assert read_records(path) == [{"training/global_step": 1}, {"training/global_step": 2, "x": None}]
    assert "metrics.jsonl: 1 lines are not" in caplog.text and "the first is line 2" in caplog.text


def test_tensorboard_has_finite_values_of_current_steps(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    save_rollouts(tmp_path, 1)
    metrics = MetricLog(tmp_path, resume_step=None, followers=[TrackerThread(TensorBoard(Config()))])
    for step in (1, 2, 3):
        metrics.write(step, {"critic/score/mean": float(step), "nan": float("nan")})
    metrics.close()
    metrics = MetricLog(tmp_path, resume_step=1, followers=[TrackerThread(TensorBoard(Config()))])
    metrics.write(2, {"critic/score/mean": 20.0})
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["critic/score/mean"]
    [samples] = events.Tensors("samples/text_summary")
    assert samples.step == 1 and b"prompt: 'two and four, 0?'" in samples.tensor_proto.string_val[0]
    assert "_hparams_/session_start_info" in events.Tags()["tensors"] + list(events.summary_metadata)
    assert [(event.step, event.value) for event in events.Scalars("critic/score/mean")] == [
        (1, 1.0),
        (2, 20.0),
    ]


def test_accuracies_by_data_source():
    metrics = {
        "val-core/gsm8k/acc/mean@1": 0.5,
        "val-core/a/b/acc/mean@4": 0.2,
        "val-core/gsm8k/acc/mean@8": 0.4,  # of sampled responses; the smallest k counts
        "val-aux/gsm8k/acc/best@4": 0.7,
    }
    assert accuracies(metrics) == {"a/b": 0.2, "gsm8k": 0.5}


@pytest.mark.parametrize(
    "step, metrics, line",
    [
        (
            7,
            FULL | {"val-core/gsm8k/acc/mean@1": 0.4123, "timing_s/testing": 123.4},
            "step  7/50 | reward  0.531 len   213 tok/s  5235 grad    0.12 loss -0.00123 |  45.6 s: gen 12.3 "
            "train 30.1 logp  2.0 refit  1.2 score  0.1 adv  0.0 | val 123 s acc 0.412",
        ),
        (0, {"val-core/x/acc/mean@1": 0.25}, "step  0/50 | acc 0.250"),
        (3, {"sft/loss": 2.345678, "timing_s/step": 1.5}, "step  3/50 | loss     2.35 |   1.5 s"),
        (3, {}, "step  3/50"),
        (
            1,
            {"val-core/gsm8k/acc/mean@1": 0.5, "val-core/math/acc/mean@1": 0.2},
            "step  1/50 | acc gsm8k 0.500 math 0.200",
        ),
        (
            1,
            {"val-core/x/acc/mean@1": 0.141, "val-core/x/failed/mean@1": 0.859},
            "step  1/50 | acc 0.141 (86% failed)",
        ),
        (
            1,
            {
                "timing_s/save_checkpoint": 0.2,
                "timing_s/testing": 0.1,
                "val-core/x/acc/mean@1": 0.0,
                "val-aux/x/score/mean@1": 0.6123,
                "val-aux/x/score/mean@4": 0.7,
            },
            "step  1/50 | save 0.2 s val 0.1 s acc 0.000 score 0.612",
        ),
        (1, {"val-core/x/acc/mean@1": 0.5, "val-aux/x/score/mean@1": 0.5}, "step  1/50 | acc 0.500"),
    ],
)
def test_step_line_shows_what_a_step_has(step, metrics, line):
    assert step_line(step, 50, metrics) == line


def test_a_validation_step_shows_the_same_phases_as_the_others():
    phases = FULL | {f"timing_s/{name}": 1.0 for name in "abcdefgh"}
    quiet = step_line(9, 100, phases)
    assert step_line(9, 100, phases | {"val-core/x/acc/mean@1": 0.5, "timing_s/testing": 9.5}).startswith(
        quiet
    )


def test_step_line_is_bounded_and_keeps_main_timings():
    phases = {f"timing_s/a_phase_with_a_long_name_{i}": float(i) for i in range(20)}
    sources = {f"val-core/data_source_{i}/acc/mean@1": 0.1 for i in range(20)}
    line = step_line(7, 100, FULL | phases)
    assert len(line) <= MAX_COLUMNS and "train 30.1" in line
    assert len(step_line(7, 100, FULL | phases | sources)) == MAX_COLUMNS
