"""One process or rank of a stage, started by tools/gpu_acceptance.py.

python -m tools.acceptance.worker STAGE OUT MODE
"""

import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tools.acceptance.findings import Findings, read_results
from tools.acceptance.stages import all_stages

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class StageTask:
    """The argument of a stage's function."""

    findings: Findings
    out: Path
    """Directory of the results; a stage may write files for later stages."""
    mode: str
    """full, quick or rehearse."""

    @property
    def is_rehearsal(self) -> bool:
        return self.mode == "rehearse"

    def size(self, full: T, rehearsal: T) -> T:
        """Return `rehearsal` in a rehearsal on the CPU, else `full`."""
        return rehearsal if self.is_rehearsal else full

    def stored(self, stage: str) -> dict:
        """Return the undamaged results of an earlier stage in the same mode; {} if there are none."""
        try:
            found = read_results(self.out / "stages" / f"{stage}.json")
        except ValueError:
            return {}
        return found if found.get("mode") == self.mode else {}


@contextmanager
def world(task: StageTask) -> Iterator:
    """Join the other ranks of this stage and yield the device, as train_rl.py does."""
    from rl.runtime.ranks import discover
    from rl.runtime.rendezvous import join_ranks
    from train_rl import prepare_environment

    ranks = join_ranks(discover())
    task.findings.writes = ranks.rank == 0
    prepare_environment(ranks)
    import rl.training  # noqa: F401  (before Megatron: on a CPU it maps Megatron's CUDA names)
    from rl.runtime.session import session

    with session(ranks) as device:
        if not device.is_cuda and not task.is_rehearsal:
            raise SystemExit("torch finds no GPU; use --rehearse on a CPU.")
        yield device


def main(name: str, out: str, mode: str) -> None:
    """Run a stage in this process and write its findings to OUT/stages/NAME.json."""
    stage = next(stage for stage in all_stages() if stage.name == name)
    findings = Findings(Path(out, "stages", f"{name}.json"))
    code = 0
    try:
        module, _, function = stage.function.partition(":")
        run = getattr(importlib.import_module(f"tools.acceptance.{module}"), function)
        run(StageTask(findings, Path(out), mode), **stage.arguments)
    except BaseException as error:
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename.removeprefix(str(ROOT) + '/')}:{last.lineno}"
        findings.check("runs to its end", False, f"{type(error).__name__}: {str(error)[:600]} ({where})")
        code = 1
    findings.write()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as train_rl.leave: the teardown of gloo groups sometimes aborts a finished process


if __name__ == "__main__":
    main(*sys.argv[1:])
