import gzip
import importlib
import json
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tables import cells
from tools.dataset_rows import code_row, countdown_row, dapo_row, math_row
from tools.prepare_data import main, prepare_gsm8k

REPOSITORY = Path(__file__).resolve().parents[3]
GSM8K = REPOSITORY / "tests/data/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def write_source(path, *, train, test):
    path.mkdir(exist_ok=True)
    for split, problems in {"train": train, "test": test}.items():
        lines = [json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in problems]
        (path / f"{split}.jsonl").write_text("".join(lines))
    return path


def test_a_problem_becomes_a_row_with_the_columns_of_verl(tmp_path):
    solution = "It is <<1000*2=2000>>2,000.\n#### 2,000"
    train = [("Q0?", "A\n#### 7"), ("How much?", solution)]
    source = write_source(tmp_path / "source", train=train, test=[("Q?", "#### -3")])
    assert prepare_gsm8k(source, tmp_path / "new/out") == {"train": 2, "test": 1}
    rows = pq.read_table(tmp_path / "new/out/train.parquet").to_pylist()
    assert rows[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"How much? {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2000"},
        "extra_info": {"split": "train", "index": 1, "answer": solution, "question": "How much?"},
    }
    (row,) = pq.read_table(tmp_path / "new/out/test.parquet").to_pylist()
    found = row["reward_model"]["ground_truth"], row["extra_info"]["split"], row["extra_info"]["index"]
    assert found == ("-3", "test", 0)


INVALID = cells(r"""
    { ;; {"question": "a"} ;; ["a"] ;; {"question": "a", "answer": "no number"} ;;
    {"question": "a", "answer": "####"} ;; {"question": "a", "answer": 5}
    """)


def test_invalid_sources_are_named_and_nothing_written(tmp_path):
    with pytest.raises(ValueError, match="lacks train.jsonl and test.jsonl of GSM8K"):
        prepare_gsm8k(tmp_path, tmp_path / "out")
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(ValueError, match="lacks test.jsonl"):
        prepare_gsm8k(tmp_path, tmp_path / "out")
    source = write_source(tmp_path, train=[("a", "#### 1")], test=[("a", "#### 1")])
    for line in INVALID:
        (source / "test.jsonl").write_text('{"question": "a", "answer": "#### 1"}\n' + line + "\n")
        with pytest.raises(ValueError, match="test.jsonl, line 2, is not (a GSM8K problem|JSON)"):
            prepare_gsm8k(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def write_jsonl(path, records, *, compress=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_bytes(gzip.compress(text.encode()) if compress else text.encode())
    return path


def prepare(tmp_path, *arguments):
    """Run the tool in this process; returns split -> rows."""
    main([*map(str, arguments), "--out", str(tmp_path / "out")])
    return {path.stem: pq.read_table(path).to_pylist() for path in (tmp_path / "out").glob("*.parquet")}


def truths(rows):
    return [row["reward_model"]["ground_truth"] for row in rows]


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as exited:
        main([*map(str, arguments), "--out", "nowhere"])
    assert exited.value.code == 2
    return capsys.readouterr().err


def test_math_reads_the_folders_of_hendrycks(tmp_path, caplog):
    for name, problem, solution, level in (
        ("train/algebra/2", "P2", r"$\boxed{2}$", 5),
        ("train/geometry/1", "P1", r"$\boxed{\pi}$", 1),
        ("train/geometry/3", "P3", "nothing", 1),
        ("test/algebra/9", "P9", r"\boxed{9}", 2),
    ):
        file = tmp_path / "MATH" / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        record = {"problem": problem, "solution": solution, "level": f"Level {level}", "type": "Algebra"}
        file.write_text(json.dumps(record))
    with caplog.at_level("INFO"):
        rows = prepare(tmp_path, "math", "--source", tmp_path / "MATH")
    assert "train: dropped 1: the solution has no \\boxed answer" in caplog.text
    assert truths(rows["train"]) == ["2", r"\pi"]
    request = "P9 Let's think step by step and output the final answer within \\boxed{}."
    info = {"split": "test", "index": 0, "answer": r"\boxed{9}", "question": "P9"}
    expected = {
        "data_source": "DigitalLearningGmbH/MATH-lighteval",
        "prompt": [{"role": "user", "content": request}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "9"},
        "extra_info": {**info, "level": "Level 2", "type": "Algebra"},
    }
    assert rows["test"] == [expected]


def test_math_reads_jsonl_and_a_train_split_alone(tmp_path):
    records = [{"problem": "P", "solution": r"\boxed{1}", "level": 3, "type": "A"}]
    rows = prepare(tmp_path, "math", "--source", write_jsonl(tmp_path / "train_all.jsonl", records))
    assert list(rows) == ["train"] and rows["train"][0]["extra_info"]["level"] == "3"


DAPO_TEXT = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def dapo_record(problem, answer):
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": DAPO_TEXT.format(problem)}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4"},
    }


