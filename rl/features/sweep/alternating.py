"""Functions in threads of their own, one at a time."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any


class AlternatingThreads:
    """Runs functions in threads, one at a time and in order; each function may wait for an answer.

    For example, with two functions the first runs until it waits or ends, then the second. Once both wait,
    `answer` gets both requests, and the first function continues.

    Args:
        functions: called with a function `wait(request)`, which returns the answer.
        answer: called in the main thread with the requests of all live functions, by index; returns the
            answers.
        prepare: called in each thread before its function.
        follow: called with the thread that takes its turn.
    """

    def __init__(
        self,
        functions: Sequence[Callable[[Callable[[Any], Any]], Any]],
        answer: Callable[[dict[int, Any]], dict[int, Any]],
        *,
        prepare: Callable[[], None],
        follow: Callable[[threading.Thread], None],
    ):
        self._answer, self._prepare, self._follow = answer, prepare, follow
        self._main = threading.Semaphore(0)
        self._turn = [threading.Semaphore(0) for _ in functions]
        self._requests: dict[int, Any] = {}
        self._answers: dict[int, Any] = {}
        self._results: dict[int, Any] = {}
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(index, function), daemon=True)
            for index, function in enumerate(functions)
        ]

    def run(self) -> list[Any]:
        """Return the results of all functions, in order. Raises the first error of a function."""
        for thread in self._threads:
            thread.start()
        live = list(range(len(self._threads)))
        while live:
            for index in live:
                self._follow(self._threads[index])
                self._turn[index].release()
                self._main.acquire()
                if self._error is not None:
                    raise self._error
            self._follow(threading.main_thread())
            live = [index for index in live if index in self._requests]
            if live:
                requests, self._requests = self._requests, {}
                self._answers = self._answer(requests)
        return [self._results[index] for index in range(len(self._threads))]

    def _run(self, index: int, function: Callable) -> None:
        self._turn[index].acquire()
        try:
            self._prepare()
            self._results[index] = function(partial(self._wait, index))
        except BaseException as error:
            self._error = error
        self._main.release()

    def _wait(self, index: int, request: Any) -> Any:
        """Yield until the request is answered; return the answer."""
        self._requests[index] = request
        self._main.release()
        self._turn[index].acquire()
        return self._answers.pop(index)
