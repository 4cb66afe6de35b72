import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from rl.config.agent_plan import make_agent_plan
from rl.features.agents import pool as pool_module
from rl.features.agents.environment import AgentRun, FinalScore, GameTurn, ToolCall, ToolCalls, answer_digest
from rl.features.agents.pool import EnvironmentPool
from rl.workers.supervisor import all_processes, descendants
from tests.spawn import ROOT

FILE = Path(__file__).parent / "hostile_environments.py"
GUARD_S = 60.0


def make_pool(name="Hostile", tools=(), sources=None, kwargs=None, **options):
    plan = make_agent_plan(f"{FILE}:{name}" if name else "", kwargs or {}, list(tools), sources or {})
    return EnvironmentPool(plan, **{"workers": 1, "timeout_s": 30.0, "memory_mib": 1024, **options})


def row(**columns):
    return {"prompt": "Go.", "messages": None, "data_source": "toy", "ground_truth": "7", **columns}


def act(*names, **arguments):
    calls = [ToolCall(str(i), "act", {"what": name, **arguments}) for i, name in enumerate(names)]
    return ToolCalls(tuple(calls))


def replies_of(pool, *names):
    """Session -> its next reply."""
    found = {}
    deadline = time.monotonic() + GUARD_S
    while set(names) - set(found):
        assert time.monotonic() < deadline, f"no reply of {set(names) - set(found)}"
        found |= {reply.session: reply for reply in pool.poll(1.0)}
    assert set(found) == set(names)
    return found


def reply_to(pool, name, action):
    pool.call(name, action)
    return replies_of(pool, name)[name]


def opened(pool, *names, **columns):
    for name in names:
        pool.open(name, row(**columns))
    found = replies_of(pool, *names)
    assert not [reply.failure for reply in found.values() if reply.failure]
    return found


def text_of(reply):
    assert not reply.failure
    (message,) = reply.messages
    return message["content"]


def wait_until(condition):
    deadline = time.monotonic() + GUARD_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


@pytest.fixture(autouse=True)
def no_process_is_left(monkeypatch):
    monkeypatch.setattr(pool_module, "CLOSING_S", 0.5)
    before = set(descendants(os.getpid(), all_processes()))
    yield
    assert set(descendants(os.getpid(), all_processes())) <= before


def test_a_session_with_tools_from_reset_to_score():
    with make_pool() as pool:
        (tools,) = pool.check()
        start = opened(pool, "a", "b")["a"]
        assert start.kind == "reset" and start.drives == "tools" and start.tools == tools
        assert start.messages == [{"role": "user", "content": "Go."}]
        malformed = ToolCall("1", "act", '{"what": ')
        wrong, unknown = ToolCall("2", "act", {"when": 1}), ToolCall("3", "fly", {})
        reply = reply_to(pool, "a", ToolCalls((*act("x").calls, malformed, wrong, unknown, *act("y").calls)))
        assert [m["tool_call_id"] for m in reply.messages] == ["0", "1", "2", "3", "0"]
        texts = [m["content"] for m in reply.messages]
        assert texts[0] == "state 1" and texts[4] == "state 2"  # in order, and nothing else was called
        assert "must be a JSON object" in texts[1] and "what: Field required" in texts[2]
        assert texts[3] == "Error: there is no tool fly; the tools are: act"
        assert reply.values == {"calls": 5.0, "errors": 3.0} and not reply.done
        assert reply.digest == answer_digest("a 2", vars(reply)) != answer_digest("b 2", vars(reply))
        assert text_of(reply_to(pool, "b", act("z"))) == "state 1"
        assert text_of(reply_to(pool, "b", act("wrong argument"))) == "Error: no such city"
        end = reply_to(pool, "a", FinalScore([{"role": "user", "content": "Go."}]))
        assert end.kind == "score" and end.values == {"score": 2.0, "turns": 1.0}
        assert end.digest == answer_digest("a 3", vars(end))


