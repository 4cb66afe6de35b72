"""The count of consumed prompts if some steps of a run are not in the file."""

import pytest

from rl.run_directory.consumed import ConsumedLog
from tests.stored_run import save_rollouts
from tools.consumed import count, main


def counted(directory, *steps):
    for step, num_drawn, draws, waiting in steps:
        own = {name: [(d, d) for d in ds] for name, ds in (("consumed", draws), ("waiting", waiting))}
        ConsumedLog(directory).append(step, num_drawn=num_drawn, dropped=[], **own)
    return count(directory)


def test_draws_of_synchronous_steps_are_not_lost(tmp_path):
    """Steps 1 and 3 took two prompts each; steps 2, 4 and 5 are in the file."""
    found = counted(tmp_path, (2, 4, [2, 3], []), (4, 8, [6], [7]), (5, 8, [7], []))
    assert found.is_exact and found.consumed == 4


def test_a_lost_draw_is_found_after_synchronous_steps(tmp_path):
    found = counted(tmp_path, (2, 6, [2, 5], [3]), (3, 6, [3], []))
    assert found.lost == [4] and not found.doubled


def test_a_synchronous_run_is_counted_from_its_rollouts(tmp_path, capsys):
    with pytest.raises(
        SystemExit, match="holds neither consumed.jsonl.* nor rollouts; name a run with logging"
    ):
        main([str(tmp_path)])
    save_rollouts(tmp_path, 2, agents=True)
    assert main([str(tmp_path)]) == 0
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert head.endswith("rollouts of 2 steps have 6 draws of 3 prompts, 3 drawn more than once")
    assert [row.split()[:4] for row in rows] == [["2", index, "1,", "2"] for index in "789"]
