import base64
import gzip
import json
import os
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rl.run.rollout_writer import FILE_COLUMNS, OF_IMAGES, images_of
from rl.run_directory.rollout_files import RolloutLog, stored_steps
from tests.stored_run import TOKENS, batch, columns, save_run
from tools import report, rollouts
from tools.report_page import write

ACCURACY = "val-core/add/acc/mean@1"
REWARD = "critic/score/mean"


def write_run(directory, records):
    directory.mkdir(parents=True)
    facts = [{"training/global_step": step, "time": 1000.0 + 10 * step} | rest for step, rest in records]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in facts))
    return directory


@pytest.fixture
def grpo(tmp_path):
    records = [(0, {ACCURACY: 0.25})] + [(step, {REWARD: step / 20}) for step in range(1, 10)]
    return write_run(tmp_path / "grpo", records + [(10, {REWARD: None, ACCURACY: 0.75})])


@pytest.fixture
def sft(tmp_path):
    records = [(0, {ACCURACY: 0.0}), (1, {"sft/loss": 3.0}), (60, {"sft/loss": 1.0, ACCURACY: 0.24})]
    return write_run(tmp_path / "sft", records)


def rows(text):
    return {cells[0]: cells[1:] for cells in (re.split(r"  +", line) for line in text.splitlines())}


def run(argv, capsys):
    report.main([str(argument) for argument in argv])
    return capsys.readouterr().out


def test_table_of_one_run(grpo, capsys):
    assert rows(run([grpo], capsys)) == {
        "run directory": [str(grpo)],
        "steps": ["10"],
        "wall time, first to last record": ["1 min 40 s"],
        "accuracy before, add": ["0.2500 (step 0)"],
        "accuracy after, add": ["0.7500 (step 10)"],
        "mean reward, first": ["0.0500 (step 1)"],
        "mean reward, last": ["0.4500 (step 9)"],
        f"plot: {grpo / 'report.png'}": [],
        f"page: {grpo / 'report.html'}": [],
    }


def test_before_adds_a_column_and_missing_numbers_are_dashes(grpo, sft, tmp_path, capsys):
    table = rows(run([grpo, "--before", sft, "--png", tmp_path / "out.png"], capsys))
    assert table["run directory"] == [str(sft), str(grpo)]
    assert table["accuracy after, add"] == ["0.2400 (step 60)", "0.7500 (step 10)"]
    assert table["wall time, first to last record"] == ["10 min 00 s", "1 min 40 s"]
    assert table["mean reward, first"] == ["-", "0.0500 (step 1)"]
    assert not (grpo / "report.png").exists()
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_validations_before_after_and_of_several_sources(tmp_path):
    def table(name, *records):
        path = write_run(tmp_path / name, records)
        return rows(report.table({path: report.read_run(path)}))

    late = table("late", (1, {REWARD: 0.1}), (5, {REWARD: 0.2, ACCURACY: 0.3}))
    assert late["accuracy before, add"] == ["-"] and late["accuracy after, add"] == ["0.3000 (step 5)"]
    once = table("once", (0, {ACCURACY: 0.3}))
    assert once["accuracy after, add"] == ["-"] and once["wall time, first to last record"] == ["-"]
    other = "val-core/mul/acc/mean@1"
    last = 4000, {REWARD: 5.0, ACCURACY: 0.3, other: 0.4}
    two = table("two", (0, {ACCURACY: 0.1, other: 0.2}), (1, {REWARD: -3.0}), last)
    assert two["accuracy before, mul"] == ["0.2000 (step 0)"]
    assert two["accuracy after, add"] == ["0.3000 (step 4000)"]
    assert two["wall time, first to last record"] == ["11 h 06 min"]


def test_plot_has_both_curves_labels_and_legend(grpo, monkeypatch):
    import matplotlib.pyplot as plt

    monkeypatch.setattr(plt, "close", lambda figure: None)
    report.draw(report.read_run(grpo), grpo / "report.png")
    figure = plt.gcf()
    left, right = figure.axes
    assert (left.get_xlabel(), left.get_ylabel()) == ("training step", "mean reward (training)")
    assert right.get_ylabel() == "held-out accuracy" and left.get_ylim() == right.get_ylim()
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["mean reward (training)", "held-out accuracy, add"]
    assert left.lines[0].get_xydata().tolist() == [[step, step / 20] for step in range(1, 10)]
    assert right.lines[0].get_xydata().tolist() == [[0, 0.25], [10, 0.75]]
    monkeypatch.undo()
    plt.close(figure)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda path: None, "there is no directory"),
        (lambda path: path.mkdir(), "holds no metrics.jsonl"),
        (lambda path: write_run(path, []), "holds no record yet"),
        (lambda path: (write_run(path, []) / "metrics.jsonl").write_text("x\n"), "holds no record yet"),
    ],
)
def test_error_is_one_sentence(tmp_path, make, message):
    make(tmp_path / "run")
    with pytest.raises(SystemExit) as stopped:
        report.main([str(tmp_path / "run")])
    error = stopped.value.code
    assert message in error and error.endswith(".") and "\n" not in error