def test_dapo_copies_and_contradictions_are_dropped(tmp_path, caplog):
    answers = [("A?", "34"), ("B?", "1"), ("A?", "34"), ("C?", "5"), ("B?", "2")]
    source = tmp_path / "dapo.parquet"
    pq.write_table(pa.Table.from_pylist([dapo_record(*answer) for answer in answers]), source)
    with caplog.at_level("INFO"):
        rows = prepare(tmp_path, "dapo-math", "--source", source)
    assert list(rows) == ["train"] and truths(rows["train"]) == ["34", "5"]
    assert [row["extra_info"]["question"] for row in rows["train"]] == ["A?", "C?"]
    assert rows["train"][0]["prompt"] == [{"role": "user", "content": DAPO_TEXT.format("A?")}]
    assert rows["train"][0]["data_source"] == "math_dapo"
    for words in ("5 rows are 3 distinct problems", "dropped 1: its copies have different"):
        assert words in caplog.text


def test_dapo_problems_without_the_published_request_get_it(tmp_path):
    records = [{"prompt": "A?", "solution": "34"}, {"prompt": [{"content": "B?"}], "label": 5}]
    rows = prepare(tmp_path, "dapo-math", "--source", write_jsonl(tmp_path / "x.jsonl", records))["train"]
    assert [row["prompt"][0]["content"] for row in rows] == [DAPO_TEXT.format("A?"), DAPO_TEXT.format("B?")]
    assert truths(rows) == ["34", "5"]


def test_aime_gives_plain_integers_and_a_data_source(tmp_path, capsys):
    records = [
        {"ID": "I-1", "Problem": "A?", "Solution": "long", "Answer": 204},
        {"problem": "B?", "answer": "033"},
        {"question": "C?", "answer": r"336^\circ"},
        {"problem": "D?", "answer": "000"},
    ]
    file = write_jsonl(tmp_path / "aime.jsonl", records)
    rows = prepare(tmp_path, "aime", "--source", file, "--data-source", "aime_2024")
    assert list(rows) == ["test"] and truths(rows["test"]) == ["204", "33", "336", "0"]
    assert {row["data_source"] for row in rows["test"]} == {"aime_2024"}
    assert rows["test"][1]["prompt"][0]["content"] == DAPO_TEXT.format("B?")
    for answer in ("1000", "-3", "x", "3.5"):
        write_jsonl(file, [{"problem": "A?", "answer": "1"}, {"problem": "B?", "answer": answer}])
        error = refusal(capsys, "aime", "--source", file).replace("\n", " ")
        assert "aime.jsonl, line 2, is not an AIME problem" in error


def reachable(numbers):
    """All values of expressions with each number once, by brute force."""
    if len(numbers) == 1:
        return {numbers[0]}
    values = set()
    for size in range(1, len(numbers)):
        for left in combinations(range(len(numbers)), size):
            right = [numbers[i] for i in range(len(numbers)) if i not in left]
            for a in reachable(tuple(numbers[i] for i in left)):
                for b in reachable(tuple(right)):
                    values |= {a + b, a - b, a * b} | ({a / b} if b else set())
    return values


def test_countdown_is_solvable_distinct_and_reproducible(tmp_path, capsys):
    def generate(folder, *options):
        return prepare(tmp_path / folder, "countdown", "--num-test", "10", "--num-train", *options)

    rows = generate("a", "30")
    problems = truths(rows["train"]) + truths(rows["test"])
    for problem in problems:
        assert problem["target"] in reachable(tuple(map(Fraction, problem["numbers"]))), problem
        assert len(problem["numbers"]) in (3, 4) and 10 <= problem["target"] <= 99
    assert len({(*sorted(problem["numbers"]), problem["target"]) for problem in problems}) == 40
    assert {len(problem["numbers"]) for problem in problems} == {3, 4}
    content = rows["train"][0]["prompt"][0]["content"]
    for words in (f"{problems[0]['numbers']}", f"equals {problems[0]['target']}.", "<answer>"):
        assert words in content
    again = generate("b", "31")
    assert again["test"] == rows["test"] and again["train"][:30] == rows["train"]
    assert generate("c", "30", "--seed", "1") != rows
    assert "must be 1 or more" in refusal(capsys, "countdown", "--num-train", "0")


def transcript(*turns):
    return "".join(f"\n\n{who}: {text}" for who, text in zip(["Human", "Assistant"] * len(turns), turns))


