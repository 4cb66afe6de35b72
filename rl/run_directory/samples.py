"""`<run.dir>/samples.jsonl`: readable samples of each step."""

import json
from pathlib import Path

FILE_NAME = "samples.jsonl"


def append_samples(path: Path, samples: list[dict]) -> None:
    """Append one JSON object per sample; each has the key training/global_step."""
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
