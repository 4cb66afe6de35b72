"""Results of an evaluation beside those of another one in the same directory."""

from pathlib import Path

import pytest

from launch.runs import read_runs
from rl.config.schema import Config
from rl.features.evaluate import results as evaluation
from rl.features.evaluate.results import CheckpointMetrics, Results, set_aside, table
from tests.configs import config_with

MEASURED = {"val-core/toy/acc/mean@1": 0.5}


@pytest.fixture
def config(tmp_path):
    (tmp_path / "a-eval").mkdir()
    return lambda *overrides: config_with(
        "run.mode=evaluate", "data.val=test.jsonl", f"run.dir={tmp_path}/a", *overrides
    )


def start(
    config: Config, *checkpoints: tuple[int, int]
) -> tuple[Path | None, list[CheckpointMetrics], Results]:
    """Begin an evaluation of checkpoints (step, checksum), as rank 0 does."""
    targets = [CheckpointMetrics(f"step_{step:06d}", step, crc32) for step, crc32 in checkpoints]
    place = set_aside(config, [], targets)
    results = Results(config, [])
    return place, [results.of(each) for each in targets], results


def measure(config: Config, name: str, result: CheckpointMetrics, results: Results | None) -> None:
    """Store the samples of a pass and, unless it is killed before, its metrics."""
    path = Path(config.run.dir, "validation", name, f"step_{result.step:06d}.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(name)
    if results is not None:
        result.passes[name] = MEASURED
        results.write()


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("key", ["validation.temperature=0.5", "run.seed=1"])
def test_a_move_that_was_killed_is_continued(config, key, monkeypatch):
    own = config()
    _, found, results = start(own, (2, 7))
    measure(own, "greedy", found[0], results)
    before = files(Path(own.run.dir))
    monkeypatch.setattr(evaluation, "MOVED", ("validation",))  # killed before the other files
    with pytest.raises(FileNotFoundError):
        start(config("validation.temperature=0.5"), (2, 7))
    monkeypatch.undo()
    place, found, _ = start(config(key), (2, 7))
    assert place == Path(f"{own.run.dir}.1") and not found[0].passes
    assert files(place) == sorted([*before, "status.json"])


def test_an_interrupted_evaluation_continues_with_its_results(config):
    own = config()
    _, found, results = start(own, (2, 7), (4, 8))
    measure(own, "greedy", found[0], results)
    measure(own, "sampled", found[0], None)
    place, found, _ = start(own, (2, 7), (4, 8), (6, 9))
    assert place is None and [each.passes for each in found] == [{"greedy": MEASURED}, {}, {}]
    assert len(files(Path(own.run.dir))) == 3


@pytest.mark.parametrize(
    "override, crc32",
    [
        ("data.val=own.jsonl", 7),
        ("validation.temperature=0.5", 7),
        ("model.path=/models/b", 7),
        ("run.seed=0", 8),
    ],
)
def test_another_evaluation_moves_the_earlier_results_and_begins_without_them(config, override, crc32):
    own = config("run.seed=0")
    _, found, results = start(own, (4, 7))
    measure(own, "greedy", found[0], results)
    measure(own, "sampled", found[0], results)
    directory, parts = Path(own.run.dir), ("evaluation.json", "metrics.jsonl")
    (directory / "metrics.jsonl").write_text("{}")
    before = {name: (directory / name).read_text() for name in parts}
    place, found, results = start(config("run.seed=0", override), (4, crc32))
    assert place == directory.with_name("a-eval.1") and found[0].passes == {}
    assert {name: (place / name).read_text() for name in parts} == before
    assert [name for name in files(place) if name not in parts] == [
        "status.json",
        "validation/greedy/step_000004.parquet",
        "validation/sampled/step_000004.parquet",
    ]
    [shown] = read_runs([place])
    assert (shown.state, shown.step) == ("finished", 4)
    assert files(directory) == ["evaluation.json"]
    measure(own, "greedy", found[0], results)
    again, *_ = start(own, (4, 9))
    assert again == directory.with_name("a-eval.2")


def test_samples_of_a_pass_that_was_killed_are_not_those_of_another_evaluation(config):
    own = config()
    _, found, _ = start(own, (4, 7))
    measure(own, "sampled", found[0], None)
    place, *_ = start(config("data.val=own.jsonl"), (4, 7))
    assert place is None and files(Path(own.run.dir)) == ["evaluation.json"]


def test_the_table_has_the_mean_score_beside_the_accuracy():
    passes = {
        "greedy": {
            "val-core/x/acc/mean@1": 0.0,
            "val-aux/x/score/mean@1": 0.5,
            "val-aux/x/turns/mean@1": 2.0,
        },
        "sampled": {"val-core/x/acc/best@4/mean": 0.25, "val-aux/x/score/std@4": 0.1},
    }
    result = CheckpointMetrics("step_000002", 2, 7, passes)
    assert [line.split() for line in table([result]).splitlines()] == [
        ["step", "2"],
        ["val-core/x/acc/mean@1", "0.0000"],
        ["val-aux/x/score/mean@1", "0.5000"],
        ["val-core/x/acc/best@4/mean", "0.2500"],
    ]
