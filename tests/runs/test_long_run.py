"""What 200 steps cost beside training: memory that must not grow, and the comparison of ranks before each phase."""

import json
from pathlib import Path
from statistics import mean

import pytest

from tests.spawn import ROOT, run_ranks
from tools.make_toy import make_toy

STEPS = 200


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> list[dict]:
    """The metrics of GRPO on two ranks, with every weight compared every tenth step."""
    directory = tmp_path_factory.mktemp("long")
    toy = make_toy(directory / "toy", layers=2, intermediate=128)
    config = directory / "config.yaml"
    config.write_text(
        f"""
        algorithm: grpo
        run: {{max_steps: {STEPS}, dir: {directory}/run}}
        model: {{path: {toy}/model, dtype: float32}}
        data: {{train: [{toy}/train.parquet], max_prompt_tokens: 16, prompts_per_step: 32}}
        training: {{optimizer: {{lr: 1.0e-3}}, offload: all}}
        rollout: {{samples_per_prompt: 4, max_response_tokens: 6, deterministic: true, cpu_kv_cache_mib: 16}}
        logging: {{samples: 2}}
        """
    )
    run_ranks(2, ROOT / "train_rl.py", "--config", config, timeout=1500)
    return [json.loads(line) for line in Path(directory, "run", "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_resident_memory_does_not_grow(records):
    used = [record["perf/host_memory_gib"] for record in records]
    early, late = mean(used[20:40]), mean(used[-20:])
    print(f"resident memory: {early:.4f} GiB in steps 21 to 40, {late:.4f} GiB in the last 20 of {STEPS}: {late / early - 1:+.2%}")
    assert late < 1.02 * early


COMPARISON = """
    import time
    from statistics import median
    import torch
    import torch.distributed as dist
    from rl.faults.agreement import PhaseAgreement
    from rl.faults.phase_tracker import PhaseEntry

    dist.init_process_group("gloo")
    agreement = PhaseAgreement({"key": 1}, "code", dist.group.WORLD)
    compared, bare = [], []
    own = torch.zeros(8, dtype=torch.int64)
    rows = torch.zeros(dist.get_world_size() * 8, dtype=torch.int64)
    for number in range(2000):
        place = PhaseEntry("update", 1, number, 0.0, 0.0, 1.0)
        start = time.perf_counter()
        agreement.check(place, 7, (0, 0))
        compared.append(time.perf_counter() - start)
        start = time.perf_counter()
        dist.all_gather_into_tensor(rows, own)
        bare.append(time.perf_counter() - start)
    print(median(compared), median(bare))
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_agreement_costs_little_more_than_its_one_collective():
    """Medians of ranks that come at the same time. In a run `timing_s/agreement` also holds the wait for the
    slowest rank, which the phase's first collective would have had otherwise."""
    for out in run_ranks(2, COMPARISON):
        compared, bare = map(float, out.split())
        print(f"agreement: {1e3 * compared:.3f} ms, {compared / bare:.2f} times one all-gather of its size")
        assert compared < 3 * bare
