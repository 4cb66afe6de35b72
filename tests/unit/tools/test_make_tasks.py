"""The questions of make_tasks.py arithmetic: right, and about pairs that the other split does not have."""

import json
import re
import subprocess
import sys

from rl.rewards.gsm8k import score
from tests.spawn import ROOT


def test_questions_about_numbers_have_right_answers_and_no_pair_is_in_both_splits(tmp_path):
    tool = [
        sys.executable,
        ROOT / "tools/make_tasks.py",
        "arithmetic",
        "--num-test",
        "150",
        "--num-train",
        "984",
        "--out",
        tmp_path,
    ]
    subprocess.run(tool, check=True)
    pairs = {}
    for split, count in (("train", 984), ("test", 150)):
        rows = [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        assert len(rows) == count
        pairs[split] = set()
        for row in rows:
            question, truth = row["prompt"][-1]["content"], row["reward_model"]["ground_truth"]
            a, b = map(int, re.findall(r"\d+", question))
            assert truth == str(a + b), question
            assert score("", f"It is {truth}.", truth, method="flexible")["score"] == 1.0
            pairs[split].add(frozenset((a, b)))
    assert not pairs["train"] & pairs["test"]
