"""Stages that run train_rl.py like a user and read the metrics that it writes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from rl.run_directory.metric_log import FILE_NAME, read_records
from tools.acceptance.features import TASKS
from tools.acceptance.worker import ROOT, StageTask
from tools.records import comparable

DETERMINISTIC = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "^NVLS",  # it fixes no order of summation
}
"""Environment variables of runs that are compared bitwise on a GPU."""
MEAN_DIFFERENCE = "training/rollout_probs_diff_mean"
"""Metric: mean difference of the probabilities of tokens by engine and trainer."""


def train(
    task: StageTask,
    name: str,
    config: str | dict,
    *overrides: str,
    ranks: int = 1,
    deterministic: bool = False,
) -> list[dict]:
    """Run train_rl.py in OUT/name; return its records. config: a file in configs/, or the config itself."""
    directory = task.out / name
    if isinstance(config, dict):
        file = task.out / f"{name}.yaml"
        file.write_text(yaml.dump(config))
    else:
        file = ROOT / "configs" / config
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    program = ["train_rl.py", "--config", str(file), f"run.dir={directory}", *overrides]
    command = [sys.executable, *(launcher if ranks > 1 else ()), *program]
    environment = os.environ | (DETERMINISTIC if deterministic else {})
    if code := subprocess.run(command, cwd=ROOT, env=environment).returncode:
        status = directory / "status.json"
        found = json.loads(status.read_text()) if status.exists() else {}
        reason = found["reason"] if found.get("state") == "failed" else "see the stage's log"
        raise RuntimeError(f"train_rl.py ended with exit code {code}: {reason}")
    return read_records(directory / FILE_NAME)


def toy_data(task: StageTask) -> tuple[str, ...]:
    """Return overrides with the toy's data, which the first stage makes, and the dtype of this device."""
    from tools.make_toy import make_toy

    toy = task.out / "toy"
    if not toy.exists():
        partial = make_toy(f"{toy}-{os.getpid()}")
        try:
            partial.rename(toy)
        except OSError:  # another stage was faster
            shutil.rmtree(partial)
    return (
        f"data.train=[{toy}/train.parquet]",
        f"model.dtype={task.size('bfloat16', 'float32')}",
        "logging.tensorboard=false",
    )


def short_run(name: str, model: str) -> dict:
    """Return the config of two steps of a tiny model, which compare every element after each refit."""
    return dict(
        algorithm="grpo",
        run=dict(name=name, max_steps=2),
        model=dict(path=model),
        data=dict(max_prompt_tokens=16, prompts_per_step=8),
        training=dict(micro_batch_tokens=200, prompts_per_minibatch=4, optimizer=dict(lr=1e-3)),
        rollout=dict(
            samples_per_prompt=4,
            max_response_tokens=6,
            deterministic=True,
            enforce_eager=True,
            gpu_memory_utilization=0.3,
            cpu_kv_cache_mib=16,
        ),
        reward=dict(function=f"{TASKS}:score"),
        refit=dict(check_every=1),
        validation=dict(every=0),
    )


