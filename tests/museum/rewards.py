"""Exhibits: scores on their way from a reward function to the advantages."""

from tests.museum.museum import Bug, caught_by, exhibit, replaces

SCORES = "scores"


@exhibit("NVIDIA-NeMo/RL#1026", ranks=2)
@caught_by(SCORES, r"rank \d .*CheckFailed: score check: rank \d got the score .*of another sample")
@replaces("rl.rewards.pool.pool.ScoringPool.score")
def order_of_the_scores_lost(bug: Bug, score, self, samples):
    """A reward model with dynamic batches returned scores in another order than its samples."""
    return score(self, samples)[::-1]


@exhibit("huggingface/trl#3098", ranks=2)
@caught_by(SCORES, r"CheckFailed: score check: sample \d+ \(prompt \d+\) has the score of another sample")
@replaces("rl.phases.scorer.gather_columns")
def scores_of_ranks_interleaved(bug: Bug, gather, results, digests, mine, total, device):
    """On several GPUs completions did not belong to the prompts that they were scored with."""
    start = bug.rank * len(mine)
    return gather(results, digests, list(range(start, start + len(mine))), total, device)


@exhibit("vllm-project/vllm#57846")
@caught_by(SCORES, r"CheckFailed: score check: rank 0 got the score .*of another sample")
def worker_repeats_old_answers(bug: Bug) -> None:
    """After an error a worker's old answer stayed queued, and the next request got it."""
    from rl.rewards.pool.pool import ScoringPool

    kept: list = []
    score = ScoringPool.score

    def remembered(self, samples):
        found = score(self, samples)
        if bug.is_on:
            bug.acts()
            return kept[0]
        kept.append(found)
        return found

    ScoringPool.score = remembered


@exhibit("huggingface/OpenEnv#1025")
@caught_by(SCORES, r"CheckFailed: score check: rank 0 got the score 0 .*that no worker computed")
def failures_of_the_reward_scored_0(bug: Bug) -> None:
    """A verifier that crashed was scored 0, which no client can tell from a wrong answer."""
    from rl.rewards.pool.pool import ScoringPool
    from rl.rewards.score import Score

    @bug.replaces(ScoringPool, "_to_scores")
    def forgiving(to_scores, self, jobs):
        jobs.outcomes[0] = "the sandbox did not answer"
        return [
            Score({**score.values, "score": 0.0, "failed": 0.0}) if score.values["failed"] else score
            for score in to_scores(self, jobs)
        ]


@exhibit(
    "PrimeIntellect-ai/verifiers#186",
    overrides=("data.prompts_per_step=16", "training.micro_batch_tokens=400"),
    warns=True,
)
@caught_by(
    "constant scores", r"warning: score check: all 64 samples have the score 0, as only 0 of 16 groups before"
)
@replaces("rl.rewards.pool.worker_process.ScoringWorker.validated")
def reward_always_0(bug: Bug, validated, self, line):
    """With one option every reward was 0, also of responses that were not truncated."""
    message = validated(self, line)
    if message and "values" in message:
        message["values"] = dict.fromkeys(message["values"], 0.0)
    return message


@exhibit("fla-org/flash-linear-attention#1073")
@caught_by("advantages", r"CheckFailed: advantage check: in group \d the reward .* sign is wrong")
def advantages_with_the_wrong_sign(bug: Bug) -> None:
    """The loss was negated twice and pushed the policy away from good responses."""
    change(bug, lambda advantages, batch: -advantages)


@exhibit("amazon-science/reskill#12")
@caught_by("advantages", r"CheckFailed: advantage check: the advantages of group \d have the sum")
def advantages_of_the_whole_batch(bug: Bug) -> None:
    """Advantages were whitened over the batch, so groups influenced each other."""

    def whitened(advantages, batch):
        rewards = batch.rewards
        return ((rewards - rewards.mean()) / rewards.std()).repeat_interleave(batch.lengths)

    change(bug, whitened)


@exhibit("ServiceNow/PipelineRL#54")
@caught_by("advantages", r"CheckFailed: advantage check: the advantages of group \d have the sum")
def baseline_of_the_first_sample(bug: Bug) -> None:
    """The mean reward of a group counted only its first rollout; training seemed to work."""

    def from_first(advantages, batch):
        first = batch.rewards[(batch.groups.unsqueeze(1) == batch.groups).int().argmax(1)]
        return (batch.rewards - first).repeat_interleave(batch.lengths)

    change(bug, from_first)


@exhibit("radixark/miles#3229", ranks=2, overrides=("training.tp=2", "model.dtype=bfloat16"))
@caught_by(
    "agreement before each phase",
    r"Disagreement: ranks disagree on the batch advantages before update.* rank 1",
)
def advantages_whitened_by_each_rank(bug: Bug) -> None:
    """Parts of a batch were whitened with statistics of their own rank."""
    change(bug, lambda advantages, batch: advantages * (1.1 if bug.rank == 1 else 1.0))


@exhibit("TensorAuto/OpenTau#136")
@caught_by(
    "advantages", r"CheckFailed: advantage check: rewards differ within groups, but every advantage is 0"
)
def advantages_zero_everywhere(bug: Bug) -> None:
    """Every advantage was 0."""
    change(bug, lambda advantages, batch: advantages * 0)


def change(bug: Bug, to) -> None:
    """Replace the advantages by `to(advantages, batch)`."""
    from rl.algorithms import grpo

    @bug.replaces(grpo, "advantages")
    def changed(advantages, batch, config):
        return to(advantages(batch, config), batch)
