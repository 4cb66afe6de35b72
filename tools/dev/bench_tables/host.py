"""Host time of an engine step: decoding steps of a model that computes nothing."""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.dev.bench_tables.machine import output_of
from tools.dev.bench_tables.report import ROOT, TableLine, middle
from tools.dev.bench_tables.tasks import save_task

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from rl.rollout.cpu_scheduler import DecodeScheduler

SHORT, LONG = 64, 320
"""Response lengths of two generations; the difference of their times is the time of decoding steps."""
OURS, THEIRS = "Lockstep", "vLLM's scheduler"


def add_arguments(add: Callable[..., Any]) -> None:
    add("--requests", nargs="+", type=int, default=[256, 512], help="requests that run (256 512)")
    add("--rounds", type=int, default=5, help="counted generations of each length (5)")


def measure(args: Namespace, runs: Path) -> list[TableLine]:
    """Return the CPU milliseconds of an engine step without the model, with both schedulers, by requests."""
    task = save_task(runs / "tiny", "tiny", mean_length=SHORT, max_length=LONG)
    rows = []
    for requests in args.requests:
        for is_async in (True, False):
            spec = {
                "model": str(task / "model"),
                "requests": requests,
                "rounds": args.rounds,
                "is_async": is_async,
            }
            step, outside = run(spec | {"is_ours": True})
            theirs, _ = run(spec | {"is_ours": False})
            columns: dict[str, float | int | str] = {
                "ms per step": middle(step),
                "of these outside vLLM's step": middle(outside),
                "ms per step with vLLM's scheduler": middle(theirs),
            }
            name = f"{requests} requests, {'asynchronous' if is_async else 'synchronous'}"
            rows.append(TableLine(name, columns, middle(step) / middle(theirs), {OURS: step, THEIRS: theirs}))
    return rows


def run(spec: dict) -> tuple[list[float], list[float]]:
    """Return what `measure_engine` returns, from a process of its own. spec: its arguments."""
    command = [sys.executable, "-m", "tools.dev.bench_tables.host", json.dumps(spec)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ((step, outside),) = output_of([command], environment)
    return step, outside


def measure_engine(*, model: str, requests: int, rounds: int, is_async: bool, is_ours: bool) -> list:
    """Return two lists over the rounds: milliseconds per step, and the part outside vLLM's step."""
    from rl.runtime.ranks import discover
    from train_rl import prepare_environment

    ranks = discover()
    prepare_environment(ranks)
    import time

    import numpy as np

    from rl.config.rollout import Rollout
    from rl.rollout.engine import RolloutEngine
    from rl.rollout.sampling import Sampling
    from rl.rollout.vllm_model import ServedModel
    from rl.runtime.session import session

    prompts = [np.arange(6, 14, dtype=np.int32)] * requests
    in_vllm = 0.0
    with session(ranks) as device:
        rollout = Rollout(
            max_concurrent_samples=requests,
            cpu_kv_cache_mib=512,
            deterministic=True,
            async_scheduling=is_async,
        )
        served = ServedModel(model, "float32", max_tokens=LONG + 8, frozen=True)
        engine = RolloutEngine(served, rollout, seed=1, device=device)
        program: Any = engine.llm.llm_engine  # its core is in this process
        core = program.engine_core.engine_core
        compute_nothing(core.model_executor)
        if not is_ours:
            use_scheduler_of_vllm(core.scheduler)
        step_of_vllm = program.step

        def timed_step() -> list:
            nonlocal in_vllm
            start = time.thread_time()
            outputs = step_of_vllm()
            in_vllm += time.thread_time() - start
            return outputs

        program.step = timed_step

        def seconds(max_tokens: int) -> np.ndarray:
            """Return the seconds of one generation, in all and outside vLLM's step, [2]."""
            nonlocal in_vllm
            engine.llm.reset_prefix_cache()
            sampling = Sampling(1, max_tokens)
            start, in_vllm = time.thread_time(), 0.0
            engine.generate(prompts, sampling, [1] * requests)
            whole = time.thread_time() - start
            return np.array([whole, whole - in_vllm])

        seconds(SHORT)
        pairs = [1e3 * (seconds(LONG) - seconds(SHORT)) / (LONG - SHORT) for _ in range(rounds)]
    return np.stack(pairs, axis=1).tolist()


def compute_nothing(executor: Any) -> None:
    """Replace the model by one that returns the same token for each request, with log-prob -1."""
    from concurrent.futures import Future

    import numpy as np
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput

    plans: list = []

    def ready(value: object) -> Future:
        future: Future = Future()
        future.set_result(value)
        return future

    def execute_model(plan: "SchedulerOutput", non_block: bool = False) -> Future:
        if not plan.total_num_scheduled_tokens:  # nothing is sampled
            return ready(EMPTY_MODEL_RUNNER_OUTPUT)
        plans.append(plan)
        return ready(None)

    def sample_tokens(grammar_output: object, non_block: bool = False) -> Any:
        names = list(plans.pop().num_scheduled_tokens)
        column = np.full((len(names), 1), 7)
        logprobs = LogprobsLists(column, -np.ones((len(names), 1), np.float32), column[:, 0])
        places = {name: place for place, name in enumerate(names)}
        output = ModelRunnerOutput(names, places, [[7] for _ in names], logprobs)
        return ready(output) if non_block else output

    executor.execute_model, executor.sample_tokens = execute_model, sample_tokens


def use_scheduler_of_vllm(scheduler: "DecodeScheduler") -> None:
    """Replace the methods of a `DecodeScheduler` by the methods of vLLM's class."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    for name in ("schedule", "update_from_output"):
        setattr(scheduler, name, getattr(AsyncScheduler, name).__get__(scheduler))


if __name__ == "__main__":
    print(json.dumps(measure_engine(**json.loads(sys.argv[1]))))
