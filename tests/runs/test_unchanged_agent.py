"""An existing agent, which knows nothing of this program, trains through its OpenAI-compatible address."""

import pytest

from tests.toy import train, write_config

LOOP = """
import openai

class Agent:
    async def run(self, base_url, api_key, row):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        messages = [{"role": "user", "content": row["prompt"]}]
        for _ in range(3):
            completion = await client.chat.completions.create(
                model="any", messages=messages, max_completion_tokens=5, temperature=0.3
            )
            messages += [completion.choices[0].message, {"role": "user", "content": "37+"}]
        return len(set(messages[-2].content)) / 5
"""
GRAPH = """
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

class Agent:
    async def run(self, base_url, api_key, row):
        model = ChatOpenAI(model="any", base_url=base_url, api_key=api_key, max_retries=0, max_tokens=5)

        async def answer(state: MessagesState) -> dict:
            return {"messages": [await model.ainvoke(state["messages"])]}

        def ask(state: MessagesState) -> dict:
            return {"messages": [("user", "37+")]}

        graph = StateGraph(MessagesState)
        for name, node in (("first", answer), ("ask", ask), ("second", answer), ("ask more", ask), ("third", answer)):
            graph.add_node(name, node)
        graph.add_sequence
        graph.add_edge(START, "first")
        for edge in (("first", "ask"), ("ask", "second"), ("second", "ask more"), ("ask more", "third")):
            graph.add_edge(*edge)
        state = await graph.compile().ainvoke({"messages": [("user", row["prompt"])]})
        return len(set(state["messages"][-1].content)) / 5
"""
AGENTS = {"openai": LOOP, "langgraph": GRAPH}


@pytest.mark.parametrize("library", AGENTS)
def test_an_unchanged_agent_trains(library, toy, tmp_path):
    pytest.importorskip(library)
    if library == "langgraph":
        pytest.importorskip("langchain_openai")
    (tmp_path / "agent.py").write_text(AGENTS[library].replace("        graph.add_sequence\n", ""))
    options = ("rollout.max_response_tokens=40", "agents.workers=1", "training.micro_batch_tokens=400")
    agent = f"agents.environment={tmp_path}/agent.py:Agent"
    steps = train(1, write_config(tmp_path, toy, *options, agent, "rollout.deterministic=false"))
    assert len(steps) == 2
    for step in steps:
        print({k: v for k, v in step.items() if "agents" in k or "num_turns" in k})
        assert step["actor/grad_norm"] > 0
        assert step["training/rollout_probs_diff_max"] < 1e-4
