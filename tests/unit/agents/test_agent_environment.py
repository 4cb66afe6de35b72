"""The checks of the section agents, the schemas of tools, and the shipped environments."""

import json
from typing import Annotated, Literal

import pytest
from pydantic import Field

from rl.config.agent_plan import make_agent_plan
from rl.config.checks import check
from rl.config.options import ConfigError
from rl.config.schema import load_config
from rl.features.agents.environment import answer_digest, load_environment, make_tool
from rl.features.agents.shipped.calculator import calculate
from rl.features.agents.shipped.gsm8k import Gsm8k
from tests.tables import rows

GSM8K = "rl.features.agents.shipped.gsm8k:Gsm8k"
CALCULATE = "rl.features.agents.shipped.calculator:calculate"


class Weather:
    def reset(self, row):
        self.row = row

    def forecast(
        self, city: str, days: int = 1, unit: Literal["C", "F"] = "C", *, key: str = "none", seed: int = 0
    ) -> dict:
        """Return the weather
        of a city.

        Args:
            city: the city: its
                full name
            days (int): how many
        Returns:
            the weather
        """
        return {"city": city, "days": days, "key": key, "seed": seed}

    async def map(self, points: list[tuple[float, float]], title: Annotated[str, Field(max_length=3)]):
        """Draw."""

    def _private(self): ...


def load(environment="", **entry):
    return load_environment(
        make_agent_plan(environment, entry.get("kwargs", {}), entry.get("tools", []), {}).default
    )


def test_a_schema_has_what_transformers_would_write():
    from transformers.utils import get_json_schema

    def forecast(city: str, days: int = 1, unit: Literal["C", "F"] = "C"):
        """Return the weather.

        Args:
            city: the city: its full name
            days: how many
            unit: C or F
        """

    assert make_tool(forecast, key="").schema == get_json_schema(forecast)
    schema = make_tool(Weather.forecast, key="", is_method=True).schema["function"]
    assert schema["description"] == "Return the weather\nof a city."
    assert list(schema["parameters"]["properties"]) == ["city", "days", "unit"]  # no settings
    assert schema["parameters"]["properties"]["city"]["description"] == "the city: its full name"
    assert schema["parameters"]["required"] == ["city"]
    drawn = make_tool(Weather.map, key="", is_method=True).schema["function"]["parameters"]["properties"]
    assert drawn["title"] == {"type": "string", "maxLength": 3}


def test_arguments_are_checked_and_settings_bound():
    tool = make_tool(Weather.forecast, key="", is_method=True)
    bound = tool.with_settings({"key": "k", "create_kwargs": {"seed": 3}, "other": 1})
    assert bound.bound_call({"city": "Rome", "days": "2"}, Weather())() == {
        "city": "Rome",
        "days": 2,
        "key": "k",
        "seed": 3,
    }
    for arguments, message in (
        ({}, "city: Field required"),
        ({"city": "Rome", "days": "two", "key": "x"}, "days: .*valid integer.*; key: Extra inputs"),
        ('{"city"', "must be a JSON object"),
    ):
        with pytest.raises(ValueError, match=message):
            bound.bound_call(arguments, Weather())


def test_a_row_chooses_tools_and_source():
    environment = load(f"{__file__}:Weather")
    assert (
        set(environment.tools_for({}))
        == {"forecast", "map"}
        == set(environment.tools_for({"tools_kwargs": {"x": {}}}))
    )
    assert set(environment.tools_for({"tools_kwargs": {"map": {}, "forecast": None}})) == {"map"}
    plan = make_agent_plan("a:B", {}, [], {"x": "c:D", "y": {"tools": [CALCULATE]}})
    assert plan.name_for({"data_source": "x"}) == "x" and plan.name_for({"data_source": "z"}) == ""
    assert plan.name_for({"data_source": "z", "interaction_kwargs": {"name": "y"}}) == "y"
    assert plan.sources["y"].environment == "" and plan.sources["x"].tools == ()


REFUSED = rows("""
    agents.environment=my_game.py => agents.environment='my_game.py' must be ;;
    agents.kwargs.high=3 agents.tools=[a:b] => agents.kwargs={'high': 3} needs agents.environment ;;
    agents.sources={x: {envronment: a:b}} => agents.sources.x.envronment is unknown ;;
    agents.tools=[{kwargs: {}}] => agents.tools[0]={'kwargs': {}} must be ;;
    agents.tools=[a:b] agents.max_tokens_per_turn=2000 => above rollout.max_response_tokens=1024
    """)


