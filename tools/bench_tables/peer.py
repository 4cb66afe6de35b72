"""The peer: installs TRL in its own virtual environment and starts it as a side of a comparison."""

import json
import subprocess
import sys
from pathlib import Path

from tools.bench_tables.sides import BenchFailed, Side

TRL = "trl==1.16.*"
HERE = Path(__file__).resolve().parent


def install(directory: Path) -> Path:
    """Install TRL with the torch and transformers of this environment, if needed; return its interpreter."""
    import torch
    import transformers

    if torch.cuda.is_available():
        raise BenchFailed(
            "the comparison with TRL supports only machines without a GPU; run it on a CPU machine."
        )
    python, stamp = directory / "bin" / "python", directory / "trl-version"
    if stamp.exists():
        return python
    print(f"installing {TRL} into {directory}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    pip += [TRL, f"torch=={torch.__version__}", f"transformers=={transformers.__version__}"]
    # First with pip's own configuration, which also works on sites without internet access.
    for index in ([], ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]):
        if subprocess.run([*pip, *index]).returncode == 0:
            program = "import importlib.metadata as m; print(m.version('trl'))"
            stamp.write_text(subprocess.check_output([python, "-c", program], text=True))
            return python
    raise BenchFailed(f"pip cannot install {TRL} into {directory}; see its messages above.")


def version(directory: Path) -> str:
    """Return the version of the installed TRL."""
    return (directory / "trl-version").read_text().strip()


def start_trl(python: Path, directory: Path, *, processes: int, threads: int, **spec) -> Side:
    """Start TRL on `processes` processes of `threads` threads; `spec` is read by trl_side.py."""
    directory.mkdir(parents=True)
    records, path = directory / "records.jsonl", directory / "spec.json"
    spec |= {"records": str(records), "directory": str(directory / "out")}
    path.write_text(json.dumps(spec, default=str))
    command = [str(python), str(HERE / "trl_side.py"), str(path)]
    if processes > 1:
        launch = "-m torch.distributed.run --standalone --nproc-per-node".split()
        command = [str(python), *launch, str(processes), *command[1:]]
    return Side(
        f"TRL, {processes} x {threads}",
        command,
        directory=directory / "side",
        records=records,
        steps_per_turn=spec["steps_per_turn"],
        environment={
            "OMP_NUM_THREADS": str(threads),
            "HF_DATASETS_CACHE": str(directory / "cache"),
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TOKENIZERS_PARALLELISM": "false",
        },
    )
