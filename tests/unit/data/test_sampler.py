import json

import numpy as np
import pytest

from rl.data.curriculum import CurriculumSampler, load_order
from rl.data.prompts import Prompt
from rl.data.sampler import MixedSampler, PromptSampler


def sampler(num_prompts: int = 10, *, seed: int = 3, shuffle: bool = True) -> PromptSampler:
    return PromptSampler(num_prompts, seed=seed, shuffle=shuffle)


def test_every_epoch_draws_every_prompt_once():
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
    assert np.bincount(drawn, minlength=4).tolist() in (
        [3, 3, 3, 2],
        [3, 3, 2, 3],
        [3, 2, 3, 3],
        [2, 3, 3, 3],
    )


def test_the_order_depends_on_the_seed():
    assert np.array_equal(sampler(100).draw(250), sampler(100).draw(250))
    assert not np.array_equal(sampler(100, seed=3).draw(100), sampler(100, seed=4).draw(100))


def test_epoch_1_of_a_seed_is_not_epoch_0_of_the_next_seed():
    assert not np.array_equal(sampler(100, seed=3).draw(200)[100:], sampler(100, seed=4).draw(100))


def test_without_shuffling_prompts_come_in_file_order():
    assert sampler(3, shuffle=False).draw(7).tolist() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("num_drawn", [0, 7, 10, 20, 33])
def test_a_restored_sampler_continues(num_drawn):
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
    with pytest.raises(
        ValueError, match="stands at prompt 10 of epoch 0, but the training data has 10 prompts"
    ):
        sampler().load_state_dict({"epoch": 0, "position": 10})


def test_no_prompts_or_a_negative_seed_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        sampler(0)
    with pytest.raises(ValueError, match="run.seed=-1"):
        sampler(seed=-1)


def test_a_cursor_of_another_kind_of_sampler_is_refused():
    with pytest.raises(ValueError, match="had data.train_weights. Resume with them"):
        sampler().load_state_dict(mixed().state_dict())
    with pytest.raises(ValueError, match="had no data.train_weights. Resume without them"):
        mixed().load_state_dict(sampler().state_dict())


# ---- weighted sources ----

SOURCES = [np.arange(0, 10), np.arange(100, 107), np.arange(200, 400)]


def mixed(weights=(0.5, 0.3, 0.2), *, sources=SOURCES, seed=3, shuffle=True) -> MixedSampler:
    return MixedSampler(sources, list(weights), seed=seed, shuffle=shuffle)


def source_of(drawn):
    return np.digitize(drawn, [100, 200])


def test_a_mixture_does_not_depend_on_how_it_is_cut_into_draws():
    whole = mixed().draw(10_000)
    assert whole.dtype == np.int64
    parts = mixed()
    assert np.array_equal(whole[:8], np.concatenate([parts.draw(3), parts.draw(5)]))
    # Across the edges of the blocks in which the sources are picked, and exactly on them.
    cuts = [4080, 8, 8, 0, 1, 4087, 8, 1800]
    assert np.array_equal(whole[8:], np.concatenate([parts.draw(n) for n in cuts]))


def test_sources_come_with_the_share_of_their_weight():
    weights = np.array([5.0, 3.0, 2.0])  # of any sum
    shares = np.bincount(source_of(mixed(weights).draw(20_000)), minlength=3) / 20_000
    deviation = np.sqrt(weights / 10 * (1 - weights / 10) / 20_000)
    assert (np.abs(shares - weights / 10) < 4 * deviation).all(), shares
    # And nowhere in the run another one: the picks are independent of each other.
    picks = source_of(mixed(weights).draw(20_000)) == 0
    assert abs(np.corrcoef(picks[:-1], picks[1:])[0, 1]) < 4 / np.sqrt(20_000)


