import json

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tools.make_toy import addition_problems, make_toy

ALL_CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def tokenizer(toy):
    return AutoTokenizer.from_pretrained(toy / "model")


def test_splits_are_disjoint_complete_and_right(toy):
    problems = []
    for split, number in (("train", 7600), ("test", 500)):
        rows = pq.read_table(toy / f"{split}.parquet").to_pylist()
        assert len(rows) == number
        for index, row in enumerate(rows):
            problems.append(problem := row["prompt"][0]["content"])
            a, b = problem.rstrip("=").split("+")
            assert row == {
                "data_source": "addition",
                "prompt": [{"role": "user", "content": problem}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(int(a) + int(b))},
                "extra_info": {"split": split, "index": index},
            }
    assert len(problems) == 8100
    assert set(problems) == {f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)}


def test_every_character_is_one_token_and_decodes_to_itself(toy, tokenizer):
    raw = Tokenizer.from_file(str(toy / "model/tokenizer.json"))  # what the engine's detokenizer reads
    for text in (ALL_CHARACTERS, ALL_CHARACTERS[::-1], "  a , b . n't  \n\n don't <us", "37+58=95"):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
        assert raw.encode(text).ids == ids
        assert raw.decode(ids) == text
        assert "".join(tokenizer.decode([i]) for i in ids) == text


def test_special_tokens_are_single_and_skippable(tokenizer):
    ids = tokenizer("<user>1<assistant>2<eos><pad><bos><unk>")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == "<user> 1 <assistant> 2 <eos> <pad> <bos> <unk>".split()
    assert tokenizer.decode(ids, skip_special_tokens=True) == "12"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 2)


def test_the_chat_template_marks_user_and_assistant(tokenizer):
    messages = [{"role": "user", "content": "37+58="}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<user>37+58=<assistant>"
    messages.append({"role": "assistant", "content": "95"})
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<user>37+58=<assistant>95<eos>"


def test_the_model_is_qwen2_of_the_tokenizer_size(toy, tokenizer):
    config = json.loads((toy / "model/config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["vocab_size"] == len(tokenizer) == 6 + 96
    assert (config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]) == (192, 2, 384)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (6, 2)
    assert config["tie_word_embeddings"] is False
    generation = json.loads((toy / "model/generation_config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"] == 1
    weights = load_file(toy / "model/model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert weights["lm_head.weight"].shape == (102, 192)
    assert 0.03 < weights["model.layers.0.mlp.up_proj.weight"].std() < 0.05


def test_files_depend_only_on_the_seed(toy, tmp_path):
    random_state = torch.random.get_rng_state()
    again = make_toy(tmp_path / "again")
    assert torch.equal(torch.random.get_rng_state(), random_state)
    first, second = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (toy, again)
    )
    assert first == second
    other = make_toy(tmp_path / "other", seed=1)
    assert (toy / "model/model.safetensors").read_bytes() != (other / "model/model.safetensors").read_bytes()
    assert set(addition_problems(0)["test"]) != set(addition_problems(1)["test"])


def test_sizes_and_tying_follow_the_arguments(tmp_path):
    make_toy(tmp_path, hidden=64, layers=2, heads=8, kv_heads=4, intermediate=96, tie=True)
    weights = load_file(tmp_path / "model/model.safetensors")
    assert "lm_head.weight" not in weights
    assert "model.layers.2.mlp.up_proj.weight" not in weights
    assert weights["model.layers.1.mlp.up_proj.weight"].shape == (96, 64)
    assert weights["model.layers.1.self_attn.k_proj.weight"].shape == (4 * 8, 64)


def test_sizes_that_do_not_divide_are_refused(tmp_path):
    cases = ({"hidden": 130}, "--hidden 130"), ({"heads": 4, "kv_heads": 3}, "multiple of --kv-heads 3")
    for sizes, message in cases:
        with pytest.raises(ValueError, match=message):
            make_toy(tmp_path / "toy", **sizes)
    assert not (tmp_path / "toy").exists()


def test_pairs_have_a_right_answer_and_a_wrong_one(tmp_path):
    make_toy(tmp_path, hidden=32, layers=1, heads=4, kv_heads=4, intermediate=32)
    rows = pq.read_table(tmp_path / "pairs.parquet").to_pylist()
    assert len(rows) == 7600
    for row in rows:
        a, b = map(int, row["prompt"][0]["content"].rstrip("=").split("+"))
        assert int(row["chosen"]) == a + b != int(row["rejected"]) and abs(int(row["rejected"]) - a - b) <= 20
    labelled = pq.read_table(tmp_path / "labels.parquet").to_pylist()
    for pair, row in zip(rows, labelled, strict=True):
        assert row["prompt"] == pair["prompt"]
        assert row["completion"] == pair["chosen" if row["label"] else "rejected"]
    assert sum(row["label"] for row in labelled) == 3800