@pytest.mark.parametrize("overrides, message", REFUSED)
def test_a_config_that_cannot_work_is_refused(overrides, message):
    words = overrides.replace(": ", ":~").replace(", ", ",~").split(" ")
    given = [word.replace("~", " ") for word in words]
    config = load_config(None, ["model.path=/models/toy", "data.train=train.jsonl", *given])
    with pytest.raises(ValueError) as caught:
        check(config)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert isinstance(caught.value, ConfigError) or "agents" in str(caught.value)


def undocumented(x: int): ...


def untyped(x):
    """Take anything."""


class ResetWithoutRow:
    def reset(self): ...


class ScoreOfTwo:
    def score(self, messages, truth): ...


UNUSABLE = rows(f"""
    {__file__}:ResetWithoutRow => write def reset ;;
    {__file__}:ScoreOfTwo => write def score ;;
    {GSM8K} kwargs={{"high": 1}} => does not accept agents.kwargs ;;
    {CALCULATE} => must name a class ;;
    tools=["{__file__}:undocumented"] => undocumented needs a docstring ;;
    tools=["{__file__}:untyped"] => parameter x of the tool untyped needs a type hint ;;
    tools=[{{"function":"{CALCULATE}","kwargs":{{"x":1}}}}] => kwargs.x is no keyword-only parameter ;;
    tools=["{CALCULATE}","{CALCULATE}"] => a second tool has the name calculate
    """)


@pytest.mark.parametrize("named, message", UNUSABLE)
def test_an_unusable_environment_is_refused(named, message):
    environment, _, rest = named.partition(" ") if not named.startswith("tools") else ("", "", named)
    entry = {key: json.loads(text) for key, _, text in [rest.partition("=")] if key}
    with pytest.raises(ValueError, match="^agents[^\n]*" + message.replace("(", "[(]")):
        load(environment, **entry)


def test_an_answer_has_one_digest_before_and_after_its_way():
    content = ["\ud800 \u00e9\n", ("a", 1e-300), {1: None, "n": float("nan")}, object]
    answer = {"messages": [{"role": "tool", "content": content}], "reward": 0.1, "done": True}
    line = json.dumps(answer, ensure_ascii=False, default=str).encode("utf-8", "replace")
    received = {"values": {}, **json.loads(line)}
    assert answer_digest("a 2", received) == answer_digest("a 2", answer) != answer_digest("a 3", answer)
    assert answer_digest("a 2", answer | {"reward": 0.2}) != answer_digest("a 2", answer)


def test_the_calculator_calculates_and_executes_nothing():
    for expression, value in (
        ("(12 + 3) * 7", "105"),
        ("2^10", "1024"),
        ("1,234 / 8", "154.25"),
        ("-7 // 2", "-4"),
    ):
        assert calculate(expression) == value
    for wrong in (
        "__import__('os')",
        "9**9**9",
        "(-1)**0.5",
        "1 +",
        "x",
        "[1]",
        "'a' * 3",
        "(" * 999,
        "1" * 1001,
    ):
        with pytest.raises(ValueError):
            calculate(wrong)
    with pytest.raises(ZeroDivisionError):
        calculate("1 / 0")


def test_gsm8k_counts_the_last_answer_and_wrong_checks():
    def end(*checks, last=""):
        environment = Gsm8k(max_checks=2)
        environment.reset({"ground_truth": "18", "messages": None, "prompt": "?"})
        for answer in checks:
            environment.check_answer(answer)
        return environment.score([{"role": "assistant", "content": last}])

    assert end(last="It is $18.") == {"score": 1.0, "acc": 1.0, "checks": 0}
    assert end("17", "18") == {"score": 0.9, "acc": 1.0, "checks": 2}
    assert end("18", last="It is 17.")["score"] == 0.0
    with pytest.raises(ValueError, match="no more than 2"):
        end("1", "2", "3")


def test_search_finds_the_best_texts_first(tmp_path):
    pytest.importorskip("bm25s")
    from rl.features.agents.shipped.search import build_index, search

    texts = [{"title": f"Number {i}", "text": f"The number {i} follows {i - 1}."} for i in range(20)]
    texts.append({"text": "Ada Lovelace wrote the first program."})
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    build_index(str(tmp_path / "texts.jsonl"), str(tmp_path / "index"))
    index = str(tmp_path / "index")
    assert search("Who wrote the first program?", index=index) == "[1] Ada Lovelace wrote the first program."
    assert search("number 12", index=index, count=1) == "[1] Number 12\nThe number 12 follows 11."
    assert search("zebra", index=index) == "nothing found"
