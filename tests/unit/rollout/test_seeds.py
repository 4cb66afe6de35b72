"""Seeds of prompts and samples: stable, distinct and of 63 bits."""

import random
from itertools import product

import pytest

from rl.rollout.sampling import seed_of


def test_seeds_never_change():
    """A resumed run, another process or another version would otherwise sample other responses."""
    assert seed_of(1, "train.3", 17) == 2818165225662528757


def test_seeds_use_all_of_63_bits():
    rng = random.Random(0)
    seeds = [seed_of(rng.randrange(2**31), "train.1", n) for n in range(5000)]
    assert 0 <= min(seeds) and max(seeds) < 2**63
    for bit in range(63):
        assert 0.45 < sum(seed >> bit & 1 for seed in seeds) / len(seeds) < 0.55, bit


def test_no_seed_is_drawn_twice_in_a_run():
    parts = list(product(range(2), ("train", "validation"), range(5), range(40), range(8)))
    seeds = {
        seed_of(seed_of(run, f"{purpose}.{step}", prompt), number)
        for run, purpose, step, prompt, number in parts
    }
    assert len(seeds) == len(parts)


@pytest.mark.parametrize(
    "parts",
    [(2, "train.3", 17), (1, "train.4", 17), (1, "train.3", 18), (1, "train.3"), (17, "train.3", 1)]
    + [(1, "train.31", 7)],
)
def test_every_part_and_its_place_count(parts):
    assert seed_of(*parts) != seed_of(1, "train.3", 17)
