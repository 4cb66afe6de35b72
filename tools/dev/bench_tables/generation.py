"""Tokens per second of a generation beside vLLM alone, with the same checkpoint, prompts and limit of tokens.

Lockstep has a rank per core, in whole GRPO steps of which timing_s/gen counts. vLLM, with its own defaults,
has a process per core with one thread and its share of the prompts; a turn ends with the last process. Both
return the log-prob of each sampled token.
"""

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tools.dev.bench_tables.peer import CASES, PeerStep, save_case
from tools.dev.bench_tables.program import CORES, start_lockstep
from tools.dev.bench_tables.report import TableLine, middle
from tools.dev.bench_tables.sides import STEP, Side, alternate, wait_for_turn

GEN, LENGTH = "timing_s/gen", "response_length/mean"


def add_arguments(add: Callable[..., Any]) -> None:
    add("--model", type=Path, metavar="DIR", help="a checkpoint; without one its rows are left out")
    add("--rows", nargs="*", default=list(CASES), metavar="NAME", choices=CASES, help="rows of peer (all)")
    add("--rounds", type=int, default=3, help="counted generations of each side (3)")


def measure(args: Namespace, runs: Path) -> list[TableLine]:
    """Return a row per case."""
    chosen = [(name, CASES[name]) for name in args.rows if CASES[name].size or args.model]
    return [compare(name, case, args, runs / str(place)) for place, (name, case) in enumerate(chosen)]


def compare(name: str, case: PeerStep, args: Namespace, runs: Path) -> TableLine:
    """Let both sides generate in turns; return the row."""
    overrides = [*save_case(runs / "task", case, args.model), f"run.max_steps={args.rounds + 1}"]
    start: dict[str, Callable[[], Side]] = {
        "Lockstep": partial(
            start_lockstep, "Lockstep", runs / "lockstep", CORES, overrides, steps_per_turn=1
        ),
        "vLLM": partial(start_vllm, runs, vars(case)),
    }
    samples = case.prompts * case.samples_per_prompt
    rates = {
        side: [samples * turn[0][LENGTH] / turn[0][GEN] for turn in turns]
        for side, turns in alternate(start, args.rounds).items()
    }
    medians = {side: middle(found) for side, found in rates.items()}
    columns: dict[str, float | int | str] = {f"{side}, tokens/s": rate for side, rate in medians.items()}
    return TableLine(name, columns, medians["Lockstep"] / medians["vLLM"], rates)


def start_vllm(runs: Path, case: dict[str, Any]) -> Side:
    """Start a process that starts a vLLM per core. case: fields of `PeerStep`."""
    return Side(
        "vLLM",
        [sys.executable, "-m", __name__, "turns", str(runs), json.dumps(case)],
        directory=runs / "side",
        records=runs / "vllm.jsonl",
        environment={"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )


def take_turns(runs: str, case: str) -> None:
    """Let all engines generate once per turn, together; write a record after each turn."""
    command = [sys.executable, "-m", __spec__.name, "engine", f"{runs}/task", case]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    cores = sorted(os.sched_getaffinity(0))
    engines = [
        subprocess.Popen(
            [*command, str(n)], env=os.environ | {"VLLM_CPU_OMP_THREADS_BIND": str(core)}, **pipes
        )
        for n, core in enumerate(cores)
    ]

    def answers() -> list[int]:
        """Return the number of tokens of each engine, once all have ended."""
        lines = [iter(engine.stdout.readline, "") for engine in engines if engine.stdout]
        return [int(next(word[7:] for word in own if word.startswith("tokens "))) for own in lines]

    answers()  # all have started
    samples = json.loads(case)["prompts"] * json.loads(case)["samples_per_prompt"]
    turn = 0
    while True:
        turn += 1
        wait_for_turn(turn)
        begun = time.perf_counter()
        for engine in engines:
            assert engine.stdin is not None
            print("go", file=engine.stdin, flush=True)
        tokens = sum(answers())
        record = {STEP: turn, GEN: time.perf_counter() - begun, LENGTH: tokens / samples}
        with open(f"{runs}/vllm.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")


def generate(task: str, case: str, number: str) -> None:
    """Print the number of tokens of a generation after each line of input. number: of this process."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    found = PeerStep(**json.loads(case))
    tokenizer: Any = AutoTokenizer.from_pretrained(f"{task}/model")
    rows = Dataset.from_parquet(f"{task}/train.parquet", cache_dir=f"{task}/cache-{number}")
    chats = rows["prompt"][int(number) : found.prompts : CORES]
    rendered = (tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats)
    prompts = [TokensPrompt(prompt_token_ids=each["input_ids"]) for each in rendered]
    engine = LLM(
        f"{task}/model",
        dtype="float32",
        max_model_len=1024,
        disable_log_stats=True,
        kv_cache_memory_bytes=1 << 29,
    )
    params = SamplingParams(
        n=found.samples_per_prompt, temperature=1.0, max_tokens=found.max_tokens, logprobs=0, detokenize=False
    )
    print("tokens 0", flush=True)
    for _ in sys.stdin:
        outputs = engine.generate(prompts, params, use_tqdm=False)
        tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
        print(f"tokens {tokens}", flush=True)


if __name__ == "__main__":
    parts: dict[str, Callable[..., None]] = {"turns": take_turns, "engine": generate}
    parts[sys.argv[1]](*sys.argv[2:])
