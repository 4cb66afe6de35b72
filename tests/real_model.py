"""Run everything on a pretrained model, with all checks on, and print a table: docs/real_model.md.

    python tools/get_model.py smollm2-135m --out models/smollm2-135m
    python -m tests.real_model models/smollm2-135m                   all rows, three steps each
    python -m tests.real_model models/smollm2-135m "pp 2" dapo       some rows
    python -m tests.real_model models/smollm2-135m --steps 100 --out runs/real "grpo" "grpo, bfloat16"

A row passes if every step ends without an alarm of a check; warnings are counted. Seconds are the median of
the steps after the first. Memory is what the dry run predicts / the largest resident memory of a rank. One
row is killed after its first checkpoint and continues, and one must be refused. The exit code is 1 if a row
fails.
"""

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from rl.config.schema import load_config
from rl.dry_run.estimate import estimate
from rl.dry_run.hardware import GIB, Hardware
from tests.spawn import ROOT, RanksFailed, run_ranks
from tools.make_tasks import arithmetic_rows

TIMEOUT_S = 3600
CONFIG = """
algorithm: grpo
run: {name: real-model}
model: {dtype: float32}
data: {max_prompt_tokens: 192, prompts_per_step: 8}
training: {micro_batch_tokens: 1024, optimizer: {lr: 1.0e-5}}
rollout: {samples_per_prompt: 4, max_response_tokens: 64}
reward: {function: "rl.rewards.gsm8k:score", kwargs: {method: flexible}, workers: 1}
validation: {every: 0}
checkpoint: {resume: never}
logging: {tensorboard: false}
"""
HEAD = "|row|ranks|steps|warnings|first step, s|later, s|GiB of a rank, predicted / measured|"
BF16, LORA = "model.dtype=bfloat16", ("adapter.kind=lora", "adapter.rank=8", "training.optimizer.lr=1e-4")
ROLES = ("roles.train=0-0", "roles.rollout=1-1", "rollout_correction.truncate_tokens=2")
PAIRS = ("data.train=[OUT/pairs.jsonl]", "training.prompts_per_minibatch=0")
WITHOUT = {
    "algorithm=sft": ["reward", "rollout"],
    "algorithm=dpo": ["reward", "rollout"],
    "algorithm=distill": ["reward"],
}
"""Sections of CONFIG that an algorithm does not use."""
TOOLS = (
    "You have two tools, calculate and check_answer. To call one, write "
    '<tool_call>{"name": "calculate", "arguments": {"expression": "2 + 3"}}</tool_call>.'
)
"""System message of the agents' rows, because the model's template omits tools."""


@dataclass(frozen=True)
class Row:
    """A row of the table: what differs from GRPO of all weights in float32 on two ranks."""

    overrides: tuple[str, ...] = ()
    ranks: int = 2
    is_killed: bool = False
    """Rank 1 is killed in its second update, and the same command continues the run."""
    refused: str = ""
    """Key that must be refused at start; empty: the row must pass."""


ROWS = {
    "grpo": Row(),
    "grpo, bfloat16": Row((BF16,)),
    "ppo with critic": Row(("algorithm=ppo", "critic.optimizer.lr=1e-5")),
    "dapo": Row(("algorithm=dapo",)),
    "rloo": Row(("algorithm=rloo",)),
    "reinforce++": Row(("algorithm=reinforce_pp",)),
    "sft on conversations": Row(
        ("algorithm=sft", "data.train=[OUT/chats.jsonl]", "data.messages_key=messages", PAIRS[1])
    ),
    "dpo": Row(("algorithm=dpo", *PAIRS)),
    "distillation": Row(("algorithm=distill", "teacher.path=MODEL")),
    "KL penalty against a reference": Row(("objective.kl_coef=0.01",)),
    "lora beside weights": Row((*LORA, "adapter.in_engine=adapter")),
    "lora merged": Row((*LORA, "adapter.in_engine=merged")),
    "lora beside weights, bfloat16": Row((*LORA, "adapter.in_engine=adapter", BF16)),
    "lora on an FP8 base": Row((*LORA, "adapter.base=fp8", BF16)),
    "FP8 engine": Row(("rollout.quantization=fp8", BF16), refused="rollout.quantization=fp8"),
    "drafts of its first two layers": Row(("rollout.draft.path=OUT/draft",)),
    "carry-over": Row(("rollout.carry_over=true", "rollout.oversample=1.5", ROLES[2])),
    "roles": Row((*ROLES, "roles.lag=1")),
    "agents with tools": Row(
        (
            "data.train=[OUT/tools.jsonl]",
            "data.max_prompt_tokens=256",
            "agents.environment=rl.features.agents.shipped.gsm8k:Gsm8k",
            "agents.tools=[rl.features.agents.shipped.calculator:calculate]",
            "agents.max_turns=3",
            "agents.max_tokens_per_turn=24",
        )
    ),
    "sampling masks": Row(("rollout.top_p=0.9", "rollout.temperature=1.2")),
    "bitwise numerics": Row(("model.numerics=bitwise",)),
    "tp 3": Row(("training.tp=3", "rollout.tp=3"), ranks=3),
    "pp 2": Row(("training.pp=2",)),
    "cp 2": Row(("training.cp=2",)),
    "killed, then continued": Row(("checkpoint.every=1", "checkpoint.resume=auto"), is_killed=True),
    "two epochs, four updates": Row(("training.epochs=2", "training.prompts_per_minibatch=4")),
}


