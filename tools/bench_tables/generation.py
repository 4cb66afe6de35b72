"""The generation phase against bare vLLM, and the static against the shared queue with two replicas."""

import json
import os
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path

import numpy as np
import yaml

from tools.bench_tables.report import ROOT, Row, middle
from tools.bench_tables.sides import STEP, Side, Turn, alternate, on_ranks, torchrun, wait_for_turn
from tools.bench_tables.tasks import CLASSES, SIZES, first_token, prompt_ids, save_task

PROMPTS, SAMPLES = 8, 8
OURS, SEEDED, PLAIN = "Lockstep", "vLLM, the same requests", "vLLM, no seeds"


def add_arguments(add) -> None:
    add("--sizes", nargs="+", choices=SIZES, default=["0.7M", "21M"], help="models (0.7M 21M)")
    add("--max-tokens", type=int, default=128, help="longest answer (128)")
    add("--rounds", type=int, default=5, help="counted generations of each side (5)")


def measure(args: Namespace, work: Path, runs: Path) -> tuple[list[Row], dict[str, str]]:
    """Return the tokens per second of Lockstep's generation phase and of vLLM's LLM.generate, by model.

    All sides run on one rank with one thread. vLLM is measured twice: with the same requests, each with a
    seed, as a reproducible run needs them; and with requests without seeds, which vLLM samples faster.
    """
    rows = []
    for size in args.sizes:
        task = save_task(runs / size, size, mean_length=args.max_tokens * 0.63, max_length=args.max_tokens)
        sides = {OURS: partial(start_ours, runs / f"{size}-ours", task, args)}
        for name in (SEEDED, PLAIN):
            directory = runs / f"{size}-{'seeded' if name == SEEDED else 'plain'}"
            sides[name] = partial(start_vllm, name, directory, task, args)
        turns = alternate(sides, args.rounds)
        rounds = {name: [tokens_per_second(turn) for turn in taken] for name, taken in turns.items()}
        rates = {name: middle(values) for name, values in rounds.items()}
        columns: dict[str, float | int | str] = {f"{name}, tokens/s": rate for name, rate in rates.items()}
        for name, figure in ((SEEDED, rates[OURS] / rates[SEEDED]), (PLAIN, rates[OURS] / rates[PLAIN])):
            rows.append(Row(f"{size}, {name}", columns, figure, rounds))
    return rows, {}


def tokens_per_second(turn: Turn) -> float:
    record = turn[-1]
    return record["generated_tokens"] / record["timing_s/gen"]


def start_ours(directory: Path, task: Path, args: Namespace) -> Side:
    """Start train_rl.py on one rank with an algorithm that only generates."""
    directory.mkdir()
    config = {
        "algorithm": f"{ROOT}/tools/bench_tables/generation_in_turns.py",
        "run": {"dir": str(directory / "run"), "max_steps": args.rounds + 1},
        "model": {"path": str(task / "model"), "dtype": "float32"},
        "data": {
            "train": [f"{task}/train.parquet"],
            "prompts_per_step": PROMPTS,
            "shuffle": False,
            "max_prompt_tokens": 16,
        },
        "rollout": {
            "samples_per_prompt": SAMPLES,
            "max_response_tokens": args.max_tokens,
            "max_concurrent_samples": PROMPTS * SAMPLES,
            "cpu_kv_cache_mib": 512,
            "deterministic": True,
        },
        "checkpoint": {"every": 0},
        "validation": {"every": 0},
    }
    path = directory / "config.yaml"
    path.write_text(yaml.dump(config))
    command = [*torchrun(1), "train_rl.py", "--config", str(path)]
    records, environment = directory / "run" / "metrics.jsonl", {"OMP_NUM_THREADS": "1"}
    return Side(OURS, command, directory=directory / "side", records=records, environment=environment)


def start_vllm(name: str, directory: Path, task: Path, args: Namespace) -> Side:
    """Start `run_vllm` in its own process."""
    directory.mkdir()
    records = directory / "records.jsonl"
    spec = {
        "model": str(task / "model"),
        "prompts": prompt_ids(task, PROMPTS),
        "samples": SAMPLES,
        "max_tokens": args.max_tokens,
        "seeded": name == SEEDED,
        "records": str(records),
    }
    path = directory / "spec.json"
    path.write_text(json.dumps(spec))
    environment = {
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCHDYNAMO_DISABLE": "1",  # as in Lockstep's ranks; otherwise vLLM compiles its sampler
    }
    command = [sys.executable, str(Path(__file__)), str(path)]
    return Side(name, command, directory=directory / "side", records=records, environment=environment)


