"""Pairs and labelled responses are drawn in the shares of their files, and in the order of a curriculum."""

import json
from collections import Counter

import pytest

from rl.config.schema import load_config
from rl.engines.inputs import Inputs
from tests.checkpoints import save_qwen2

ORDER = """
def order(epoch, rows, rng):
    return sorted(range(len(rows)), key=lambda i: rows[i].text, reverse=True)
"""
COLUMNS = {"dpo": {"chosen": "2", "rejected": "3"}, "kto": {"completion": "2", "label": True}}


@pytest.mark.parametrize("algorithm", COLUMNS)
def test_rated_data_has_weights_and_a_curriculum(tmp_path, algorithm):
    model = save_qwen2(tmp_path / "model", seed=1)
    files = [tmp_path / f"{name}.jsonl" for name in ("few", "many")]
    for file, numbers in zip(files, (range(2), range(2, 9))):
        rows = [{"prompt": f"{number}+1="} | COLUMNS[algorithm] for number in numbers]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text(ORDER)
    base = [f"algorithm={algorithm}", f"model.path={model}", f"data.train=[{files[0]}, {files[1]}]"]
    base += ["data.max_prompt_tokens=16", "rollout.max_response_tokens=6", "data.prompts_per_step=2"]

    def drawn(override, number):
        inputs = Inputs(load_config(None, [*base, override]), 1)
        return [inputs.prompts[i] for i in inputs.prompt_order().draw(number)]

    shares = Counter(row.data_source for row in drawn("data.train_weights=[3.0, 1.0]", 4000))
    assert shares["few"] / 4000 == pytest.approx(0.75, abs=0.03)  # four standard errors
    texts = [row.text for row in drawn(f"data.curriculum={tmp_path}/own.py:order", 9)]
    assert texts == [f"{number}+1=" for number in reversed(range(9))]