def test_a_run_without_rewards_has_a_page_and_no_plot(tmp_path, capsys):
    runs = [write_run(tmp_path / name, [(1, {"sft/loss": 1.0})]) for name in "ab"]
    for some in (runs[:1], runs):
        assert report.main([*map(str, some)]) == 0
        out = capsys.readouterr().out
        assert "no plot: the records hold n" in out and (runs[0] / "report.html").is_file()
    assert not (runs[0] / "report.png").exists()


@pytest.mark.parametrize(
    "state, words",
    [
        ("failed", "run failed: training.tp=3 is wrong; use 2. Correct this, and start it again."),
        ("stopped", "run was stopped: training.tp=3 is wrong; use 2. The same command continues it."),
        ("running", "no step has ended yet; lockstep status "),
    ],
)
def test_a_run_without_steps_names_the_reason(tmp_path, state, words):
    run_dir = write_run(tmp_path / "run", [])
    status = {"state": state, "step": 0, "reason": "training.tp=3 is wrong; use 2."}
    (run_dir / "status.json").write_text(json.dumps(status))
    for message in ("holds no record yet: ", "holds no metrics.jsonl: "):
        with pytest.raises(SystemExit) as stopped:
            report.main([str(run_dir)])
        assert message in stopped.value.code and words in stopped.value.code
        (run_dir / "metrics.jsonl").unlink(missing_ok=True)


def test_a_run_is_compared_with_its_expected_curve(grpo, tmp_path, capsys):
    recipe = tmp_path / "own.yaml"
    recipe.write_text(
        f"points:\n  {ACCURACY}: {{0: [0.2, 0.3], 5: [0, 1], 10: [0.8, 1], 20: [0, 1]}}\n"
        f"  {REWARD}: {{1: [0, 0.04]}}\n"
    )
    assert report.main([str(grpo), "--expect", str(recipe)]) == report.UNMET_EXIT
    found = [
        line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("val-", "crit"))
    ]
    assert [" ".join(words[5:]) for words in found] == [
        "0.2500 met",
        "- missing",
        "0.7500 too low",
        "- not reached",
        "0.0500 too high",
    ]
    recipe.write_text(f"points: {{{ACCURACY}: {{0: [0.2, 0.3]}}}}\n")
    assert report.main([str(grpo), "--expect", str(recipe)]) == 0


def test_table_is_printed_where_matplotlib_is_missing(grpo, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="needs matplotlib"):
        report.main([str(grpo)])
    assert rows(capsys.readouterr().out)["steps"] == ["10"]


def test_several_runs_are_compared_by_their_accuracy(grpo, tmp_path, capsys, monkeypatch):
    import matplotlib.pyplot as plt

    other = write_run(tmp_path / "other", [(0, {ACCURACY: 0.1}), (5, {ACCURACY: 0.2})])
    monkeypatch.setattr(plt, "close", lambda figure: None)
    report.main([str(grpo), str(other), "--png", str(tmp_path / "curves.png")])
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert len(rows(capsys.readouterr().out)["steps"]) == 2
    [axes] = plt.gcf().axes
    assert {line.get_label(): line.get_xydata().tolist() for line in axes.lines} == {
        grpo.name: [[0, 0.25], [10, 0.75]],
        "other": [[0, 0.1], [5, 0.2]],
    }
    monkeypatch.undo()
    plt.close("all")


def test_a_copied_run_has_the_same_events(tmp_path):
    run = save_run(tmp_path / "run")
    events = write._events(run, write._configs(run))
    assert [(event["time"], event["kind"]) for event in events] == [
        ("1970-01-01 00:01:30 UTC", "start"),
        ("1970-01-01 00:01:41 UTC", "resume"),
        ("1970-01-01 00:03:10 UTC", "fault"),
        ("1970-01-01 00:03:20 UTC", "failed"),
    ]
    for path in run.rglob("*"):  # as after a copy
        os.utime(path, (0, 0))
    assert write._events(run, write._configs(run)) == events


def test_the_page_has_the_images_of_the_groups_within_the_limit(tmp_path):
    of, files = batch(1), {0: [b"\x89PNG of one", b"of two"], 1: [], 2: [bytes(5000)]}
    prompts = [
        replace(prompt, images=tuple(SimpleNamespace(content=file) for file in files[group]))
        for group, prompt in enumerate(of.prompts)
    ]
    seeing = replace(of, prompts=prompts)
    stored = columns(1, seeing) | {"images": images_of(seeing, list(range(len(seeing))))}
    log = RolloutLog(tmp_path, FILE_COLUMNS | OF_IMAGES, kind="all", token_texts=lambda: TOKENS)
    log.write(1, lambda: stored)
    log.close()

    def found(limit: int) -> dict[int, list[bytes]]:
        parts = write.PageData()
        write._samples(parts, 0, tmp_path, stored_steps(tmp_path), limit)
        groups = json.loads(gzip.decompress(base64.b64decode(parts.packed["tokens.0.1"])))
        return {each["group"]: [*map(base64.b64decode, each.get("images", []))] for each in groups}

    assert found(2**20) == files
    assert len(found(4000)) < 3  # the third image counts
    assert rollouts.main([str(tmp_path), "--export", str(tmp_path / "out.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    found_files = [[*map(base64.b64decode, row["images"])] for row in rows[::2]]
    assert found_files == [*files.values()] and {row["images"] for row in rows[1::2]} == {None}
