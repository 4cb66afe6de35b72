"""Constants of this machine for the dry run (`rl.dry_run.hardware`), measured with the program's own passes.

Ranks share the memory, the caches and the clock of their machine, so that constants hold for a number of
ranks: as many processes measure at once, and start each pass together. If they are more than the cores,
processor seconds are counted, because the estimate counts the turns that they take on a core.

A pass over few tokens gives the time of launches, passes over many in short and in long sequences the speeds
of products and of attention. An engine step with one sample gives its time on the host, steps with many
samples the time per sample, steps with long caches the speed of reading them. A message is measured after a
product, because a rank in a pass also waits for the others, and for its thread to be woken.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from rl.dry_run.hardware import GIB, Hardware
from tools.dev.bench_tables.report import ROOT
from tools.dev.bench_tables.sides import CLOCK, BenchFailed, clock, torchrun

Dtype = Literal["float32", "bfloat16"]
CORES = len(os.sched_getaffinity(0))
ROUNDS = 5
FEW, MANY, LONG = (4, 4), (8, 120), (8, 504)
"""(prompt, response) of the sequences in passes over few tokens, many, and as many in longer sequences."""
LARGE = 50e6
"""Number of parameters from which passes have a quarter of the sequences, and fewer rounds are measured."""
SEQUENCES = 32
"""Sequences of a pass over many tokens, and samples of an engine step."""
CACHED = 384
"""Tokens of the prompts of engine steps with long caches."""
BETWEEN = 20
"""Messages of a measurement, each after a product."""
MIB = 1 << 20
BARRIER = "LOCKSTEP_BENCH_BARRIER"
"""Environment variable: port:processes of the store through which processes start a pass together."""


def measure_machine(model: Path, ranks: int, clock: str, dtype: Dtype = "float32") -> dict[str, float]:
    """Return what `hardware_of` reads for this many ranks.

    model: directory of the checkpoint. clock: elapsed or processor, which more ranks than cores always take.
    dtype: `model.dtype` of the passes.
    """
    from torch.distributed import TCPStore

    if ranks > CORES:
        clock = "processor"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), CLOCK: clock}
    module = ["-m", "tools.dev.bench_tables.machine"]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alone = [[sys.executable, *module, "rank", str(model), dtype]] * ranks
    found = mean(output_of(alone, environment | {BARRIER: f"{store.port}:{ranks}"}))
    if (linked := min(ranks, CORES)) > 1:
        links = [[*torchrun(linked), *module, "links", str(model), "float32"]]
        found |= mean(output_of(links, environment | {CLOCK: "elapsed"}))
    return found


def hardware_of(found: dict[str, float], ranks: int) -> Hardware:
    """Return the machine on which this many ranks run. found: what `measure_machine` returned for them."""
    layers = found["layers"] + 1  # embedding and head count as one
    forward, update = ((found[f"{name}_5"] - found[f"{name}_1"]) / 4 for name in ("forward", "update"))
    backward = max(0.0, update / forward - 1)

    # Passes over as many tokens, in sequences of two lengths: products cost the same, attention does not.
    many, long = (found[f"update_{name}"] - found["update_1"] for name in ("many", "long"))
    scores = found["scores_long"] - found["scores_many"]
    products = max(0.5 * many, many - (long - many) * found["scores_many"] / scores)
    rate = 3 * found["operations"] / products
    attention = 3 * scores / (long - many) if long > many else rate

    token = 2 * found["parameters"] / rate
    reading = max(found["itemsize"] * found["parameters"] / found["copy"], token)
    # Engine steps of as many samples, with caches of two lengths.
    per_position = max(0.0, found["decode_long"] - found["decode_many"]) / CACHED
    sequences = found["sequences"]
    cache = sequences * found["cache_bytes"] / per_position if per_position else found["copy"]
    caches = per_position * found["cached"]
    samples = found["decode_many"] - found["decode_1"] - caches - max(0.0, sequences * token - reading)
    # Half of the messages gather, the others scatter sums.
    small, large = (
        (found.get(f"gather_{size}", 0.0) + found.get(f"scatter_{size}", 0.0)) / 2
        for size in ("small", "large")
    )
    message = 4 * MIB * (min(ranks, CORES) - 1)
    return Hardware(
        ranks_per_node=ranks,
        tflops=found["product"] / 1e12,
        train_share=rate / found["product"],
        attention_share=attention / found["product"],
        hbm_gb_s=found["copy"] / 1e9,
        hbm_share=1.0,
        cache_share=cache / found["copy"],
        nvlink_gb_s=message / (large - small) / 1e9 if large > small else 1.0,
        link_share=1.0,
        exchange_us=1e6 * small,
        near_us=1e6 * found.get("all_reduce", 0.0),
        layer_ms=1e3 * forward / layers,
        backward_launches=backward,
        update_ms=1e3 * (found["update_1"] - update),
        cores_per_rank=min(1.0, CORES / ranks),
        engine_step_ms=1e3 * (found["decode_1"] - reading),
        engine_sample_ms=1e3 * max(0.0, samples) / (sequences - 1),
        host_memory_gib=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB,
    )


def output_of(commands: Sequence[list[str]], environment: dict[str, str]) -> list[Any]:
    """Run the commands at once; return the JSON objects in the last lines of their outputs."""
    options: dict = dict(cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started = [subprocess.Popen(command, **options) for command in commands]
    ended = [process.communicate() for process in started]
    for command, process, (_, log) in zip(commands, started, ended):
        if process.returncode:
            raise BenchFailed(f"{' '.join(command)}\n{log[-4000:]}")
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


def mean(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(one[name] for one in found) / len(found) for name in found[0]}


def barrier() -> Callable[[], None]:
    """Return a function that waits until all processes of `measure_machine` have called it as often."""
    if BARRIER not in os.environ:
        return lambda: None
    from torch.distributed import TCPStore

    port, processes = map(int, os.environ[BARRIER].split(":"))
    store, calls = TCPStore("127.0.0.1", port, is_master=False), 0

    def wait() -> None:
        nonlocal calls
        calls += 1
        if store.add(f"arrived-{calls}", 1) == processes:
            store.set(f"all-{calls}", "")
        store.wait([f"all-{calls}"])

    return wait


def seconds(function: Callable[[], object], together: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the median seconds of several calls after one that is not counted.

    together: called before each of them.
    """
    times, now = [], clock()
    for _ in range(rounds + 1):
        together()
        start = now()
        function()
        times.append(now() - start)
    return statistics.median(times[1:])


