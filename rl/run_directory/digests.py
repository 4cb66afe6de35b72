"""`<run.dir>/digests.jsonl`: a digest of each stage of each step, by which two runs can be compared.

A digest of token ids is a hash. A digest of other numbers is [hash, weighted sum, norm]: two digests with
different hashes tell by their sums whether the numbers differ by rounding or by another value.
`lockstep compare --parting` reads the file.
"""

import json
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rl.run_directory.delayed_writes import DelayedWrites
from rl.run_directory.metric_log import STEP, parse_record

FILE_NAME = "digests.jsonl"
STAGES = {
    "prompts": "prompt_ids",
    "tokens": "response_ids",
    "engine log-probs": "rollout_logprobs",
    "scores": "score",
    "old log-probs": "old_logprobs",
    "advantages": "advantages",
}
"""Stage of a step, in their order -> column of the stored samples."""
START, WEIGHTS = "weights at the start", "weights"
"""Stages before and after the others. START is in the first step after each start of the run."""


def digest_of(values: np.ndarray) -> list[Any]:
    """Return the digest of numbers [n]. The weights of the sum depend on the place, so that swaps differ."""
    numbers = values.astype(np.float64)
    hashed = f"{zlib.crc32(np.ascontiguousarray(values).data):08x}"
    return [hashed, float(numbers @ _places(len(numbers))), float(np.sqrt(numbers @ numbers))]


def gap(a: list[Any], b: list[Any]) -> float:
    """Return the estimated norm of the difference of the numbers behind two digests, relative to their norm.

    The weights of the sum have the variance 1 / 12.
    """
    return float(np.sqrt(12) * abs(a[1] - b[1]) / max(a[2], b[2], 1e-30))


def _places(size: int) -> np.ndarray:
    return _weights(1 << max(size - 1, 1).bit_length())[:size]


@lru_cache(maxsize=2)
def _weights(size: int) -> np.ndarray:
    """Return numbers between -0.5 and 0.5 that are far apart for neighbours, float64 [size]."""
    return np.arange(size) * 0.6180339887498949 % 1 - 0.5


class DigestLog:
    """Writes the file of a run. For rank 0 only; not collective."""

    def __init__(self, run_dir: str | Path):
        self._writes = DelayedWrites(Path(run_dir, FILE_NAME))

    def append(self, step: int, digests: dict[str, Any]) -> None:
        """Append the digests of a step, by stage. If the disk is full, keep them and try again later."""
        self._writes.append(step, json.dumps({STEP: step} | digests))

    def close(self) -> None:
        self._writes.close()


def read_digests(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return step -> stage -> digest; {} for a run without the file."""
    path = run_dir / FILE_NAME
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    records = [json.loads(line) for line in lines if parse_record(line)]
    return {record[STEP]: record for record in records}