AT_ONCE = {"raises": "RuntimeError: broken", "exits": "SystemExit: 3", "eats memory": "MemoryError"}
LATE = {"hangs": "CallTimeout: the call took longer than the limit of 3 s"}
WITH_ITS_WORKER = {"crashes": "SIGSEGV", "kills itself": "SIGKILL", "kills its parent": "was killed"}


def test_workers_inherit_only_variables_that_are_named(monkeypatch):
    keys = ("WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "OPENAI_API_KEY", "HF_TOKEN", "LOCKSTEP_JOB_KEY")
    for name in (*keys, "MINE", "LC_TIME"):
        monkeypatch.setenv(name, "value")
    with make_pool(variables=["MINE"]) as pool:
        opened(pool, "a")
        (message,) = reply_to(pool, "a", act("names its variables")).messages
    found = set(message["content"].split())
    assert {"PATH", "HOME", "PYTHONPATH", "LC_TIME", "MINE"} <= found and not found & set(keys), found


@pytest.mark.parametrize("failures, timeout_s", [(AT_ONCE, 30.0), (LATE, 3.0)])
def test_a_tool_that_goes_wrong_costs_its_session_only(failures, timeout_s):
    with make_pool(timeout_s=timeout_s, memory_mib=500) as pool:
        for what, reason in failures.items():
            opened(pool, "bad", "good")
            pool.call("bad", act(what))
            pool.call("good", act("x"))  # in the same worker
            replies = replies_of(pool, "bad", "good")
            assert reason in replies["bad"].failure, what
            assert text_of(replies["good"]) == "state 1"
            assert text_of(reply_to(pool, "good", act("x"))) == "state 2"
            pool.close("bad")
            pool.close("good")


def test_a_worker_that_ends_costs_its_sessions_only():
    with make_pool(workers=2) as pool:
        opened(pool, "other")
        for turn, (what, reason) in enumerate(WITH_ITS_WORKER.items(), 1):
            opened(pool, "bad", "neighbour")  # the worker with the fewest sessions is chosen first
            bad, neighbour, other = (
                text_of(reply_to(pool, n, act("pids"))) for n in ("bad", "neighbour", "other")
            )
            assert bad != other == neighbour
            pool.call("bad", act(what))
            assert reason in replies_of(pool, "bad")["bad"].failure, what
            pool.close("bad")
            pool.close("neighbour")
            assert text_of(reply_to(pool, "other", act("x"))) == f"state {2 * turn}"


@pytest.mark.parametrize("what", ["forks", "returns 10 MB", "returns half a surrogate", "leaves a daemon"])
def test_a_harmless_tool_costs_nothing(tmp_path, what):
    pid_file = tmp_path / "pids"
    with make_pool(kwargs={"pid_file": str(pid_file)}) as pool:
        opened(pool, "a")
        text = text_of(reply_to(pool, "a", act(what)))
        if what == "returns 10 MB":
            assert text == "x" * 8192 + "\n[9991808 more characters were left out]"
        if what == "returns half a surrogate":
            assert text == "a?b"
        assert text_of(reply_to(pool, "a", act("x"))) == "state 2"
        pool.close("a")
        if what == "leaves a daemon":  # killed with the last session
            (pid,) = map(int, pid_file.read_text().split())
            wait_until(lambda: not pool.poll(0.01) and pid not in all_processes())
            opened(pool, "b")
            assert text_of(reply_to(pool, "b", act("x"))) == "state 1"


def test_a_wrong_result_is_one_sentence_with_its_method():
    place = r"Wrong.{} \(hostile_environments.py, line \d+\)"
    with make_pool("Wrong", kwargs={"start": 7}) as pool:
        pool.open("a", row())
        failure = replies_of(pool, "a")["a"].failure
        assert re.fullmatch(
            place.format("reset") + " must return a text or a list of messages, not int 7", failure
        )
    with make_pool("Wrong") as pool:
        opened(pool, "a")
        failure = reply_to(pool, "a", GameTurn("x")).failure
        words = r" must return \(text, reward, done\) .*, not tuple \('more', 1.0\)"
        assert re.fullmatch(place.format("step") + words, failure)
        failure = reply_to(pool, "a", FinalScore([])).failure
        words = ": the score must be a finite number of float32, it is str 'good'; return a number or a dict."
        assert re.fullmatch(place.format("score") + words, failure)


def test_async_sessions_of_a_worker_run_concurrently():
    names = [f"s{i}" for i in range(20)]
    with make_pool("Game") as pool:
        starts = opened(pool, *names)
        assert starts["s0"].messages == [{"role": "text", "content": "Guess:"}]
        assert starts["s0"].drives == "step" and starts["s0"].tools == []
        for name in names:
            pool.call(name, GameTurn("together"))
        assert {(r.kind, r.reward, r.done) for r in replies_of(pool, *names).values()} == {
            ("step", 0.0, False)
        }
        last = reply_to(pool, "s0", GameTurn("7"))
        assert (text_of(last), last.reward, last.done) == ("right", 1.0, True)
        assert reply_to(pool, "s0", FinalScore([])).values == {}  # it has no score


@pytest.mark.parametrize(
    "name, action", [("Hostile", act("holds the interpreter lock")), ("Game", GameTurn("block"))]
)
def test_a_silent_worker_is_killed_with_its_sessions(monkeypatch, name, action):
    monkeypatch.setattr(pool_module, "GRACE_S", 2.0)
    with make_pool(name, timeout_s=2.0) as pool:
        opened(pool, "bad", "idle")
        for session in ("bad", "idle"):  # the second is told at its next request
            assert "was silent for 4 s" in reply_to(pool, session, action).failure
        opened(pool, "new")
        assert reply_to(pool, "new", FinalScore([])).failure == ""


@pytest.mark.parametrize(
    "name, action", [("Game", GameTurn("wait")), ("Agent", AgentRun("wait", "")), ("Hostile", act("hangs"))]
)
def test_close_ends_a_call_in_progress(name, action):
    with make_pool(name) as pool:
        opened(pool, "a", "b")
        pool.call("a", action)
        assert pool.poll(0.2) == []
        pool.close("a")
        opened(pool, "a")  # the name is free
        pool.close("b")
        assert pool.poll(0.2) == []


def test_kept_sessions_block_no_worker():
    """A process that takes no further session ends once it has only kept ones; their next reply says so."""
    with make_pool(timeout_s=1.0) as pool:
        opened(pool, "kept", "other")
        pool.open("alone", row(), alone=True)
        pool.keep("kept")
        assert reply_to(pool, "other", act("hangs")).cause == "time"
        pool.close("other")
        assert set(replies_of(pool, "alone")) == {"alone"}  # in a new process, the only one allowed
        pool.keep("kept", False)
        lost = reply_to(pool, "kept", act("state"))
        assert lost.failure and lost.reopen == "shared"
        pool.keep("alone")
        opened(pool, "next")
        assert reply_to(pool, "alone", act("state")).reopen == "alone"


def test_an_agent_that_drives_itself():
    with make_pool("Agent") as pool:
        assert opened(pool, "a")["a"].drives == "run"
        reply = reply_to(pool, "a", AgentRun("http://x", "key"))
        assert (reply.kind, reply.done, reply.values) == ("run", True, {"score": 1.0, "url_length": 11.0})


def test_sync_methods_of_a_session_share_a_thread():
    with make_pool("Sqlite") as pool:
        opened(pool, "a", "b")
        for sql, result in (("create table t as select 1 as x", "[]"), ("select x + 1 from t", "[[2]]")):
            assert text_of(reply_to(pool, "a", ToolCalls((ToolCall("0", "query", {"sql": sql}),)))) == result


def test_sources_functions_and_tools_of_a_server():
    tools = [{"function": f"{FILE}:add", "kwargs": {"sign": -1}}]
    with make_pool("", tools, {"served": {"environment": f"{FILE}:Server"}}) as pool:
        reply = opened(pool, "a", messages=[{"role": "user", "content": "Add."}])["a"]
        assert reply.messages == [{"role": "user", "content": "Add."}] and reply.drives == "tools"
        assert set(reply.tools[0]["function"]["parameters"]["properties"]) == {"a", "b"}
        assert text_of(reply_to(pool, "a", ToolCalls((ToolCall("0", "add", {"a": 2}),)))) == "-3"
        named = opened(pool, "b", agent_name="served")["b"]
        assert [tool["function"]["name"] for tool in named.tools] == ["add", "echo"]
        reply = reply_to(pool, "b", ToolCalls((ToolCall("0", "echo", {"text": "hi"}),)))
        assert text_of(reply) == '{"name": "echo", "text": "hi"}'
        verl = {"add": {"create_kwargs": {"sign": 5}}, "echo": None}
        opened(pool, "c", tools_kwargs=verl)
        assert text_of(reply_to(pool, "c", ToolCalls((ToolCall("0", "add", {"a": 2}),)))) == "15"


def test_what_cannot_be_loaded_is_refused(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    for plan in ([f"{tmp_path}/broken.py:X", "ZeroDivisionError"], [f"{FILE}:Nothing", "has no 'Nothing'"]):
        with EnvironmentPool(
            make_agent_plan(plan[0], {}, [], {}), workers=1, timeout_s=9.0, memory_mib=0
        ) as pool:
            with pytest.raises(ValueError, match=plan[1]):
                pool.check()
            pool.open("a", row())
            assert plan[1] in replies_of(pool, "a")["a"].failure


def test_wake_ends_a_poll_from_another_thread():
    with make_pool("Agent") as pool:
        opened(pool, "a")
        pool.call("a", AgentRun("wait", ""))
        threading.Timer(0.1, pool.wake).start()
        assert pool.poll(GUARD_S) == []


@pytest.mark.parametrize("end", ["signal.SIGKILL", "signal.SIGABRT"])
def test_no_process_outlives_the_rank(tmp_path, end):
    """Threads hang, a daemon and a fork live, and the rank is killed."""
    program = f"""
        import os, signal, time
        from tests.ranks.agents.test_environment_pool import act, make_pool, opened
        pool = make_pool(workers=2, kwargs={{"pid_file": {str(tmp_path / "daemon")!r}}})
        opened(pool, "a", "b", "c")
        for name, what in (("a", "hangs"), ("b", "leaves a daemon"), ("c", "hangs")):
            pool.call(name, act(what))
        while not os.path.exists({str(tmp_path / "daemon")!r}):
            pool.poll(0.1)
        from rl.workers.supervisor import all_processes, descendants
        daemon = open({str(tmp_path / "daemon")!r}).read()
        print(*descendants(os.getpid(), all_processes()), daemon, flush=True)
        os.kill(os.getpid(), {end})
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )
    assert done.returncode == -getattr(signal, end.partition(".")[2]), done.stderr
    pids = {int(pid) for pid in done.stdout.split()}
    assert len(pids) >= 5
    wait_until(lambda: pids.isdisjoint(all_processes()))


def test_the_python_tool_runs_programs_in_the_sandbox():
    python = {"function": "rl.features.agents.shipped.python:python", "kwargs": {"memory_mib": 256}}
    programs = {
        "print(6 * 7)": "42",
        "1 / 0": "ZeroDivisionError",
        "print('a', flush=True); import os; os.abort()": "a\n[signal 6]",
        "x = bytearray(1 << 30)": "MemoryError\n[exit status 1]",
        "open('/etc/passwd')": "PermissionError",
    }
    with make_pool("", [python]) as pool:
        opened(pool, "a")
        calls = tuple(ToolCall(str(i), "python", {"code": code}) for i, code in enumerate(programs))
        for message, expected in zip(reply_to(pool, "a", ToolCalls(calls)).messages, programs.values()):
            assert expected in message["content"]
