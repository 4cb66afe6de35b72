"""Images of the rows of micro-batches."""

from types import SimpleNamespace

import numpy as np
import pytest

import rl.training  # noqa: F401  # before Megatron
from rl.vision.tower import WrongImages, _images_of


def test_samples_that_share_a_prompt_share_its_images():
    ids = np.arange(4, dtype=np.int32)
    batch = SimpleNamespace(prompt_ids=[ids, ids], held={})
    row = SimpleNamespace(samples=[0, 1], starts=np.array([[0, 0], [4, 6]]))
    images = [(SimpleNamespace(offset=1, num_tokens=2, digest=digest, pixels=None),) for digest in (5, 6)]
    assert _images_of(batch, row, [images[0]] * 2).places.tolist() == [1, 2]
    with pytest.raises(WrongImages, match="set training.shared_prefix=false"):
        _images_of(batch, row, images)
