import json

import numpy as np
import pytest

from rl.data.curriculum import CurriculumOrder, load_order
from rl.data.prompt_order import MixedOrder, PromptOrder, warn_of_repeated_rows
from rl.data.prompts import Prompt


def order(num_prompts: int = 10, *, seed: int = 3, shuffle: bool = True) -> PromptOrder:
    return PromptOrder(num_prompts, seed=seed, shuffle=shuffle)


def test_every_epoch_draws_every_prompt_once_in_another_order():
    drawn = order()
    places = np.concatenate([drawn.draw(3) for _ in range(10)])
    assert places.dtype == np.int64 and (np.sort(places.reshape(3, 10)) == np.arange(10)).all()
    first, second = order(100).draw(200).reshape(2, 100)
    assert (first != second).any()
    assert sorted(np.bincount(order(4).draw(11), minlength=4)) == [2, 3, 3, 3]


def test_the_order_does_not_depend_on_how_it_is_cut_into_draws():
    whole, parts = order().draw(60), order()
    assert np.array_equal(whole, np.concatenate([parts.draw(n) for n in (0, 1, 9, 10, 25, 15)]))


def test_the_order_depends_on_the_seed():
    assert np.array_equal(order(100).draw(250), order(100).draw(250))
    other = order(100, seed=4).draw(100)
    assert not np.array_equal(order(100, seed=3).draw(100), other)
    # Epoch 1 of a seed is not epoch 0 of the next one.
    assert not np.array_equal(order(100, seed=3).draw(200)[100:], other)


def test_a_step_that_draws_more_rows_than_there_are_is_warned_of():
    assert warn_of_repeated_rows(64, 64) == ""
    warning = warn_of_repeated_rows(50, 64)
    assert "data.prompts_per_step=64 is above the 50 rows of data.train" in warning and "most 50" in warning


def test_without_shuffling_prompts_come_in_file_order():
    assert order(3, shuffle=False).draw(7).tolist() == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("num_drawn", [0, 7, 10, 20, 33])
def test_a_restored_order_continues(num_drawn):
    saved = order()
    saved.draw(num_drawn)
    restored = order()
    restored.draw(5)
    restored.load_state_dict(saved.state_dict())
    assert np.array_equal(restored.draw(25), saved.draw(25))


def test_the_state_is_the_epoch_and_the_position_in_it():
    drawn = order()
    drawn.draw(23)
    assert drawn.state_dict() == {"epoch": 2, "position": 3} and drawn.epoch == 2
    drawn.draw(7)
    assert drawn.state_dict() == {"epoch": 3, "position": 0}


def refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()


def test_invalid_orders_and_cursors_are_refused():
    beyond = "stands at prompt 10 of epoch 0, but the training data has 10 prompts"
    refused(beyond, lambda: order().load_state_dict({"epoch": 0, "position": 10}))
    refused("at least one", lambda: order(0))
    refused("run.seed=-1", lambda: order(seed=-1))
    with_weights, without = "had data.train_weights. Resume with", "had no data.train_weights. Resume without"
    refused(f"{with_weights} them", lambda: order().load_state_dict(mixed().state_dict()))
    refused(f"{without} them", lambda: mixed().load_state_dict(order().state_dict()))


SOURCES = [np.arange(0, 10), np.arange(100, 107), np.arange(200, 400)]


def mixed(weights=(0.5, 0.3, 0.2), *, sources=SOURCES, seed=3, shuffle=True) -> MixedOrder:
    return MixedOrder(sources, list(weights), seed=seed, shuffle=shuffle)


def source_of(drawn):
    return np.digitize(drawn, [100, 200])


def test_a_mixture_does_not_depend_on_how_it_is_cut_into_draws():
    whole = mixed().draw(10_000)
    assert whole.dtype == np.int64
    parts = mixed()
    assert np.array_equal(whole[:8], np.concatenate([parts.draw(3), parts.draw(5)]))
    # Sources are picked in blocks: across the edges of the blocks, and exactly on them.
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


def test_an_invalid_mixture_is_refused():
    for message, weights, options in (
        ("data.train_weights=.* one weight per file, 3", (1, 1), {}),
        ("data.train is empty", (), {"sources": []}),
        (r"data.train\[1\] has no prompts", (1, 1), {"sources": [np.arange(3), np.arange(0)]}),
        *((r"data.train_weights\[2\]=", (1, 1, wrong), {}) for wrong in (-1, float("nan"), float("inf"))),
        ("all 0", (0, 0, 0), {}),
        ("run.seed=-1", (0.5, 0.3, 0.2), {"seed": -1}),
    ):
        refused(message, lambda: mixed(weights, **options))  # noqa: B023


