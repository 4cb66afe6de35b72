"""The promise of model.numerics=bitwise: the trainer computes the log-probs that the engine sampled with."""

from torch import Tensor

from rl.data.batch import Batch
from rl.training.micro_batch_plans import MicroBatchPlan


class NumericsDiffer(RuntimeError):
    """Raised on every rank if a log-prob of the trainer is not bitwise that of the engine."""


def check_equal(
    batch: Batch, logprobs: Tensor, version: int, plans: list[MicroBatchPlan], *, replayed: str = ""
) -> None:
    """Raise NumericsDiffer if sampled tokens have another log-prob than in the engine.

    logprobs: the trainer's, float32 [T]. version: that of the policy that learns from the batch. plans: the
    mini-batches, which tell the rank of a sample. replayed: run whose samples are replayed (`run.rollouts`).
    """
    assert batch.rollout_logprobs is not None and batch.mask is not None
    differ = (logprobs != batch.rollout_logprobs) & (batch.mask > 0)
    if not differ.any():
        return
    first = int(differ.nonzero()[0])
    sample = int((batch.offsets[1:] <= first).sum())
    by_rank = [(rank, micro) for plan in plans for rank, micros in enumerate(plan) for micro in micros]
    holder = next(rank for rank, micro in by_rank if sample in micro)
    sampled = batch.weight_versions
    remedy = "Use model.numerics=fast, or compare the libraries and processors of the ranks."
    if replayed and version:
        remedy = (
            f"In run.mode=train_only the weights of version {version} are those of run.rollouts={replayed} "
            "only if this run has learned as that run did: a key that changes an update, such as "
            "training.optimizer.lr, leads to other weights. Compare the config.yaml of both runs and set the "
            "same values, or use model.numerics=fast."
        )
    raise NumericsDiffer(
        f"model.numerics=bitwise: {int(differ.sum())} of {int((batch.mask > 0).sum())} sampled tokens have "
        f"another log-prob in the trainer than in the engine. The first one is token "
        f"{first - int(batch.offsets[sample])} of sample {sample}: {float(logprobs[first])!r} in the trainer "
        f"(data parallel rank {holder}, weights of version {version}), "
        f"{float(batch.rollout_logprobs[first])!r} in the engine (version "
        f"{'unknown' if sampled is None else int(sampled[first])}). {remedy}"
    )
