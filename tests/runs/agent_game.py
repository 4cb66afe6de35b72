"""A game for runs with environments: repeats a part of the policy's text for three turns."""

import os
import signal
import time
from pathlib import Path


class Echo:
    """The game. With `kill_at` its call of that number kills a rank of the run, once.

    Args:
        directory: holds the run directory `run` and the files of this class.
        kill_at: numbers of the calls, over all games, that kill rank `number % 2`.
        stops: whether they request a stop of the run instead.
    """

    def __init__(
        self, directory: str = "", kill_at: list[int] | None = None, sleep_s: float = 0.0, stops: bool = False
    ):
        self.directory, self.kill_at, self.sleep_s, self.turns = Path(directory), kill_at, sleep_s, 0
        self.stops = stops

    def reset(self, row):
        return row["prompt"]

    def step(self, text):
        time.sleep(self.sleep_s)
        if self.kill_at:
            self.count_call()
        self.turns += 1
        return f"+{text[-2:]}=", len(set(text)) / 6, self.turns == 3

    def count_call(self) -> None:
        """Count this call in a file, and kill a rank if its number is one of `kill_at`."""
        with open(self.directory / "calls", "ab", buffering=0) as file:
            file.write(b".")
            number = file.tell()
        killed = self.directory / f"killed_{number}"
        if number in (self.kill_at or []) and not killed.exists():
            killed.touch()
            if self.stops:
                return (self.directory / "run" / "stop").touch()
            beat = (self.directory / "run" / "heartbeat" / f"rank_{number % 2}.json").read_text()
            os.kill(int(beat.partition('"pid": ')[2].partition(",")[0]), signal.SIGKILL)


class Varied(Echo):
    """The game with one to eight turns, by what the policy writes."""

    def step(self, text):
        answer, reward, _ = super().step(text)
        return answer, reward, self.turns == 8 or sum(map(ord, text)) % 4 == 0


class Long(Echo):
    """The game with a long prompt, which fills blocks of the engine's KV cache."""

    def reset(self, row):
        return 40 * row["prompt"]


class Lines(Echo):
    """The game with answers that begin a new line, as a chat template separates turns."""

    def step(self, text):
        answer, *rest = super().step(text)
        return f"\n{answer}", *rest


class Brittle:
    """A game of one turn that raises unless the policy's text has an even number of characters.

    Every fifth reset raises, too.
    """

    resets = 0

    def reset(self, row):
        Brittle.resets += 1
        if Brittle.resets % 5 == 0:
            raise RuntimeError("no game")
        return row["prompt"]

    def step(self, text):
        if len(text) % 2:
            raise RuntimeError("wrong answer")
        return "", 1.0, True
