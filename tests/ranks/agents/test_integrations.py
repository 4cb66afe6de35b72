"""Integrations to environments of other packages, in the workers of a pool, with the real packages."""

import os
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl.config.agent_plan import make_agent_plan
from rl.features.agents.environment import AgentRun, FinalScore, GameTurn, ToolCall, ToolCalls
from rl.features.agents.pool import EnvironmentPool
from tests.ranks.agents.chat_server import ChatServer
from tests.spawn import ROOT, free_port

HERE = Path(__file__).parent
PROMPT = [{"role": "user", "content": "a prompt"}]


def needs(module, extra):
    """Skip the test if a module of an extra of setup.py is not installed."""
    return pytest.importorskip(module, reason=f"needs pip install 'lockstep-rl[{extra}]'")


def make_pool(name, interpreter="", timeout_s=60, **kwargs):
    plan = make_agent_plan(f"rl.features.agents.integrations.{name}", kwargs, [], {})
    return EnvironmentPool(plan, workers=1, timeout_s=timeout_s, memory_mib=0, interpreter=interpreter)


def make_row(seed, **extra_info):
    extra_info = {"seed": seed, **extra_info}
    columns = {"prompt": "a prompt", "messages": PROMPT, "ground_truth": "", "data_source": "toy"}
    return {**columns, "extra_info": extra_info, "interaction_kwargs": None, "tools_kwargs": None}


def answer(pool, session):
    """The next reply, which must be to this session."""
    replies = pool.poll(timeout_s=60)
    assert [reply.session for reply in replies] == [session]
    assert replies[0].failure == ""
    return replies[0]


def ask(pool, session, action):
    pool.call(session, action)
    return answer(pool, session)


def start(pool, session, row):
    pool.open(session, row)
    return answer(pool, session)


def call_tool(pool, session, name, **arguments):
    return ask(pool, session, ToolCalls((ToolCall("1", name, arguments),)))


def test_gem_game_is_solved_by_bisection():
    needs("gem", "gem")
    with make_pool("gem:Gem", env_id="game:GuessTheNumber-v0-easy") as pool:
        reply = start(pool, "a", make_row(seed=3))
        assert "between 1 and 10" in reply.messages[0]["content"] and reply.drives == "step"
        low, high = 1, 10
        while not reply.done:
            guess = (low + high) // 2
            reply = ask(pool, "a", GameTurn(f"\\boxed{{{guess}}}"))
            if "is lower" in reply.messages[0]["content"]:
                high = guess - 1
            else:
                low = guess + 1
        assert reply.reward == 1.0


def play_at_random(pool, session, row):
    """Play with moves that the game lists; yield what the game says, then the values of the score."""
    reply, rng = start(pool, session, row), random.Random(0)
    while not reply.done:
        text = reply.messages[0]["content"]
        yield text
        moves = re.findall(r"'(\[\w+\])'", text.splitlines()[-1])
        reply = ask(pool, session, GameTurn(rng.choice(moves)))
    yield ask(pool, session, FinalScore([])).values


def test_textarena_games_do_not_disturb_each_other():
    needs("textarena", "textarena")
    with make_pool("textarena:Game", opponent="random") as pool:
        rows = [make_row(seed, env_id=name) for seed in range(4) for name in ("TicTacToe-v0", "KuhnPoker-v0")]
        alone = [list(play_at_random(pool, f"alone {i}", row)) for i, row in enumerate(rows)]
        games = {i: play_at_random(pool, f"among others {i}", row) for i, row in enumerate(rows)}
        together = [[] for _ in rows]
        while games:
            for i, game in list(games.items()):
                if (said := next(game, None)) is None:
                    del games[i]
                else:
                    together[i].append(said)
    assert together == alone
    assert {values["score"] for *_, values in alone} == {1.0, -1.0}
    assert "You are Player 1" in alone[2][0] and "You are Player 0" in alone[0][0]


