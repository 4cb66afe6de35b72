"""Constants of this machine for the dry run (`rl.dry_run.hardware`), measured with the program's own passes.

As many processes measure at once as the machine has cores, because ranks of a run share its memory and clock.
A pass over few tokens gives the time of launches, one over many the speed of products; an engine step with
one sample gives its time on the host, one with many the time per sample.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rl.dry_run.hardware import Hardware
from tools.bench_tables.report import ROOT
from tools.bench_tables.sides import CLOCK, BenchFailed, clock, torchrun

CORES = len(os.sched_getaffinity(0))
ROUNDS = 5
FEW, MANY = (4, 4), (8, 120)
"""(prompt, response) of the sequences in passes over few and many tokens."""
SEQUENCES = 32
"""Sequences of a pass over many tokens, and samples of an engine step."""
MIB = 1 << 20


def measure_machine(model: Path, clock: str) -> dict[str, float]:
    """Return what `hardware_of` reads. model: directory of the checkpoint. clock: elapsed or processor."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), CLOCK: clock}
    module = ["-m", "tools.bench_tables.machine"]
    alone = [[sys.executable, *module, "rank", str(model)]] * CORES
    found = mean(output_of(alone, environment))
    if CORES > 1:
        links = [[*torchrun(CORES), *module, "links"]]
        found |= mean(output_of(links, environment))
    return found


def hardware_of(found: dict[str, float], ranks: int) -> Hardware:
    """Return the machine on which this many ranks run. found: what `measure_machine` returned."""
    layers = found["layers"] + 1  # embedding and head count as one
    forward, update = ((found[f"{name}_5"] - found[f"{name}_1"]) / 4 for name in ("forward", "update"))
    backward = max(0.0, update / forward - 1)
    arithmetic = found["update_many"] - found["update_1"]
    rate = 3 * found["operations"] / arithmetic
    token = 2 * found["parameters"] / rate
    reading = max(4 * found["parameters"] / found["copy"], token)
    samples = found["decode_many"] - found["decode_1"] - (SEQUENCES * token - reading)
    # Half of the messages gather, the others scatter sums.
    small, large = (
        (found.get(f"gather_{size}", 0.0) + found.get(f"scatter_{size}", 0.0)) / 2
        for size in ("small", "large")
    )
    message = 4 * MIB * (CORES - 1)
    return Hardware(
        ranks_per_node=ranks,
        tflops=found["product"] / 1e12,
        train_share=rate / found["product"],
        hbm_gb_s=found["copy"] / 1e9,
        hbm_share=1.0,
        nvlink_gb_s=message / (large - small) / 1e9 if large else 1.0,
        link_share=1.0,
        near_us=1e6 * small,
        layer_ms=1e3 * forward / layers,
        backward_launches=backward,
        update_ms=1e3 * (found["update_1"] - update),
        launches_ahead=0,
        cores_per_rank=min(1.0, CORES / ranks),
        engine_step_ms=1e3 * (found["decode_1"] - reading),
        engine_sample_ms=1e3 * max(0.0, samples) / (SEQUENCES - 1),
        gpu_memory_gib=80.0,
    )


