"""Cost of 200 steps beside training: memory, which must not grow, and the comparison of ranks."""

from statistics import mean

import pytest

from tests.spawn import run_ranks
from tests.toy import train, write_config

STEPS = 200


@pytest.mark.slow
def test_resident_memory_does_not_grow(toy, tmp_path):
    batch = ("data.prompts_per_step=32", "training.prompts_per_minibatch=0", "training.offload=all")
    config = write_config(tmp_path, toy, *batch, f"run.max_steps={STEPS}")
    records = train(2, config, timeout=1500)
    used = [record["perf/host_memory_gib"] for record in records]
    early, late = mean(used[20:40]), mean(used[-20:])
    print(f"resident memory in steps 21 to 40: {early:.4f} GiB; in the last 20 of {STEPS}: {late:.4f} GiB")
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
    own = torch.zeros(9, dtype=torch.int64)
    rows = torch.zeros(dist.get_world_size() * 9, dtype=torch.int64)
    for number in range(2000):
        place = PhaseEntry("update", 1, number, 0.0, 0.0, 1.0)
        start = time.perf_counter()
        agreement.check(place, {"ids": 7}, 0, (0, 0, 0))
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
