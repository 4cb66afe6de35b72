"""An existing agent, which knows nothing of this program, trains through its OpenAI-compatible address."""

import pytest

from tests import bounds
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
            await client.chat.completions.create(  # for the agent's own use: no part of the trajectory
                model="any", messages=messages[:1], max_completion_tokens=3, store=False
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

        nodes = [("first", answer), ("ask", ask), ("second", answer), ("ask more", ask), ("third", answer)]
        graph = StateGraph(MessagesState).add_sequence(nodes).add_edge(START, "first")
        state = await graph.compile().ainvoke({"messages": [("user", row["prompt"])]})
        return len(set(state["messages"][-1].content)) / 5
"""
AGENTS = {"openai": LOOP, "langgraph": GRAPH}


@pytest.mark.parametrize("library", AGENTS)
def test_an_unchanged_agent_trains(library, toy, tmp_path):
    pytest.importorskip(library)
    if library == "langgraph":
        pytest.importorskip("langchain_openai")
    (tmp_path / "agent.py").write_text(AGENTS[library])
    options = ("rollout.max_response_tokens=40", "agents.workers=1", "training.micro_batch_tokens=400")
    agent = f"agents.environment={tmp_path}/agent.py:Agent"
    steps = train(1, write_config(tmp_path, toy, *options, agent, "rollout.deterministic=false"))
    assert len(steps) == 2
    for step in steps:
        assert step["agents/turns"] == 3 and step["agents/rows"] == 1
        assert step["actor/grad_norm"] > 0
        # The engine's log-probs of turns are the trainer's of one pass over the trajectory.
        assert step["training/rollout_probs_diff_max"] < bounds.TOY_LOGPROB
