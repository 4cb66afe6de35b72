"""The second source of what a reward function gets: the row of the file, and all response ids."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rl.checks.batches import CheckFailed
from rl.checks.grades import READ_BYTES, Arguments, Grades
from rl.config.reward_sources import Component, RewardPlan
from rl.config.schema import Config, Data
from rl.data.batch import Batch
from rl.data.prompts import Prompt, load_prompts
from rl.data.reading import read_row, row_bytes
from rl.phases.truths import arguments
from rl.rewards.mixture import Mixture
from tests.chat_templates import tokenizer_of

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"What is {n} + 1?"}],
        "reward_model": {"ground_truth": str(n + 1)},
        "extra_info": {"n": n},
    }
    for n in range(6)
]


@pytest.fixture(params=["parquet", "jsonl", "json"])
def prompts(request, tmp_path):
    path = tmp_path / f"rows.{request.param}"
    if request.param == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=4)
    elif request.param == "json":
        path.write_text(json.dumps(ROWS))
    else:
        path.write_text("\n\n".join(map(json.dumps, ROWS)) + "\n")
    options = dict(prompt_key="prompt", max_prompt_tokens=128, overlong="error")
    return load_prompts([path], tokenizer_of("qwen2.5"), **options)


def test_arguments_of_another_row_or_text_are_named(prompts):
    tokenizer = tokenizer_of("qwen2.5")
    ids = [np.array(tokenizer.encode(f"It is {n}."), np.int32) for n in range(6)]
    ids[0] = np.append(ids[0], np.int32(tokenizer.eos_token_id))
    batch = Batch(
        [prompt.token_ids for prompt in prompts],
        ids,
        torch.arange(6),
        torch.zeros(6, dtype=torch.bool),
        prompts=prompts,
    )
    again = Arguments(Data(max_prompt_tokens=128), tokenizer, ())
    given = {n: arguments(prompt, f"It is {n}.") for n, prompt in enumerate(prompts)}
    again.check(batch, given)
    wrong = {
        "response": given[3] | {"response": "It is"},
        "ground_truth": given[3] | {"ground_truth": "9"},
        "extra_info": given[3] | {"extra_info": {"n": 5}},
        "data_source": given[3] | {"data_source": "x"},
    }
    for name, found in wrong.items():
        with pytest.raises(CheckFailed, match=rf"got the {name} .* for sample 3 \(prompt 3\)"):
            again.check(batch, given | {3: found})
    moved = [replace(prompt, place=other.place) for prompt, other in zip(prompts, prompts[1:] + prompts[:1])]
    with pytest.raises(CheckFailed, match="prompt 0 does not contain the text of .*, row [23]"):
        again.check_prompt(moved[0])


def test_a_string_as_a_users_message_is_compared_with_its_row(tmp_path):
    path = tmp_path / "a.jsonl"
    texts = ["1+1=", "[1, 2]: the sum?", "[1, 2]", "42", '[{"id": 1, "value": "caf\\u00e9"}]']
    path.write_text("".join(json.dumps({"question": text}) + "\n" for text in texts))
    options = dict(prompt_key="question", string_prompts="user", max_prompt_tokens=128, overlong="error")
    prompts = load_prompts([path], tokenizer_of("qwen2.5"), **options)
    data = Data(prompt_key="question", string_prompts="user", max_prompt_tokens=128)
    again = Arguments(data, tokenizer_of("qwen2.5"), ())
    for prompt in prompts:
        again.check_prompt(prompt)
    with pytest.raises(CheckFailed, match="prompt 0 does not contain the text of .*, row 2"):
        again.check_prompt(replace(prompts[0], place=prompts[1].place))


def test_rows_of_a_large_row_group_are_read_in_proportion(tmp_path):
    """A file with one row group of 200,000 rows is decoded up to the row, so few steps read it again."""
    path, size = tmp_path / "large.parquet", 200_000
    texts = np.char.mod("%0300d", np.arange(size)).tolist()  # some 60 MB
    pq.write_table(pa.table({"prompt": texts}), path, row_group_size=size)
    places = [f"{path}, row {number}" for number in (1, 5000, size)]
    assert [int(read_row(place).values["prompt"]) for place in places] == [0, 4999, size - 1]
    costs = [row_bytes(place) for place in places]
    assert costs[0] < READ_BYTES / 4 < costs[1] < READ_BYTES < 5 * READ_BYTES < costs[2]
    prompt = Prompt(size - 1, np.zeros(1, np.int32), "", "toy", None, {}, place=places[2])
    batch = Batch(
        [prompt.token_ids],
        [np.zeros(1, np.int32)],
        torch.zeros(1).long(),
        torch.zeros(1) > 0,
        prompts=[prompt],
    )
    again, number = Arguments(Data(), tokenizer_of("qwen2.5"), ()), 0
    for _ in range(40):
        again.check(batch, {})
        number += again.affords(batch, 0)
    assert 0 < number * costs[2] <= 41 * READ_BYTES


def test_the_acc_is_that_of_a_function_and_not_of_a_number_with_such_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    functions = []
    for number, found in enumerate(
        ({"score": 1, "format/acc": 0}, {"score": 1, "step/acc": 0, "acc": 1}, {"score": 0, "acc": 0})
    ):
        path = tmp_path / f"own{number}.py"
        path.write_text(f"def score(prompt, response, ground_truth, **_):\n    return {found}\n")
        functions.append(Component(f"{path}:score"))
    batch = Batch(
        [np.zeros(1, np.int32)], [np.zeros(1, np.int32)], torch.zeros(1).long(), torch.zeros(1, dtype=bool)
    )
    given = dict(prompt="1+1=", response="2", ground_truth="2", data_source="toy", extra_info={})
    for own in (functions[:1] * 2, functions):
        plan = RewardPlan(tuple(own))
        grades, score = Grades(Config(), tokenizer_of("qwen2.5"), (), plan), Mixture(plan).score(given)
        score.values["failed"] = 0.0
        batch.scores = torch.tensor([score.values["score"]])
        batch.score_details = {name: torch.tensor([value]) for name, value in score.values.items()}
        assert grades._problem(batch, 0, given, score) == ""
        other = replace(score, feedback=score.prediction or "another text")
        assert "answers, or their texts, were exchanged" in grades._problem(batch, 0, given, other)
    score.values["acc"] = 0.0
    assert "has the acc 0.0, but its reward functions gave [1.0, 0.0]" in grades._problem(
        batch, 0, given, score
    )
