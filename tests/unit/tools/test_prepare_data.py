import gzip
import json
from fractions import Fraction
from itertools import combinations
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.tables import cells, rows
from tools.dataset_rows import code_row, countdown_row, dapo_row, last_boxed, math_row
from tools.prepare_data import DATASETS, main, prepare_gsm8k

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
    source = write_source(
        tmp_path / "source",
        train=[("Q0?", "A\n#### 7"), ("How much?", "It is <<1000*2=2000>>2,000.\n#### 2,000")],
        test=[("Q?", "#### -3")],
    )
    assert prepare_gsm8k(source, tmp_path / "new/out") == {"train": 2, "test": 1}
    rows = pq.read_table(tmp_path / "new/out/train.parquet").to_pylist()
    assert rows[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"How much? {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2000"},
        "extra_info": {
            "split": "train",
            "index": 1,
            "answer": "It is <<1000*2=2000>>2,000.\n#### 2,000",
            "question": "How much?",
        },
    }
    (row,) = pq.read_table(tmp_path / "new/out/test.parquet").to_pylist()
    assert row["reward_model"]["ground_truth"] == "-3"
    assert (row["extra_info"]["split"], row["extra_info"]["index"]) == ("test", 0)


def test_a_source_without_the_files_is_refused_with_their_names(tmp_path):
    with pytest.raises(ValueError, match="lacks train.jsonl and test.jsonl of GSM8K"):
        prepare_gsm8k(tmp_path, tmp_path / "out")
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(ValueError, match="lacks test.jsonl"):
        prepare_gsm8k(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    "line",
    cells("""
        { ;; {"question": "a"} ;; ["a"] ;; {"question": "a", "answer": "no number"} ;;
        {"question": "a", "answer": "####"} ;; {"question": "a", "answer": 5}
        """),
)
def test_an_invalid_line_is_named_and_nothing_written(tmp_path, line):
    source = write_source(tmp_path, train=[("a", "#### 1")], test=[("a", "#### 1")])
    (source / "test.jsonl").write_text('{"question": "a", "answer": "#### 1"}\n' + line + "\n")
    with pytest.raises(ValueError, match="test.jsonl, line 2, is not (a GSM8K problem|JSON)"):
        prepare_gsm8k(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def write_jsonl(path, records, *, compress=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    if compress:
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def prepare(tmp_path, *arguments):
    """Run the tool in this process; returns split -> rows."""
    main([*map(str, arguments), "--out", str(tmp_path / "out")])
    return {path.stem: pq.read_table(path).to_pylist() for path in (tmp_path / "out").glob("*.parquet")}


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as exited:
        main([*map(str, arguments), "--out", "nowhere"])
    assert exited.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "solution, answer",
    rows(r"""
        So $x=\boxed{5}$. => 5 ;;
        First \boxed{1}, at last $\boxed{\frac{1}{\sqrt{2}}}$. => \frac{1}{\sqrt{2}} ;;
        $\fbox{(-\infty, 2]}$ => (-\infty, 2] ;; $\boxed{\left\{ 1, 2 \right\}}$ => \left\{ 1, 2 \right\} ;;
        $\boxed 7$ apples => 7
        """)
    + [(r"$\boxed{5", None), (r"$\boxedx{5}$", None), ("no answer", None)],
)
def test_the_answer_of_a_solution_is_in_its_last_box(solution, answer):
    assert last_boxed(solution) == answer


def test_math_reads_the_folders_of_hendrycks(tmp_path, caplog):
    for name, problem in {
        "train/algebra/2.json": {
            "problem": "P2",
            "solution": r"$\boxed{2}$",
            "level": "Level 5",
            "type": "Algebra",
        },
        "train/geometry/1.json": {
            "problem": "P1",
            "solution": r"$\boxed{\pi}$",
            "level": "Level 1",
            "type": "Geometry",
        },
        "train/geometry/3.json": {
            "problem": "P3",
            "solution": "nothing",
            "level": "Level 1",
            "type": "Geometry",
        },
        "test/algebra/9.json": {
            "problem": "P9",
            "solution": r"\boxed{9}",
            "level": "Level 2",
            "type": "Algebra",
        },
    }.items():
        (tmp_path / "MATH" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "MATH" / name).write_text(json.dumps(problem))
    with caplog.at_level("INFO"):
        rows = prepare(tmp_path, "math", "--source", tmp_path / "MATH")
    assert "train: dropped 1: the solution has no \\boxed answer" in caplog.text
    assert [row["reward_model"]["ground_truth"] for row in rows["train"]] == ["2", r"\pi"]
    assert rows["test"] == [
        {
            "data_source": "DigitalLearningGmbH/MATH-lighteval",
            "prompt": [
                {
                    "role": "user",
                    "content": "P9 Let's think step by step and output the final answer within \\boxed{}.",
                }
            ],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "9"},
            "extra_info": {
                "split": "test",
                "index": 0,
                "answer": r"\boxed{9}",
                "question": "P9",
                "level": "Level 2",
                "type": "Algebra",
            },
        }
    ]


