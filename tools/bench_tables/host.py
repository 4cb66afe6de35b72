"""Host time of an engine step: decoding steps of a model that computes nothing."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from tools.bench_tables.report import ROOT, Row, middle
from tools.bench_tables.sides import BenchFailed
from tools.bench_tables.tasks import save_task

SHORT, LONG = 64, 320
"""Response lengths of the two generations whose difference is the time of decoding steps."""
OURS, THEIRS = "Lockstep", "vLLM's scheduler"


def add_arguments(add) -> None:
    add("--requests", nargs="+", type=int, default=[256, 512], help="requests that run (256 512)")
    add("--rounds", type=int, default=5, help="counted generations of each length (5)")
    add("--profile", type=Path, metavar="FILE", help="write a profile of the long generations (cProfile)")


def measure(args: Namespace, runs: Path) -> list[Row]:
    """Return the milliseconds of an engine step without the model, with both schedulers, by requests."""
    task = save_task(runs / "tiny", "tiny", mean_length=SHORT, max_length=LONG)
    rows = []
    for requests in args.requests:
        rounds = {}
        for name in (OURS, THEIRS):
            spec = dict(model=str(task / "model"), requests=requests, rounds=args.rounds, ours=name == OURS)
            spec["profile"] = str(args.profile) if args.profile and name == OURS else ""
            rounds[name] = run(spec)
        step, request = zip(*rounds[OURS])
        theirs = middle([pair[0] for pair in rounds[THEIRS]])
        columns: dict[str, float | int | str] = {
            "ms per step": middle(step),
            "ms per request": middle(request),
            "ms per step with vLLM's scheduler": theirs,
        }
        times = {name: [pair[0] for pair in pairs] for name, pairs in rounds.items()}
        rows.append(Row(f"{requests} requests", columns, middle(step) / theirs, times))
    return rows


def run(spec: dict) -> list[tuple[float, float]]:
    """Return the milliseconds per step and per request of each round, measured in a process of its own."""
    command = [sys.executable, "-m", "tools.bench_tables.host", json.dumps(spec)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise BenchFailed(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_engine(*, model: str, requests: int, rounds: int, ours: bool, profile: str) -> list:
    """Return milliseconds per step and per request of each round. Arguments: the keys of `run`'s spec."""
    from rl.runtime.ranks import discover
    from train_rl import prepare_environment

    ranks = discover()
    prepare_environment(ranks)
    import cProfile
    import time

    import numpy as np

    from rl.config.schema import Rollout
    from rl.rollout.engine import RolloutEngine
    from rl.rollout.sampling import Sampling
    from rl.runtime.session import session

    profiler = cProfile.Profile()
    prompts = [np.arange(6, 14, dtype=np.int32)] * requests
    with session(ranks) as device:
        rollout = Rollout(max_concurrent_samples=requests, cpu_kv_cache_mib=512, deterministic=True)
        engine = RolloutEngine(
            model, rollout, dtype="float32", max_tokens=LONG + 8, seed=1, device=device, frozen=True
        )
        core = engine.llm.llm_engine.engine_core.engine_core
        compute_nothing(core.model_executor)
        if not ours:
            use_scheduler_of_vllm(core.scheduler)

        def seconds(max_tokens: int) -> float:
            engine.llm.reset_prefix_cache()
            sampling = Sampling(1, 1.0, 1.0, 0, 0.0, max_tokens, (), ())
            start = time.perf_counter()
            engine.generate(prompts, sampling, [1] * requests)
            return time.perf_counter() - start

        seconds(SHORT)
        pairs = []
        for _ in range(rounds):
            short, long = seconds(SHORT), seconds(LONG)
            step = (long - short) / (LONG - SHORT)
            pairs.append((1e3 * step, 1e3 * (short - SHORT * step) / requests))
        if profile:
            profiler.runcall(seconds, LONG)
            profiler.dump_stats(profile)
    return pairs


def compute_nothing(executor) -> None:
    """Replace the model by one that returns the same token for each request, with log-prob -1."""
    from concurrent.futures import Future

    import numpy as np
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

    def execute_model(plan, non_block=False):
        names = list(plan.num_scheduled_tokens)
        column = np.full((len(names), 1), 7)
        logprobs = LogprobsLists(column, -np.ones((len(names), 1), np.float32), column[:, 0])
        places = {name: place for place, name in enumerate(names)}
        future: Future = Future()
        future.set_result(ModelRunnerOutput(names, places, [[7] for _ in names], logprobs))
        return future

    executor.execute_model = execute_model


def use_scheduler_of_vllm(scheduler) -> None:
    """Replace the methods of a `DecodeScheduler` by those of vLLM's class."""
    from vllm.v1.core.sched.scheduler import Scheduler

    scheduler.schedule = Scheduler.schedule.__get__(scheduler)
    scheduler.update_from_output = Scheduler.update_from_output.__get__(scheduler)


if __name__ == "__main__":
    print(json.dumps(measure_engine(**json.loads(sys.argv[1]))))
