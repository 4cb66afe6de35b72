"""Runs one worker of the environment pool. A worker holds the environments of many trajectories and calls
them.

rl.workers.supervisor describes the processes of a worker. The pool sends pickles to the worker. The first one
is (plan, sys.path or None). Each later one is (number of the session, request, name of the request,
argument). The request is "open" (the argument is the row), "act" (the argument is an action), or "close". The
worker answers with JSON lines:

    {"ready": [[schema, ...], ...]} or {"unloadable": sentence, "traceback": text}   once, after the imports
    {"n": number, ...}                                                               the fields of a Reply
    {"closed": number, "error": text}                                                after "close"; "" if no
    error {"alive": true}                                                                  every BEAT_S during
    calls

A message with "retire" says that the process must take no further session. The pool ends the process together
with its last session, because a thread that exceeded its time limit cannot be ended, and because memory may
be leaked or fragmented.

Async methods run in one event loop. The sync methods of a session run in a thread of its own. At most THREADS
of these threads work at a time, and the time limit of a call starts when its thread may work. For example, if
20 sessions are in sync calls, 12 of them wait, and their limits have not begun. If the loop itself is
blocked, the pool kills the process. An environment must end the processes that it starts, in its method
`close`. Processes that are left without a parent are killed when the worker holds no session. All other
processes are killed with the worker.
"""

import asyncio
import contextlib
import functools
import inspect
import json
import os
import select
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl.config.agent_plan import AgentPlan
from rl.features.agents.environment import (
    AgentRun,
    Failure,
    FinalScore,
    GameTurn,
    LoadedEnvironment,
    Tool,
    ToolCall,
    ToolCalls,
    answer_digest,
    load_environment,
    task_digest,
)
from rl.features.agents.observations import content, is_observation, with_uris
from rl.rewards.score import to_finite, to_score
from rl.workers.host import Host
from rl.workers.messages import RejectedResult, encodable, explain, place_of, shown, too_slow
from rl.workers.supervisor import run_worker

BEAT_S = 1.0
"""Seconds between two signs of life during calls."""
THREADS = 8
"""Maximum number of synchronous calls at a time in a worker, except `run`."""
STACK_BYTES = 2 << 20
"""Stack size of a session's thread, in bytes. It counts as address space of the process."""
MAX_LINE_BYTES = 16 << 20
"""Maximum length of a message, in bytes. For example, a prompt of a million tokens has about 4 MB."""
TOOL_ERRORS = (ValueError, ArithmeticError, LookupError)
"""Exceptions of a tool that become an answer to the policy."""


class CallTimeout(TimeoutError):
    """Raised if a call exceeds the time limit of the pool. An environment may raise TimeoutError for other
    reasons."""


CAUSES = {CallTimeout: Failure.TIME, MemoryError: Failure.MEMORY}
"""Exception of a call -> cause of the failure that it means."""