def test_math_reads_jsonl_and_a_train_split_alone(tmp_path):
    file = write_jsonl(
        tmp_path / "train_all.jsonl", [{"problem": "P", "solution": r"\boxed{1}", "level": 3, "type": "A"}]
    )
    rows = prepare(tmp_path, "math", "--source", file)
    assert list(rows) == ["train"] and rows["train"][0]["extra_info"]["level"] == "3"


# ---- dapo-math and aime ----

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
    records = [
        dapo_record("A?", "34"),
        dapo_record("B?", "1"),
        dapo_record("A?", "34"),
        dapo_record("C?", "5"),
    ]
    records += [dapo_record("B?", "2")]
    source = tmp_path / "dapo.parquet"
    pq.write_table(pa.Table.from_pylist(records), source)
    with caplog.at_level("INFO"):
        rows = prepare(tmp_path, "dapo-math", "--source", source)
    assert list(rows) == ["train"]
    assert [
        (row["extra_info"]["question"], row["reward_model"]["ground_truth"]) for row in rows["train"]
    ] == [("A?", "34"), ("C?", "5")]
    assert rows["train"][0]["prompt"] == [{"role": "user", "content": DAPO_TEXT.format("A?")}]
    assert rows["train"][0]["data_source"] == "math_dapo"
    assert (
        "5 rows are 3 distinct problems" in caplog.text
        and "dropped 1: its copies have different" in caplog.text
    )


def test_dapo_problems_without_the_published_request_get_it(tmp_path):
    file = write_jsonl(
        tmp_path / "x.jsonl",
        [{"prompt": "A?", "solution": "34"}, {"prompt": [{"content": "B?"}], "label": 5}],
    )
    rows = prepare(tmp_path, "dapo-math", "--source", file)["train"]
    assert [row["prompt"][0]["content"] for row in rows] == [DAPO_TEXT.format("A?"), DAPO_TEXT.format("B?")]
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["34", "5"]


def test_aime_gives_plain_integers_and_a_data_source(tmp_path):
    records = [
        {"ID": "I-1", "Problem": "A?", "Solution": "long", "Answer": 204},
        {"problem": "B?", "answer": "033"},
    ]
    records += [{"question": "C?", "answer": r"336^\circ"}, {"problem": "D?", "answer": "000"}]
    file = write_jsonl(tmp_path / "aime.jsonl", records)
    rows = prepare(tmp_path, "aime", "--source", file, "--data-source", "aime_2024")
    assert list(rows) == ["test"]
    assert [row["reward_model"]["ground_truth"] for row in rows["test"]] == ["204", "33", "336", "0"]
    assert {row["data_source"] for row in rows["test"]} == {"aime_2024"}
    assert rows["test"][1]["prompt"][0]["content"] == DAPO_TEXT.format("B?")


@pytest.mark.parametrize("answer", ["1000", "-3", "x", "3.5"])
def test_what_is_no_answer_of_aime_is_named(tmp_path, capsys, answer):
    file = write_jsonl(
        tmp_path / "aime.jsonl", [{"problem": "A?", "answer": "1"}, {"problem": "B?", "answer": answer}]
    )
    assert "aime.jsonl, line 2, is not an AIME problem" in refusal(capsys, "aime", "--source", file).replace(
        "\n", " "
    )


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


