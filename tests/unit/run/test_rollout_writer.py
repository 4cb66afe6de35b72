"""Batches as stored rollouts, and back; the files that a run leaves and that a resumed run replaces."""

from dataclasses import fields, replace

import datasets
import pandas
import pyarrow.parquet
import pytest
import torch

from rl.config.options import ConfigError
from rl.config.schema import Config, Run
from rl.features.stored_runs.batches import StoredBatches
from rl.features.stored_runs.score_only import score_only
from rl.rollout.samples import SOURCES
from rl.run.rollout_writer import FILE_COLUMNS
from rl.run_directory.rollout_files import GIVEN_BY, RolloutLog, read, remove_after, stored_steps
from tests.stored_run import TOKENS, batch, columns, save_rollouts


def assert_same(found, expected):
    for field in fields(expected):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if field.name == "prompts":
            strip = [(p.index, p.text, p.data_source, p.ground_truth, p.extra_info) for p in one]
            assert strip == [(p.index, p.text, p.data_source, p.ground_truth, p.extra_info) for p in other]
        elif isinstance(other, torch.Tensor):
            assert torch.equal(one, other), field.name
        elif field.name in ("score_details", "extra"):
            assert {name: v.tolist() for name, v in one.items()} == {n: v.tolist() for n, v in other.items()}
        elif field.name.endswith("_ids"):
            assert [ids.tolist() for ids in one] == [ids.tolist() for ids in other]
        else:
            assert one == other, field.name


@pytest.mark.parametrize("agents", [False, True])
def test_a_stored_batch_returns_as_it_was_collected(tmp_path, agents):
    original = batch(agents=agents)
    if agents:  # the first trajectory has two rows
        original = replace(original, trajectories=torch.tensor([0, 0, 1, 2, 3, 4]))
    log = RolloutLog(tmp_path, FILE_COLUMNS, kind="all", token_texts=lambda: TOKENS)
    log.write(1, lambda: columns(1, original))
    log.write(2, lambda: columns(2, original.keep_groups([])))  # dapo may find no group to learn from
    log.close()
    config = Config(run=Run(mode="train_only", rollouts=str(tmp_path), max_steps=2))
    assert_same(StoredBatches(config).batch(1), original)
    assert len(StoredBatches(config).batch(2)) == 0
    rows = read(stored_steps(tmp_path)[1]).to_pylist()
    places = [(row["group"], row["sample"], row["row"]) for row in rows[:3]]
    assert places == [(0, 0, 0), (0, 0, 1) if agents else (0, 1, 0), (1, 0, 0)]
    assert rows[0]["response"] and "<end>" not in rows[0]["response"]
    if agents:
        assert [message["role"] for message in rows[0]["messages"]] == [
            "prompt",
            "assistant",
            "tool",
            "assistant",
        ]
    config = replace(config, run=replace(config.run, max_steps=3))
    with pytest.raises(
        ConfigError, match="none of step 3 of run.max_steps=3; set run.max_steps to at most 2"
    ):
        StoredBatches(config)


def test_stored_token_ids_that_are_no_integers_are_refused(tmp_path):
    save_rollouts(tmp_path, 1)
    path = stored_steps(tmp_path)[1]
    table = read(path)
    place = table.column_names.index("response_ids")
    floats = table["response_ids"].cast(pyarrow.list_(pyarrow.float64()))
    pyarrow.parquet.write_table(table.set_column(place, "response_ids", floats), path)
    config = Config(run=Run(mode="train_only", rollouts=str(tmp_path), max_steps=1))
    with pytest.raises(ConfigError, match="row 0: response_ids has values of type float64"):
        StoredBatches(config).batch(1)


@pytest.mark.parametrize("reads", [StoredBatches, score_only])
def test_a_run_without_a_directory_is_not_called_one_without_rollouts(tmp_path, reads):
    config = Config(run=Run(rollouts=str(tmp_path / "absent")))
    with pytest.raises(ConfigError, match="there is no directory run.rollouts=.*absent; lockstep status"):
        reads(config)


def test_readers_and_writers_name_the_same_sources():
    assert GIVEN_BY == SOURCES


def test_pandas_and_datasets_read_all_steps(tmp_path):
    save_rollouts(tmp_path, 2)
    frame = pandas.read_parquet(tmp_path / "rollouts")
    assert frame.step.tolist() == [1] * 6 + [2] * 6 and list(frame.columns) == list(FILE_COLUMNS)
    files = str(tmp_path / "rollouts" / "*.parquet")
    rows = datasets.load_dataset(
        "parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache")
    )
    assert len(rows) == 12 and rows[0]["response_ids"] == frame.response_ids[0].tolist()


def test_a_resumed_run_removes_later_and_partial_files(tmp_path):
    save_rollouts(tmp_path, 3)
    (tmp_path / "rollouts" / "step_000004.parquet.partial").write_text("")
    remove_after(tmp_path, 2)
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == [
        "step_000001.parquet",
        "step_000002.parquet",
    ]


def test_a_failed_write_is_raised_by_the_next_call(tmp_path):
    log = RolloutLog(tmp_path, FILE_COLUMNS, kind="all", token_texts=lambda: TOKENS)
    log.write(1, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        log.flush()
    assert stored_steps(tmp_path) == {}