def run_vllm(spec: dict) -> None:
    """Generate in turns with vLLM as its documentation shows, on the CPU without compilation."""
    from vllm import LLM, SamplingParams

    from rl.rollout.sampling import seed_of

    prompts = spec["prompts"]
    llm = LLM(
        spec["model"],
        dtype="float32",
        max_model_len=len(prompts[0]) + spec["max_tokens"],
        max_num_seqs=len(prompts) * spec["samples"],
        kv_cache_memory_bytes=512 << 20,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
    )
    common = dict(temperature=1.0, max_tokens=spec["max_tokens"], logprobs=0, detokenize=False)
    turn = 0
    while True:
        turn += 1
        if spec["seeded"]:
            requests = [({"prompt_token_ids": ids}, j) for ids in prompts for j in range(spec["samples"])]
            params = [
                SamplingParams(seed=seed_of(turn, place, j), **common)
                for place, (_, j) in enumerate(requests)
            ]
            asked = [prompt for prompt, _ in requests]
        else:
            asked = [{"prompt_token_ids": ids} for ids in prompts]
            params = [SamplingParams(n=spec["samples"], **common)] * len(prompts)
        wait_for_turn(turn)
        start = time.perf_counter()
        outputs = llm.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        record = {STEP: turn, "timing_s/gen": seconds, "generated_tokens": tokens}
        with open(spec["records"], "a") as file:
            file.write(json.dumps(record) + "\n")


# Queues -------------------------------------------------------------------------------------------------


def add_queue_arguments(add) -> None:
    add("--size", choices=SIZES, default="0.7M", help="model (0.7M)")
    add("--prompts", type=int, default=96, help="prompts of a generation (96)")
    add("--max-tokens", type=int, default=160, help="longest answer (160)")
    add("--rounds", type=int, default=5, help="counted generations of each queue (5)")


def measure_queues(args: Namespace, work: Path, runs: Path) -> tuple[list[Row], dict[str, str]]:
    """Return the share of two replicas' time in which a replica is idle, for both queues.

    Prompts alternate between two sources, as with two files in `data.train`. One eighth of the prompts has
    answers of the maximum length, the others have short answers. Five of six long answers belong to the first
    source. Their positions change in each round.
    """
    task = save_task(runs / "task", args.size, mean_length=args.max_tokens / 8, max_length=args.max_tokens)
    found = on_ranks(
        "generation:generate_by_queue",
        2,
        runs / "ranks",
        model=str(task / "model"),
        num_prompts=args.prompts,
        max_tokens=args.max_tokens,
        rounds=args.rounds,
    )
    rows = []
    for queue, taken in found.items():
        idle = [1 - sum(seconds) / len(seconds) / max(seconds) for seconds in taken]
        longest = [max(seconds) for seconds in taken]
        columns: dict[str, float | int | str] = {"idle": middle(idle), "most": max(idle)}
        columns["s of the last replica"] = middle(longest)
        figure = middle(idle) if queue == "shared" else None
        rows.append(Row(f"{queue} queue", columns, figure, {"idle": idle, "seconds": longest}))
    return rows + measure_orders(args, runs), {}


def measure_orders(args: Namespace, runs: Path) -> list[Row]:
    """Return the idle share of a shared queue whose prompts have log-normal lengths, in two orders.

    A prompt's answers are all of one class of lengths, and the lengths of the turn before are expected.
    """
    task = save_task(
        runs / "log-normal",
        args.size,
        mean_length=args.max_tokens / 8,
        max_length=args.max_tokens,
        is_log_normal=True,
    )
    found = on_ranks(
        "generation:generate_in_orders",
        2,
        runs / "orders",
        model=str(task / "model"),
        num_prompts=args.prompts,
        max_tokens=args.max_tokens,
        rounds=args.rounds,
    )
    rows = []
    for order, taken in found.items():
        idle = [1 - sum(seconds) / len(seconds) / max(seconds) for seconds, _ in taken]
        bounds = [bound for _, bound in taken]
        columns: dict[str, float | int | str] = {"idle": middle(idle), "most": max(idle)}
        columns |= {"greedy bound": middle(bounds), "above it": middle(idle) - middle(bounds)}
        rows.append(Row(f"shared queue, log-normal, {order}", columns, middle(idle), {"idle": idle}))
    return rows