def feature(task: StageTask, *, name: str) -> None:
    """Run two steps of a tiny model with one feature; the program's checks end a run that is wrong."""
    import torch

    from tools import bounds
    from tools.acceptance.features import FEATURES
    from tools.make_image_toy import make_image_toy
    from tools.tiny_models import SIZES, save_tiny

    wanted = FEATURES[name]
    directory = task.out / "features" / name
    shutil.rmtree(directory, ignore_errors=True)
    model, teacher = (
        save_tiny(wanted.architecture, directory / kind, seed=seed, **wanted.sizes)
        for seed, kind in enumerate(("model", "teacher"))
    )
    overrides = [override.format(teacher=teacher) for override in wanted.overrides.split()]
    overrides += task.size("", wanted.on_two).split()
    ranks = task.size(wanted.ranks, min(wanted.ranks, 2))
    if wanted.has_images:
        overrides.append(f"data.train=[{make_image_toy(directory / 'images', rows=64)}/train.parquet]")
    overrides = [*toy_data(task), *overrides]
    records = train(task, f"features/{name}/run", short_run(name, model), *overrides, ranks=ranks)
    task.findings.check("every step", len(records) == 2, "weights, log-probs, tokens and ranks were compared")
    dtype, width = task.size((torch.bfloat16, 1), (torch.float32, SIZES["hidden_size"]))
    hf = json.loads(Path(model, "config.json").read_text())
    layers = hf.get("text_config", hf)["num_hidden_layers"]
    # The largest difference of log-probs is this share of the largest log-prob, which is below 10 with such
    # weights and a vocabulary of 45; a probability differs by less than its logarithm.
    limits = dict(wanted.at_most)
    if not wanted.differs:
        limits[MEAN_DIFFERENCE] = 10 * bounds.of_logits(layers, width, dtype)
    for key, limit in limits.items():
        values = [record[key] for record in records if key in record]
        task.findings.at_most(f"largest {key}", max(values, default=float("nan")), limit)
    for key, limit in {"actor/grad_norm": 0.0, **wanted.above}.items():
        value = max((record.get(key, 0.0) for record in records), default=0.0)
        task.findings.check(f"{key} above {limit:g}", value > limit, value=f"{value:.4g}")