def write_inputs(model: Path, out: Path) -> None:
    """Write the questions, conversations and pairs, and a model of the first two layers."""
    rows = list(arithmetic_rows(0))
    chats, pairs = [], []
    for row in rows:
        right = row["reward_model"]["ground_truth"]
        answers = [
            {"role": "assistant", "content": f"The answer is {text}."} for text in (right, right + "0")
        ]
        chats.append({"messages": [*row["prompt"], answers[0]]})
        pairs.append(
            {"prompt": row["prompt"], "chosen": answers[0]["content"], "rejected": answers[1]["content"]}
        )
    tools = [row | {"prompt": [{"role": "system", "content": TOOLS}, *row["prompt"]]} for row in rows]
    for name, content in (("train", rows), ("chats", chats), ("pairs", pairs), ("tools", tools)):
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    transformers_logging.set_verbosity_error()
    config = AutoConfig.from_pretrained(model, num_hidden_layers=2)
    AutoModelForCausalLM.from_pretrained(model, config=config, dtype="auto").save_pretrained(out / "draft")
    AutoTokenizer.from_pretrained(model).save_pretrained(out / "draft")


def take(name: str, row: Row, model: Path, out: Path, steps: int) -> tuple[str, bool]:
    """Run a row; return its line of the table and whether it passed."""
    run = out / "run"
    shutil.rmtree(run, ignore_errors=True)
    config = yaml.safe_load(CONFIG)
    for section in WITHOUT.get(next(iter(row.overrides), ""), ()):
        del config[section]
    (out / "config.yaml").write_text(yaml.dump(config))
    overrides = [option.replace("OUT", str(out)).replace("MODEL", str(model)) for option in row.overrides]
    overrides = [f"model.path={model}", f"data.train=[{out}/train.jsonl]", *overrides]
    overrides += [f"run.dir={run}", f"run.max_steps={steps}"]
    command: tuple[object, ...] = ("--config", out / "config.yaml", *overrides)
    begun = time.monotonic()
    try:
        if row.is_killed:
            kill(row, command)
        said = run_ranks(row.ranks, ROOT / "train_rl.py", *command, timeout=TIMEOUT_S, with_stderr=True)
    except RanksFailed as failure:
        lines = [line for text in failure.stderr for line in text.splitlines() if line.startswith("error")]
        if row.refused and lines and row.refused in lines[0]:
            return f"|{name}|{row.ranks}|refused||||", True
        return f"|{name}|{row.ranks}|**no**: {lines[-1] if lines else failure}||||", False
    total = time.monotonic() - begun
    if row.refused:
        return f"|{name}|{row.ranks}|**not refused**||||", False
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if record["training/global_step"] > 0]
    seconds = [record["timing_s/step"] for record in records]
    memory = max(record["perf/host_memory_gib"] for record in records)
    memories = f"{predicted_gib(row.ranks, out / 'config.yaml', overrides):.1f} / {memory:.1f}"
    warnings = sum(line.startswith("warning") for text in said for line in text.splitlines())
    later = statistics.median(seconds[1:] or seconds)
    cells = (name, row.ranks, len(records), warnings, f"{seconds[0]:.1f}", f"{later:.1f}", memories)
    print(f"{name}: {total:.0f} s", file=sys.stderr, flush=True)
    return f"|{'|'.join(map(str, cells))}|", True


def kill(row: Row, command: tuple[object, ...]) -> None:
    """Run the row until rank 1 is killed in its second update, after the first checkpoint."""
    fault = ("kill_this_rank", "update", 1, 2)
    with contextlib.suppress(RanksFailed):
        run_ranks(row.ranks, ROOT / "tests/runs/faulty_train.py", *fault, *command, timeout=TIMEOUT_S)
        raise AssertionError("rank 1 was not killed")


def predicted_gib(ranks: int, path: Path, overrides: list[str]) -> float:
    """Return the peak memory of a rank that the dry run predicts."""
    config = load_config(path, overrides)
    found = estimate(config, ranks, Hardware(ranks_per_node=ranks, host_memory_gib=64.0), plan=False)
    phases = ("training", "refit", "generation") if found.memory.engine else ("training",)
    return max(found.memory.peak(phase)[0] for phase in phases) / GIB


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="directory of the model")
    parser.add_argument("names", nargs="*", help="rows; all if none is given")
    parser.add_argument("--steps", type=int, default=3, help="steps of each row (3)")
    parser.add_argument("--out", type=Path, help="directory of the runs; the default is removed at the end")
    args = parser.parse_intermixed_args()
    if unknown := set(args.names) - set(ROWS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    with tempfile.TemporaryDirectory(prefix="real-model-") as directory:
        out = (args.out or Path(directory)).resolve()
        out.mkdir(parents=True, exist_ok=True)
        write_inputs(args.model, out)
        print(f"{HEAD}\n|-|-|-|-|-|-|-|")
        num_failed = 0
        for name in args.names or ROWS:
            line, passed = take(name, ROWS[name], args.model.resolve(), out, args.steps)
            print(line, flush=True)
            num_failed += not passed
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
