"""Values of prompts in a stored validation."""

import json
from collections import defaultdict
from pathlib import Path

from rl.run_directory.rollout_files import read

PromptValues = dict[tuple[str, int, str], float]
"""(data source, index in the data, text of the prompt) -> mean of a metric over its samples."""
SCORE = "score"


def prompt_values(path: Path, metric: str = "acc") -> PromptValues:
    """Return the values of a stored validation, without prompts that have none.

    metric: score, or another number that the reward function returned; the score counts in place of `acc` if
    it returned none. Raises ValueError if no sample has the metric.
    """
    columns = ["data_source", "prompt_index", "prompt", SCORE, "score_details"]
    found, names = defaultdict(list), {"acc": None, SCORE: None}
    for row in read(path, columns).to_pylist():
        details = json.loads(row["score_details"])
        numbers = {name: value for name, value in details.items() if isinstance(value, (int, float))}
        numbers = {"acc": row[SCORE]} | numbers | {SCORE: row[SCORE]}
        names |= dict.fromkeys(numbers)
        if metric in numbers:
            found[row["data_source"], row["prompt_index"], row["prompt"]].append(numbers[metric])
    if not found:
        raise ValueError(f"--metric {metric}: no sample in {path} has it; use one of {', '.join(names)}.")
    return {key: sum(values) / len(values) for key, values in found.items()}
