"""The generation phase of a run against bare vLLM."""

import json
import os
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

from tools.bare_vllm import generations
from tools.bench_tables.program import of_task, start_lockstep
from tools.bench_tables.report import Row, middle
from tools.bench_tables.sides import STEP, Side, Turn, alternate, wait_for_turn
from tools.bench_tables.tasks import SIZES, prompt_ids, save_task

PROMPTS, SAMPLES = 8, 8
OURS, SEEDED, PLAIN = "Lockstep", "vLLM, the same requests", "vLLM, no seeds"


def add_arguments(add) -> None:
    add("--sizes", nargs="+", choices=SIZES, default=["0.7M", "21M"], help="models (0.7M 21M)")
    add("--max-tokens", type=int, default=128, help="longest answer (128)")
    add("--rounds", type=int, default=5, help="counted generations of each side (5)")


def measure(args: Namespace, runs: Path) -> list[Row]:
    """Return the tokens per second of Lockstep's generation phase and of vLLM's LLM.generate, by model.

    All sides run on one rank with one thread. vLLM is measured twice: with the same requests, each with a
    seed, as a reproducible run needs them; and with requests without seeds, which vLLM samples faster.
    """
    rows = []
    for size in args.sizes:
        task = save_task(runs / size, size, mean_length=args.max_tokens * 0.63, max_length=args.max_tokens)
        overrides = [
            *of_task(task),
            f"run.max_steps={args.rounds + 1}",
            f"data.prompts_per_step={PROMPTS}",
            f"rollout.samples_per_prompt={SAMPLES}",
            f"rollout.max_response_tokens={args.max_tokens}",
            "rollout.deterministic=true",
        ]
        sides = {OURS: partial(start_lockstep, OURS, runs / f"{size}-ours", 1, overrides, threads=1)}
        for name in (SEEDED, PLAIN):
            directory = runs / f"{size}-{'seeded' if name == SEEDED else 'plain'}"
            sides[name] = partial(start_vllm, name, directory, task, args.max_tokens)
        turns = alternate(sides, args.rounds)
        rounds = {name: [tokens_per_second(turn) for turn in taken] for name, taken in turns.items()}
        rates = {name: middle(values) for name, values in rounds.items()}
        columns: dict[str, float | int | str] = {f"{name}, tokens/s": rate for name, rate in rates.items()}
        rows += [
            Row(f"{size}, {name}", columns, rates[OURS] / rates[name], rounds) for name in (SEEDED, PLAIN)
        ]
    return rows


def tokens_per_second(turn: Turn) -> float:
    record = turn[-1]
    return record["response_length/mean"] * PROMPTS * SAMPLES / record["timing_s/gen"]


def start_vllm(name: str, directory: Path, task: Path, max_tokens: int) -> Side:
    """Start `run_vllm` in its own process."""
    directory.mkdir()
    path, records = directory / "spec.json", directory / "records.jsonl"
    spec = dict(model=str(task / "model"), prompts=prompt_ids(task, PROMPTS), max_tokens=max_tokens)
    path.write_text(json.dumps(spec | {"seeded": name == SEEDED, "records": str(records)}))
    environment = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, str(Path(__file__)), str(path)]
    return Side(name, command, directory=directory / "side", records=records, environment=environment)


def run_vllm(*, records: str, prompts: list[list[int]], **spec) -> None:
    """Generate in turns with vLLM as its documentation shows."""
    options = dict(
        dtype="float32",
        max_num_seqs=PROMPTS * SAMPLES,
        kv_cache_memory_bytes=512 << 20,
        logprobs_mode="processed_logprobs",
    )
    taken = generations(prompts=prompts, samples=SAMPLES, wait=wait_for_turn, **spec, **options)
    for turn, (tokens, seconds) in enumerate(taken, start=1):
        record = {STEP: turn, "timing_s/gen": seconds, "response_length/mean": tokens / (PROMPTS * SAMPLES)}
        with open(records, "a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    run_vllm(**json.loads(Path(sys.argv[1]).read_text()))
