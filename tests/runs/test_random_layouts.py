"""Whole runs in random layouts learn the same as one rank with one micro-batch.

tests/layout_draws.py draws layout, algorithm and samples; some responses are empty. A draw runs again by
its number: pytest --slow tests/runs/test_random_layouts.py -k "[17]". Each also runs with the defaults and
branches of CUDA (tests/rehearsal/as_on_cuda.py), and learns the same as the rank without them.
"""

import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests import bounds
from tests.layout_draws import (
    LAYERS,
    ONE_RANK,
    STEPS,
    WIDTH,
    Draw,
    draw,
    save_data,
    save_models,
    save_samples,
)
from tests.records import MACHINE, records
from tests.spawn import run_ranks
from tests.toy import ON_CUDA, TRAIN

SPLIT = re.compile(f"{MACHINE.pattern}|global_seqlen/|training/(imbalance|micro_batch|empty)")
"""Metrics that depend on how a step is divided."""
TERM = 8 * bounds.of_logits(LAYERS, WIDTH)  # means over tokens of log-probs of size 8 and their ratios
GRADIENT = bounds.of_gradient(LAYERS, 512)  # a weight's gradient is a sum over the tokens of a step
NUM_DRAWS = 150
IN_SUITE = (0, 1, 2, 6, 7, 9)
"""Draws that run without --slow: tp, pp, ep, cp and dp, dense and with experts, six algorithms."""
IN_SUITE_ON_CUDA = (2,)
TIMEOUT = 200  # seconds until a run counts as hanging; it takes two on a quiet machine


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("layouts") / "models"
    save_models(directory)
    return directory


def assert_learns_as_one_rank(drawn: Draw, directory: Path, program: Path = TRAIN) -> None:
    where = f"{drawn.world_size} ranks, {drawn.layout}, {drawn.overrides}"
    found = {}
    for size, layout, own in ((1, ONE_RANK, TRAIN), (drawn.world_size, drawn.layout, program)):
        run = directory / f"run{size}"
        run_ranks(size, own, *drawn.command(layout, run), timeout=TIMEOUT)
        found[size] = [{n: v for n, v in step.items() if not SPLIT.match(n)} for step in records(run)]
    reference, steps = found[1], found[drawn.world_size]
    assert len(steps) == len(reference) == STEPS
    for step, expected in zip(steps, reference):
        assert step.keys() == expected.keys(), where
        for name in expected:
            bound = GRADIENT if name.endswith("grad_norm") else TERM
            same = step[name] == expected[name]  # null stands for a number that is not finite
            same = same or math.isclose(step[name], expected[name], rel_tol=bound, abs_tol=bound)
            assert same, f"{name} {step[name]} instead of {expected[name]}: {where}"


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[] if n in IN_SUITE else pytest.mark.slow) for n in range(NUM_DRAWS)]
)
def test_learning_does_not_depend_on_the_layout(number, models, tmp_path):
    assert_learns_as_one_rank(draw(number, models, tmp_path), tmp_path)


@pytest.mark.parametrize(
    "number",
    [pytest.param(n, marks=[] if n in IN_SUITE_ON_CUDA else pytest.mark.slow) for n in range(NUM_DRAWS)],
)
def test_learning_is_the_same_with_cudas_defaults(number, models, tmp_path):
    drawn = on_cuda(draw(number, models, tmp_path))
    assert_learns_as_one_rank(drawn, tmp_path, ON_CUDA)


def on_cuda(drawn: Draw) -> Draw:
    """Return the draw as a GPU accepts it: context parallelism requires 16 bits there."""
    layout = drawn.layout | {"overlap_gradients": "auto", "cp": 1}
    world_size = drawn.world_size // drawn.layout["cp"]
    if world_size % (layout["pp"] * layout.get("ep", 1) * (layout.get("etp") or 1)):
        layout |= {"ep": 1, "etp": 0}
    return replace(drawn, world_size=world_size, layout=layout)


def test_a_dense_critic_learns_beside_a_mixture(models, tmp_path):
    rng, keys = random.Random(0), ["algorithm=ppo", f"critic.path={models}/dense"]
    save_data(tmp_path, rng, 8)
    save_samples(tmp_path, rng, 4, 2, has_rows=False)
    files = [f"model.path={models}/mixture", f"data.train=[{tmp_path}/data.parquet]"]
    sizes = ["data.prompts_per_step=8", "rollout.samples_per_prompt=2", "rollout.max_response_tokens=24"]
    drawn = Draw(2, {"ep": 2}, [*keys, *files, *sizes, f"run.rollouts={tmp_path}"])
    assert_learns_as_one_rank(drawn, tmp_path)
