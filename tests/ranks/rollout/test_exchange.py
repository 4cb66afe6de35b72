"""The exchange of samples between real ranks."""

from tests.spawn import run_ranks


def test_every_sample_reaches_every_rank_as_it_was():
    out = run_ranks(
        2,
        """
        import numpy as np
        import torch.distributed as dist
        from rl.rollout.exchange import exchange
        from rl.rollout.samples import Sample, Segment, pack
        from rl.runtime.device import choose_device
        from rl.runtime.plain_data import encode

        def segment(*ids, **options):
            ids = np.array(ids, np.int32)
            return Segment(ids, -ids.astype(np.float32) / 3, ids + 1000, **options)

        held = {"routes": np.arange(12, dtype=np.uint8).reshape(3, 4)}
        row = dict(row=1, prompt_ids=np.array([3, 4], np.int32))
        generated = [
            [
                Sample(1, 0, (segment(1, 2, held=held), segment(7, source="tool", turn=1)), "length"),
                Sample(0, 1, (), outcome={"score": 0.5}, conversation=[{"role": "user"}], **row),
            ],
            [Sample(0, 0, (segment(5, held=held, context_digest=9),), "abort")],
        ]
        dist.init_process_group("gloo")
        rank, device = dist.get_rank(), choose_device(0)
        everything = [sample for own in generated for sample in own]
        for with_texts in (False, True):
            found = exchange(generated[rank], device, conversations=with_texts)
            packed, expected = (pack(s, held=False, conversations=with_texts) for s in (found, everything))
            assert packed.pop("holder").tolist() == [0, 0, 1] and set(expected.pop("holder")) == {-1}
            assert encode(packed) == encode(expected) and bool(found[1].conversation) == with_texts
            assert [sample.rank for sample in found] == [0, 0, 1]
            has_values = [sample.held("routes") is not None for sample in found]
            assert has_values == [rank == 0, False, rank == 1]
        assert exchange([], device) == []
        print("same")
        dist.destroy_process_group()
        """,
    )
    assert [text.strip() for text in out] == ["same"] * 2
