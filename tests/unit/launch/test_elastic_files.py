"""The files by which the nodes of an elastic run agree."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from launch import elastic
from launch.elastic_files import Board, ElasticGeneration, Lease, exit_code
from launch.slurm import GIVEN
from rl.config.checks import check
from rl.config.options import ConfigError
from rl.config.schema import load_config
from rl.dry_run.estimate import estimate
from rl.dry_run.hardware import Hardware
from rl.dry_run.layouts import fastest, find_layout
from tests.spawn import ROOT

NODE1, NODE2 = (Lease(f"node{n}-1", f"node{n}", f"node{n}", 2, "7", "c0", n) for n in (1, 2))


def test_the_ranks_do_not_get_the_jobs_environment(monkeypatch):
    """It may hold tokens; only the agent submits jobs."""
    monkeypatch.setenv(GIVEN, "given")
    assert GIVEN not in elastic._environment(ElasticGeneration(1, [NODE1]), 0, 0, 0)


def test_a_node_lives_while_its_lease_changes(tmp_path):
    board, leases = Board(str(tmp_path), lost_s=0.5), (replace(NODE1), replace(NODE2))
    for lease in leases:
        Board(str(tmp_path), lost_s=0.5).renew(lease)
    assert board.alive() == []  # both may have been left by an earlier start
    for lease in leases:
        board.renew(lease)
    assert [lease.node for lease in board.alive()] == ["node1", "node2"]
    while len(board.alive()) == 2:  # node2 is not renewed any more
        board.renew(leases[0])
        time.sleep(0.05)
    assert [lease.node for lease in board.alive()] == ["node1"]
    again = replace(NODE1, key="node1-9", started=9)  # an agent that was started again on node1
    for _ in range(2):
        board.renew(again)
        found = board.alive()
    assert [lease.key for lease in found] == ["node1-9"]


def test_of_many_proposals_for_a_number_one_holds(tmp_path):
    boards = [Board(str(tmp_path), lost_s=9) for _ in range(8)]
    own = [ElasticGeneration(1, [replace(NODE1, ranks=n)], ["training.tp=1"]) for n in range(8)]
    threads = [
        threading.Thread(target=b.propose, args=(g, f"a{g.members[0].ranks}")) for b, g in zip(boards, own)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [board.newest(None) for board in boards]
    assert found[0] in own and all(each == found[0] for each in found)
    boards[0].propose(ElasticGeneration(2, code=0), "a0")
    assert boards[1].newest(found[1]) == ElasticGeneration(2, code=0) == Board(str(tmp_path), 9).newest(None)


def test_damaged_files_count_as_no_lease_and_no_members(tmp_path):
    board, generation = Board(str(tmp_path), lost_s=9), ElasticGeneration(1, [NODE1], ["training.tp=1"])
    board.propose(generation, "a0")
    for text in ("", "[]", "{}", '{"number": 2, "members": [{}]}', '{"number": 2, "members": [], "odd": 1}'):
        (board.directory / "generation-000002.json").write_text(text)
        (board.directory / "node1-1.json").write_text(text)
        found = board.newest(None)
        assert (found.number, found.members, found.reason) == (2, [], "its record is damaged")
        assert board.newest(generation) == found and board.alive() == []
    board.propose(generation := ElasticGeneration(3, [NODE1]), "a0")
    assert board.newest(found) == generation == board.newest(None)


@pytest.mark.parametrize(
    "codes, expected", [([0, 0], 0), ([75, 75], 75), ([0, 75], 75), ([1, 75], 1), ([1, 2], 2), ([-9, 1], 137)]
)
def test_the_code_of_a_node_is_that_of_its_cause(codes, expected):
    assert exit_code(codes) == expected


BAD = {
    "run.elastic.max_nodes=1": "run.elastic.max_nodes=1 is below run.elastic.min_nodes=2; set it to 2",
    "checkpoint.every=0": "checkpoint.every=0 leaves no checkpoint from which the other nodes continue",
    "run.elastic.layouts=[{nodes: 5}]": "run.elastic.layouts has nodes=5, but each layout needs a number",
    "run.elastic.layouts=[{nodes: true}]": "run.elastic.layouts has nodes=true, but each layout needs",
    "run.elastic.layouts=[{nodes: 3}]": "run.elastic.min_nodes=2, but the smallest of run.elastic.layouts",
    "run.elastic.lost_s=4": "run.elastic.lost_s=4, but a node that lives is seen once a second",
    "run.elastic.layouts=[{nodes: 2, data.shuffle: false}]": "run.elastic.layouts sets data.shuffle, but",
    "run.elastic.min_nodes=0": "run.elastic.max_nodes=4 has no effect",
    "run.limits.jobs=1": "run.limits.jobs is 1, but must be at least 2",
    "run.limits.node_hours=-1": "run.limits.node_hours is -1.0, but must be 0 or more",
    "run.limits.partitions=['a,b']": 'run.limits.partitions holds "a,b", but each entry is the name of one',
    "run.limits.not_before=tomorrow": 'run.limits.not_before="tomorrow" is not a local time; write it as',
    "run.limits.not_before=2026-12-24T18:00+01:00": "is not a local time; write it as 2026-12-24T18:00",
}
ELASTIC = ("run.elastic.min_nodes=2", "run.elastic.max_nodes=4", "checkpoint.every=1")


@pytest.mark.parametrize("override", BAD)
def test_bad_input_is_refused(override):
    config = load_config(str(ROOT / "configs" / "quickstart.yaml"), [*ELASTIC, override])
    with pytest.raises(ConfigError, match="run.elastic|run.limits|checkpoint.every") as error:
        check(config)
    assert BAD[override] in str(error.value)


def test_the_dry_run_finds_a_layout_for_the_ranks_that_are_left():
    path = str(ROOT / "configs" / "qwen2.5-7b_gsm8k_grpo_8gpu.yaml")
    wide = load_config(path, ["training.tp=8", "rollout.tp=8"])
    found = find_layout(wide, 4, Hardware(ranks_per_node=4))
    assert found is not None and 4 % (found["training.tp"] * found["training.pp"]) == 0
    assert find_layout(load_config(path), 8, Hardware()) == {}  # as it is
    assert find_layout(wide, 4, Hardware(ranks_per_node=4, gpu_memory_gib=15.0)) is None
    assert find_layout(wide, 1, Hardware(ranks_per_node=1)) is None  # 7B does not fit


def test_a_plan_lists_faster_configurations_that_fit():
    path = str(ROOT / "configs" / "qwen2.5-7b_gsm8k_grpo_8gpu.yaml")
    before = estimate(load_config(path, ["rollout.tp=4"]), 8, Hardware(), plan=False)
    found = fastest(before, tries=30)
    seconds = [change.estimate.step_seconds for change in found]
    assert seconds == sorted(seconds) and seconds[0] < before.step_seconds and len(found) == 5
    assert all(not change.estimate.problems and check(change.estimate.config) == [] for change in found)


def test_the_first_agent_makes_a_run_directory_that_others_cannot_enter(tmp_path):
    Board(str(tmp_path / "run"), lost_s=5.0)
    assert [oct(path.stat().st_mode & 0o007) for path in tmp_path.rglob("*")] == ["0o0", "0o0"]


@pytest.mark.parametrize(
    "words, name, message",
    [
        (["--ranks=1"], "MAX_ATTEMPTS", "MAX_ATTEMPTS='x' must be a number"),
        (["--ranks=1", "--node=a/b"], "NONE", "--node=a/b"),
    ],
)
def test_an_agent_refuses_at_its_start_what_a_death_would_need(words, name, message):
    command = [sys.executable, "-m", "launch.elastic", "--config=none.yaml", "--nodes=1", *words]
    done = subprocess.run(command, env=os.environ | {name: "x"}, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr
