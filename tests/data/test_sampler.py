import numpy as np
import pytest

from rl.data.sampler import PromptSampler


def sampler(num_prompts: int = 10, *, seed: int = 3, shuffle: bool = True) -> PromptSampler:
    return PromptSampler(num_prompts, seed=seed, shuffle=shuffle)


def test_every_epoch_draws_every_prompt_once_whatever_the_batch_size():
    drawn = sampler()
    order = np.concatenate([drawn.draw(3) for _ in range(10)])
    assert order.dtype == np.int64
    for epoch in order.reshape(3, 10):
        assert sorted(epoch) == list(range(10))


def test_epochs_differ_in_their_order():
    first, second = sampler(100).draw(200).reshape(2, 100)
    assert (first != second).any()


def test_the_order_does_not_depend_on_how_it_is_cut_into_draws():
    whole = sampler().draw(60)
    parts = sampler()
    assert np.array_equal(whole, np.concatenate([parts.draw(n) for n in (0, 1, 9, 10, 25, 15)]))


def test_a_draw_may_exceed_the_number_of_prompts():
    drawn = sampler(4).draw(11)
    assert np.bincount(drawn, minlength=4).tolist() in ([3, 3, 3, 2], [3, 3, 2, 3], [3, 2, 3, 3], [2, 3, 3, 3])


def test_the_same_seed_gives_the_same_order_and_another_seed_another():
    assert np.array_equal(sampler(100).draw(250), sampler(100).draw(250))
    assert not np.array_equal(sampler(100, seed=3).draw(100), sampler(100, seed=4).draw(100))


def test_epoch_1_of_a_seed_is_not_epoch_0_of_the_next_seed():
    assert not np.array_equal(sampler(100, seed=3).draw(200)[100:], sampler(100, seed=4).draw(100))


def test_without_shuffling_prompts_come_in_file_order():
    assert sampler(3, shuffle=False).draw(7).tolist() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("num_drawn", [0, 7, 10, 20, 33])
def test_a_sampler_with_restored_state_continues_where_the_saved_one_stood(num_drawn):
    saved = sampler()
    saved.draw(num_drawn)
    restored = sampler()
    restored.draw(5)
    restored.load_state_dict(saved.state_dict())
    assert np.array_equal(restored.draw(25), saved.draw(25))


def test_the_state_is_the_epoch_and_the_position_in_it():
    drawn = sampler()
    drawn.draw(23)
    assert drawn.state_dict() == {"epoch": 2, "position": 3}
    assert drawn.epoch == 2
    drawn.draw(7)
    assert drawn.state_dict() == {"epoch": 3, "position": 0}


def test_a_cursor_beyond_the_data_is_refused():
    with pytest.raises(ValueError, match="stands at prompt 10 of epoch 0, but the training data has 10 prompts"):
        sampler().load_state_dict({"epoch": 0, "position": 10})


def test_no_prompts_or_a_negative_seed_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        sampler(0)
    with pytest.raises(ValueError, match="run.seed is -1"):
        sampler(seed=-1)