def test_each_source_of_a_mixture_has_its_own_epochs():
    drawn = mixed().draw(3000)
    for i, source in enumerate(SOURCES):
        own = drawn[source_of(drawn) == i]
        epochs = own[: len(own) // len(source) * len(source)].reshape(-1, len(source))
        assert len(epochs) > 1
        assert (np.sort(epochs, axis=1) == source).all()
        assert not np.array_equal(epochs[0], epochs[1])


def test_sources_of_one_length_are_walked_in_different_orders():
    drawn = mixed((1, 1), sources=[np.arange(50), np.arange(100, 150)]).draw(400)
    first, second = drawn[drawn < 100][:50], drawn[drawn >= 100][:50] - 100
    assert not np.array_equal(first, second)


def test_without_shuffling_each_source_keeps_its_order():
    drawn = mixed(shuffle=False).draw(500)
    for i, source in enumerate(SOURCES):
        own = drawn[source_of(drawn) == i]
        assert np.array_equal(own, np.resize(source, len(own)))


def test_a_source_of_weight_0_is_not_drawn_from():
    for weights in ((0, 1, 0), (1, 0, 1), (0, 0, 7)):
        drawn = source_of(mixed(weights).draw(9000))
        assert set(drawn) == {i for i, weight in enumerate(weights) if weight}


def test_the_epoch_of_a_mixture_is_the_smallest():
    drawn = mixed((0.5, 0.0, 0.5), sources=[np.arange(2), np.arange(5), np.arange(10, 20)])
    assert drawn.epoch == 0
    counted = 0
    while drawn.epoch == 0:
        counted += int(drawn.draw(1)[0] >= 10)
    assert counted == 10


@pytest.mark.parametrize("num_drawn", [0, 1, 17, 230, 4095, 4096, 4097])
def test_a_restored_mixture_continues(num_drawn):
    saved = mixed()
    saved.draw(num_drawn)
    state = json.loads(json.dumps(saved.state_dict()))
    restored = mixed()
    restored.draw(5)
    restored.load_state_dict(state)
    assert np.array_equal(restored.draw(500), saved.draw(500))
    assert restored.state_dict() == saved.state_dict()


def test_another_seed_gives_another_mixture():
    assert not np.array_equal(mixed().draw(50), mixed(seed=4).draw(50))
    assert not np.array_equal(source_of(mixed().draw(200)), source_of(mixed(seed=4).draw(200)))


def test_a_mixture_that_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="data.train_weights=.* one weight per file, 3"):
        mixed((1, 1))
    with pytest.raises(ValueError, match="data.train is empty"):
        mixed((), sources=[])
    with pytest.raises(ValueError, match="data.train\\[1\\] has no prompts"):
        mixed((1, 1), sources=[np.arange(3), np.arange(0)])
    for wrong in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"data.train_weights\[2\]="):
            mixed((1, 1, wrong))
    with pytest.raises(ValueError, match="all 0"):
        mixed((0, 0, 0))
    with pytest.raises(ValueError, match="run.seed=-1"):
        mixed(seed=-1)


def test_a_mixture_refuses_the_cursor_of_other_data():
    state = mixed().state_dict()
    with pytest.raises(ValueError, match="has 3 data sources, but data.train has 2"):
        mixed((1, 1), sources=SOURCES[:2]).load_state_dict(state)
    state["sources"][1]["position"] = 7
    with pytest.raises(
        ValueError, match="stands at prompt 7 of epoch 0, but the training data has 7 prompts"
    ):
        mixed().load_state_dict(state)


# ---- curriculum ----

PROMPTS = [Prompt(i, np.arange(5 - i, dtype=np.int32), f"prompt {i}", "test", None, {}) for i in range(5)]


def curriculum(order, *, seed=3) -> CurriculumSampler:
    return CurriculumSampler(PROMPTS, order, seed=seed)


def growing(epoch, prompts, rng):
    """Shortest first, one more in each epoch, in random order."""
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i].token_ids))
    return rng.permutation(by_length[: epoch + 2])


def test_a_curriculum_decides_order_subset_and_repetition():
    drawn = curriculum(lambda epoch, prompts, rng: [[4, 3], (0, 0, 1), range(2, 5)][epoch % 3]).draw(10)
    assert drawn.dtype == np.int64 and drawn.tolist() == [4, 3, 0, 0, 1, 2, 3, 4, 4, 3]


def test_a_curriculum_gets_epoch_prompts_and_generator():
    drawn = curriculum(growing).draw(2 + 3 + 4)
    assert (
        sorted(drawn[:2]) == [3, 4] and sorted(drawn[2:5]) == [2, 3, 4] and sorted(drawn[5:]) == [1, 2, 3, 4]
    )
    assert np.array_equal(drawn, curriculum(growing).draw(9))
    assert any(not np.array_equal(drawn, curriculum(growing, seed=seed).draw(9)) for seed in range(4))


