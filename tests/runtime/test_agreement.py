import json

import pytest

from rl.options import ConfigError
from tests.ranks import run_ranks

PROGRAM = """
    import dataclasses, json
    import torch.distributed as dist

    from rl.config import Config
    from rl.options import ConfigError
    from rl.runtime.agreement import agree_on_config, fail_together

    dist.init_process_group("gloo")
    rank, said = dist.get_rank(), {}

    def outcome(name, action):
        try:
            said[name] = action()
        except ConfigError as error:
            said[name] = f"ConfigError: {error}"

    def read(*failing):
        with fail_together():
            if rank in failing:
                raise ValueError(f"no file on host {rank}")
        return "went on"

    outcome("nobody", lambda: read())
    outcome("first", lambda: read(0))
    outcome("second", lambda: read(1))
    outcome("both", lambda: read(0, 1))

    def agree(change):
        config = Config()
        if rank == 1:
            change(config)
        agree_on_config(config)
        return "agreed"

    outcome("same", lambda: agree(lambda config: None))
    outcome("seed", lambda: agree(lambda config: setattr(config.run, "seed", 7)))
    outcome("nested", lambda: agree(lambda config: setattr(config.training.optimizer, "lr", 0.5)))
    outcome("list", lambda: agree(lambda config: config.data.train.append("other.parquet")))
    outcome("type", lambda: agree(lambda config: setattr(config.training, "tp", True)))
    outcome("after", lambda: agree(lambda config: None))
    dist.destroy_process_group()
    print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said():
    """What each of two ranks met, by case."""
    return [json.loads(out) for out in run_ranks(2, PROGRAM)]


def test_ranks_go_on_if_none_fails(said):
    assert [rank["nobody"] for rank in said] == ["went on"] * 2


@pytest.mark.parametrize(("case", "culprit"), [("first", 0), ("second", 1)])
def test_every_rank_fails_if_one_does_and_the_error_names_it(said, case, culprit):
    assert [rank[case] for rank in said] == [f"ConfigError: no file on host {culprit} (on rank {culprit})"] * 2


def test_an_error_of_all_ranks_is_said_once_and_names_none(said):
    assert [rank["both"] for rank in said] == ["ConfigError: no file on host 0"] * 2


def test_equal_configs_agree_also_after_others_did_not(said):
    assert [rank[case] for rank in said for case in ("same", "after")] == ["agreed"] * 4


@pytest.mark.parametrize(
    ("case", "key"),
    [("seed", "run.seed"), ("nested", "training.optimizer.lr"), ("list", "data.train"), ("type", "training.tp")],
)
def test_a_config_that_differs_is_named_by_key_and_rank_on_every_rank(said, case, key):
    expected = f"ConfigError: {key} differs between ranks: rank 1 and rank 0 were started differently."
    assert [rank[case] for rank in said] == [expected] * 2


def test_the_shared_failure_is_one_that_the_entry_point_says_in_a_sentence():
    assert issubclass(ConfigError, ValueError)
