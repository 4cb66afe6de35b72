"""One worker of the scoring pool: calls the reward functions (rl.workers.supervisor has its processes).

The pool sends pickles, after the first one chunks [(index, sample), ...]. It receives JSON lines:

    {"ready": is_async}                                                      once, after the import
    {"i": index, "of": [seal, *parts], "values": {name: number}, "prediction": text or null}    a score, which
                                                                             may also have "feedback": text
    {"i": index, "error": text, "last": bool}                                a failure; last: the host exits
    {"i": index, "waiting": true}                                            called, and now awaited
"""

import os
import signal
import socket
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl.config.reward_sources import RewardPlan
from rl.rewards.mixture import Mixture
from rl.rewards.score import Score
from rl.workers.host import Host
from rl.workers.messages import RejectedResult, explain, too_slow
from rl.workers.supervisor import run_worker

if TYPE_CHECKING:
    import asyncio

MAX_LINE_BYTES = 1 << 20


class RewardHost(Host):
    """Calls the reward functions on the samples from the pool and sends the results back."""

    def __init__(self, work: socket.socket, *, timeout_s: float):
        super().__init__(work)
        self._timeout_s, self._cwd = timeout_s, os.getcwd()
        self._runner: asyncio.Runner | None = None

    def load(self, plan: RewardPlan) -> bool:
        self._mixture = Mixture(plan)
        return self._mixture.is_async

    def serve_requests(self) -> None:
        while True:
            try:
                chunk = self.receive()
            except EOFError:
                return
            waiting = self._call(self._mixture, chunk)
            if waiting:
                self._await(waiting)
                self._restore_state()

    def _call(
        self, mixture: Mixture, chunk: Sequence[tuple[int, Mapping[str, Any]]]
    ) -> list[tuple[int, Awaitable[Score]]]:
        """Score the samples in order; return the calls that must be awaited."""
        waiting = []
        for index, sample in chunk:
            try:
                outcome = mixture.score(sample)
            except BaseException as error:
                self._fail(index, error)
            else:
                if isinstance(outcome, Score):
                    self._answer(index, outcome)
                else:
                    self.send({"i": index, "waiting": True})
                    waiting.append((index, outcome))
            self._restore_state()
        return waiting

    def _await(self, waiting: Sequence[tuple[int, Awaitable[Score]]]) -> None:
        """Await all concurrently, each with its own time limit, and answer each when it completes."""
        import asyncio  # imported here because it doubles the time that a worker needs to start

        async def settle(index: int, outcome: Awaitable[Score]) -> None:
            # Not wait_for, which runs the call in a separate task: all blocking calls would be answered last.
            try:
                async with asyncio.timeout(self._timeout_s) as limit:
                    score = await outcome
            except BaseException as error:
                self._fail(index, TimeoutError(too_slow(self._timeout_s)) if limit.expired() else error)
            else:
                self._answer(index, score)

        async def settle_all() -> None:
            await asyncio.gather(*(settle(*call) for call in waiting))

        if self._runner is None:  # one event loop for all chunks: functions keep connections bound to it
            self._runner = asyncio.Runner()
        self._runner.run(settle_all())

    def _answer(self, index: int, score: Score) -> None:
        message = {"i": index, "of": [score.seal, *score.parts]}
        message |= {"values": score.values, "prediction": score.prediction}
        if score.feedback is not None:
            message["feedback"] = score.feedback
        if sum(map(len, score.values)) > MAX_LINE_BYTES // 32:  # a character may take 12 bytes
            error = RejectedResult(f"{len(score.values)} values are too many for one sample")
            return self._fail(index, error)
        self.send(message)

    def _fail(self, index: int, error: BaseException) -> None:
        # Leaked or fragmented memory would fail the next samples too, so a new process continues with them.
        last = isinstance(error, MemoryError)
        self.send({"i": index, "error": explain(error), "last": last})
        if last:
            os._exit(0)

    def _restore_state(self) -> None:
        """Reset the alarm and the working directory, which would affect the next sample."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            moved = os.getcwd() != self._cwd
        except FileNotFoundError:  # it was removed
            moved = True
        if moved:
            os.chdir(self._cwd)


if __name__ == "__main__":
    run_worker(lambda work, options: RewardHost(work, timeout_s=options["timeout_s"]).serve())
