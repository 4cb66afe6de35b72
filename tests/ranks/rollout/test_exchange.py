"""The exchange of samples between real ranks."""

import json

from tests.spawn import run_ranks


def test_every_column_of_a_sample_reaches_every_rank():
    out = run_ranks(
        2,
        """
        import json
        import numpy as np
        import torch.distributed as dist
        from rl.rollout.exchange import exchange
        from rl.rollout.turns import Sample
        from rl.runtime.device import choose_device

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        lengths = [[3, 0], [1, 2]]  # [prompt][sample]; rank r holds sample r of each prompt

        def sample(prompt):
            ids = np.arange(lengths[prompt][rank], dtype=np.int32) + 10 * prompt + 100 * rank
            mask, versions = (ids % 2).astype(np.int32), ids + 1000
            return Sample(prompt, rank, ids, -ids.astype(np.float32), bool(prompt), mask, versions)

        batch = exchange([np.ones(2, np.int32)] * 2, [sample(1), sample(0)], 2, choose_device(0))
        columns = (batch.mask, batch.rollout_logprobs, batch.weight_versions, batch.truncated, batch.groups)
        print(json.dumps([[ids.tolist() for ids in batch.response_ids], *(c.tolist() for c in columns)]))
        dist.destroy_process_group()
        """,
    )
    assert out[0] == out[1]
    ids, mask, logprobs, versions, truncated, groups = json.loads(out[0])
    assert ids == [[0, 1, 2], [], [10], [110, 111]]
    flat = [token for sample in ids for token in sample]
    assert mask == [token % 2 for token in flat]
    assert logprobs == [-token for token in flat]
    assert versions == [token + 1000 for token in flat]
    assert truncated == [False, False, True, True] and groups == [0, 0, 1, 1]