def output_of(commands: Sequence[list[str]], environment: dict[str, str]) -> list[dict[str, float]]:
    """Run the commands at once; return the JSON objects in the last lines of their outputs."""
    options: dict = dict(cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started = [subprocess.Popen(command, **options) for command in commands]
    ended = [process.communicate() for process in started]
    for process, (_, log) in zip(started, ended):
        if process.returncode:
            raise BenchFailed(f"{' '.join(process.args)}\n{log[-4000:]}")
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


def mean(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(one[name] for one in found) / len(found) for name in found[0]}


def seconds(function: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the least seconds of several calls after one that is not counted; other processes only add."""
    times, now = [], clock()
    for _ in range(rounds + 1):
        start = now()
        function()
        times.append(now() - start)
    return min(times[1:])


def measure_rank(model: str) -> dict[str, float]:
    """Return the constants of one rank that trains and generates alone."""
    from rl.runtime.ranks import discover
    from train_rl import prepare_environment

    ranks = discover()
    prepare_environment(ranks)
    import numpy as np
    import torch

    from rl.config.schema import load_config
    from rl.data.batch import Batch
    from rl.dry_run.shape import models_of
    from rl.engines.engines import build_policy
    from rl.models import read_hf_config
    from rl.phases.policy_gradient import policy_loss
    from rl.rollout.engine import RolloutEngine
    from rl.rollout.sampling import Sampling
    from rl.runtime.session import session
    from rl.training.grid import build_grid
    from rl.training.loss import Totals
    from tools.bench_tables.program import CONFIG

    config = load_config(
        str(CONFIG), (f"model.path={model}", "training.shared_prefix=false", "algorithm=grpo")
    )
    hf = read_hf_config(model)
    policy, length = models_of(config)[0]["policy"], sum(MANY)
    out: dict[str, float] = {"layers": policy.num_layers, "parameters": policy.multiplied}
    out["operations"] = 2 * SEQUENCES * length * (policy.multiplied + policy.score_products(length))
    width, inner = hf["hidden_size"], hf["intermediate_size"]

    def tokens(length: int):
        return np.arange(length, dtype=np.int32) % 90 + 6

    with session(ranks) as device:
        x, w = torch.randn(2048, width), torch.randn(width, inner)
        out["product"] = 2 * 2048 * width * inner / seconds(lambda: x @ w, 20)
        big, copy = torch.zeros(2, 16 * MIB)
        out["copy"] = 2 * 64 * MIB / seconds(lambda: copy.copy_(big))
        grid = build_grid(tp=1, pp=1, cp=1, ep=1, etp=1, vpp=1, seed=1)
        trainer = build_policy(config, hf, grid, device)
        loss = policy_loss(config)

        def passes(shape: tuple[int, int], micro_batches: list[list[int]]) -> tuple[float, float]:
            number = sum(map(len, micro_batches))
            batch = Batch(
                prompt_ids=[tokens(shape[0]) for _ in range(number)],
                response_ids=[tokens(shape[1]) for _ in range(number)],
                groups=torch.arange(number),
                truncated=torch.zeros(number, dtype=torch.bool),
            )
            total = number * shape[1]
            batch.old_logprobs, batch.advantages = torch.full((total,), -4.5), torch.ones(total)
            batch.rollout_logprobs = batch.old_logprobs
            totals = Totals(float(total), float(number), float(number))
            plan = [micro_batches]

            def update():
                trainer.update(batch, plan, lambda micro: loss(micro, totals), lr=1e-9, outputs=loss.reads)

            return (seconds(lambda: trainer.forward(batch, [plan], ("logprobs",))), seconds(update))

        out["forward_1"], out["update_1"] = passes(FEW, [[0]])
        out["forward_5"], out["update_5"] = passes(FEW, [[i] for i in range(5)])
        out["forward_many"], out["update_many"] = passes(MANY, [list(range(SEQUENCES))])
        engine = RolloutEngine(model, config.rollout, dtype="float32", max_tokens=256, seed=1, device=device)

        def generation(samples: int, length: int) -> float:
            group = min(samples, 8)
            sampling = Sampling(group, 1.0, 1.0, 0, 0.0, length, (), ())
            prompts = [tokens(8) + number for number in range(samples // group)]
            return seconds(lambda: engine.generate(prompts, sampling, [*range(len(prompts))]), 3)

        for name, samples in (("1", 1), ("many", SEQUENCES)):
            out[f"decode_{name}"] = (generation(samples, 96) - generation(samples, 16)) / 80
    return out


def measure_links() -> dict[str, float]:
    """Return the constants of messages between ranks on all cores."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        size = dist.get_world_size()

        def gather(elements: int) -> float:
            x, whole = torch.zeros(elements), torch.zeros(size * elements)
            return seconds(lambda: dist.all_gather_into_tensor(whole, x), 50)

        def scatter(elements: int) -> float:
            x, whole = torch.zeros(elements), torch.zeros(size * elements)
            return seconds(lambda: dist.reduce_scatter_tensor(x, whole), 50)

        out = {}
        for name, one in (("gather", gather), ("scatter", scatter)):
            out[f"{name}_small"], out[f"{name}_large"] = one(256), one(MIB)
    finally:
        dist.destroy_process_group()
    return out


if __name__ == "__main__":
    print(json.dumps(measure_rank(sys.argv[2]) if sys.argv[1] == "rank" else measure_links()))
