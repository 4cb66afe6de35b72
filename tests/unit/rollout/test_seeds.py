import random
import subprocess
import sys

import pytest

from rl.rollout.sampling import seed_of
from tests.spawn import ROOT


def test_seeds_are_the_same_in_every_process_whatever_its_hash_seed():
    program = (
        "from rl.rollout.sampling import seed_of as s; print(s(1, 'train.3', 17), s(s(1, 'train.3', 17), 2))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={
            "PATH": "",
            "PYTHONPATH": ":".join([str(ROOT), *sys.path]),
            "PYTHONHASHSEED": "4711",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    prompt = seed_of(1, "train.3", 17)
    assert [int(word) for word in done.stdout.split()] == [prompt, seed_of(prompt, 2)]


def test_seeds_do_not_change_between_versions():
    """A resumed run would sample other responses."""
    assert seed_of(1, "train.3", 17) == 2818165225662528757


def test_seeds_fit_into_63_bits_and_use_them_all():
    rng = random.Random(0)
    seeds = [seed_of(rng.randrange(2**31), "train.1", n) for n in range(5000)]
    assert 0 <= min(seeds) and max(seeds) < 2**63
    for bit in range(63):
        share = sum(seed >> bit & 1 for seed in seeds) / len(seeds)
        assert 0.45 < share < 0.55, bit


def test_no_seed_is_drawn_twice_in_a_run():
    seeds = {
        seed_of(seed_of(run, f"{purpose}.{step}", prompt), number)
        for run in range(2)
        for purpose in ("train", "validation")
        for step in range(5)
        for prompt in range(40)
        for number in range(8)
    }
    assert len(seeds) == 2 * 2 * 5 * 40 * 8


@pytest.mark.parametrize(
    "parts",
    [
        (2, "train.3", 17),
        (1, "train.4", 17),
        (1, "train.3", 18),
        (1, "train.3"),
        (17, "train.3", 1),
        (1, "train.31", 7),
    ],
)
def test_every_part_and_its_place_count(parts):
    assert seed_of(*parts) != seed_of(1, "train.3", 17)