class EnvironmentHost(Host):
    """The sessions of this process, and the connection to the pool."""

    def __init__(self, work: socket.socket, *, timeout_s: float, max_output_chars: int):
        super().__init__(work)
        self.timeout_s, self.max_output_chars = timeout_s, max_output_chars
        self.threads = asyncio.Semaphore(THREADS)
        self.must_retire = False
        self._sessions: dict[int, TrajectoryEnvironment] = {}

    def load(self, plan: AgentPlan) -> list[list[dict[str, Any]]]:
        """Return the tools of each environment."""
        self._plan = plan
        specs = {"": plan.default, **plan.sources}
        self._environments = {name: load_environment(spec) for name, spec in specs.items()}
        return [[tool.schema for tool in e.tools_for({}).values()] for e in self._environments.values()]

    def serve_requests(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        threading.stack_size(STACK_BYTES)

        def receive() -> None:
            try:
                while True:
                    loop.call_soon_threadsafe(self._dispatch, self.receive())
            finally:
                os._exit(0)  # the pool has closed the socket, or memory is exhausted

        threading.Thread(target=receive, daemon=True).start()
        while True:
            await asyncio.sleep(BEAT_S)
            # The pool does not read between two phases. If this sent to a full socket, every call would
            # block.
            can_send = bool(select.select([], [self._work], [], 0)[1])
            if can_send and any(session.is_busy for session in self._sessions.values()):
                self.send({"alive": True})

    def _dispatch(self, message: tuple[int, str, str, Any]) -> None:
        number, request, name, argument = message
        try:
            if request == "open":
                environment = self._environments[self._plan.name_for(argument)]
                self._sessions[number] = TrajectoryEnvironment(self, environment, argument)
            session = self._sessions[number]
            if request == "close":
                session.closing = asyncio.create_task(self._close(number, session))
            else:
                call = session.open() if request == "open" else session.act(argument)
                session.task = asyncio.create_task(self._answer(number, name, session, call))
        except BaseException:
            os._exit(1)  # out of memory: the pool would wait for the answer

    async def _answer(
        self, number: int, name: str, session: "TrajectoryEnvironment", call: Coroutine[Any, Any, dict]
    ) -> None:
        try:
            fields = await call
            fields["digest"] = answer_digest(name, fields)
        except BaseException as error:
            if session.closing is not None:
                raise
            self.must_retire |= isinstance(error, MemoryError)
            fields = {"failure": explain(error)}
            fields["cause"] = next(
                (c for kind, c in CAUSES.items() if isinstance(error, kind)), Failure.ERROR
            )
        self.send({"n": number, **fields})

    async def _close(self, number: int, session: "TrajectoryEnvironment") -> None:
        error = ""
        try:
            await session.close()
        except BaseException as caught:
            error = explain(caught)
        del self._sessions[number]
        self.send({"closed": number, "error": error})

    def send(self, message: dict[str, Any]) -> None:
        self.exit_in_forks()
        try:
            message["retire"] = self.must_retire
            line = json.dumps(message, ensure_ascii=False, default=str).encode("utf-8", "replace")
            if len(line) > MAX_LINE_BYTES:
                failure = f"the environment sent {len(line)} bytes, more than {MAX_LINE_BYTES}"
                line = json.dumps({"n": message.get("n"), "failure": failure}).encode()
            self._work.sendall(line + b"\n")
        except BaseException:
            os._exit(1)  # out of memory: the pool would wait for the answer


class TrajectoryEnvironment:
    """The environment of one trajectory."""

    def __init__(self, host: EnvironmentHost, environment: LoadedEnvironment, row: dict[str, Any]):
        self._host, self._environment, self._row = host, environment, row
        self._task = task_digest(row)  # before the environment may change it
        self._instance: Any = None
        self._tools: dict[str, Tool] = {}
        self._listed: list[str] = []
        """Names of the tools of `list_tools`."""
        self.task: asyncio.Task[None] | None = None
        """The last request."""
        self.closing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1)
        self._in_thread = self._is_stuck = False

    @property
    def is_busy(self) -> bool:
        return self.closing is not None or (self.task is not None and not self.task.done())

    async def open(self) -> dict[str, Any]:
        """Construct and reset the environment; return the fields of the reply."""
        environment, start = self._environment, self._row.get("messages") or self._row.get("prompt")
        if environment.cls is not None:
            self._instance = await self._call(functools.partial(environment.cls, **environment.kwargs))
        if hasattr(self._instance, "reset"):
            start = await self._call(self._instance.reset, dict(self._row))
        if is_observation(start):
            start = [{"role": "user", "content": content(start)}]
        messages = [{"role": "text", "content": start}] if isinstance(start, str) else start
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise self._wrong("reset", "a text or a list of messages", start)
        messages = list(map(with_uris, messages))
        self._tools = environment.tools_for(self._row)
        schemas = [tool.schema for tool in self._tools.values()]
        if hasattr(self._instance, "list_tools"):
            listed = await self._call(self._instance.list_tools)
            try:
                self._listed = [schema["function"]["name"] for schema in listed]
            except (TypeError, KeyError):
                raise self._wrong("list_tools", "a list of schemas in OpenAI's form", listed) from None
            schemas += listed
        fields = {"messages": messages, "tools": schemas, "drives": environment.drives, "done": self._done}
        return fields | {"task": self._task}

    async def act(self, action: ToolCalls | GameTurn | AgentRun | FinalScore) -> dict[str, Any]:
        """Carry out an action; return the fields of the reply."""
        if isinstance(action, ToolCalls):
            results = [(call, *await self._use_tool(call)) for call in action.calls]
            messages = [
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}
                for call, content, _ in results
            ]
            values = {"calls": float(len(results)), "errors": float(sum(failed for *_, failed in results))}
            return {"messages": messages, "values": values, "done": self._done}
        if isinstance(action, GameTurn):
            result = await self._call(self._instance.step, action.text)
            is_triple = isinstance(result, tuple | list) and len(result) == 3
            number = to_finite(result[1]) if is_triple else None
            if number is None:
                raise self._wrong("step", "(text, reward, done) with a finite number as reward", result)
            text, _, done = result
            message = {"role": "user", "content": content(text, self._text)}
            return {"messages": [message], "reward": number, "done": bool(done)}
        if isinstance(action, AgentRun):
            arguments = (action.base_url, action.api_key, dict(self._row))
            result = await self._call(self._instance.run, *arguments, is_limited=False)
            return {"done": True, "values": {} if result is None else self._score("run", result)}
        if not hasattr(self._instance, "score"):
            return {"values": {}, "done": True}
        score = self._instance.score
        given = [action.messages] if inspect.signature(score).parameters else []
        return {"values": self._score("score", await self._call(score, *given)), "done": True}

    def _score(self, method: str, result: Any) -> dict[str, float]:
        """Return the numbers of a score. Raises RejectedResult with the method's place."""
        try:
            return to_score(result).values
        except RejectedResult as error:
            raise RejectedResult(f"{place_of(getattr(self._instance, method))}: {error}") from None

    def _wrong(self, method: str, wanted: str, result: Any) -> RejectedResult:
        """Return the error for a method that returned something else than `wanted`."""
        place = place_of(getattr(self._instance, method))
        return RejectedResult(f"{place} must return {wanted}, not {shown(result)}")

    async def close(self) -> None:
        """End a call in progress, and close the environment."""
        if self.task is not None and not self.task.done():
            if self._in_thread:  # cannot be cancelled
                await asyncio.wait({self.task}, timeout=self._host.timeout_s)
            self.task.cancel()
            await asyncio.wait({self.task}, timeout=self._host.timeout_s)
            self._is_stuck |= not self.task.done()
        self._host.must_retire |= self._is_stuck
        try:
            if not self._is_stuck and hasattr(self._instance, "close"):
                await self._call(self._instance.close)
        finally:
            self._thread.shutdown(wait=False)

    async def _use_tool(self, call: ToolCall) -> tuple[str | list[dict], bool]:
        """Return a tool's output, and whether it is an error message."""
        try:
            if call.name in self._tools:
                instance = self._instance if call.name in self._environment.methods else None
                function = self._tools[call.name].bound_call(call.arguments, instance)
            elif call.name in self._listed and isinstance(call.arguments, dict):
                function = functools.partial(self._instance.call_tool, call.name, call.arguments)
            elif call.name in self._listed:
                raise ValueError(f"the arguments must be a JSON object, not {call.arguments:.200}")
            else:
                known = ", ".join([*self._tools, *self._listed]) or "none"
                raise ValueError(f"there is no tool {call.name:.200}; the tools are: {known}")
            return content(await self._call(function), self._text), False
        except TOOL_ERRORS as error:
            name = "" if type(error) is ValueError else f"{type(error).__name__}: "
            return self._text(f"Error: {name}{error}"), True

    @property
    def _done(self) -> bool:
        return bool(getattr(self._instance, "done", False))

    def _text(self, result: str) -> str:
        """Return a text, shortened to the limit."""
        if left_out := max(len(result) - self._host.max_output_chars, 0):
            result = f"{result[: self._host.max_output_chars]}\n[{left_out} more characters were left out]"
        return encodable(result)

    async def _call(self, function: Callable[..., Any], *arguments: Any, is_limited: bool = True) -> Any:
        """Call code of the user within the time limit. A sync function runs in the session's thread."""
        limit_s = self._host.timeout_s if is_limited else None
        is_async = inspect.iscoroutinefunction(function)
        slot = self._host.threads if is_limited and not is_async else contextlib.nullcontext()
        async with slot:
            try:
                async with asyncio.timeout(limit_s) as limit:
                    result = (
                        function(*arguments) if is_async else await self._call_in_thread(function, *arguments)
                    )
                    return await result if inspect.isawaitable(result) else result
            except TimeoutError:
                if limit_s is not None and limit.expired():
                    raise CallTimeout(too_slow(limit_s)) from None
                raise
            finally:
                self._host.exit_in_forks()

    async def _call_in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the thread of the session.

        Some objects work only in the thread that made them, for example a connection of sqlite3.
        """

        def job() -> tuple[Any, BaseException | None]:  # a future cannot hold every exception
            try:
                return function(*arguments), None
            except BaseException as caught:
                return None, caught
            finally:
                self._host.exit_in_forks()

        try:
            outcome = asyncio.get_running_loop().run_in_executor(self._thread, job)
        except RuntimeError as error:  # no address space for the thread's stack
            raise MemoryError(str(error)) from error
        self._in_thread = True
        try:
            result, failure = await outcome
        except asyncio.CancelledError:
            self._is_stuck = self._host.must_retire = True
            raise
        finally:
            self._in_thread = False
        if failure is not None:
            raise failure
        return result


def _serve(work: socket.socket, options: dict[str, Any]) -> None:
    limits = {name: options[name] for name in ("timeout_s", "max_output_chars")}
    EnvironmentHost(work, **limits).serve()


if __name__ == "__main__":
    run_worker(_serve)
