"""Share of the always-on checks in a step, timed inside a run, because it is below the noise of steps.

As a program, this file is train_rl.py with a timer around each check:

    python tools/bench_tables/checks.py [arguments of train_rl.py]

Its last line of output has the seconds of each step.
"""

import importlib
import json
import os
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

CHECKS = {
    "samples": ["rl.checks.checks:Checks.generated", "rl.rollout.batches:_check_digests"],
    "hashes of batches": [
        "rl.data.batch:Batch.hashes",
        "rl.data.batch:Batch.hash_samples",
        "rl.data.batch:Batch.hash_scores",
        "rl.faults.agreement:PhaseAgreement.check",
    ],
    "log-probs": ["rl.checks.checks:Checks.log_probs"],
    "advantages and rewards": ["rl.checks.checks:Checks.before_update"],
    "loss": ["rl.checks.updates:Counts.__call__", "rl.checks.updates:LossGradient.check"],
    "update": [
        "rl.checks.checks:Checks.after_update",
        "rl.training.gradients:ReductionProbe.begin",
        "rl.training.gradients:ReductionProbe.sums",
        "rl.training.gradients:ReductionProbe.check",
        "rl.training.optimizer:StateSample.num_changed",
        "rl.training.optimizer:StateSample.changes",
        "rl.training.engine:clipped_norms",
        "rl.training.engine:check_clipped",
    ],
    "weights": ["rl.checks.checks:Checks.weights", "rl.engines.memory:check_weights"],
}
"""Kind of check -> its functions, as `rl`'s own modules call them."""


def add_arguments(add: Callable[..., Any]) -> None:
    add("--size", default="0.7M", help="model of tools/bench_tables/tasks.py (0.7M)")
    add("--prompts", type=int, default=128, help="prompts of a step (128)")
    add("--samples", type=int, default=8, help="samples per prompt (8)")
    add("--max-tokens", type=int, default=64, help="longest answer (64)")
    add("--steps", type=int, default=12, help="counted steps (12)")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further overrides of the config")


def measure(args: Namespace, runs: Path) -> list:
    """Return a row per kind of check, and one for all: the median of its share of a step, in percent."""
    from tools.bench_tables.machine import output_of
    from tools.bench_tables.program import CONFIG, of_task
    from tools.bench_tables.report import TableLine, middle
    from tools.bench_tables.tasks import save_task

    task = save_task(runs / "task", args.size, mean_length=args.max_tokens / 2, max_length=args.max_tokens)
    overrides = [
        *of_task(task),
        f"run.dir={runs / 'run'}",
        f"run.max_steps={args.steps + 2}",
        f"data.prompts_per_step={args.prompts}",
        f"rollout.samples_per_prompt={args.samples}",
        f"rollout.max_response_tokens={args.max_tokens}",
        *args.set,
    ]
    command = [sys.executable, __file__, "--config", str(CONFIG), *overrides]
    (found,) = output_of([command], os.environ | {"OMP_NUM_THREADS": "1"})
    steps: list[dict[str, float]] = found[2:]  # the first ones compile and allocate
    seconds = middle([step["step"] for step in steps])

    def row(name: str, values: list[float]) -> TableLine:
        shares = [100 * value / step["step"] for value, step in zip(values, steps)]
        return TableLine(name, {"ms": 1000 * middle(values), "step, s": seconds}, middle(shares))

    rows = [row(name, [step[name] for step in steps]) for name in CHECKS]
    return [*rows, row("all", [sum(step[name] for name in CHECKS) for step in steps])]


# The timed program ----------------------------------------------------------------------------------------


class Timers:
    """Seconds of every check in each step; a check within another one counts for the outer one alone."""

    def __init__(self) -> None:
        self.steps: list[defaultdict[str, float]] = []
        self._began, self._is_inside = 0.0, False

    def timed(self, kind: str, function: Callable) -> Callable:
        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside or not self.steps:
                return function(*args, **kwargs)
            self._is_inside, before = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._is_inside = False
                self.steps[-1][kind] += time.perf_counter() - before

        return wrapper

    def begin(self, function: Callable) -> Callable:
        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            now = time.perf_counter()
            if self.steps:
                self.steps[-1]["step"] = now - self._began
            self.steps.append(defaultdict(float))
            self._began = now
            return function(*args, **kwargs)

        return wrapper


def replace_function(place: str, wrap: Callable[[Callable], Callable]) -> None:
    """Wrap MODULE:NAME or MODULE:CLASS.NAME."""
    module, _, name = place.partition(":")
    *owners, last = name.split(".")
    owner = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    setattr(owner, last, wrap(getattr(owner, last)))


def main(*arguments: str) -> int:
    import train_rl

    timers, prepare = Timers(), train_rl.prepare_environment

    def prepare_and_wrap(*args: Any, **kwargs: Any) -> None:
        prepare(*args, **kwargs)  # before Megatron is imported
        replace_function("rl.phases.step_record:StepRecord.begin", timers.begin)
        for kind, places in CHECKS.items():
            for place in places:
                replace_function(place, partial(timers.timed, kind))

    train_rl.prepare_environment = prepare_and_wrap
    sys.argv[1:] = arguments
    code = train_rl.main()
    print(json.dumps([dict.fromkeys(CHECKS, 0.0) | step for step in timers.steps[:-1]]))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
