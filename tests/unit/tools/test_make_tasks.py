"""The questions of `lockstep data tasks arithmetic`: right, and in no two splits about the same pair."""

import json
import re

from rl.rewards.gsm8k import score
from tools.make_tasks import main


def test_questions_about_numbers_have_right_answers_and_no_pair_is_in_both_splits(tmp_path):
    main(["arithmetic", "--num-test", "150", "--num-train", "984", "--out", str(tmp_path)])
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
