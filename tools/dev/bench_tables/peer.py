"""A GRPO step of Lockstep beside one of TRL's GRPOTrainer, with the same checkpoint, prompts and reward.

Both sides use all cores: Lockstep with a rank per core, TRL with a process per core, or with one process and
a thread per core, whichever is faster. Both train all samples in one update, in float32, without gradient
checkpointing. TRL generates with transformers. Its package is enough, because the CPU stack has the others:

    pip install --no-deps --target trl trl==1.16.0
    python tools/dev/bench.py peer --peer trl --model models/smollm2-135m
    python tools/dev/bench.py peer --peer trl --override training.backend=transformers
"""

import json
import os
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tools.dev.bench_tables.program import CORES, of_task, start_lockstep, turn_seconds
from tools.dev.bench_tables.report import TableLine, middle
from tools.dev.bench_tables.sides import STEP, BenchFailed, Side, Turn, alternate, torchrun, wait_for_turn
from tools.dev.bench_tables.tasks import REWARD, save_task

PHASES = {"gen": "generation", "old_log_prob": "old log-probs", "update_actor": "update"}
"""Metric without timing_s/ -> its name in the table; the rest of a step is not shown."""
RATE = 1e-8
"""Learning rate; the lengths of the answers must not change."""


@dataclass(frozen=True)
class PeerStep:
    """One row. size: of `save_task`, or empty for the checkpoint of --model; mean: tokens of an answer."""

    size: str
    prompts: int
    samples_per_prompt: int
    max_tokens: int
    mean: float = 0.0
    micro_batch: int = 16
    """Samples of a micro-batch of TRL."""


CASES = {
    "0.7M, 16 x 8, up to 256": PeerStep("0.7M", 16, 8, 256, 57.0),
    "0.7M, 128 x 8, up to 6": PeerStep("0.7M", 128, 8, 6, 4.0, micro_batch=256),
    "21M, 16 x 8, up to 128": PeerStep("21M", 16, 8, 128, 81.0),
    "model, 32 x 8, up to 64": PeerStep("", 32, 8, 64, micro_batch=8),
    "model, 8 x 4, up to 256": PeerStep("", 8, 4, 256, micro_batch=4),
}


def add_arguments(add: Callable[..., Any]) -> None:
    add("--peer", type=Path, required=True, metavar="DIR", help="directory with the package trl")
    add("--model", type=Path, metavar="DIR", help="a checkpoint; without one its rows are left out")
    add("--rows", nargs="*", default=[], metavar="NAME", help="rows (all)")
    add("--rounds", type=int, default=3, help="counted steps of each side (3)")
    add(
        "--override",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="key of another run of Lockstep, a third side",
    )
    add("--peer-processes", type=int, nargs="*", default=sorted({1, CORES}), help="processes of TRL to try")


def measure(args: Namespace, runs: Path) -> list[TableLine]:
    """Return a row per case. Raises BenchFailed for a directory without TRL or an unknown row."""
    if not (args.peer / "trl").is_dir():
        raise BenchFailed(
            f"--peer={args.peer} has no package trl; install it with `pip install --no-deps --target "
            f"{args.peer} trl==1.16.0`."
        )
    if unknown := set(args.rows) - set(CASES):
        raise BenchFailed(f"--rows has {', '.join(sorted(unknown))}; there are {'; '.join(CASES)}.")
    lines = []
    for place, (name, case) in enumerate(CASES.items()):
        if (args.rows and name not in args.rows) or not (case.size or args.model):
            continue
        lines.append(compare(name, case, args, runs / str(place)))
        print(name, lines[-1].columns, lines[-1].figure, file=sys.stderr, flush=True)
    return lines


def compare(name: str, case: PeerStep, args: Namespace, runs: Path) -> TableLine:
    """Let both sides take the steps of a case in turns; return the row."""
    task, steps = runs / "task", args.rounds + 1
    overrides = [*save_case(task, case, args.model), f"run.max_steps={steps}"]
    spec = {"task": str(task), "steps": steps, "samples": case.prompts * case.samples_per_prompt} | vars(case)
    ours = {"Lockstep": overrides}
    if args.override:
        ours[" ".join(args.override)] = [*overrides, *args.override]
    start: dict[str, Callable[[], Side]] = {
        side: partial(start_lockstep, side, runs / f"lockstep-{place}", CORES, keys, steps_per_turn=1)
        for place, (side, keys) in enumerate(ours.items())
    }
    for processes in args.peer_processes:
        peer = partial(start_trl, args.peer.resolve(), runs / f"trl-{processes}", processes, spec)
        start[f"TRL, {processes} x {max(1, CORES // processes)}"] = peer
    turns = alternate(start, args.rounds)
    medians = {side: middle([turn_seconds(turn) for turn in taken]) for side, taken in turns.items()}
    theirs = min((side for side in turns if side not in ours), key=medians.__getitem__)
    columns: dict[str, float | int | str] = {}
    for side, label in {theirs: "TRL", **dict(zip(ours, ours))}.items():
        columns[f"{label}, s"] = medians[side]
        columns[f"of {label}"] = phases_of(turns[side])
        lengths = [record["response_length/mean"] for turn in turns[side] for record in turn]
        columns[f"mean answer, {label}"] = statistics.mean(lengths)
    columns["TRL runs on"] = theirs.removeprefix("TRL, ")
    return TableLine(name, columns, medians[theirs] / medians["Lockstep"])


