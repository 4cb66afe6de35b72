"""The section trace of the configuration."""

import pytest

from rl.config.options import ConfigError
from rl.config.trace import Trace, check_trace


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (dict(steps=[3, -1]), "trace.steps holds -1"),
        (dict(steps=[3, 11]), "run.max_steps=10; choose an earlier step"),
        (dict(steps=[1], ranks=[-2]), "trace.ranks holds -2"),
        (dict(steps=[1], torch_profiler=["update", "step"]), "keep only step, or only phases"),
    ],
)
def test_steps_and_ranks_that_do_not_exist_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        check_trace(Trace(**keys), max_steps=10)


def test_steps_of_the_run_pass():
    check_trace(Trace(steps=[0, 10], torch_profiler=["update"]), max_steps=10)