def test_countdown_is_solvable_distinct_and_reproducible(tmp_path):
    rows = prepare(tmp_path / "a", "countdown", "--num-train", "30", "--num-test", "10")
    problems = [row["reward_model"]["ground_truth"] for split in ("train", "test") for row in rows[split]]
    for problem in problems:
        assert problem["target"] in reachable(tuple(map(Fraction, problem["numbers"]))), problem
        assert len(problem["numbers"]) in (3, 4) and 10 <= problem["target"] <= 99
    assert len({(*sorted(problem["numbers"]), problem["target"]) for problem in problems}) == 40
    assert {len(problem["numbers"]) for problem in problems} == {3, 4}
    content = rows["train"][0]["prompt"][0]["content"]
    assert (
        f"{problems[0]['numbers']}" in content
        and f"equals {problems[0]['target']}." in content
        and "<answer>" in content
    )
    again = prepare(tmp_path / "b", "countdown", "--num-train", "31", "--num-test", "10")
    assert again["test"] == rows["test"] and again["train"][:30] == rows["train"]
    assert (
        prepare(tmp_path / "c", "countdown", "--num-train", "30", "--num-test", "10", "--seed", "1") != rows
    )


def test_countdown_needs_problems(capsys):
    assert "must be 1 or more" in refusal(capsys, "countdown", "--num-train", "0")


def transcript(*turns):
    return "".join(f"\n\n{who}: {text}" for who, text in zip(["Human", "Assistant"] * len(turns), turns))


def test_hh_rlhf_reads_gz_and_splits_off_the_last_turn(tmp_path, caplog):
    pairs = [
        {
            "chosen": transcript("Hi", "Hello", "How?", "So."),
            "rejected": transcript("Hi", "Hello", "How?", "No\n\nidea."),
        },
        {"chosen": transcript("Hi", "A"), "rejected": transcript("Ho", "B")},
        {"chosen": transcript("Hi", "A"), "rejected": transcript("Hi", "")},
        {"chosen": transcript("Hi", "A"), "rejected": transcript("Hi", "A")},
        {
            "chosen": "\n\nHuman: a\n\nHuman: b\n\nAssistant: c",
            "rejected": "\n\nHuman: a\n\nHuman: b\n\nAssistant: d",
        },
        {"chosen": transcript("", "A"), "rejected": transcript("", "B")},
    ]
    write_jsonl(tmp_path / "hh/helpful-base/train.jsonl.gz", pairs, compress=True)
    write_jsonl(tmp_path / "hh/harmless-base/train.jsonl.gz", pairs[:1], compress=True)
    write_jsonl(tmp_path / "hh/harmless-base/test.jsonl.gz", pairs[:1], compress=True)
    with caplog.at_level("INFO"):
        rows = prepare(tmp_path, "hh-rlhf", "--source", tmp_path / "hh")
    assert {split: len(found) for split, found in rows.items()} == {"train": 2, "test": 1}
    assert caplog.text.count("dropped 1:") == 5
    assert rows["test"] == [
        {
            "data_source": "Anthropic/hh-rlhf",
            "prompt": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
                {"role": "user", "content": "How?"},
            ],
            "ability": "alignment",
            "reward_model": {"style": "model", "ground_truth": "So."},
            "extra_info": {"split": "test", "index": 0},
            "chosen": "So.",
            "rejected": "No\n\nidea.",
        }
    ]


def test_a_broken_gz_file_is_named(tmp_path, capsys):
    file = write_jsonl(
        tmp_path / "train.jsonl.gz", [{"chosen": transcript("Hi", "A"), "rejected": ""}], compress=True
    )
    whole = file.read_bytes()
    for broken in (whole[:-9], whole[:12] + b"\xff" * 20 + whole[32:], b"no gzip"):
        file.write_bytes(broken)
        assert "train.jsonl.gz cannot be read" in refusal(capsys, "hh-rlhf", "--source", file)


