"""GRPO learns the quickstart's task with context parallel ranks and with bfloat16 moments as without."""

from pathlib import Path

import pytest

from tests.records import records
from tests.spawn import ROOT
from tests.toy import train
from tools.make_toy import make_toy

CONFIGS, STEPS = ROOT / "configs", 50
ACCURACY = "val-core/addition/acc/mean@1"
VARIANTS = {"cp": ("training.cp=2",), "bfloat16": ("training.optimizer.moments=bfloat16",)}
NOISE = 4 * (2 * 0.9 * 0.1 / 500) ** 0.5
"""Four standard deviations of the difference of two accuracies of 0.9, each of 500 problems."""


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """Return a directory with the toy and a model that is right about half of the time."""
    directory = tmp_path_factory.mktemp("learning")
    toy = make_toy(directory / "toy")
    own = (f"model.path={toy}/model", f"data.train=[{toy}/train.parquet]")
    train(2, CONFIGS / "quickstart_sft.yaml", *own, run=directory / "sft", timeout=900)
    return directory


def accuracies(directory: Path, name: str, *overrides: str) -> list[float]:
    """Return the held-out accuracies of a run, first before training and last at its end."""
    toy, run = directory / "toy", directory / name
    data = (f"data.train=[{toy}/train.parquet]", f"data.val=[{toy}/test.parquet]")
    own = (f"model.path={directory}/sft/hf", f"run.max_steps={STEPS}", "checkpoint.every=0", *overrides)
    train(2, CONFIGS / "quickstart.yaml", *data, *own, run=run, timeout=2400)
    found = [record[ACCURACY] for record in records(run) if ACCURACY in record]
    print(name, found)
    return found


@pytest.fixture(scope="module")
def plain(task) -> list[float]:
    return accuracies(task, "plain")


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_learn_as_the_plain_run(task, plain, variant):
    found = accuracies(task, variant, *VARIANTS[variant])
    assert found[0] == plain[0] and plain[-1] > plain[0] + 0.2
    assert abs(found[-1] - plain[-1]) <= NOISE
