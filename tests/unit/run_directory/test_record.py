import errno
import json
import shutil

import pytest

from rl.config.options import load
from rl.config.schema import Config, Run
from rl.run_directory import record


def test_a_full_disk_in_start_up_is_one_sentence(tmp_path, monkeypatch):
    """shutil.copytree raises one error with a line for every file."""

    def full(source, target, **options):
        reason = str(OSError(errno.ENOSPC, "No space left on device", str(target)))
        raise shutil.Error([(str(source), str(target), reason)] * 200)

    monkeypatch.setattr(shutil, "copytree", full)
    config = Config(run=Run(dir=str(tmp_path)))
    with pytest.raises(
        ValueError, match=r"cannot be written: .*No space left.*bytes are free there"
    ) as found:
        with record.writing(tmp_path):
            record.record_run(config, 0, world_size=1, start_up_s={})
    assert str(found.value).startswith(f"run.dir={tmp_path} ") and len(str(found.value)) < 500


def test_a_step_has_the_config_of_the_start_that_took_it(tmp_path):
    for time, mark in enumerate(("", "-after-step-20", "-after-step-10")):
        (tmp_path / f"config{mark}.yaml").write_text("")
        (tmp_path / f"environment{mark}.json").write_text(json.dumps({"time": time}))
    (tmp_path / "config-mine.yaml").write_text("")
    found = [record.config_of_step(tmp_path, step).name for step in (1, 10, 11, 20, 21)]
    first, second = "config.yaml", "config-after-step-10.yaml"
    assert found == [first, first, second, second, second]
    with pytest.raises(ValueError, match="there is no directory .*none"):
        record.config_of_step(tmp_path / "none", 3)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="has no config.yaml"):
        record.config_of_step(tmp_path / "none", 3)


def test_config_yaml_is_of_the_newest_start(tmp_path):
    """A continued run has its present config in config.yaml, and the earlier records beside it."""
    steps = {}
    for last_step, max_steps in ((0, 12), (12, 16), (12, 18), (8, 20)):
        config = Config(run=Run(dir=str(tmp_path), max_steps=max_steps))
        record.record_run(config, last_step, world_size=1, start_up_s={})
        steps[last_step] = max_steps
        assert load(Config, tmp_path / "config.yaml").run.max_steps == max_steps
    found = {
        start.after_step: load(Config, start.config).run.max_steps for start in record.starts_of(tmp_path)
    }
    assert found == steps == {0: 12, 12: 18, 8: 20}
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        f"{stem}{mark}{suffix}"
        for stem, suffix in (("config", ".yaml"), ("environment", ".json"), ("code", ""))
        for mark in ("", "-after-step-0", "-after-step-12")
    }
