"""The options are a wing: each folder of rl/features, with its line of rl/config/wing.py, can be removed."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl.config.wing import FEATURES

ROOT = Path(__file__).resolve().parents[2]

SETTINGS = {
    "adapters": ["adapter.kind=lora"],
    "agents": ["agents.tools=[my_tools.py:search]"],
    "bitwise": ["model.numerics=bitwise"],
    "carry_over": ["rollout.carry_over=true"],
    "changed_only": ["refit.changed_only=true"],
    "containers": ["agents.container.image=/images/debian.sif"],
    "drafts": ["rollout.draft.path=draft"],
    "early_stop": ["sweep.stop=median"],
    "evaluate": ["data.val=[toy.jsonl]", "run.mode=evaluate"],
    "first_step": ["run.mode=check"],
    "fp8_engine": ["rollout.quantization=fp8"],
    "kv_offload": ["rollout.kv_offload_gib=1"],
    "roles": ["roles.rollout=1"],
    "router_replay": ["training.router_replay=engine"],
    "sampling_masks": ["rollout.top_p=0.9"],
    "stored_runs": ["run.mode=train_only"],
    "sweep": ["sweep.adapters=[{run.seed: 1}]"],
    "teachers": ["algorithm=distill", "teacher.path=teacher"],
    "trace": ["trace.steps=[1]"],
    "transformers_backend": ["training.backend=transformers"],
    "vision": ["data.image_key=images"],
}
"""Folder -> settings that need it; the last one is named by the refusal."""


def clean_environment() -> dict[str, str]:
    """Return an environment that hides the modules of this checkout from the copy."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def copy_without(folder: str, target: Path) -> None:
    """Copy the program without an option's folder (for example rl/features/sweep) and entry in the table."""
    subprocess.run(
        f"git ls-files -z rl configs tools/make_toy.py train_rl.py | xargs -0 cp --parents -t {target}",
        shell=True,
        cwd=ROOT,
        check=True,
    )
    subprocess.run(["rm", "-r", target / "rl" / "features" / folder], check=True)
    table = target / "rl" / "config" / "wing.py"
    text = table.read_text()
    entries = next(
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FEATURES"
    )
    assert isinstance(entries, ast.Dict)
    place = [key.value for key in entries.keys if isinstance(key, ast.Constant)].index(folder)
    key, entry = entries.keys[place], entries.values[place]
    assert key is not None and entry.end_lineno is not None
    lines = text.splitlines(keepends=True)
    table.write_text("".join(lines[: key.lineno - 1] + lines[entry.end_lineno :]))


@pytest.mark.slow
@pytest.mark.parametrize("folder", FEATURES)
def test_program_works_without_the_option(folder, config, tmp_path_factory):
    program = tmp_path_factory.mktemp("program")
    copy_without(folder, program)

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "train_rl.py", *map(str, arguments)]
        return subprocess.run(
            command,
            cwd=program,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    assert "training.optimizer.lr" in run("--help").stdout
    refused = run("--config", config, *SETTINGS[folder])
    key = SETTINGS[folder][-1].partition("=")[0]
    assert refused.returncode == 2 and "was removed" in refused.stderr, refused.stderr
    assert key.rpartition(".")[2] in refused.stderr or key.partition(".")[0] in refused.stderr
    estimate = run("--config", config, "--dry-run", "--world-size", 2)
    assert "FITS" in estimate.stdout, estimate.stdout + estimate.stderr
    trained = run("--config", config)
    assert trained.returncode == 0, trained.stderr
    assert len((config.parent / "run" / "metrics.jsonl").read_text().splitlines()) == 2
