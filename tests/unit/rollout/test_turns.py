"""A response of one turn: one request, then the sample."""

import numpy as np
import pytest

from rl.rollout.turns import Completion, Request, SingleTurn


def test_a_single_turn_asks_once_and_keeps_the_completion():
    request = Request([1, 2], seed=7, max_tokens=5)
    response = SingleTurn(3, 1, request)
    assert response.next_request() is request
    logprobs = np.array([-1.0, -2.0], np.float32)
    response.receive(Completion(np.array([4, 5], np.int32), logprobs, truncated=True, weights_version=9))
    assert response.next_request() is None
    sample = response.sample()
    assert (sample.prompt, sample.number, sample.truncated) == (3, 1, True)
    assert sample.token_ids.tolist() == [4, 5] and sample.logprobs is logprobs
    assert sample.mask.tolist() == [1, 1] and sample.weight_versions.tolist() == [9, 9]
    assert sample.mask.dtype == sample.weight_versions.dtype == np.int32


def test_a_response_without_a_completion_has_no_sample():
    with pytest.raises(AssertionError, match="not complete"):
        SingleTurn(0, 0, Request([1], seed=1, max_tokens=1)).sample()
