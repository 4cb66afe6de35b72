"""The paths of a config: absent ones are listed, and a user's file that is not Python is refused."""

import pytest

from rl.config.named_paths import absent_paths, users_files
from rl.config.options import ConfigError
from rl.config.schema import load_config
from rl.dry_run.command import main


def absent(*overrides):
    lines = absent_paths(load_config(None, ["model.path=qwen2.5-7b", "data.train=[a.parquet]", *overrides]))
    assert all(line.startswith("not on this machine: ") and line.endswith("without it") for line in lines)
    return [line.split()[4].rstrip(";") for line in lines]


BOTH = ["data.train=a.parquet", "model.path=qwen2.5-7b"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], BOTH),
        (["data.val=[b.jsonl]", "adapter.path=c"], [BOTH[0], "data.val=b.jsonl", BOTH[1], "adapter.path=c"]),
        (["data.val=[b.jsonl]", "validation.every=0"], BOTH),
        (["reward.function=r.py:score"], [*BOTH, "reward.function=r.py"]),
        (["algorithm=sft", "reward.function=r.py:score"], BOTH),
        (["reward.sources={m: [{function: r.py:f}]}"], [*BOTH, "reward.sources.m[0].function=r.py"]),
        (["reward.judge.path=j"], [*BOTH, "reward.judge.path=j"]),
        (["agents.tools=[t.py:f]"], [*BOTH, "agents.tools[0]=t.py"]),
        (["run.mode=evaluate", "data.curriculum=c.py:order", "data.val=[b]"], ["data.val=b", BOTH[1]]),
    ],
)
def test_each_path_that_the_run_reads_and_that_is_not_here_is_listed(overrides, expected):
    assert absent(*overrides) == expected


def test_a_file_here_is_not_listed_unless_it_is_no_python(tmp_path):
    file = tmp_path / "r.py"
    key = f"reward.function={file}:score"
    file.write_text("def score(**given):\n    return 1.0\n")
    assert absent(key) == BOTH
    assert [*users_files(load_config(None, [key]))] == [("reward.function", file)]
    file.write_text("def score(**given)\n    return 1.0\n")
    with pytest.raises(
        ConfigError, match=r"reward.function=.*r.py cannot be imported: SyntaxError: .*line 1"
    ):
        absent(key)


def test_a_dry_run_names_what_is_absent_below_its_verdict(tmp_path, capsys):
    config = tmp_path / "mine.yaml"
    config.write_text("model: {path: qwen2.5-0.5b}\ndata: {train: [a.parquet]}\n")
    assert main(["--config", str(config), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].startswith("FITS") and "data.train=a.parquet" in lines[-2]
    assert lines[-1] == "not on this machine: model.path=qwen2.5-0.5b; the run refuses to start without it"
    (tmp_path / "r.py").write_text("def")
    assert main(["--config", str(config), "--dry-run", f"reward.function={tmp_path}/r.py:score"]) == 2
    assert "SyntaxError" in capsys.readouterr().err