def test_a_mixture_refuses_the_cursor_of_other_data():
    state = mixed().state_dict()
    fewer = mixed((1, 1), sources=SOURCES[:2])
    refused("has 3 data sources, but data.train has 2", lambda: fewer.load_state_dict(state))
    state["sources"][1]["position"] = 7
    beyond = "stands at prompt 7 of epoch 0, but the training data has 7 prompts"
    refused(beyond, lambda: mixed().load_state_dict(state))


PROMPTS = [Prompt(i, np.arange(5 - i, dtype=np.int32), f"prompt {i}", "test", None, {}) for i in range(5)]


def curriculum(order, *, seed=3) -> CurriculumOrder:
    return CurriculumOrder(PROMPTS, order, seed=seed)


def growing(epoch, prompts, rng):
    """Shortest first, one more in each epoch, in random order."""
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i].token_ids))
    return rng.permutation(by_length[: epoch + 2])


def test_a_curriculum_decides_order_subset_and_repetition():
    drawn = curriculum(lambda epoch, prompts, rng: [[4, 3], (0, 0, 1), range(2, 5)][epoch % 3]).draw(10)
    assert drawn.dtype == np.int64 and drawn.tolist() == [4, 3, 0, 0, 1, 2, 3, 4, 4, 3]


def test_a_curriculum_gets_epoch_prompts_and_generator():
    drawn = curriculum(growing).draw(2 + 3 + 4)
    assert [sorted(part) for part in np.split(drawn, [2, 5])] == [[3, 4], [2, 3, 4], [1, 2, 3, 4]]
    assert np.array_equal(drawn, curriculum(growing).draw(9))
    assert any(not np.array_equal(drawn, curriculum(growing, seed=seed).draw(9)) for seed in range(4))


def test_a_restored_curriculum_continues():
    for num_drawn in range(12):
        saved, restored = curriculum(growing), curriculum(growing)
        saved.draw(num_drawn)
        state = saved.state_dict()
        assert set(state) == {"epoch", "position"} and saved.epoch == state["epoch"]
        restored.load_state_dict(json.loads(json.dumps(state)))
        assert restored.digest == saved.digest != curriculum(lambda *_: [0]).digest
        assert np.array_equal(restored.draw(20), saved.draw(20))


def test_a_curriculum_may_sort_its_list_in_place():
    def in_place(epoch, prompts, rng):
        prompts.reverse()
        return range(5)

    assert curriculum(in_place).draw(10).tolist() == [0, 1, 2, 3, 4] * 2
    assert [prompt.index for prompt in PROMPTS] == [0, 1, 2, 3, 4]


ORDERS = [
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
    (np.array([True, False, True]), "returned a mask instead of indices: return np.flatnonzero"),
    (PROMPTS, "flat sequence of integers"),
]


@pytest.mark.parametrize("returned, message", ORDERS)
def test_an_order_that_is_no_list_of_indices_is_refused(returned, message):
    refused(
        f"data.curriculum, epoch 0: .*{message}", lambda: curriculum(lambda epoch, prompts, rng: returned)
    )


def test_an_invalid_curriculum_is_refused():
    fails_later = curriculum(lambda epoch, prompts, rng: {0: [0, 1]}[epoch])
    refused(
        r"data.curriculum, epoch 1, raised KeyError: 1 \(test_prompt_order.py, line \d+\)",
        lambda: fails_later.draw(2),
    )
    refused("at least one", lambda: CurriculumOrder([], growing, seed=0))
    refused("run.seed=-1", lambda: curriculum(growing, seed=-1))
    beyond, state = (
        "stands at prompt 3 of epoch 1, but data.curriculum returns 3",
        {"epoch": 1, "position": 3},
    )
    refused(beyond, lambda: curriculum(growing).load_state_dict(state))


def test_an_order_function_is_found_in_a_file_and_in_a_module(tmp_path, monkeypatch):
    (tmp_path / "lesson_order.py").write_text("def order(epoch, prompts, rng): return [epoch]\nnumber = 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for spec in (f"{tmp_path}/lesson_order.py:order", "lesson_order.py:order", "lesson_order:order"):
        assert curriculum(load_order(spec)).draw(3).tolist() == [0, 1, 2]
    for spec, message in (
        ("lesson_order:missing", ": lesson_order has no 'missing', only order"),
        ("lesson_order:number", " must be callable"),
        ("order", ".*must have the form"),
        (":order", ".*must have the form"),
        ("nowhere.py:order", ".*cannot be imported: FileNotFoundError"),
        ("no_such_package:order", ".*cannot be imported: ModuleNotFoundError"),
        ("math:sqrt", r".*cannot be called with \(epoch, prompts, rng\)"),
    ):
        refused(f"data.curriculum='{spec}'{message}", lambda: load_order(spec))  # noqa: B023
