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
        from rl.rollout.batches import batch_of
        from rl.rollout.exchange import exchange
        from rl.rollout.samples import Sample, Segment
        from rl.runtime.device import choose_device

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        lengths = [[3, 0], [1, 2]]  # [prompt][sample]; rank r holds sample r of each prompt

        def sample(prompt):
            ids = np.arange(lengths[prompt][rank], dtype=np.int32) + 10 * prompt + 100 * rank
            logprobs = -ids.astype(np.float32)
            segments = (
                Segment(ids[:1], logprobs[:1], ids[:1] + 1000),
                Segment(ids[1:], logprobs[1:], ids[1:] + 1000, source="tool"),
            )
            return Sample(prompt, rank, segments, ["stop", "length"][prompt])

        samples = exchange([sample(1), sample(0)], choose_device(0))
        batch = batch_of(samples, [np.ones(2, np.int32)] * 2, samples_per_prompt=2)
        columns = (batch.mask, batch.rollout_logprobs, batch.weight_versions, batch.truncated, batch.groups)
        print(json.dumps([[ids.tolist() for ids in batch.response_ids], *(c.tolist() for c in columns)]))
        dist.destroy_process_group()
        """,
    )
    assert out[0] == out[1]
    ids, mask, logprobs, versions, truncated, groups = json.loads(out[0])
    assert ids == [[0, 1, 2], [], [10], [110, 111]]
    flat = [token for sample in ids for token in sample]
    assert mask == [1, 0, 0, 1, 1, 0]
    assert logprobs == [-token for token in flat]
    assert versions == [token + 1000 for token in flat]
    assert truncated == [False, False, True, True] and groups == [0, 0, 1, 1]


def test_rows_contexts_outcomes_and_missing_samples():
    out = run_ranks(
        2,
        """
        import json
        import numpy as np
        import torch.distributed as dist
        from rl.rollout.batches import batch_of
        from rl.rollout.exchange import exchange
        from rl.rollout.samples import Sample, Segment
        from rl.runtime.device import choose_device

        dist.init_process_group("gloo")
        rank = dist.get_rank()

        def sample(prompt, number, row, token, **options):
            ids = np.array([token], np.int32)
            segment = Segment(ids, np.zeros(1, np.float32), np.zeros(1, np.int32))
            return Sample(prompt, number, (segment,), row=row, **options)

        # Prompt 0 lost sample 0; sample 1 of prompt 1 has two rows, the second with a context of its own.
        own = [
            [sample(1, 1, 1, 7, prompt_ids=np.array([3, 4], np.int32)), sample(0, 1, 0, 5)],
            [sample(1, 0, 0, 6, outcome={"score": 0.5}), sample(1, 1, 0, 8)],
        ][rank]
        batch = batch_of(exchange(own, choose_device(0)), [np.ones(1, np.int32)] * 2)
        columns = batch.groups.tolist(), batch.trajectories.tolist(), batch.score_details["score"].tolist()
        ids = [x.tolist() for x in batch.response_ids], [x.tolist() for x in batch.prompt_ids]
        print(json.dumps([*columns, *ids]))
        dist.destroy_process_group()
        """,
    )
    assert out[0] == out[1]
    groups, trajectories, scores, responses, prompts = json.loads(out[0])
    assert responses == [[5], [6], [8], [7]] and prompts == [[1], [1], [1], [3, 4]]
    assert groups == [0, 1, 1, 1] and trajectories == [0, 1, 2, 2]
    assert [score if score == score else None for score in scores] == [None, 0.5, None, None]