def test_textarena_self_play_learns_from_one_seat():
    needs("textarena", "textarena")

    def first_move(messages):
        text = messages[-1]["content"]
        if "You are Player 0" in messages[0]["content"]:
            return "no move of this game"  # the opponent, for which a move is drawn
        return re.findall(r"'(\[\w+\])'", text.splitlines()[-1])[0]

    with ChatServer(first_move) as server, make_pool("textarena:SelfPlay", env_id="KuhnPoker-v0") as pool:
        start(pool, "a", make_row(seed=1))
        reply = ask(pool, "a", AgentRun(server.base_url, "secret"))
    assert reply.values["score"] in (1.0, -1.0)
    assert {key for key, _ in server.requests} == {"secret"}
    for body in (body for _, body in server.requests):
        seat = 1 if body["store"] else 0  # the seed's last bit is the policy's seat
        assert f"You are Player {seat} in" in body["messages"][0]["content"]
        shown = " ".join(message["content"] for message in body["messages"])
        assert len(set(re.findall(r"round 1 out of 3 rounds. Your card is: '(\w)'", shown))) == 1


def test_reasoning_gym_scores_its_own_answers():
    module = needs("reasoning_gym", "reasoning-gym")
    from rl.features.agents.integrations.reasoning_gym import puzzles, score

    # Puzzles with tuples, with numpy's strings and with a scorer that accepts several answers.
    for name in ("chain_sum", "arc_agi", "knights_knaves", "countdown"):
        entry = module.create_dataset(name, seed=5, size=1)[0]
        ((question, packed),) = puzzles(name, {}, seed=5, size=1)
        assert question == entry["question"]
        right = score("", f"I think <answer>{entry['answer']}</answer>", packed)
        assert (right["score"], right["acc"]) == (1.0, 1.0)
        assert score("", "no idea", packed)["score"] < 0.1
    with make_pool("reasoning_gym:Puzzle", attempts=2) as pool:
        start(pool, "a", make_row(0) | {"ground_truth": packed})
        assert not ask(pool, "a", GameTurn("<answer>1</answer>")).done
        assert ask(pool, "a", GameTurn(f"<answer>{entry['answer']}</answer>")).done
        assert ask(pool, "a", FinalScore([])).values == {"score": 1.0, "acc": 1.0, "attempts": 2.0}


class Server:
    """A server process of a test; the port answers when the context has been entered."""

    def __init__(self, *command):
        self.port = free_port()
        self._command = [*command, str(self.port)]

    def __enter__(self):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(self._command, env=environment)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return self
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"{self._command} does not listen")

    def __exit__(self, *exception):
        self._process.kill()
        self._process.wait()


def check_ledger(pool):
    """The server's tool is used by two trajectories; a refused call is answered."""
    reply = start(pool, "a", make_row(0))
    assert reply.messages == PROMPT
    (tool,) = reply.tools
    assert tool["function"]["name"] == "add"
    assert tool["function"]["parameters"]["properties"]["amount"]["type"] == "integer"
    assert call_tool(pool, "a", "add", amount=3).messages[0]["content"] == "3"
    assert call_tool(pool, "a", "add", amount=4).messages[0]["content"] == "7"
    refused = call_tool(pool, "a", "add", amount="some")
    assert refused.messages[0]["content"].startswith("Error: ") and refused.values["errors"] == 1.0
    start(pool, "b", make_row(0))
    return call_tool(pool, "b", "add", amount=1).messages[0]["content"]


def test_mcp_server_on_stdio_is_one_process_per_trajectory():
    needs("mcp", "mcp")
    with make_pool("mcp:Mcp", command=[sys.executable, str(HERE / "mcp_server.py")]) as pool:
        assert check_ledger(pool) == "1"


def test_mcp_server_on_http():
    needs("mcp", "mcp")
    with Server(sys.executable, str(HERE / "mcp_server.py")) as server:
        with make_pool("mcp:Mcp", url=f"http://127.0.0.1:{server.port}/mcp") as pool:
            assert check_ledger(pool) == "8"


def test_openenv_server_by_text_and_by_tools():
    needs("websockets", "openenv")
    python = os.environ.get("OPENENV_PYTHON")
    if not python:
        pytest.skip("needs OPENENV_PYTHON, an interpreter with openenv-core, which pins another pillow")
    with Server(python, str(HERE / "openenv_server.py"), "text") as server:
        url = f"http://127.0.0.1:{server.port}"
        with make_pool("openenv:OpenEnv", url=url, action="number", observation="hint") as pool:
            assert start(pool, "a", make_row(21)).messages[0]["content"] == "Guess a number."
            assert "valid integer" in ask(pool, "a", GameTurn("five")).messages[0]["content"]
            assert not ask(pool, "a", GameTurn("4")).done
            reply = ask(pool, "a", GameTurn("5"))
            assert (reply.messages[0]["content"], reply.reward, reply.done) == ("right", 1.0, True)
            assert ask(pool, "a", FinalScore([])).values == {"score": 1.0}
    with Server(python, str(HERE / "openenv_server.py"), "tools") as server:
        with make_pool("openenv:OpenEnvTools", url=f"http://127.0.0.1:{server.port}") as pool:
            (tool,) = start(pool, "a", make_row(21)).tools
            assert tool["function"]["parameters"]["required"] == ["number"]
            assert "negative" in call_tool(pool, "a", "guess", number=-1).messages[0]["content"]
            assert not call_tool(pool, "a", "guess", number=4).done
            reply = call_tool(pool, "a", "guess", number=5)
            assert (reply.messages[0]["content"], reply.done) == ("right", True)
            assert ask(pool, "a", FinalScore([])).values == {"score": 1.0}


