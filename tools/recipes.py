"""The shipped recipes: their commands, dry-run verdicts, published results and expected curves.

    lockstep recipes [NAME ...]            print some recipes, or all
    lockstep report RUN_DIR --expect NAME  compare a run with the expected curve of a recipe

tools/docs/generate.py writes the table of docs/recipes.md.
A recipe is a file configs/expected/NAME.yaml with these keys:

    config         file in configs/, without .yaml
    overrides      key=value pairs that override it (none)
    model          folder in configs/models with the model's shape; if absent, no dry run
    ranks          number of ranks
    gpu_memory_gb  80 or 141: the smaller GPU on which the recipe fits
    points         metric -> {step: [low, high]}: the expected curve
    basis          source of the expected curve
    published      published results, each 'who, what; address', or a statement that there are none
"""

import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.config.command_line import make_parser
from rl.config.options import Raw, build, read_file
from rl.config.schema import load_config
from rl.dry_run.estimate import Estimate, estimate
from rl.dry_run.hardware import GIB, Hardware

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "configs" / "expected"
GPUS = {
    80: Hardware(gpu_memory_gib=79.1),  # H100
    141: Hardware(gpu_memory_gib=139.8, hbm_gb_s=4800.0),  # H200
}
"""Nominal GPU memory in GB -> hardware, with the memory that CUDA reports, for example 79.1 GiB of 80 GB."""


@dataclass(frozen=True)
class Expected:
    """A value that a run is expected to reach."""

    metric: str
    step: int
    low: float
    high: float


@dataclass
class Recipe:
    """The keys of a recipe's file; see the docstring of this module."""

    config: str = ""
    overrides: list[str] = field(default_factory=list)
    model: str = ""
    ranks: int = 1
    gpu_memory_gb: int = 80
    points: dict[str, Any] = field(default_factory=dict)
    basis: str = ""
    published: list[str] = field(default_factory=list)

    def expected(self) -> list[Expected]:
        """Return the points of all curves. Raises ValueError if one is not {step: [low, high]}."""
        found = []
        for metric, curve in self.points.items():
            try:
                for step, (low, high) in curve.items():
                    found.append(Expected(metric, int(step), float(low), float(high)))
            except (AttributeError, TypeError, ValueError):
                raise ValueError(f"points.{metric}={curve} must map steps to [low, high].") from None
        if not found:
            raise ValueError("points is empty; add the expected curve of a metric.")
        return found

    def command(self) -> str:
        """Return the command that starts the recipe."""
        if self.ranks == 1:
            launcher = "lockstep"
        elif self.ranks <= 8:
            launcher = f"torchrun --nproc-per-node {self.ranks} -m lockstep"
        else:
            launcher = "srun --ntasks-per-node 8 lockstep"
        words = [*launcher.split(), "train", "--config", f"configs/{self.config}.yaml", *self.overrides]
        return shlex.join(words)

    def dry_run(self, gpu: int, *, plan: bool = True) -> Estimate:
        """Return the estimate on `GPUS[gpu]`.

        plan: whether to plan the refit, which takes seconds for many ranks.
        """
        config = load_config(str(ROOT / "configs" / f"{self.config}.yaml"), self.overrides)
        shape = str(ROOT / "configs" / "models" / self.model / "config.json")
        return estimate(config, self.ranks, GPUS[gpu], shape=shape, plan=plan)


def read_recipe(name: str) -> Recipe:
    """Return a recipe by its name, or by the path of its file. Raises ValueError or OSError."""
    path = Path(name) if name.endswith(".yaml") else RECIPES / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(f"recipe={name} does not exist; give a file or one of {', '.join(names())}.")
    return build(Recipe, Raw(((str(path), read_file(path)),), ()))


def names() -> list[str]:
    """Return the names of the shipped recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def dry_runs() -> str:
    """Return the table of all dry runs, which takes a minute."""
    rows = ["| recipe | GPUs | 80 GB | 141 GB |", "| --- | --- | --- | --- |"]
    for name, recipe in ((name, read_recipe(name)) for name in names()):
        if recipe.model:
            verdicts = " | ".join(_verdict(recipe.dry_run(gpu)) for gpu in GPUS)
            rows.append(f"| `{name}` | {recipe.ranks} | {verdicts} |")
    return "\n".join(rows)


def _verdict(found: Estimate) -> str:
    if found.problems:
        return "does not fit: " + "; ".join(found.problems)
    peak = max(found.memory.peak(phase)[0] for phase in ("training", "refit", "generation"))
    return f"fits, {peak / GIB:.0f} GiB, {found.step_seconds:.0f} s per step"


def describe(name: str) -> str:
    """Return the command of a recipe, its expected curve and the published results."""
    recipe = read_recipe(name)
    curve = ", ".join(
        f"`{point.metric}` {point.low:g} to {point.high:g} at step {point.step}"
        for point in recipe.expected()
    )
    lines = [name, f"  {recipe.command()}", f"  expected: {curve}", f"  basis: {recipe.basis}"]
    return "\n".join([*lines, *(f"  published: {line}" for line in recipe.published)])


def main(argv: list[str]) -> int:
    """Print the named recipes, or all."""
    parser = make_parser(__doc__)
    parser.add_argument("names", metavar="RECIPE", nargs="*", help="name or file (all)")
    try:
        print("\n\n".join(describe(name) for name in parser.parse_args(argv).names or names()))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