def pair(prompt, chosen, rejected):
    return {"chosen": transcript(*prompt, chosen), "rejected": transcript(*prompt, rejected)}


def test_hh_rlhf_reads_gz_and_splits_off_the_last_turn(tmp_path, caplog):
    twice = "\n\nHuman: a\n\nHuman: b\n\nAssistant: "
    pairs = [
        pair(("Hi", "Hello", "How?"), "So.", "No\n\nidea."),
        {"chosen": transcript("Hi", "A"), "rejected": transcript("Ho", "B")},
        pair(["Hi"], "A", ""),
        pair(["Hi"], "A", "A"),
        {"chosen": twice + "c", "rejected": twice + "d"},
        pair([""], "A", "B"),
    ]
    for name, some in {"helpful-base/train": 6, "harmless-base/train": 1, "harmless-base/test": 1}.items():
        write_jsonl(tmp_path / f"hh/{name}.jsonl.gz", pairs[:some], compress=True)
    with caplog.at_level("INFO"):
        rows = prepare(tmp_path, "hh-rlhf", "--source", tmp_path / "hh")
    assert {split: len(found) for split, found in rows.items()} == {"train": 2, "test": 1}
    assert caplog.text.count("dropped 1:") == 5
    roles = ("user", "assistant", "user")
    expected = {
        "data_source": "Anthropic/hh-rlhf",
        "prompt": [{"role": role, "content": text} for role, text in zip(roles, ("Hi", "Hello", "How?"))],
        "ability": "alignment",
        "reward_model": {"style": "model", "ground_truth": "So."},
        "extra_info": {"split": "test", "index": 0},
        "chosen": "So.",
        "rejected": "No\n\nidea.",
    }
    assert rows["test"] == [expected]


def test_a_broken_gz_file_is_named(tmp_path, capsys):
    file = write_jsonl(tmp_path / "train.jsonl.gz", [pair(["Hi"], "A", "")], compress=True)
    whole = file.read_bytes()
    for broken in (whole[:-9], whole[:12] + b"\xff" * 20 + whole[32:], b"no gzip"):
        file.write_bytes(broken)
        assert "train.jsonl.gz cannot be read" in refusal(capsys, "hh-rlhf", "--source", file)


def test_code_problems_of_apps_and_code_contests(tmp_path, caplog):
    tests = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
    call = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}
    problems = [
        {"input_output": json.dumps(tests), "difficulty": "interview", "solutions": "[]"},
        {"input_output": call, "starter_code": "def add(a, b):\n    "},
        {"input_output": ""},
        {"input_output": '{"inputs": [], "outputs": []}'},
        {"input_output": '{"inputs": ["1"], "outputs": []}'},
        {"input_output": '{"inputs": ["1", "2"], "outputs": ["1"]}'},
        {"input_output": '{"inputs": [' + "9" * 5000 + '], "outputs": [1]}'},
    ]
    write_jsonl(tmp_path / "apps/train.jsonl", [{"question": f"Q{i}."} | p for i, p in enumerate(problems)])
    contest = {"description": "Echo.", "public_tests": {"input": ["a"], "output": ["a"]}, "difficulty": 7}
    contest["private_tests"] = {"input": [], "output": []}
    contest["generated_tests"] = {"input": ["b"], "output": ["b"]}
    newer = {"description": "Echo 2.", "public_tests": [{"input": "a", "output": "a"}]}
    write_jsonl(tmp_path / "apps/test.jsonl", [contest, newer])
    with caplog.at_level("INFO"):
        rows = prepare(tmp_path, "code", "--source", tmp_path / "apps", "--data-source", "apps")
    assert [json.loads(truth) for truth in truths(rows["train"])] == [tests, call]
    echoes = [{"inputs": [*text], "outputs": [*text]} for text in ("ab", "a")]
    assert [json.loads(truth) for truth in truths(rows["test"])] == echoes
    plain, function = (row["prompt"][0]["content"] for row in rows["train"])
    assert plain.startswith("Q0.\n\n") and "standard input" in plain and "```python" in plain
    assert "def add(a, b):" in function and "`add`" in function and "standard input" not in function
    assert {row["data_source"] for row in rows["train"] + rows["test"]} == {"apps"}
    for reason in (
        "3: there are no tests",
        "1: the tests are not JSON",
        "1: inputs and outputs of the tests",
    ):
        assert f"dropped {reason}" in caplog.text


