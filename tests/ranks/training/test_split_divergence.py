"""The divergence from a teacher with half of the vocabulary on each of two ranks."""

import torch
import torch.distributed as dist

from tests.spawn import run_ranks
from tests.unit.training.test_divergence import NAMES, K, assert_near, chunked, inputs, reference


def test_two_ranks_equal_float64(tmp_path):
    """The second rank has 18 real rows of 32; all of the teacher's k tokens may lie on one rank."""
    program = """
        import sys
        import torch
        import torch.distributed as dist

        from rl.features.teachers.divergence import head_rows
        from tests.unit.training.test_divergence import NAMES, K, chunked, inputs

        dist.init_process_group("gloo")
        rank, results = dist.get_rank(), []
        hidden, weight, teacher_hidden, teacher_weight, upstream = inputs()
        own, taught = weight.chunk(2)[rank], teacher_weight.chunk(2)[rank]
        for name in NAMES:
            for k in (0, K, 40):
                found, grad_hidden, grad_weight = chunked(
                    hidden, own, teacher_hidden, taught, upstream, name=name, k=k, group=dist.group.WORLD,
                    chunk=4,
                )
                dist.all_reduce(grad_hidden)
                results.append((name, k, found, grad_hidden, grad_weight))
        # A teacher whose 80 rows are split at row 40, for a policy with 32 rows on each rank.
        larger = torch.arange(80.0)[:, None]
        results.append(head_rows(larger.chunk(2)[rank], 32, dist.group.WORLD))
        torch.save(results, f"{sys.argv[1]}/{rank}.pt")
        dist.destroy_process_group()
    """
    run_ranks(2, program, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert torch.cat([results.pop() for results in ranks]).squeeze(1).tolist() == list(range(64))
    assert len(ranks[0]) == 3 * len(NAMES)
    one = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    for first, second in zip(*ranks, strict=True):
        name, k = first[:2]
        for on_first, on_second in zip(first[2:4], second[2:4]):
            assert torch.equal(on_first, on_second)
        found = (*first[2:4], torch.cat([first[4], second[4]]))
        assert_near(found, reference(*inputs(), name=name, k=k))
        if k != 40:
            alone = chunked(*inputs(), name=name, k=k, group=one, chunk=4)
            assert_near(found, [part.double() for part in alone])
    assert K < 40