@pytest.mark.parametrize("num_drawn", range(12))
def test_a_restored_curriculum_continues(num_drawn):
    saved = curriculum(growing)
    saved.draw(num_drawn)
    state = saved.state_dict()
    assert set(state) == {"epoch", "position"} and saved.epoch == state["epoch"]
    restored = curriculum(growing)
    restored.load_state_dict(json.loads(json.dumps(state)))
    assert np.array_equal(restored.draw(20), saved.draw(20))


def test_a_cursor_beyond_the_epoch_of_a_curriculum_is_refused():
    with pytest.raises(
        ValueError, match="stands at prompt 3 of epoch 1, but data.curriculum returns 3 prompts"
    ):
        curriculum(growing).load_state_dict({"epoch": 1, "position": 3})


def test_a_curriculum_may_sort_its_list_in_place():
    def in_place(epoch, prompts, rng):
        prompts.reverse()
        return range(5)

    sampler = curriculum(in_place)
    assert sampler.draw(10).tolist() == [0, 1, 2, 3, 4] * 2
    assert [prompt.index for prompt in PROMPTS] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "returned, message",
    [
        ([], "returned no indices"),
        (np.array([], dtype=int), "returned no indices"),
        (None, "must return a sequence of indices, not missing"),
        (7, "must return a sequence of indices, not int 7"),
        ([0, 5], "index 5 must be in 0..4"),
        ([0, -1], "index -1 must be in 0..4"),
        ([0.0, 1.0], "flat sequence of integers, not float64"),
        ([[0, 1], [2, 3]], r"flat sequence of integers, not int64 of shape \[2, 2\]"),
        ([[0, 1], [2]], "must return a sequence of indices"),
        (["0", "1"], "flat sequence of integers"),
        (
            np.array([True, False, True, True, True]),
            "returned a mask instead of indices: return np.flatnonzero",
        ),
        (PROMPTS, "flat sequence of integers"),
    ],
)
def test_an_order_that_is_no_list_of_indices_is_refused(returned, message):
    with pytest.raises(ValueError, match=f"data.curriculum, epoch 0: .*{message}"):
        curriculum(lambda epoch, prompts, rng: returned)


def test_a_failing_order_function_names_the_epoch():
    sampler = curriculum(lambda epoch, prompts, rng: {0: [0, 1]}[epoch])
    with pytest.raises(ValueError, match="data.curriculum failed for epoch 1: KeyError: 1"):
        sampler.draw(2)


def test_a_curriculum_needs_prompts_and_a_seed():
    with pytest.raises(ValueError, match="at least one"):
        CurriculumSampler([], growing, seed=0)
    with pytest.raises(ValueError, match="run.seed=-1"):
        curriculum(growing, seed=-1)


def test_an_order_function_is_found_in_a_file_and_in_a_module(tmp_path, monkeypatch):
    (tmp_path / "lesson_order.py").write_text(
        "def order(epoch, prompts, rng):\n    return [epoch]\n\nnumber = 5\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for spec in (f"{tmp_path}/lesson_order.py:order", "lesson_order.py:order", "lesson_order:order"):
        assert curriculum(load_order(spec)).draw(3).tolist() == [0, 1, 2]
    with pytest.raises(
        ValueError, match="data.curriculum='lesson_order:missing': lesson_order has no 'missing', only order"
    ):
        load_order("lesson_order:missing")
    with pytest.raises(ValueError, match="data.curriculum='lesson_order:number' must be callable"):
        load_order("lesson_order:number")


@pytest.mark.parametrize(
    "spec, message",
    [
        ("order", "must have the form"),
        (":order", "must have the form"),
        ("nowhere.py:order", "cannot be imported: FileNotFoundError"),
        ("no_such_package:order", "cannot be imported: ModuleNotFoundError"),
        ("math:sqrt", r"cannot be called with \(epoch, prompts, rng\)"),
    ],
)
def test_an_order_function_that_is_not_there_is_refused(spec, message):
    with pytest.raises(ValueError, match=f"data.curriculum='{spec}'.*{message}"):
        load_order(spec)