def test_column_types_hold_beyond_one_row_group(tmp_path):
    tests = {"inputs": ["x"], "outputs": ["y"]}
    records = [{"question": f"Q{i}", "input_output": tests} for i in range(2500)]
    rows = prepare(tmp_path, "code", "--source", write_jsonl(tmp_path / "train.jsonl", records))["train"]
    assert len(rows) == 2500
    assert rows[2499]["extra_info"] == {"split": "train", "index": 2499, "difficulty": ""}
    assert pq.ParquetFile(tmp_path / "out/train.parquet").num_row_groups == 3


def test_a_source_with_nothing_to_read_is_refused(tmp_path, capsys):
    def error():
        return refusal(capsys, "math", "--source", tmp_path)

    assert "does not exist" in refusal(capsys, "math", "--source", tmp_path / "nowhere")
    (tmp_path / "readme.md").write_text("x")
    write_jsonl(tmp_path / "other.jsonl", [{}])
    assert "holds no .parquet, .jsonl, .jsonl.gz, .json files named train or test" in error()
    for records, message in (
        ([], "train.jsonl is empty"),
        ([{"question": "a"}], "train.jsonl, line 1, is not a MATH problem: problem must be text"),
        ([{"problem": "a", "solution": "b"}], "the split train is empty"),
    ):
        write_jsonl(tmp_path / "train.jsonl", records)
        assert message in error()
    assert not Path("nowhere").exists()


def test_from_hub_takes_the_splits_of_the_data_set(tmp_path, monkeypatch):
    asked = []
    problem = {"problem": "P", "solution": r"\boxed{1}", "level": "1", "type": "A"}

    def load_dataset(name, config):
        asked.append((name, config))
        kinds = {"question": "Q", "answer": "#### 3"} if "gsm8k" in name else {**problem, "answer": "1"}
        split = datasets.Dataset.from_list([kinds])
        return datasets.DatasetDict(dict.fromkeys(("train", "test", "valid"), split))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert set(prepare(tmp_path / "a", "gsm8k", "--from-hub")) == {"train", "test"}
    assert set(prepare(tmp_path / "b", "math", "--from-hub", "someone/MATH")) == {"train", "test"}
    assert set(prepare(tmp_path / "c", "aime", "--from-hub")) == {"test"}
    assert asked == [("openai/gsm8k", "main"), ("someone/MATH", None), ("HuggingFaceH4/aime_2024", None)]


SUM = "```python\nprint({}(map(int, input().split())))\n```"
CODE = {"question": "Add.", "input_output": {"inputs": ["1 2\n"], "outputs": ["3\n"]}}
MATH = {"problem": "P", "solution": r"$\boxed{\frac{1}{2}}$"}
REWARDS = [  # reward function, row, response, what makes it wrong
    ("math", math_row(MATH, split="train", index=0), r"It is $\boxed{\frac12}$.", (r"\frac12", "2")),
    ("dapo", dapo_row("P", "34", split="train", index=0), "So.\nAnswer: 34", ("34", "35")),
    ("countdown", countdown_row([3, 5, 7], 22, split="train", index=0), "<answer> 3 * 5 + 7 </answer>", "*+"),
    ("code", code_row(CODE, split="train", index=0), SUM.format("sum"), ("sum", "max")),
]


@pytest.mark.parametrize("name, row, right, change", REWARDS)
def test_rewards_read_the_requested_form_and_ground_truth(name, row, right, change):
    score, truth = importlib.import_module(f"rl.rewards.{name}").score, row["reward_model"]["ground_truth"]
    assert score("P", right, truth)["acc"] == 1.0
    assert score("P", right.replace(*change, 1), truth)["acc"] == 0.0


def test_rows_of_gsm8k_have_whole_numbers(tmp_path):
    assert prepare_gsm8k(GSM8K, tmp_path) == {"train": 32, "test": 48}
    for split in ("train", "test"):
        for number in truths(pq.read_table(tmp_path / f"{split}.parquet").to_pylist()):
            assert number == str(int(number))


def test_a_geometry_problem_keeps_its_images(tmp_path):
    image = {"bytes": b"png", "path": None}
    records = [{"images": [image], "problem": "<image>Find x.", "answer": "2 \\sqrt{221}"}]
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(records), tmp_path / f"{split}-00000.parquet")
    main(["geo3k", "--source", str(tmp_path), "--out", str(tmp_path / "out")])
    (row,) = pq.read_table(tmp_path / "out" / "test.parquet").to_pylist()
    assert row["images"] == [image] and row["prompt"][0]["content"].startswith("<image>Find x. You FIRST")
    assert row["reward_model"]["ground_truth"] == "2 \\sqrt{221}"
    pq.write_table(pa.Table.from_pylist([records[0] | {"images": []}]), tmp_path / "test-00000.parquet")
    with pytest.raises(SystemExit):
        main(["geo3k", "--source", str(tmp_path), "--out", str(tmp_path / "other")])
