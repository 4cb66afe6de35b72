"""An export has its name only while it is whole."""

import shutil

import pytest

from rl.checkpoint import hf


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(hf.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(hf, "broadcast_object", lambda value: value)


def write(target: str) -> None:
    directory = hf.NewDirectory(target, lambda: None)
    (directory.partial / "config.json").write_text("new")
    directory.finish()


def test_a_kill_while_an_older_export_is_removed_leaves_no_half_of_it(tmp_path, monkeypatch):
    """The older export was removed under its name, where its weights could remain without a tokenizer."""
    target = tmp_path / "hf"
    write(str(target))
    (target / "tokenizer.json").write_text("old")

    def killed(path, **options):
        if path.exists():
            (path / "config.json").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        write(str(target))
    assert [path.name for path in target.iterdir()] == ["config.json"]
    monkeypatch.undo()


def test_a_name_with_a_slash_at_its_end_is_written(tmp_path):
    """The partial directory was inside the export, and was removed with it."""
    write(f"{tmp_path}/export/")
    assert (tmp_path / "export/config.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
