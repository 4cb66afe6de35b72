"""Share of the always-on checks in a step, timed inside a run, because it is below the noise of steps.

As a program, this file is train_rl.py with a timer around each check:

    python tools/dev/bench_tables/checks.py [arguments of train_rl.py]

Its last line of output has the seconds of each step.
"""

import importlib
import json
import os
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

CHECKS = {
    "samples": ["rl.checks.checks:Checks.generated", "rl.rollout.batches:_check_digests"],
    "hashes of batches": [
        "rl.data.batch:Batch.hashes",
        "rl.data.batch:Batch.hash_samples",
        "rl.data.batch:Batch.hash_scores",
        "rl.faults.agreement:PhaseAgreement.check",
    ],
    "grades": ["rl.checks.grades:Grades.check"],
    "log-probs": ["rl.checks.checks:Checks.log_probs"],
    "advantages and rewards": ["rl.checks.checks:Checks.before_update"],
    "loss": ["rl.checks.updates:UpdateChecks._terms", "rl.checks.updates:UpdateChecks._watch"],
    "update": [
        "rl.checks.updates:UpdateChecks.end",
        "rl.training.gradients:ReductionProbe.begin",
        "rl.training.gradients:ReductionProbe.sums",
        "rl.training.gradients:ReductionProbe.check",
        "rl.training.optimizer:StateSample.num_changed",
        "rl.training.optimizer:StateSample.changes",
        "rl.training.audit:clipped_norms",
        "rl.training.audit:check_clipped",
    ],
    "noise of rounding": ["rl.phases.inference:Inference._measure_noise"],
    "backward pass": ["rl.checks.slope:SlopeCheck.check"],
    "weights of ranks": ["rl.checks.checks:Checks.weights"],
    "weights of engines": ["rl.engines.memory:check_weights", "rl.engines.memory:check_refit"],
}
"""Kind of check -> its functions, as `rl`'s own modules call them."""


def add_arguments(add: Callable[..., Any]) -> None:
    add("--size", default="0.7M", help="model of tools/dev/bench_tables/tasks.py (0.7M)")
    add("--model", default="", help="directory of a checkpoint, in place of --size")
    add("--prompts", type=int, default=128, help="prompts of a step (128)")
    add("--samples", type=int, default=8, help="samples per prompt (8)")
    add("--max-tokens", type=int, default=64, help="longest answer (64)")
    add("--steps", type=int, default=12, help="counted steps (12)")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further overrides of the config")


def measure(args: Namespace, runs: Path) -> list:
    """Return a row per kind of check, and one for all: its share of the first step, and the median later."""
    from tools.dev.bench_tables.machine import output_of
    from tools.dev.bench_tables.program import CONFIG, of_task
    from tools.dev.bench_tables.report import TableLine, middle
    from tools.dev.bench_tables.tasks import save_task

    task = save_task(runs / "task", args.size, mean_length=args.max_tokens / 2, max_length=args.max_tokens)
    overrides = [
        *of_task(task),
        f"run.dir={runs / 'run'}",
        f"run.max_steps={args.steps + 3}",  # the last one has no end
        f"data.prompts_per_step={args.prompts}",
        f"rollout.samples_per_prompt={args.samples}",
        f"rollout.max_response_tokens={args.max_tokens}",
        *([f"model.path={args.model}", "data.max_prompt_tokens=96"] if args.model else []),
        *args.set,
    ]
    command = [sys.executable, __file__, "--config", str(CONFIG), *overrides]
    (steps,) = output_of([command], os.environ | {"OMP_NUM_THREADS": "1"})
    first, later = steps[0], steps[2:]  # the second one still allocates
    seconds = middle([step["step"] for step in later])

    def row(name: str, kinds: Sequence[str]) -> TableLine:
        def share(step: dict[str, float]) -> float:
            return 100 * sum(step[kind] for kind in kinds) / step["step"]

        columns = {
            "step, s": seconds,
            "first, s": first["step"],
            "ms": 1000 * middle([sum(step[kind] for kind in kinds) for step in later]),
            "first, %": share(first),
        }
        return TableLine(name, columns, middle([share(step) for step in later]))

    return [*(row(name, [name]) for name in CHECKS), row("all", list(CHECKS))]


# The timed program ----------------------------------------------------------------------------------------


class Timers:
    """Seconds of every kind of check in each step, without the seconds of checks of another kind inside."""

    def __init__(self) -> None:
        self.steps: list[defaultdict[str, float]] = []
        self._began = self._since = 0.0
        self._kind = ""

    def timed(self, kind: str, function: Callable) -> Callable:
        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self.steps:
                return function(*args, **kwargs)
            outer = self._switch(kind)
            try:
                return function(*args, **kwargs)
            finally:
                self._switch(outer)

        return wrapper

    def _switch(self, kind: str) -> str:
        """Begin to count for this kind, "" for none; return the kind before."""
        now, before = time.perf_counter(), self._kind
        if before:
            self.steps[-1][before] += now - self._since
        self._kind, self._since = kind, now
        return before

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
