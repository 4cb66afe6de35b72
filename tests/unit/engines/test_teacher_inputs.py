"""Teachers with another vocabulary, or missing for a source, are refused before anything is built."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rl.config.options import ConfigError
from rl.config.schema import load_config
from rl.engines.inputs import Inputs
from tests.checkpoints import save_qwen2
from tools.make_toy import build_tokenizer


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("inputs")
    for name, seed in (("policy", 1), ("same", 2), ("tokens", 3), ("rows", 4)):
        save_qwen2(directory / name, seed=seed)
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(directory / "tokens")
    hf = json.loads((directory / "rows/config.json").read_text())
    (directory / "rows/config.json").write_text(json.dumps(hf | {"vocab_size": hf["vocab_size"] - 1}))
    rows = [{"prompt": "1+1=", "data_source": source} for source in ("sums", "products")]
    pq.write_table(pa.Table.from_pylist(rows), directory / "data.parquet")
    return directory


def inputs(files, *overrides):
    base = [f"model.path={files}/policy", f"data.train=[{files}/data.parquet]", "algorithm=distill"]
    limits = ["data.max_prompt_tokens=16", "rollout.max_response_tokens=6", "data.prompts_per_step=2"]
    return Inputs(load_config(None, [*base, *limits, *overrides]), 1)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["teacher.path=FILES/tokens"], "the id of token '<more>' is"),
        (["teacher.sources={sums: FILES/same}"], "data_source=products of data.train has no teacher"),
        (["teacher.path=FILES/same", "teacher.top_k=1000"], "teacher.top_k=1000 is not below the vocabulary"),
        (["teacher.self_taught=present"], "teacher.max_prompt_tokens=4096 and rollout.max_resp"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(files, overrides, words):
    with pytest.raises(ConfigError) as caught:
        inputs(files, *(text.replace("FILES", str(files)) for text in overrides))
    assert words in str(caught.value)


def test_a_teacher_with_fewer_rows_is_refused(files):
    """The files of the model no longer fit its config either, which is why either error may come first."""
    with pytest.raises((ConfigError, ValueError), match="vocab_size|embed_tokens|shape"):
        inputs(files, f"teacher.path={files}/rows")


def test_a_teacher_of_all_other_sources_is_accepted(files):
    found = inputs(files, f"teacher.path={files}/same", f"teacher.sources={{sums: {files}/policy}}")
    paths = {name: model.path for name, model in found.models.items() if name.startswith("teacher")}
    assert paths == {"teacher 1": f"{files}/same", "teacher 2": f"{files}/policy"}


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ("tokens", "the id of token '<more>' is"),
        ("rows", "vocab_size is"),
        ("missing", "missing is not a directory"),
    ],
)
def test_a_draft_model_with_another_vocabulary_is_refused(files, draft, words):
    with pytest.raises((ConfigError, ValueError)) as caught:
        inputs(files, "algorithm=grpo", f"rollout.draft.path={files}/{draft}")
    assert words in str(caught.value) and "rollout.draft.path=" in str(caught.value)
    inputs(files, "algorithm=grpo", f"rollout.draft.path={files}/same")
