"""A game of up to four turns with answers that take log-normal times."""

import asyncio
import math
import random
from typing import Any


class Slow:
    """The game. median_s: median time of an answer, in seconds."""

    def __init__(self, median_s: float):
        self.median_s, self.left = median_s, random.randint(1, 4)

    def reset(self, row: dict[str, Any]) -> Any:
        return row["prompt"]

    async def step(self, text: str) -> tuple[str, float, bool]:
        await asyncio.sleep(random.lognormvariate(math.log(self.median_s), 1.0))
        self.left -= 1
        return "more", 0.0, self.left == 0

    def score(self) -> float:
        return random.random()
