import json
import re

import pandas
import pytest

from rl.run_directory.rollout_files import read, stored_steps
from tests.stored_run import save_rollouts
from tools import rollouts


@pytest.fixture
def run(tmp_path):
    save_rollouts(tmp_path / "run", 3, agents=True)
    return tmp_path / "run"


def rows_of(run):
    return [row for path in stored_steps(run).values() for row in read(path).to_pylist()]


FILTERS = {
    ("--step", "2:"): lambda row: row["step"] >= 2,
    ("--score", "0.25:0.75", "--source", "sums"): lambda row: (
        0.25 <= row["score"] <= 0.75 and row["data_source"] == "sums"
    ),
    ("--length", ":5", "--truncated"): lambda row: row["length"] <= 5 and row["truncated"],
    ("--group", "1", "--text", "four, [12]"): lambda row: row["group"] == 1,
    ("--sample", "0", "--step", "1"): lambda row: row["sample"] == 0 and row["step"] == 1,
    ("--text", "six six|two two"): lambda row: any(
        re.search("six six|two two", message["content"]) for message in row["messages"]
    ),
}


@pytest.mark.parametrize("arguments", FILTERS)
def test_filters_select_these_rows(run, tmp_path, arguments):
    expected = [row for row in rows_of(run) if FILTERS[arguments](row)]
    for kind in ("parquet", "jsonl", "csv"):
        assert rollouts.main([str(run), *arguments, "--export", str(tmp_path / f"out.{kind}")]) == 0
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert found == expected and 0 < len(found) < 18
    assert len(pandas.read_parquet(tmp_path / "out.parquet")) == len(pandas.read_csv(tmp_path / "out.csv"))


def test_statistics_tables_and_texts(run, capsys):
    rollouts.main([str(run)])
    lines = capsys.readouterr().out.splitlines()
    assert re.split("  +", lines[2])[:3] == ["2", "6", "3"] and lines[2].endswith("50.0%")
    rollouts.main([str(run), "--table", "--step", "1"])
    assert len(capsys.readouterr().out.splitlines()) == 7
    rollouts.main([str(run), "--show", "1", "--step", "3"])
    text = capsys.readouterr().out
    assert text.count("step=3") == 1 and "--- tool\n" in text and "two and four, 0?" not in text


def test_the_samples_of_all_steps_are_sorted(run, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    for key in ("length", "score"):
        expected = sorted(row[key] for row in rows_of(run))
        rollouts.main([str(run), "--sort", key, "--export", str(out)])
        assert [json.loads(line)[key] for line in out.read_text().splitlines()] == expected
    capsys.readouterr()
    longest = max(row["length"] for row in rows_of(run) if row["score"] < 0.5)
    rollouts.main([str(run), "--score", ":0.49", "--sort", "length", "--reverse", "--show", "1"])
    text = capsys.readouterr().out
    assert f"length={longest} " in text and text.count("step=") == 1
    rollouts.main([str(run), "--sort", "length", "--reverse"])
    assert len(capsys.readouterr().out.splitlines()) == 19


@pytest.mark.parametrize(
    "kind, prompts, said", [("sample", 32, True), ("sample", 4, False), ("all", 32, False)]
)
def test_the_share_of_stored_samples_is_printed(run, capsys, kind, prompts, said):
    keys = {"logging": {"rollouts": kind}, "data": {"prompts_per_step": prompts}}
    (run / "config.yaml").write_text(json.dumps(keys | {"rollout": {"samples_per_prompt": 4}}))
    rollouts.main([str(run)])
    line = "16 of 128 samples of each step are stored (logging.rollouts=sample)"
    assert (line in capsys.readouterr().err.splitlines()) == said


def test_a_run_without_rollouts_names_the_reason_of_its_end(tmp_path):
    status = {"state": "failed", "step": 0, "reason": "RewardError: no answer\nin row 3."}
    (tmp_path / "status.json").write_text(json.dumps(status))
    with pytest.raises(SystemExit, match="the run failed: RewardError: no answer in row 3. Correct this"):
        rollouts.main([str(tmp_path)])
    (tmp_path / "status.json").write_text(json.dumps(status | {"step": 3}))
    with pytest.raises(SystemExit, match="logging.rollouts=sample or all"):
        rollouts.main([str(tmp_path)])


def test_a_run_without_rollouts_names_the_key(tmp_path):
    with pytest.raises(SystemExit, match="logging.rollouts=sample or all"):
        rollouts.main([str(tmp_path)])


def test_a_step_that_is_not_stored_is_refused_with_the_stored_ones(run, tmp_path):
    with pytest.raises(
        SystemExit, match="--step: .* holds rollouts of 3 steps from 1 to 3, and none of this"
    ):
        rollouts.main([str(run), "--step", "99"])
    with pytest.raises(SystemExit, match="there is no directory .*absent; lockstep status lists the runs"):
        rollouts.main([str(tmp_path / "absent")])


def test_a_range_with_a_dash_is_refused_with_the_colon(run, capsys):
    for text, said in (("3-5", "'3-5' is not a range; write LOW:HIGH, here 3:5"), ("x", "LOW:, :HIGH or")):
        with pytest.raises(SystemExit):
            rollouts.main([str(run), "--step", text])
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "form", [[], ["--table"], ["--show", "1"], ["--sort", "score"], ["--export", "x.csv"]]
)
def test_filters_that_match_nothing_are_answered_with_what_there_is(run, form):
    for wrong in (["--source", "gsm8k"], ["--score", "9:"], ["--text", "nowhere"]):
        with pytest.raises(SystemExit, match="of these 3 steps matches .* is sums or texts, scores from"):
            rollouts.main([str(run), *wrong, *form])
    with pytest.raises(SystemExit, match=r"--text='\(' is no regular expression: "):
        rollouts.main([str(run), "--text", "(", *form])
