"""The commands of docs/tutorial/slurm.md, as written there, on the cluster."""

import pytest

from tests.doc_commands import blocks, copy_tree, pages_with
from tests.records import records
from tests.slurm.cluster import wait_for
from tests.spawn import ROOT


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("slurm"))
def test_jobs_of_a_page_train_and_continue(page, cluster, tmp_path):
    copy_tree(tmp_path)
    env = dict(LOCKSTEP_ROOT=str(tmp_path), PYTHONPATH=str(tmp_path))
    for block in blocks(ROOT / "docs" / "tutorial" / "laptop.md"):  # the page uses its files
        if block.kind == "file":
            (tmp_path / block.argument).write_text(block.text)
    for block in blocks(ROOT / page):
        if block.kind == "slurm":
            cluster.run("bash", "-euc", block.text, cwd=tmp_path, **env)
            wait_for(lambda: not cluster.run("squeue", "--noheader"), "the end of the jobs")
    logs = "".join(path.read_text() for path in tmp_path.glob("train-*.out"))
    assert [record["training/global_step"] for record in records(tmp_path / "runs" / "tutorial")] == list(
        range(13)
    ), logs