def measure_rank(model: str, dtype: Dtype) -> dict[str, float]:
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
    from rl.rollout.vllm_model import ServedModel
    from rl.runtime.session import session
    from rl.training.grid import build_grid
    from rl.training.loss import Totals
    from rl.training.model import DTYPES
    from tools.dev.bench_tables.program import CONFIG

    config = load_config(
        str(CONFIG),
        (f"model.path={model}", f"model.dtype={dtype}", "training.shared_prefix=false", "algorithm=grpo"),
    )
    hf = read_hf_config(model)
    policy, itemsize = models_of(config)[0]["policy"], DTYPES[dtype].itemsize
    sequences, rounds = (SEQUENCES // 4, 2) if policy.parameters > LARGE else (SEQUENCES, ROUNDS)
    tokens = sequences * sum(MANY)
    out: dict[str, float] = {"layers": policy.num_layers, "parameters": policy.multiplied}
    out |= {"operations": 2 * tokens * policy.multiplied, "itemsize": itemsize}
    out |= {"cache_bytes": itemsize * policy.cache_elements(1), "sequences": sequences}
    for name, shape in (("many", MANY), ("long", LONG)):
        out[f"scores_{name}"] = 2 * tokens * policy.score_products(sum(shape))
    width, inner = hf["hidden_size"], hf["intermediate_size"]
    together = barrier()

    def token_ids(length: int, number: int = 0) -> np.ndarray:
        return (np.arange(length, dtype=np.int32) + number) % 90 + 6

    def rates() -> tuple[float, float]:
        """Return the operations per second of a large matrix product, and the bytes of a copy."""
        x, w = (torch.randn(*shape, dtype=DTYPES[dtype]) for shape in ((2048, width), (width, inner)))
        product = 2 * 2048 * width * inner / seconds(lambda: x @ w, together, 20)
        big, copy = torch.zeros(2, 16 * MIB)
        return product, 2 * 64 * MIB / seconds(lambda: copy.copy_(big), together)

    with session(ranks) as device:
        out["product"], out["copy"] = rates()
        grid = build_grid(tp=1, pp=1, cp=1, ep=1, etp=1, vpp=1, seed=1)
        trainer = build_policy(config, hf, grid, device)
        loss = policy_loss(config)

        def passes(shape: tuple[int, int], micro_batches: list[list[int]]) -> tuple[float, float]:
            number = sum(map(len, micro_batches))
            batch = Batch(
                prompt_ids=[token_ids(shape[0]) for _ in range(number)],
                response_ids=[token_ids(shape[1]) for _ in range(number)],
                groups=torch.arange(number),
                truncated=torch.zeros(number, dtype=torch.bool),
            )
            total = number * shape[1]
            batch.old_logprobs, batch.advantages = torch.full((total,), -4.5), torch.ones(total)
            batch.rollout_logprobs = batch.old_logprobs
            totals = Totals(float(total), float(number), float(number))
            plan = [micro_batches]

            def update() -> None:
                trainer.update(batch, plan, lambda micro: loss(micro, totals), lr=1e-9, outputs=loss.reads)

            forward = seconds(lambda: trainer.forward(batch, [plan], ("logprobs",)), together, rounds)
            return forward, seconds(update, together, rounds)

        out["forward_1"], out["update_1"] = passes(FEW, [[0]])
        out["forward_5"], out["update_5"] = passes(FEW, [[i] for i in range(5)])
        out["forward_many"], out["update_many"] = passes(MANY, [list(range(sequences))])
        _, out["update_long"] = passes(LONG, [list(range(tokens // sum(LONG)))])
        served = ServedModel(model, dtype, max_tokens=1024, frozen=True)
        engine = RolloutEngine(served, config.rollout, seed=1, device=device)

        def generation(samples: int, prompt: int, length: int) -> float:
            """Return the seconds of a generation of samples that share no prompt."""
            sampling = Sampling(1, length)
            prompts = [token_ids(prompt, number) for number in range(samples)]
            return seconds(
                lambda: engine.generate(prompts, sampling, [*range(samples)]), together, min(rounds, 3)
            )

        for name, samples, prompt in (("1", 1, 8), ("many", sequences, 8), ("long", sequences, 8 + CACHED)):
            short, long = (generation(samples, prompt, length) for length in (16, 96))
            out[f"decode_{name}"] = (long - short) / 80
        out["cached"] = 8 + (16 + 96) / 2
    return out


def measure_links(model: str, dtype: Dtype) -> dict[str, float]:
    """Return the constants of messages between ranks, each on a core of its own."""
    from rl.runtime.ranks import discover
    from train_rl import prepare_environment

    ranks = discover()
    prepare_environment(ranks)
    import torch
    import torch.distributed as dist

    from rl.config.rollout import Rollout
    from rl.models import read_hf_config
    from rl.rollout.engine import RolloutEngine
    from rl.rollout.vllm_model import ServedModel
    from rl.runtime.session import session

    x, w = torch.randn(2048, 128), torch.randn(128, 256)
    out = {}
    with session(ranks) as device:

        def added(message: Callable[[], object]) -> float:
            """Return the mean seconds that a message after each product adds."""

            def several(*functions: Callable[[], object]) -> float:
                return seconds(lambda: [function() for function in functions * BETWEEN], dist.barrier)

            return max(0.0, several(lambda: x @ w, message) - several(lambda: x @ w)) / BETWEEN

        def exchanges(elements: int) -> list[float]:
            """Return the seconds of a gather and of a sum that is scattered, of [elements] per rank."""
            part, whole = torch.zeros(elements), torch.zeros(ranks.world_size * elements)
            return [
                added(lambda: dist.all_gather_into_tensor(whole, part)),
                added(lambda: dist.reduce_scatter_tensor(part, whole)),
            ]

        out["gather_small"], out["scatter_small"] = exchanges(256)
        out["gather_large"], out["scatter_large"] = exchanges(MIB)
        if read_hf_config(model)["num_attention_heads"] % ranks.world_size:
            return out  # the model has no tensor parallel engine on these ranks
        rollout = Rollout(tp=ranks.world_size, cpu_kv_cache_mib=64)
        served = ServedModel(model, dtype, max_tokens=64, frozen=True)
        RolloutEngine(served, rollout, seed=1, device=device)
        from vllm.distributed import tensor_model_parallel_all_reduce

        out["all_reduce"] = added(lambda: tensor_model_parallel_all_reduce(torch.zeros(32, 128)))
    return out


if __name__ == "__main__":
    measured = {"rank": measure_rank, "links": measure_links}[sys.argv[1]](
        sys.argv[2], "bfloat16" if sys.argv[3] == "bfloat16" else "float32"
    )
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(measured))
