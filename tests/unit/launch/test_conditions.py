"""Conditions of sweep files, for example `training.tp > 1`: their meaning, and that they only compare."""

import pytest

from launch.conditions import holds
from rl.config.options import ConfigError
from tests.tables import cells

VALUES = {"training.tp": 2, "training.pp": 4, "training.optimizer.lr": 1e-6}
VALUES |= {"algorithm": "grpo", "training.shared_prefix": True, "x": 0}


@pytest.mark.parametrize(
    "condition, expected",
    [
        ("training.tp * training.pp > 8", False),
        ("training.tp * training.pp >= 8", True),
        ("1 < training.tp <= 2", True),
        ("1 < training.pp < 3", False),
        ("algorithm == 'grpo' and training.tp == 2", True),
        ("algorithm in ['ppo', 'dapo'] or not training.shared_prefix", False),
        ("training.shared_prefix == true", True),
        ("training.optimizer.lr < 2e-6", True),
        ("-training.tp + 3 == training.pp % 3", True),
        ("x == 0 or 1 / x > 0", True),  # what follows a decided part is not looked at
        ("x != 0 and 1 / x > 0", False),
        ("algorithm not in ['grpo']", False),
    ],
)
def test_a_condition_is_read_as_python_reads_it(condition, expected):
    assert holds(condition, VALUES) is expected


@pytest.mark.parametrize(
    "code",
    cells("""
        __import__('os').system('true') ;; ().__class__ ;; training.tp.__class__ ;; [x for x in [1]] ;;
        (lambda: 1)() ;; algorithm[0] == 'g' ;; f'{algorithm}' ;; {'a': 1} ;; b'bytes' == 1 ;;
        9 ** 9 ** 9 > 1 ;; 1 if x else 2 ;; (y := 2) > 1
        """),
)
def test_anything_that_could_run_is_refused(code):
    with pytest.raises(ConfigError):
        holds(code, VALUES)


def test_unknown_keys_and_undecidable_conditions_are_refused():
    for condition, message in (
        ("training.tq > 1", r"did you mean training\.tp\?"),
        ("algorithm > 1", "cannot be decided"),
        ("1 / x > 0", "cannot be decided"),
    ):
        with pytest.raises(ConfigError, match=message):
            holds(condition, VALUES)