def save_case(task: Path, case: PeerStep, model: Path) -> list[str]:
    """Write the task of a case; return the overrides with which Lockstep takes its steps."""
    if case.size:
        save_task(task, case.size, mean_length=case.mean, max_length=case.max_tokens)
    else:
        save_questions(task, model)
    return [
        *of_task(task),
        f"training.optimizer.lr={RATE}",
        f"data.prompts_per_step={case.prompts}",
        f"rollout.samples_per_prompt={case.samples_per_prompt}",
        f"rollout.max_response_tokens={case.max_tokens}",
        *([] if case.size else ["data.max_prompt_tokens=192", "training.micro_batch_tokens=1024"]),
    ]


def phases_of(turns: list[Turn]) -> str:
    records = [record for turn in turns for record in turn]
    medians = {word: middle([r.get(f"timing_s/{key}", 0.0) for r in records]) for key, word in PHASES.items()}
    return ", ".join(f"{word} {value:.2f}" for word, value in medians.items())


def save_questions(task: Path, model: Path) -> None:
    """Write a task with the checkpoint, questions in its chat, and the reward of the other rows."""
    from datasets import Dataset

    from tools.make_tasks import arithmetic_rows

    task.mkdir(parents=True)
    (task / "model").symlink_to(model.resolve())
    (task / "reward.py").write_text(REWARD)
    Dataset.from_list(list(arithmetic_rows(0))).to_parquet(task / "train.parquet")


def start_trl(package: Path, directory: Path, processes: int, spec: dict[str, Any]) -> Side:
    """Start TRL on processes that divide the cores. package: directory with trl. spec: see `train`."""
    directory.mkdir(parents=True)
    records, path = directory / "records.jsonl", directory / "spec.json"
    path.write_text(json.dumps(spec | {"records": str(records), "directory": str(directory)}))
    python = [sys.executable] if processes == 1 else torchrun(processes)
    return Side(
        f"TRL on {processes}",
        [*python, "-m", "tools.dev.bench_tables.peer", str(path)],
        directory=directory / "side",
        records=records,
        environment={
            "PYTHONPATH": os.pathsep.join((str(Path(__file__).resolve().parents[3]), str(package))),
            "OMP_NUM_THREADS": str(max(1, CORES // processes)),
            "HF_DATASETS_CACHE": str(directory / "cache"),
            "CUDA_VISIBLE_DEVICES": "",
        },
    )


def train(spec: dict[str, Any]) -> None:
    """Train with TRL; write a record with the names of metrics.jsonl after each step.

    spec: fields of `PeerStep`, task (directory), steps, samples (of a step), records (file), directory.
    """
    import importlib.util
    import time

    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    task = Path(spec["task"])
    found = importlib.util.spec_from_file_location("reward", task / "reward.py")
    assert found is not None and found.loader is not None
    grader = importlib.util.module_from_spec(found)
    found.loader.exec_module(grader)

    def reward(prompts: list, completions: list, **_: object) -> list[float]:
        return [grader.score("", completion[0]["content"], "") for completion in completions]

    seconds: dict[str, float] = {}
    lengths: list[int] = []

    class Timed(GRPOTrainer):  # type: ignore[misc]
        def _generate(self, *args: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            out = super()._generate(*args, **options)
            seconds["gen"] = seconds.get("gen", 0.0) + time.perf_counter() - begun
            lengths.extend(len(ids) for ids in out[1])
            return out

        def _generate_and_score_completions(self, *args: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            out = super()._generate_and_score_completions(*args, **options)
            seconds["collect"] = seconds.get("collect", 0.0) + time.perf_counter() - begun
            return out

    class Turns(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: object) -> None:
            wait_for_turn(1 + state.global_step)
            seconds.clear()
            lengths.clear()
            seconds["begun"] = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
            if not trainer.accelerator.is_main_process:
                return
            total = time.perf_counter() - seconds["begun"]
            times = {"step": total, "gen": seconds["gen"], "update_actor": total - seconds["collect"]}
            times["old_log_prob"] = seconds["collect"] - seconds["gen"]
            record = {STEP: state.global_step, "response_length/mean": statistics.mean(lengths)}
            record |= {f"timing_s/{name}": value for name, value in times.items()}
            with open(spec["records"], "a") as file:
                file.write(json.dumps(record) + "\n")

    of_process = spec["samples"] // int(os.environ.get("WORLD_SIZE", 1))
    micro_batch = min(spec["micro_batch"], of_process)
    config = GRPOConfig(
        output_dir=spec["directory"],
        max_steps=spec["steps"],
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=of_process // micro_batch,
        num_generations=spec["samples_per_prompt"],
        max_completion_length=spec["max_tokens"],
        learning_rate=RATE,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="dapo",  # the mean over all tokens of the step, as objective.aggregation=token-mean
        temperature=1.0,
        top_k=0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,  # the default, true, is slower
        model_init_kwargs={"dtype": "float32"},
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = Dataset.from_parquet(str(task / "train.parquet"), cache_dir=os.environ["HF_DATASETS_CACHE"])
    trainer = Timed(
        model=str(task / "model"),
        reward_funcs=reward,
        args=config,
        train_dataset=rows.select_columns(["prompt"]),
        processing_class=AutoTokenizer.from_pretrained(task / "model", padding_side="left"),
    )
    trainer.add_callback(Turns())
    trainer.train()


if __name__ == "__main__":
    train(json.loads(Path(sys.argv[1]).read_text()))
