"""Accuracies of prompts in a stored validation."""

import json
from collections import defaultdict
from pathlib import Path

from rl.run_directory.rollout_files import read

PromptValues = dict[tuple[str, int, str], float]
"""(data source, index in the data, text of the prompt) -> mean accuracy over its samples."""


def prompt_values(path: Path) -> PromptValues:
    """Return the accuracies of a stored validation: `acc` of the reward function, or the score without it."""
    columns = ["data_source", "prompt_index", "prompt", "score", "score_details"]
    found = defaultdict(list)
    for row in read(path, columns).to_pylist():
        accuracy = json.loads(row["score_details"]).get("acc", row["score"])
        found[row["data_source"], row["prompt_index"], row["prompt"]].append(accuracy)
    return {key: sum(values) / len(values) for key, values in found.items()}