def long_answers(rng: np.random.Generator, num_prompts: int) -> np.ndarray:
    """Return which prompts have long answers, bool [num_prompts]."""
    is_long = np.zeros(num_prompts, bool)
    num_long = num_prompts // 8
    for source, count in enumerate((num_long - num_long // 6, num_long // 6)):
        places = np.arange(source, num_prompts, 2)
        is_long[rng.choice(places, count, replace=False)] = True
    return is_long


def generate_by_queue(device, *, model: str, num_prompts: int, max_tokens: int, rounds: int) -> dict:
    """Return, by queue, the seconds of each replica in each round. Collective over the world."""
    import torch.distributed as dist

    from rl.runtime.collectives import gather_objects

    engine, sampling = build_engine(device, model, max_tokens)
    short, long = 10, 60  # last token of a prompt with short and with long answers
    found: dict[str, list[list[float]]] = {"static": [], "shared": []}
    for turn in range(rounds + 1):
        is_long = long_answers(np.random.default_rng(turn), num_prompts)
        prompts = [np.array([4, long if flag else short], np.int32) for flag in is_long]
        for queue, taken in found.items():
            engine.config.deterministic = queue == "static"
            dist.barrier()
            start = time.perf_counter()
            engine.generate(prompts, sampling, [turn * num_prompts + k for k in range(num_prompts)])
            seconds = gather_objects(time.perf_counter() - start)
            if turn > 0:
                taken.append(seconds)
    return found


def build_engine(device, model: str, max_tokens: int):
    """Return an engine that generates two groups of 4 samples at a time, and its sampling parameters."""
    from rl.config.schema import Rollout
    from rl.rollout.engine import RolloutEngine
    from rl.rollout.sampling import Sampling

    rollout = Rollout(max_response_tokens=max_tokens, max_concurrent_samples=8, cpu_kv_cache_mib=64)
    engine = RolloutEngine(
        model, rollout, dtype="float32", max_tokens=max_tokens + 8, seed=0, device=device, frozen=True
    )
    sampling = Sampling(
        samples_per_prompt=4, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=max_tokens,
        stop=(), stop_token_ids=(),
    )  # fmt: skip
    return engine, sampling


def generate_in_orders(device, *, model: str, num_prompts: int, max_tokens: int, rounds: int) -> dict:
    """Return, by order, the seconds of each replica and the greedy bound of each round.

    Collective over the world.
    """
    import torch.distributed as dist

    from rl.rollout.queue import PastLengths, greedy_idle
    from rl.runtime.collectives import gather_objects

    engine, sampling = build_engine(device, model, max_tokens)
    classes = np.random.default_rng(0).integers(0, CLASSES, num_prompts)
    prompts = [np.array([4, first_token(number)], np.int32) for number in classes]
    past = PastLengths()
    found: dict[str, list] = {"in the order of the data": [], "longest first": []}
    for turn in range(rounds + 1):
        for name, taken in found.items():
            order = past.longest_first(range(num_prompts)) if name == "longest first" else None
            seeds = [turn * num_prompts + k for k in range(num_prompts)]
            dist.barrier()
            start = time.perf_counter()
            samples = engine.generate(prompts, sampling, seeds, order=order)
            seconds = gather_objects(time.perf_counter() - start)
            parts = gather_objects([(sample.prompt, len(sample.token_ids)) for sample in samples])
            groups, lengths = zip(*(pair for part in parts for pair in part))
            loads = np.bincount(groups, lengths).tolist()
            if turn > 0:
                taken.append((seconds, greedy_idle(loads, engine.num_replicas)))
        past.note(range(num_prompts), groups, lengths)
    return found


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    run_vllm(json.loads(Path(sys.argv[1]).read_text()))
