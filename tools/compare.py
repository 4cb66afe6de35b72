"""Is run B better than run A, and where do they part? Compare what two runs have stored.

    lockstep compare runs/a runs/b
    lockstep compare runs/a-1,runs/a-2,runs/a-3 runs/b-1,runs/b-2,runs/b-3 --margin 0.01
    lockstep compare runs/a-eval runs/b-eval --metric score

A and B are a run directory each, or several seeds separated by commas. They may be runs, whose validations
are stored unless logging.rollouts=none, or evaluations (run.mode=evaluate). The answers are about the last
step that all have in common, and about the mean over all common steps (the learning curve). With --parting
the command names the first step, stage and sample at which the training of two runs differs, and all keys of
the configs and environments that differ. In deterministic runs this is the cause or its first effect.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path

import numpy as np

# As a script, Python searches only tools/ for modules.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rl.config.command_line import make_parser
from rl.run_directory.rollout_files import VALIDATIONS, stored_steps
from rl.run_directory.status import refuse_missing
from tools.comparison.paired import ALPHA, compare
from tools.comparison.parting import parting
from tools.comparison.values import SCORE, PromptValues, prompt_values

MARGIN = 0.02
"""Smallest difference that matters, unless --margin says otherwise."""


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("a", metavar="A", help="run directory, or those of several seeds separated by commas")
    add("b", metavar="B", help="the other run, or its seeds")
    add("--margin", type=float, default=MARGIN, help=f"smallest difference that matters ({MARGIN})")
    add(
        "--metric", default="acc", metavar="NAME", help="acc (default), score or another number of the reward"
    )
    add("--parting", action="store_true", help="say where the training of A and B parts instead")
    args = parser.parse_args(argv)
    if not 0 < args.margin < math.inf:
        parser.error(f"--margin={args.margin:g} must be greater than 0 and finite, e.g. {MARGIN}")
    arms = [[Path(name) for name in text.split(",")] for text in (args.a, args.b)]
    if both := {run.resolve() for run in arms[0]} & {run.resolve() for run in arms[1]}:
        raise ValueError(f"A and B both name {both.pop()}; name two different runs.")
    if args.parting:
        print("\n".join(parting(Path(args.a), Path(args.b))))
        return 0
    print("\n".join(answers(arms, margin=args.margin, metric=args.metric)))
    return 0


def answers(arms: Sequence[Sequence[Path]], *, margin: float, metric: str) -> list[str]:
    """Return the lines of the answer. Raises ValueError if the runs share no validation."""
    if min(len(arm) for arm in arms) == 1:
        scope = "one seed of A or B: the answer is about these runs, not about another seed of their configs"
    else:
        scope = f"{len(arms[0])} seeds of A, {len(arms[1])} of B"
    lines = [f"{scope}; intervals have a confidence of {1 - ALPHA:.0%}"]
    runs = [run for arm in arms for run in arm]
    for run in runs:
        refuse_missing(run)
    for name, directory in VALIDATIONS.items():
        files = {run: stored_steps(run, directory) for run in runs}
        if steps := sorted(set.intersection(*(set(found) for found in files.values()))):
            values = {run: {step: prompt_values(files[run][step], metric) for step in steps} for run in runs}
            lines += _of_pass(name, arms, values, steps, margin, metric)
    if len(lines) == 1:
        names = ", ".join(map(str, runs))
        raise ValueError(
            f"{names} have no stored validation of a step in common; make them with "
            "lockstep eval --config CONFIG (docs/evaluation.md)."
        )
    return lines


def _of_pass(
    name: str,
    arms: Sequence[Sequence[Path]],
    values: Mapping[Path, Mapping[int, PromptValues]],
    steps: Sequence[int],
    margin: float,
    metric: str,
) -> list[str]:
    """Return the lines about the greedy or the sampled responses."""
    tables = [table for found in values.values() for table in found.values()]
    shared = sorted(reduce(lambda kept, table: kept & table.keys(), tables, set(tables[0])))
    if len(shared) < 2:
        raise ValueError(
            f"the {name} validations have {len(shared)} prompts in common, but a comparison needs at least "
            "two; evaluate both on the same data.val."
        )
    lines = []
    sources = dict.fromkeys(source for source, *_ in shared)
    groups = {"all": shared} | {source: [key for key in shared if key[0] == source] for source in sources}
    for group, keys in groups.items():
        if len(keys) < 2 or group != "all" and len(sources) == 1:
            continue
        label = f"{name}, {'all sources' if group == 'all' else group}, {len(keys)} prompts"
        parts = {f"step {steps[-1]}": steps[-1:]}
        if len(steps) > 1:
            parts[f"mean of the curve, {len(steps)} steps"] = steps
        for part, chosen in parts.items():
            own, other = (_table(arm, values, chosen, keys) for arm in arms)
            if np.ptp(own) == np.ptp(other) == 0 and own[0, 0] == other[0, 0]:
                advice = "" if metric == SCORE else f"; try --metric {SCORE}"
                lines.append(
                    f"{label}, {part}: {metric} is {own[0, 0]:g} in all samples of A and B, so it tells "
                    f"nothing{advice}"
                )
                continue
            verdict = compare(own, other, margin=margin)
            means = f"A {own.mean():.4f}, B {other.mean():.4f}"
            lines.append(f"{label}, {part}: {means}: {verdict.text}")
    return lines


def _table(
    arm: Sequence[Path],
    values: Mapping[Path, Mapping[int, PromptValues]],
    steps: Sequence[int],
    keys: Sequence[tuple[str, int, str]],
) -> np.ndarray:
    """Return the mean over the steps of each seed and prompt, float64 [seeds, prompts]."""
    rows = [[[values[run][step][key] for key in keys] for step in steps] for run in arm]
    return np.array(rows).mean(axis=1)


if __name__ == "__main__":
    sys.exit(main())
