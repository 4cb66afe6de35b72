"""Images of the rows of micro-batches."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import rl.training  # noqa: F401  # before Megatron
from rl.data.batch import data_responses
from rl.data.held import PLACES
from rl.data.prompts import Prompt
from rl.features.vision.tower import VisionTower, WrongImages, _images_of
from rl.models.tower_cost import TowerCost
from rl.training.micro_batch_plans import Cost, Workload


def test_samples_that_share_a_prompt_share_its_images():
    ids = np.arange(4, dtype=np.int32)
    batch = SimpleNamespace(prompt_ids=[ids, ids], held={})
    row = SimpleNamespace(samples=[0, 1], starts=np.array([[0, 0], [4, 6]]))
    images = [(SimpleNamespace(offset=1, num_tokens=2, digest=digest, pixels=None),) for digest in (5, 6)]
    assert _images_of(batch, row, [images[0]] * 2).places.tolist() == [1, 2]
    with pytest.raises(WrongImages, match="set training.shared_prefix=false"):
        _images_of(batch, row, images)


def test_texts_from_the_data_have_no_images():
    text = replace(Prompt.of_tokens(np.arange(3, dtype=np.int32)), response_ids=np.arange(2, dtype=np.int32))
    batch, row = data_responses([text]), SimpleNamespace(samples=[0])
    assert VisionTower(learns=False).row(batch, row, is_reference=False) is row
    cost = Cost(tower=TowerCost(1, 1, 1, (1, 1), 4, 4))
    assert Workload.of_batch(batch, cost=cost, shared_prefix=False).own_tokens


def test_lost_images_of_a_trajectory_are_noticed():
    """Environments may give another prompt than the data's; only the data's has known images."""
    image, ids = SimpleNamespace(offset=1, height=28, width=28, digest=5), np.arange(4, dtype=np.int32)
    prompt = replace(Prompt.of_tokens(ids), images=(image,))
    tower = VisionTower(learns=False, given="any format")

    def seen(prompt_ids, *places):
        held = {PLACES: SimpleNamespace(local={0: np.array(places, np.int64).reshape(-1, 4)})}
        batch = SimpleNamespace(prompts=[prompt], groups=[0], prompt_ids=[prompt_ids], held=held)
        return tower._seen(batch, 0)

    assert seen(ids, (1, 28, 28, 5)) == (image,)
    assert seen(ids[:3]) == ()
    for places in ((), ((1, 28, 28, 6),), ((1, 28, 28, 5), (2, 28, 28, 5))):
        with pytest.raises(WrongImages, match="other images than its prompt has"):
            seen(ids, *places)
