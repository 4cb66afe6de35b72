import errno
import shutil

import pytest

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
