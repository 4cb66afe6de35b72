import asyncio
import inspect
import pickle

import pytest

from rl.config.reward_sources import Component, RewardPlan, check_sources, make_plan
from rl.rewards.mixture import Mixture, short_names
from rl.rewards.score import Score
from rl.workers.messages import RejectedResult

SAMPLE = {"prompt": "p", "response": "2", "ground_truth": "2", "data_source": "toy", "extra_info": {}}
HANG_S = 60

FUNCTIONS = """
import asyncio

def number(response, *, offset=0, **extra):
    return float(response) + offset

def answer(response, ground_truth, **extra):
    return {"score": 1.0, "acc": float(response == ground_truth), "pred": response, "steps": 3}

def other_answer(**extra):
    return {"score": 1.0, "acc": 0.5, "pred": "other"}

def broken(**extra):
    raise RuntimeError("broken")

def huge(**extra):
    return 3e38

def taking(extra_info, **extra):
    return float(extra_info.pop("left", 0))

async def later(response, extra_info, **extra):
    if "barrier" in extra_info:
        await extra_info["barrier"].wait()
    return {"score": float(response), "pred": "later"}

async def broken_later(**extra):
    await asyncio.sleep(0.01)
    raise RuntimeError("broken later")
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("functions") / "rules.py"
    path.write_text(FUNCTIONS)
    return path


def mixture(file, *entries):
    entries = [{**entry, "function": f"{file}:{entry['function']}"} for entry in entries]
    return Mixture(make_plan("rl.rewards.exact:score", {}, {"toy": entries}))


def test_a_plan_holds_default_and_source_components():
    entries = [{"function": "c.d:g", "weight": 2, "kwargs": {"y": [1]}}, {"function": "e.py:h"}]
    plan = make_plan("a.b:f", {"x": 1}, {"math": entries})
    assert plan.default == (Component("a.b:f", 1.0, {"x": 1}, "reward"),)
    assert plan.sources == {
        "math": (
            Component("c.d:g", 2.0, {"y": [1]}, "reward.sources.math[0]"),
            Component("e.py:h", 1.0, {}, "reward.sources.math[1]"),
        )
    }
    assert pickle.loads(pickle.dumps(plan)) == plan


MALFORMED = [  # entries, the key below reward.sources.math and the error
    ([], r"=\[\] must list at least one"),
    ("a:f", r"='a:f' must list"),
    (["a:f"], r"\[0\]='a:f' must be a mapping"),
    ([{"function": "a:f"}, {"weight": 1}], r"\[1\]\.function is missing"),
    ([{"function": "a"}], r"\[0\]\.function='a' must be package"),
    ([{"function": None}], r"\[0\]\.function=None"),
]
MALFORMED += [  # beside a function
    ([{"function": "a:f", name: value}], rf"\[0\]\.{message}")
    for name, value, message in (
        ("wieght", 1, "wieght is unknown; .* function, weight, kwargs"),
        ("weight", "1", "weight='1' must be a finite number"),
        ("weight", True, "weight=True"),
        ("weight", float("nan"), "weight=nan"),
        ("kwargs", [1], r"kwargs=\[1\] must map"),
        ("kwargs", {1: 2}, "kwargs=.* must map keyword names"),
        ("kwargs", {"prompt": 2}, r"kwargs\.prompt must not be set"),
    )
]


@pytest.mark.parametrize("entries, message", MALFORMED)
def test_a_malformed_entry_is_refused_by_its_key(entries, message):
    with pytest.raises(ValueError, match=rf"reward\.sources\.math{message}"):
        check_sources({"math": entries})


def test_sources_that_are_no_mapping_or_no_strings_are_refused():
    one = {"function": "a:f"}
    assert check_sources({"math": one}) == check_sources({"math": [one]})
    with pytest.raises(ValueError, match="reward.sources=.* must map data sources"):
        check_sources(["a:f"])
    with pytest.raises(ValueError, match="reward.sources.7: a data source must be a string"):
        check_sources({7: one})


def test_a_failed_import_names_the_config_key(file):
    entries = [{"function": f"{file}:{name}"} for name in ("number", "absent")]
    plan = make_plan("rl.rewards.exact:score", {}, {"math": entries})
    with pytest.raises(ValueError, match=r"^reward\.sources\.math\[1\]\.function=.* has no 'absent'"):
        Mixture(plan)


def test_short_names_are_stems_made_unique():
    functions = ["a.b.math:f", "x/y/math.py:g", "math:h", "a.math_2:f", "length.py:f"]
    assert short_names([Component(f) for f in functions]) == "math math_2 math_3 math_2_2 length".split()


def test_the_data_source_chooses_and_the_default_takes_the_rest(file):
    mix = mixture(file, {"function": "number", "kwargs": {"offset": 5}})
    assert mix.score(SAMPLE) == Score({"score": 7.0})
    assert mix.score({**SAMPLE, "data_source": "other"}).values["score"] == 1.0  # exact match
    plan = RewardPlan((Component(f"{file}:number", kwargs={"offset": 1}),))
    assert Mixture(plan).score(SAMPLE) == Score({"score": 3.0})
    score = mixture(file, {"function": "answer", "weight": 0.5}).score(SAMPLE)
    assert score == Score({"score": 0.5, "acc": 1.0, "steps": 3.0}, "2")


def test_weighted_sum_and_values_of_each_function(file):
    weights = {"number": -0.5, "answer": 2, "other_answer": 0}
    entries = [{"function": name, "weight": weight} for name, weight in weights.items()]
    score = mixture(file, *entries).score(SAMPLE)
    number, answer = {"rules/score": 2.0}, {"score": 1.0, "acc": 1.0, "steps": 3.0}
    expected = {"score": -0.5 * 2.0 + 2 * 1.0, "acc": 1.0, "rules_3/score": 1.0, "rules_3/acc": 0.5}
    assert score.values == expected | number | {f"rules_2/{name}": value for name, value in answer.items()}
    assert score.prediction == "2"  # of the first that has one
    score = mixture(file, {"function": "number"}, {"function": "number"}).score(SAMPLE)
    assert score == Score({"score": 4.0, "rules/score": 2.0, "rules_2/score": 2.0})


def test_a_function_that_fails_fails_the_sample(file):
    with pytest.raises(RuntimeError, match="broken"):
        mixture(file, {"function": "number"}, {"function": "broken"}).score(SAMPLE)
    with pytest.raises(RejectedResult, match="weighted sum of the scores is 6e.38"):
        mixture(file, {"function": "huge"}, {"function": "huge"}).score(SAMPLE)


def test_a_function_that_changes_its_arguments_changes_no_other_call(file):
    mix = mixture(file, {"function": "taking"}, {"function": "taking"})
    sample = SAMPLE | {"extra_info": {"left": 3}}
    scores = [mix.score(sample) for _ in range(2)]
    assert [score.values["score"] for score in scores] == [6.0, 6.0] and scores[0].seal == scores[1].seal


class Meeting(asyncio.Barrier):
    def __deepcopy__(self, memo):
        return self


def test_async_functions_run_concurrently(file):
    mix = mixture(file, {"function": "later"}, {"function": "number", "weight": 10}, {"function": "later"})
    assert mix.is_async and not mixture(file, {"function": "number"}).is_async

    async def meet():
        # Neither call of `later` returns before both have begun: one after the other they would never return.
        sample = SAMPLE | {"extra_info": {"barrier": Meeting(2)}}
        return await asyncio.wait_for(mix.score(sample), HANG_S)

    score = asyncio.run(meet())
    assert score.values == {"score": 24.0, "rules/score": 2.0, "rules_2/score": 2.0, "rules_3/score": 2.0}
    assert score.prediction == "later"


def test_an_async_function_that_fails_fails_the_sample(file):
    for entries in (["broken_later"], ["later", "broken_later"]):
        outcome = mixture(file, *({"function": name} for name in entries)).score(SAMPLE)
        assert inspect.isawaitable(outcome)

        async def settle(outcome=outcome):
            return await outcome

        with pytest.raises((RuntimeError, ExceptionGroup)) as caught:
            asyncio.run(settle())
        error = caught.value.exceptions[0] if isinstance(caught.value, ExceptionGroup) else caught.value
        assert str(error) == "broken later"
