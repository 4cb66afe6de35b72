"""Commands of README.md and docs/ as written there, page by page."""

import os
import subprocess
import sys

import pytest

from tests.doc_commands import ROOT, blocks, copy_tree, pages_with, patterns


def run_page(page: str, directory, *modes: str) -> None:
    """Run the blocks of these modes in one shell; compare the outputs that the page shows with theirs."""
    copy_tree(directory)
    script, shown, ran = ["set -euo pipefail"], [], False
    for number, block in enumerate(blocks(ROOT / page)):
        if block.kind == "file":
            (directory / f"block{number}").write_text(block.text)
            script.append(f"mkdir -p $(dirname {block.argument}); cp block{number} {block.argument}")
        elif block.kind in modes:
            script += [f"echo '## {block.place}'", block.text]
        if block.kind in ("run", "slow", "slurm"):
            ran = block.kind in modes
        elif block.kind == "output" and ran:
            shown.append(block)
    env = os.environ | {
        "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
        "VIRTUAL_ENV": sys.prefix,
        "PYTHONPATH": str(directory),
    }
    command = ["bash", "-c", "\n".join(script)]
    options = dict(cwd=directory, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    done = subprocess.run(command, timeout=1500, **options)
    assert done.returncode == 0, done.stdout[-5000:]
    printed = patterns(done.stdout)
    for block in shown:
        missing = [line for line in patterns(block.text) if line and line not in printed]
        assert not missing, f"{block.place} is not in the output: {missing}\n{done.stdout[-5000:]}"


@pytest.mark.parametrize("page", pages_with("run"))
def test_fast_commands_of_a_page(page, tmp_path):
    run_page(page, tmp_path, "run")


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("slow"))
def test_all_commands_of_a_page(page, tmp_path):
    run_page(page, tmp_path, "run", "slow")
