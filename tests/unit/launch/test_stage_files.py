"""slurm/stage.sh, with srun and sbcast played on one node: copies that are whole, damaged or refused."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SRUN = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
SBCAST = '#!/bin/bash\necho "$@" >>"$CALLS"\n[ ! -e "$FULL" ] && cp "$2" "$3"\n'
STAGE = """
set -eu
job_id=7
source "$LOCKSTEP_ROOT/slurm/starts.sh"
staged=()
source "$LOCKSTEP_ROOT/slurm/stage.sh"
printf '%s\\n' "PYTHON=${PYTHON:-}" "${staged[@]}"
"""


class Node:
    """A node's disk, a shared directory with a model, and the calls of sbcast."""

    def __init__(self, directory: Path):
        self.directory, self.calls = directory, directory / "calls"
        self.model = directory / "shared disk" / "my model"
        (self.model / "sub").mkdir(parents=True)
        (self.model / "config.json").write_text("{}")
        (self.model / "sub" / "weights").write_text("1" * 5000)
        for name, text in {"srun": SRUN, "sbcast": SBCAST}.items():
            (directory / name).write_text(text)
            (directory / name).chmod(0o755)
        (directory / "disk").mkdir()

    def stage(self, words: str = "", *, job: int = 7, code: int = 0) -> tuple[list[str], str]:
        """Return the overrides of a job that stages the words, and its messages."""
        env = dict(
            PATH=f"{self.directory}:/usr/bin:/bin",
            HOME=str(self.directory),
            CALLS=str(self.calls),
            FULL=str(self.directory / "full"),
            LOCKSTEP_ROOT=str(ROOT),
            LOCKSTEP_NODE_DISK=str(self.directory / "disk"),
            LOCKSTEP_STAGE=words or f"model.path='{self.model}'",
            SLURM_JOB_ID=str(job),
            SLURM_JOB_NUM_NODES="1",
        )
        done = subprocess.run(["bash", "-c", STAGE], env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stderr
        return [line for line in done.stdout.splitlines() if "=" in line], done.stderr

    @property
    def copies(self) -> list[Path]:
        """Everything in the directory of the copies but its lock."""
        return [path for place in (self.directory / "disk").iterdir() for path in place.glob("[!l]*")]

    @property
    def sent(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


@pytest.fixture
def node(tmp_path) -> Node:
    return Node(tmp_path)


def test_a_copy_is_made_once_and_again_after_a_change(node):
    environment = node.directory / "venv"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to("/bin/true")
    words = f"environment={environment} model.path='{node.model}' data.train='{node.model}/sub/weights'"
    python, model, data = node.stage(words)[0]
    place = Path(model.removeprefix("model.path="))
    assert place.name == "my model" and (place / "sub" / "weights").read_text() == "1" * 5000
    assert Path(python.removeprefix("PYTHON=")).is_symlink() and "/disk/" in python
    assert Path(data.removeprefix("data.train=")).read_text() == "1" * 5000
    assert node.stage(words)[0] == [python, model, data] and node.sent == 3
    (node.model / "config.json").write_text("{1}")
    assert node.stage(words)[0][1] != model and node.sent == 4
    assert len(node.copies) == 4


def test_the_copy_has_the_files_outside_to_which_links_lead(node):
    """As in a snapshot of Hugging Face's cache."""
    blob = node.directory / "shared disk" / "blobs" / "abc"
    blob.parent.mkdir()
    blob.write_text("2" * 5000)
    (node.model / "linked").symlink_to("../blobs/abc")
    place = Path(node.stage()[0][1].removeprefix("model.path="))
    blob.rename(node.directory / "away")
    assert (place / "linked").read_text() == "2" * 5000
    (node.directory / "away").rename(blob)
    assert Path(node.stage()[0][1].removeprefix("model.path=")) == place and node.sent == 1
    blob.write_text("3" * 5000)
    assert Path(node.stage()[0][1].removeprefix("model.path=")) != place
    for name in ("train.parquet", "test.parquet"):  # the name of a file says its form
        (file := node.model.parent / name).symlink_to(blob)
        [staged] = node.stage(f"data.train='{file}'")[0][1:]
        assert (
            staged.endswith(f"/{name}") and Path(staged.removeprefix("data.train=")).read_text() == "3" * 5000
        )
    (node.model / "loop").symlink_to(".")
    overrides, errors = node.stage()
    assert overrides == ["PYTHON="] and "loop" in errors and f"the ranks read {node.model}" in errors


def test_a_damaged_copy_is_replaced(node):
    _, model = node.stage()[0]
    weights = Path(model.removeprefix("model.path="), "sub", "weights")
    weights.unlink()
    assert node.stage()[0][1] == model and weights.exists() and node.sent == 2


def test_jobs_that_stage_at_once_have_one_whole_copy(node):
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda job: node.stage(job=job)[0], range(4)))
    assert all(each == found[0] for each in found) and len(node.copies) == 1
    assert Path(found[0][1].removeprefix("model.path="), "sub", "weights").exists()


def test_ranks_read_the_shared_disk_if_the_nodes_is_full(node):
    (node.directory / "full").touch()
    overrides, errors = node.stage()
    assert overrides == ["PYTHON="] and f"the ranks read {node.model}" in errors
    (node.directory / "full").unlink()
    assert len(node.stage()[0]) == 2 and len(node.copies) == 1


def test_what_a_killed_job_left_does_no_harm(node):
    """The job, requeued, finds its half of a copy. A cut archive is not used."""
    node.stage()
    (archive,) = (node.directory / ".cache" / "lockstep" / "stage").iterdir()
    (copy,) = node.copies
    copy.rename(copy.parent / "job-7.tar.new")
    assert len(node.stage()[0]) == 2 and node.copies == [copy]
    copy.rename(node.directory / "away")
    archive.write_bytes(archive.read_bytes()[:2000])
    overrides, errors = node.stage()
    assert overrides == ["PYTHON="] and "the ranks read" in errors and node.copies == []


def test_what_a_killed_job_left_is_removed_after_a_day(node):
    """And a copy if no job has used it for two weeks."""
    node.stage()
    (copy,), archives = node.copies, node.directory / ".cache" / "lockstep" / "stage"
    for place, name in (
        (copy.parent, "job-3.tar"),
        (copy.parent, "0123456789abcdef"),
        (archives, ".partial.x"),
    ):
        (place / name).touch()
        os.utime(place / name, (time := (place / name).stat().st_mtime - 2 * 86400, time))
    (node.model / "config.json").write_text("{1}")
    node.stage()
    assert {path.name for path in node.copies} >= {copy.name, "0123456789abcdef"} and len(node.copies) == 3
    assert not list(archives.glob(".partial.*"))


def test_a_directory_of_another_user_is_refused(node):
    (mine,) = {path.parent for path in (node.stage(), node.copies)[1]}
    mine.rename(node.directory / "theirs")
    mine.symlink_to(node.directory / "theirs")
    overrides, errors = node.stage()
    assert overrides == ["PYTHON="] and "belongs to another user" in errors


def test_a_word_without_a_file_is_refused(node):
    for word in ("model.path", "model.path=/nowhere"):
        assert "must have words KEY=PATH" in node.stage(word, code=2)[1]
