"""Tools and interactions written for verl, with a stand-in for verl's registries of them."""

import asyncio
import sys
from types import ModuleType, SimpleNamespace

import pytest

from rl.config.agent_plan import EnvironmentSpec
from rl.features.agents.environment import load_environment
from rl.features.agents.integrations import verl

ROW = {
    "messages": [{"role": "user", "content": "2 + 2?"}],
    "tools_kwargs": {"check": {"create_kwargs": {"truth": "4"}}},
    "interaction_kwargs": {"name": "judge", "truth": "4"},
}


class Check:
    """Compares with the truth that `create` received; a second use of an instance fails."""

    name, tool_schema = (
        "check",
        SimpleNamespace(model_dump=lambda exclude_unset, exclude_none: {"function": {"name": "check"}}),
    )

    def __init__(self):
        self.live = {}

    async def create(self, create_kwargs):
        self.live["1"] = create_kwargs["truth"]
        return "1", None

    async def execute(self, instance, parameters, agent_data):
        assert agent_data.tools_kwargs == ROW["tools_kwargs"]
        text = "right" if parameters["answer"] == self.live[instance] else "w" * 300
        return SimpleNamespace(**{"text": text, "image": None, **parameters}), 0.5, {}

    async def release(self, instance):
        del self.live[instance]


class Judge:
    async def start_interaction(self, instance_id, truth, **_):
        self.truths = {instance_id: truth}

    async def generate_response(self, instance_id, messages, **_):
        is_right = messages[-1]["content"] == self.truths[instance_id]
        return is_right, "yes" if is_right else "no", float(is_right), {}


@pytest.fixture
def registries(monkeypatch):
    check = Check()
    made = {"tool": [check], "interaction": {"judge": Judge()}}
    for kind, objects in made.items():
        module = ModuleType(f"verl.{kind}s.utils.{kind}_registry")
        setattr(module, f"initialize_{kind}s_from_config", lambda config, objects=objects: objects)
        for name in ("verl", f"verl.{kind}s", f"verl.{kind}s.utils"):
            monkeypatch.setitem(sys.modules, name, sys.modules.get(name) or ModuleType(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    verl.load.cache_clear()
    yield check
    verl.load.cache_clear()


def test_a_call_has_its_own_instance_and_its_errors_are_read(registries, caplog):
    verl.log_first.cache_clear()
    tools = verl.Tools("tools.yaml", cut_to=20)
    assert tools.reset(ROW) == ROW["messages"] and tools.list_tools() == [{"function": {"name": "check"}}]

    def call(**arguments):
        return asyncio.run(tools.call_tool("check", arguments))

    assert call(answer="4") == "right" and registries.live == {}
    assert call(answer="5") == f"{10 * 'w'}...(truncated)...{10 * 'w'}"
    assert call() == "Error when executing tool: 'answer'" and registries.live == {}
    assert call(answer="4", image=["a", None]) == {"text": "right", "image": ["a"]}
    with pytest.raises(ValueError, match="check returned a video"):
        call(answer="4", video=["a"])
    assert call() and caplog.messages == ["the first KeyError of verl's tool check"]
    tools.reset(ROW | {"extra_info": {"tool_selection": ["other"]}})
    assert tools.list_tools() == [] and call(answer="4").startswith("Error")


def test_an_interaction_answers_turns_without_calls(registries, monkeypatch):
    call = {"id": "7", "function": {"name": "check", "arguments": '{"answer": "4"}'}}
    turns = [{"content": None, "tool_calls": [call, call]}, {"content": "4", "reasoning_content": "2 and 2"}]
    turns += [{"content": "4"}]
    seen = []

    async def complete(base_url, api_key, messages, tools):
        seen.append([message["content"] for message in messages])
        return {"role": "assistant", **turns[len(seen) - 1]}

    monkeypatch.setattr(verl, "complete", complete)
    agent = verl.ToolAgent("interactions.yaml", tools="tools.yaml")
    agent.reset(ROW)
    assert asyncio.run(agent.run("http://a/v1", "key", ROW)) is None
    assert seen[-1] == ["2 + 2?", None, "right", "4", "no"]  # the judge reads the reasoning, too
    for kind, drives in (("Tools", "tools"), ("ToolAgent", "run")):
        files = {"tools": "t"} | ({"interactions": "i"} if drives == "run" else {})
        spec = EnvironmentSpec(f"rl.features.agents.integrations.verl:{kind}", files)
        loaded = load_environment(spec)
        assert (loaded.drives, loaded.methods) == (drives, {})


def test_a_python_without_verl_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(RuntimeError, match="tools=tools.yaml needs verl; set agents.interpreter"):
        verl.Tools("tools.yaml")
