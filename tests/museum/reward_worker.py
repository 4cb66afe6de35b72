"""A worker that answers awaited calls in the order of their completion, and reward functions."""

import asyncio
import itertools

CALLS = itertools.count()


async def slow_first(prompt, response, **extra):
    """Return a distinct score for each response. A response with a higher first letter takes less time."""
    await asyncio.sleep(0.001 * (256 - ord(response[:1] or "z") % 256))
    return len(set(response)) / 6 + len(response) / 100


def later_0(prompt, response, **extra):
    """Return 0 after the 64 samples of the first step."""
    return len(set(response)) / 6 if next(CALLS) < 64 else 0.0


def voted(prompt, response, **extra):
    """Return one of four answers, of which one is right."""
    answer = sum(map(ord, response)) % 4
    return {"score": float(answer == 1), "acc": float(answer == 1), "pred": str(answer)}


def main() -> None:
    from rl.rewards.pool.worker import RewardHost
    from rl.workers.supervisor import run_worker

    class Mixed(RewardHost):
        def _await(self, waiting) -> None:
            indices = iter(sorted(index for index, _ in waiting))
            answer = self._answer
            self._answer = lambda index, score: answer(next(indices), score)  # type: ignore[method-assign]
            super()._await(waiting)
            self._answer = answer  # type: ignore[method-assign]

    run_worker(lambda work, options: Mixed(work, timeout_s=options["timeout_s"]).serve())


if __name__ == "__main__":
    main()