def test_code_problems_of_apps_and_code_contests(tmp_path, caplog):
    write_jsonl(
        tmp_path / "apps/train.jsonl",
        [
            {
                "question": "Add.",
                "input_output": json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]}),
                "difficulty": "interview",
                "solutions": "[]",
            },
            {
                "question": "Add them.",
                "input_output": {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]},
                "starter_code": "def add(a, b):\n    ",
            },
            {"question": "No tests.", "input_output": ""},
            {"question": "Empty.", "input_output": '{"inputs": [], "outputs": []}'},
            {"question": "Odd.", "input_output": '{"inputs": ["1"], "outputs": []}'},
            {"question": "Uneven.", "input_output": '{"inputs": ["1", "2"], "outputs": ["1"]}'},
            {"question": "Huge.", "input_output": '{"inputs": [' + "9" * 5000 + '], "outputs": [1]}'},
        ],
    )
    contest = {"description": "Echo.", "public_tests": {"input": ["a"], "output": ["a"]}, "difficulty": 7}
    contest |= {
        "private_tests": {"input": [], "output": []},
        "generated_tests": {"input": ["b"], "output": ["b"]},
    }
    newer = {"description": "Echo 2.", "public_tests": [{"input": "a", "output": "a"}]}
    write_jsonl(tmp_path / "apps/test.jsonl", [contest, newer])
    with caplog.at_level("INFO"):
        rows = prepare(tmp_path, "code", "--source", tmp_path / "apps", "--data-source", "apps")
    assert [json.loads(row["reward_model"]["ground_truth"]) for row in rows["train"]] == [
        {"inputs": ["1 2\n"], "outputs": ["3\n"]},
        {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"},
    ]
    assert [json.loads(row["reward_model"]["ground_truth"]) for row in rows["test"]] == [
        {"inputs": ["a", "b"], "outputs": ["a", "b"]},
        {"inputs": ["a"], "outputs": ["a"]},
    ]
    plain, function = (row["prompt"][0]["content"] for row in rows["train"])
    assert plain.startswith("Add.\n\n") and "standard input" in plain and "```python" in plain
    assert "def add(a, b):" in function and "`add`" in function and "standard input" not in function
    assert {row["data_source"] for row in rows["train"] + rows["test"]} == {"apps"}
    assert (
        "dropped 3: there are no tests" in caplog.text and "dropped 1: the tests are not JSON" in caplog.text
    )
    assert "dropped 1: inputs and outputs of the tests do not match" in caplog.text


def test_column_types_hold_beyond_one_row_group(tmp_path):
    records = [
        {"question": f"Q{i}", "input_output": {"inputs": ["x"], "outputs": ["y"]}} for i in range(2500)
    ]
    rows = prepare(tmp_path, "code", "--source", write_jsonl(tmp_path / "train.jsonl", records))["train"]
    assert len(rows) == 2500 and rows[2499]["extra_info"] == {
        "split": "train",
        "index": 2499,
        "difficulty": "",
    }
    assert pq.ParquetFile(tmp_path / "out/train.parquet").num_row_groups == 3


def test_a_source_with_nothing_to_read_is_refused(tmp_path, capsys):
    assert "does not exist" in refusal(capsys, "math", "--source", tmp_path / "nowhere")
    (tmp_path / "readme.md").write_text("x")
    write_jsonl(tmp_path / "other.jsonl", [{}])
    assert "holds no .parquet, .jsonl, .jsonl.gz, .json files named train or test" in refusal(
        capsys, "math", "--source", tmp_path
    )
    write_jsonl(tmp_path / "train.jsonl", [])
    assert "train.jsonl is empty" in refusal(capsys, "math", "--source", tmp_path)
    write_jsonl(tmp_path / "train.jsonl", [{"question": "a"}])
    error = refusal(capsys, "math", "--source", tmp_path)
    assert "train.jsonl, line 1, is not a MATH problem: problem must be text" in error
    write_jsonl(tmp_path / "train.jsonl", [{"problem": "a", "solution": "b"}])
    assert "the split train is empty" in refusal(capsys, "math", "--source", tmp_path)
    assert not Path("nowhere").exists()


def test_from_hub_takes_the_splits_of_the_data_set(tmp_path, monkeypatch):
    asked = []
    problem = {"problem": "P", "solution": r"\boxed{1}", "level": "1", "type": "A"}

    def load_dataset(name, config):
        asked.append((name, config))
        kinds = {"question": "Q", "answer": "#### 3"} if "gsm8k" in name else {**problem, "answer": "1"}
        return datasets.DatasetDict(
            {split: datasets.Dataset.from_list([kinds]) for split in ("train", "test", "valid")}
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert set(prepare(tmp_path / "a", "gsm8k", "--from-hub")) == {"train", "test"}
    assert set(prepare(tmp_path / "b", "math", "--from-hub", "someone/MATH")) == {"train", "test"}
    assert set(prepare(tmp_path / "c", "aime", "--from-hub")) == {"test"}
    assert asked == [("openai/gsm8k", "main"), ("someone/MATH", None), ("HuggingFaceH4/aime_2024", None)]


def test_the_math_reward_reads_the_requested_form():
    reward = pytest.importorskip("rl.rewards.math")
    row = math_row({"problem": "P", "solution": r"$\boxed{\frac{1}{2}}$"}, split="train", index=0)
    truth = row["reward_model"]["ground_truth"]
    assert reward.score("P", r"It is $\boxed{\frac12}$.", truth)["acc"] == 1.0
    assert reward.score("P", r"It is $\boxed{2}$.", truth)["acc"] == 0.0


def test_the_dapo_reward_reads_the_requested_form():
    reward = pytest.importorskip("rl.rewards.dapo")
    truth = dapo_row("P", "34", split="train", index=0)["reward_model"]["ground_truth"]
    assert reward.score("P", "So.\nAnswer: 34", truth)["acc"] == 1.0
    assert reward.score("P", "So.\nAnswer: 35", truth)["acc"] == 0.0


def test_the_countdown_reward_reads_the_requested_form():
    reward = pytest.importorskip("rl.rewards.countdown")
    truth = countdown_row([3, 5, 7], 22, split="train", index=0)["reward_model"]["ground_truth"]
    assert reward.score("P", "<think>x</think> <answer> 3 * 5 + 7 </answer>", truth)["acc"] == 1.0
    assert reward.score("P", "<think>x</think> <answer> 3 + 5 + 7 </answer>", truth)["acc"] == 0.0


def test_the_reward_of_code_runs_the_tests_of_the_row():
    reward = pytest.importorskip("rl.rewards.code")
    record = {"question": "Add.", "input_output": {"inputs": ["1 2\n"], "outputs": ["3\n"]}}
    truth = code_row(record, split="train", index=0)["reward_model"]["ground_truth"]
    program = "```python\nprint(sum(map(int, input().split())))\n```"
    assert reward.score("P", program, truth)["acc"] == 1.0
    assert reward.score("P", program.replace("sum", "max"), truth)["acc"] == 0.0


def test_rows_of_gsm8k_have_whole_numbers(tmp_path):
    assert prepare_gsm8k(GSM8K, tmp_path) == {"train": 32, "test": 48}
    for split in ("train", "test"):
        for row in pq.read_table(tmp_path / f"{split}.parquet").to_pylist():
            number = row["reward_model"]["ground_truth"]
            assert number == str(int(number)), row


@pytest.mark.parametrize("name", DATASETS)
def test_a_failed_download_is_refused_in_one_sentence(tmp_path, name, monkeypatch, capsys):
    def fail(*arguments):
        raise ConnectionError("no route to host.\nmore")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(SystemExit):
        main([name, "--from-hub", "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err.strip().split("error: ")[1]
    assert error.startswith(
        f"{DATASETS[name].hub} cannot be loaded from the Hugging Face hub (no route to host)"
    )
    assert error.endswith("pass its files with --source.") and "\n" not in error
    assert not (tmp_path / "out").exists()