def test_verifiers_taskset_runs_in_its_own_interpreter(monkeypatch):
    python = os.environ.get("VERIFIERS_PYTHON")
    if not python:
        pytest.skip("needs VERIFIERS_PYTHON, an interpreter with 'lockstep-rl[verifiers]' and uv beside it")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{HERE}")
    env = {
        "taskset": {"id": "adding_taskset"},
        "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
    }
    module = "rl.features.agents.integrations.verifiers"
    listing = f"import json; from {module} import tasks; print(list(tasks({env}, 2))[1][1])"
    task = subprocess.check_output([python, "-c", listing], cwd=ROOT, text=True)

    def add(messages):
        return "It is " + str(sum(map(int, re.findall(r"\d+", messages[-1]["content"]))))

    with ChatServer(add) as server, make_pool("verifiers:Verifiers", python, 120, env=env) as pool:
        start(pool, "a", make_row(0, task=task))
        reply = ask(pool, "a", AgentRun(server.base_url, "secret"))
    assert reply.values == {"score": 1.0}
    assert [key for key, _ in server.requests] == ["secret"]


def test_simulated_user_ends_the_conversation_and_judges_it():
    def reply(messages):
        if messages[0]["content"].startswith("Was it polite?"):
            assert (
                "user: I want tea.\nassistant: Here is tea.\nuser: Thanks. ###STOP###"
                in messages[0]["content"]
            )
            return "Mostly, so 0.75"
        assert messages[0] == {"role": "system", "content": messages[0]["content"]}
        return "I want tea." if len(messages) == 2 else "Thanks. ###STOP###"

    rules = {"role": "system", "content": "You sell tea."}
    row = make_row(0, user="You want tea.") | {"messages": [rules]}
    with ChatServer(reply) as server:
        kwargs = {"base_url": server.base_url, "model": "m", "judge": "Was it polite?", "temperature": 0.5}
        with make_pool("user_simulation:UserSimulation", **kwargs) as pool:
            reply = start(pool, "a", row)
            assert reply.messages == [rules, {"role": "user", "content": "I want tea."}]
            assert ask(pool, "a", GameTurn("Here is tea.")).done
            assert ask(pool, "a", FinalScore([])).values == {"score": 0.75}
    assert all(body["model"] == "m" and body["temperature"] == 0.5 for _, body in server.requests)


def test_grades_of_a_simulated_user_are_unambiguous():
    from rl.features.agents.integrations.user_simulation import read_grade

    grades = {
        "0.3/1": 0.3,
        "I count 2 of 3.\nGrade: **0.7**.": 0.7,
        "0.25 out of 1": 0.25,
        "1.0": 1.0,
        ".5": 0.5,
    }
    assert {text: read_grade(text) for text in grades} == grades
    for text in ("0.5 to 0.7", "3/10", "80%", "7", "-0.5", "0,3", "none", ""):
        with pytest.raises(RuntimeError, match="must have one number from 0 to 1"):
            read_grade(text)


def test_missing_package_is_refused_with_its_extra(tmp_path):
    module = tmp_path / "mine.py"
    module.write_text(
        "from rl.features.agents.integrations.imports import require\n"
        "package = require('absent_package', extra='gem')\n\n\nclass Mine:\n    pass\n"
    )
    plan = make_agent_plan(f"{module}:Mine", {}, [], {})
    with EnvironmentPool(plan, workers=1, timeout_s=60, memory_mib=0) as pool:
        with pytest.raises(ValueError, match=r"agents.environment=.*absent_package.*lockstep-rl\[gem\]"):
            pool.check()