def learning(task: StageTask) -> None:
    """Train the quickstart: a supervised warm-up, then GRPO to 0.9 held-out accuracy."""
    data = toy_data(task)
    for name in ("sft", "grpo"):
        shutil.rmtree(task.out / name, ignore_errors=True)
    short = task.size((), ("run.max_steps=2", "data.prompts_per_step=32"))
    train(task, "sft", "quickstart_sft.yaml", f"model.path={task.out}/toy/model", *data, *short)
    records = train(
        task,
        "grpo",
        "quickstart.yaml",
        f"model.path={task.out}/sft/hf",
        f"data.val=[{task.out}/toy/test.parquet]",
        *data,
        *short,
        *task.size((), ("validation.max_prompts=32",)),
    )
    accuracies = [value for record in records for key, value in record.items() if key.endswith("/acc/mean@1")]
    task.findings.note("held-out accuracy before GRPO", accuracies[0])
    task.findings.target("held-out accuracy after GRPO", accuracies[-1], 0.9, applies=not task.is_rehearsal)
    gaps = [record[MEAN_DIFFERENCE] for record in records if MEAN_DIFFERENCE in record]
    if gaps:
        task.findings.at_most("engine against trainer: mean difference of probabilities", max(gaps), 0.02)
    seconds = sorted(record["timing_s/step"] for record in records if record.get("timing_s/step"))
    task.findings.note("median step", seconds[len(seconds) // 2], unit="s")


def resume(task: StageTask, *, ranks: int = 1) -> None:
    """Compare a run of four steps with a run that is stopped after its second step and resumed.

    ranks: with several, the trainer has two tensor parallel ranks.
    """
    data, ranks = toy_data(task), task.size(ranks, min(ranks, 2))
    first, second = ("straight", "stopped") if ranks == 1 else ("straight-8", "stopped-8")
    overrides = (
        f"model.path={task.out}/toy/model",
        *data,
        "run.max_steps=4",
        "checkpoint.every=2",
        "checkpoint.keep_last=0",
        "checkpoint.export_hf=false",
        "validation.every=0",
        "data.prompts_per_step=32",
        "training.prompts_per_minibatch=16",
        "objective.entropy_coef=0.01",  # the untrained model gets no reward, so only entropy gives a gradient
        *(("training.tp=2",) if ranks > 1 else ()),
    )
    straight, stopped = task.out / first, task.out / second
    for directory in (straight, stopped):
        shutil.rmtree(directory, ignore_errors=True)
    train(task, first, "quickstart.yaml", *overrides, ranks=ranks, deterministic=True)
    shutil.copytree(straight, stopped)
    shutil.rmtree(stopped / "checkpoints" / "step_000004")
    lines = (stopped / "metrics.jsonl").read_text().splitlines(keepends=True)
    (stopped / "metrics.jsonl").write_text("".join(lines[:-2]))
    train(task, second, "quickstart.yaml", *overrides, ranks=ranks, deterministic=True)
    records = list(map(comparable, (straight, stopped)))
    differing = sorted(
        {key for a, b in zip(*records) for key in a.keys() | b.keys() if a.get(key) != b.get(key)}
    )
    learns = all(record["actor/grad_norm"] > 0 for record in records[0])
    same = not differing and len(records[0]) == len(records[1]) and learns
    task.findings.check("every metric of steps 3 and 4 is bitwise equal", same, ", ".join(differing))
    files = sorted(straight.glob("checkpoints/step_000004/*.safetensors"))
    equal = [file.read_bytes() == (stopped / file.relative_to(straight)).read_bytes() for file in files]
    text = f"{sum(equal)} of {len(equal)} files"
    task.findings.check("weights and optimizer states are bitwise equal", bool(equal) and all(equal), text)
    starts = straight / "environment.json", stopped / "environment.json"
    for text, file in zip(("a first start", "a second start"), starts):
        seconds = json.loads(file.read_text())["start_up_s"].get("compilation", 0.0)
        task.findings.note(f"vLLM's compilation in {text}", seconds, unit="s")


def timeline(task: StageTask, *, ranks: int = 1, engine_ranks: int = 1) -> None:
    """Run GRPO steps of a model with the shape of Qwen2.5-1.5B; report the last step by phase.

    ranks: with several, the model has the shape of Qwen2.5-7B, the trainer two tensor parallel ranks, and the
    report the dry run's forecast.
    """
    from tools.acceptance.speed import PROMPT, RESPONSE, checkpoint, save_prompts

    prompt, response = task.size((PROMPT, RESPONSE), (16, 8))
    num_prompts = ranks * task.size(16, 4)
    several, ranks = ranks > 1, task.size(ranks, min(ranks, 2))
    shutil.rmtree(task.out / "timeline", ignore_errors=True)
    config = dict(
        algorithm="grpo",
        run=dict(name="timeline", max_steps=task.size(3, 2)),
        model=dict(path=str(checkpoint(task, shape="qwen2.5-7b" if several else "")), dtype="bfloat16"),
        data=dict(
            train=[str(save_prompts(task, prompt))], max_prompt_tokens=prompt, prompts_per_step=num_prompts
        ),
        training=dict(tp=2 if several else 1),
        rollout=dict(samples_per_prompt=8, max_response_tokens=response, tp=engine_ranks),
        objective=dict(kl_coef=0.001),
        reward=dict(function="rl.rewards.exact:score"),
        validation=dict(every=0),
        checkpoint=dict(every=0),
        logging=dict(tensorboard=False),
    )
    last = train(task, "timeline", config, ranks=ranks)[-1]
    parts = {
        key.removeprefix("timing_s/"): value for key, value in last.items() if key.startswith("timing_s/")
    }
    step = parts.pop("step")
    task.findings.timeline = dict(sorted(parts.items(), key=lambda part: -part[1]))
    task.findings.note(
        "step", step, unit="s", text=f"{num_prompts * 8} samples of {prompt} + {response} tokens"
    )
    for key in ("perf/throughput", "perf/max_memory_allocated_gb", "perf/host_memory_gib", "actor/grad_norm"):
        if key in last:
            task.findings.note(key, last[key])
    if several:
        _forecast(task, last, ranks)


def _forecast(task: StageTask, measured: dict, ranks: int) -> None:
    """Compare the seconds of each phase and the memory with the dry run's, of H100s."""
    from rl.config.schema import load_config
    from rl.dry_run.estimate import estimate
    from rl.dry_run.hardware import GIB, Hardware

    predicted = estimate(load_config(str(task.out / "timeline.yaml"), []), ranks, Hardware())
    for phase, seconds in predicted.seconds.items():
        text = f"{seconds:.1f} s predicted"
        task.findings.note(phase, measured.get(f"timing_s/{phase}", 0.0), unit="s", text=text)
    text = f"{predicted.memory.peak('training')[0] / GIB:.1f} GiB predicted with NCCL"
    used = measured.get("perf/max_memory_allocated_gb", 0.0)
    task.findings.note("memory in training", used, unit="GiB", text=text)
