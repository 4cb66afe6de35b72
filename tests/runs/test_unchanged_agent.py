"""An existing agent, which knows nothing of this program, trains through its OpenAI-compatible address."""

import json
from pathlib import Path

import pytest

from rl.features.agents.stored_log import load
from rl.run_directory.event_files import DIRECTORY
from tests import bounds
from tests.toy import train, write_config

LOOP = """
import json
import openai

class Agent:
    def __init__(self, out):
        self.out = out

    async def ask(self, client, messages, **options):
        completion = await client.chat.completions.create(
            model="any", messages=messages, logprobs=True, extra_body={"return_token_ids": True}, **options
        )
        choice = completion.choices[0]
        logprobs = [entry.logprob for entry in choice.logprobs.content]
        with open(self.out, "a") as file:
            print(json.dumps([choice.token_ids, logprobs]), file=file)
        return choice.message

    async def run(self, base_url, api_key, row):
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        messages = [{"role": "user", "content": row["prompt"]}]
        for _ in range(3):
            message = await self.ask(client, messages, max_completion_tokens=5)
            # for the agent's own use: no part of the trajectory
            await self.ask(client, messages[:1], max_completion_tokens=3, store=False)
            messages += [message, {"role": "user", "content": "37+"}]
        return len(set(message.content)) / 5
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


def assert_agent_trains(source: str, toy: Path, directory: Path, *overrides: str) -> None:
    """Train two steps with an agent of three turns, on tokens that were sampled for it."""
    (directory / "agent.py").write_text(source)
    options = ("rollout.max_response_tokens=40", "agents.workers=1", "training.micro_batch_tokens=400")
    agent = f"agents.environment={directory}/agent.py:Agent"
    steps = train(1, write_config(directory, toy, *options, agent, "rollout.deterministic=false", *overrides))
    assert len(steps) == 2
    for step in steps:
        assert step["agents/turns"] == 3 and step["agents/rows"] == 1
        assert step["actor/grad_norm"] > 0
        # The engine's log-probs of turns are the trainer's of one pass over the trajectory.
        assert step["training/rollout_probs_diff_max"] < bounds.TOY_LOGPROB


def test_a_loop_around_the_openai_client_trains(toy, tmp_path):
    """The client receives the engine's ids and log-probs."""
    assert_agent_trains(LOOP, toy, tmp_path, f"agents.kwargs={{out: {tmp_path}/received}}")
    received = [json.loads(line) for line in (tmp_path / "received").read_text().splitlines()]
    logs = [load(path) for path in (tmp_path / "run" / DIRECTORY).rglob("*.events")]
    sampled = [[c.token_ids.tolist(), c.logprobs.tolist()] for log in logs for c in log.completions.values()]
    assert len(sampled) == 2 * 8 * 4 * 6 and sorted(received) == sorted(sampled)


def test_a_graph_of_langgraph_trains(toy, tmp_path):
    pytest.importorskip("langgraph")
    pytest.importorskip("langchain_openai")
    assert_agent_trains(GRAPH, toy, tmp_path)
