"""The chunked head with half of the vocabulary on each of two ranks."""

import torch
import torch.distributed as dist

from tests.spawn import run_ranks
from tests.unit.training.test_logprobs import assert_same, chunked, error_of, inputs, reference, some_masks


def test_two_ranks_equal_one(tmp_path):
    """Real rows of the second rank: 18 of 32, then none at all; without and with sampling masks."""
    program = """
        import sys
        import torch
        import torch.distributed as dist

        from tests.unit.training.test_logprobs import chunked, inputs, some_masks

        dist.init_process_group("gloo")
        rank, results = dist.get_rank(), []
        for vocab_size in (50, 32, 20):
            hidden, weight, targets, upstream = inputs(rows=64, vocab_size=vocab_size)
            for chunk, cut in ((3, False), (1000, False), (3, True), (1000, True)):
                keeps = some_masks(targets, vocab_size=vocab_size) if cut else None
                logprobs, entropy, grad_hidden, grad_weight = chunked(
                    hidden, weight.chunk(2)[rank], targets, upstream, keeps=keeps,
                    temperature=0.8, vocab_size=vocab_size, group=dist.group.WORLD, chunk=chunk,
                )
                own_part = grad_hidden.clone()
                dist.all_reduce(grad_hidden)
                results.append(
                    (vocab_size, chunk, logprobs, entropy, grad_hidden, grad_weight, own_part, cut)
                )
        torch.save(results, f"{sys.argv[1]}/{rank}.pt")
        dist.destroy_process_group()
    """
    run_ranks(2, program, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert len(ranks[0]) == 12
    one = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    for first, second in zip(*ranks, strict=True):
        vocab_size, chunk = first[:2]
        for on_first, on_second in zip(first[2:5], second[2:5]):
            assert torch.equal(on_first, on_second)  # outputs and summed gradient are equal on both
        assert first[6].abs().sum() > 0
        assert bool(second[6].abs().sum() > 0) == (vocab_size > 32)
        data = inputs(rows=64, vocab_size=vocab_size)
        keeps = some_masks(data[2], vocab_size=vocab_size) if first[7] else None
        found = (*first[2:5], torch.cat([first[5], second[5]]))
        error = error_of(*data[:2], temperature=0.8, vocab_size=vocab_size)
        assert_same(found, reference(*data, temperature=0.8, vocab_size=vocab_size, keeps=keeps), error)
        alone = chunked(*data, temperature=0.8, vocab_size=vocab_size, group=one, chunk=chunk, keeps=keeps)
        assert_same(found, [tensor.double() for tensor in alone], error)
