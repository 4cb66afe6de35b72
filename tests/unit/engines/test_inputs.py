"""Which files and columns a run reads: training data and ground truths only if something uses them."""

import json

import pytest

from rl.config.checks import check
from rl.config.schema import load_config
from rl.engines.inputs import Inputs
from tests.checkpoints import save_qwen2


@pytest.fixture
def inputs(tmp_path):
    """Return a function of overrides; train.jsonl has responses, test.jsonl has answers."""
    rows = {
        "train": {"prompt": "1+1=", "response": "2"},
        "test": {"prompt": "2+1=", "answer": "3", "level": 4},
    }
    for name, row in rows.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    base = [f"model.path={save_qwen2(tmp_path / 'model', seed=1)}", f"data.val={tmp_path}/test.jsonl"]
    base += ["data.ground_truth_key=answer", "data.max_prompt_tokens=16", "rollout.max_response_tokens=6"]

    def read(*overrides):
        check(config := load_config(None, [*base, *overrides]))
        return Inputs(config, 1)

    return read


def test_only_scored_rows_need_a_ground_truth(inputs, tmp_path):
    train = f"data.train={tmp_path}/train.jsonl"
    keys = "data.response_key=response", "validation.greedy=true", "validation.loss=false"
    found = inputs(train, "algorithm=sft", *keys)
    assert (found.held_out[0].ground_truth, found.held_out[0].extra_info) == ("3", {"level": 4})
    assert found.prompts[0].ground_truth is None and found.prompts[0].response_ids is not None
    with pytest.raises(ValueError, match="no column 'answer'.*data.ground_truth_key"):
        inputs(train)


@pytest.mark.parametrize("algorithm", ["grpo", "dpo", "sft"])
def test_an_evaluation_reads_only_its_own_data(inputs, algorithm):
    keys = "validation.greedy=true", "validation.loss=false", "data.train=[none]"
    found = inputs(f"algorithm={algorithm}", "run.mode=evaluate", *keys)
    assert [prompt.ground_truth for prompt in found.held_out] == ["3"] and found.prompts is found.held_out
    assert len(inputs("run.mode=evaluate").held_out) == 1
