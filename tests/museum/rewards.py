"""Exhibits: scores on their way from a reward function to the advantages."""

from tests.museum.museum import Bug, exhibit

SCORES = "scores"


@exhibit(
    name="order of the scores lost",
    peer="NVIDIA-NeMo/RL#1026",
    saw="A reward model with dynamic batches returned scores in another order than its samples.",
    caught_by=SCORES,
    expects=r"rank \d .*CheckFailed: score check: rank \d got the score .*of another sample",
    ranks=2,
)
def lost_order(bug: Bug) -> None:
    from rl.rewards.pool.pool import ScoringPool

    @bug.replaces(ScoringPool, "score")
    def arrived(score, self, samples):
        return score(self, samples)[::-1]


@exhibit(
    name="scores of ranks interleaved",
    peer="huggingface/trl#3098",
    saw="On several GPUs completions did not belong to the prompts that they were scored with.",
    caught_by=SCORES,
    expects=r"CheckFailed: score check: sample \d+ \(prompt \d+\) has the score of another sample",
    ranks=2,
)
def ranks_interleaved(bug: Bug) -> None:
    from rl.phases import scorer

    @bug.replaces(scorer, "gather_columns")
    def end_to_end(gather, results, digests, mine, total, device):
        start = bug.rank * len(mine)
        return gather(results, digests, list(range(start, start + len(mine))), total, device)


@exhibit(
    name="worker repeats old answers",
    peer="vllm-project/vllm#57846",
    saw="After an error a worker's old answer stayed queued, and the next request got it.",
    caught_by=SCORES,
    expects=r"CheckFailed: score check: rank 0 got the score .*of another sample",
)
def old_answers(bug: Bug) -> None:
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


@exhibit(
    name="failures of the reward scored 0",
    peer="huggingface/OpenEnv#1025",
    saw="A verifier that crashed was scored 0, which no client can tell from a wrong answer.",
    caught_by=SCORES,
    expects=r"CheckFailed: score check: rank 0 got the score 0 .*that no worker computed",
)
def failures_as_zero(bug: Bug) -> None:
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
    name="reward always 0",
    peer="PrimeIntellect-ai/verifiers#186",
    saw="With one option every reward was 0, also of responses that were not truncated.",
    caught_by="constant scores",
    expects=r"warning: score check: all 64 samples have the score 0, as only 0 of 16 groups before",
    overrides=("data.prompts_per_step=16", "training.micro_batch_tokens=400"),
    warns=True,
)
def always_zero(bug: Bug) -> None:
    from rl.rewards.pool.worker_process import ScoringWorker

    @bug.replaces(ScoringWorker, "validated")
    def nothing(validated, self, line):
        message = validated(self, line)
        if message and "values" in message:
            message["values"] = dict.fromkeys(message["values"], 0.0)
        return message


@exhibit(
    name="advantages with the wrong sign",
    peer="fla-org/flash-linear-attention#1073",
    saw="The loss was negated twice and pushed the policy away from good responses.",
    caught_by="advantages",
    expects=r"CheckFailed: advantage check: in group \d the reward .* sign is wrong",
)
def wrong_sign(bug: Bug) -> None:
    change(bug, lambda advantages, batch: -advantages)


@exhibit(
    name="advantages of the whole batch",
    peer="amazon-science/reskill#12",
    saw="Advantages were whitened over the batch, so groups influenced each other.",
    caught_by="advantages",
    expects=r"CheckFailed: advantage check: the advantages of group \d have the sum",
)
def of_the_batch(bug: Bug) -> None:
    def whitened(advantages, batch):
        rewards = batch.rewards
        return ((rewards - rewards.mean()) / rewards.std()).repeat_interleave(batch.lengths)

    change(bug, whitened)


@exhibit(
    name="baseline of the first sample",
    peer="ServiceNow/PipelineRL#54",
    saw="The mean reward of a group counted only its first rollout; training seemed to work.",
    caught_by="advantages",
    expects=r"CheckFailed: advantage check: the advantages of group \d have the sum",
)
def of_the_first(bug: Bug) -> None:
    def from_first(advantages, batch):
        first = batch.rewards[(batch.groups.unsqueeze(1) == batch.groups).int().argmax(1)]
        return (batch.rewards - first).repeat_interleave(batch.lengths)

    change(bug, from_first)


@exhibit(
    name="advantages zero everywhere",
    peer="TensorAuto/OpenTau#136",
    saw="Every advantage was 0.",
    caught_by="advantages",
    expects=r"CheckFailed: advantage check: rewards differ within groups, but every advantage is 0",
)
def zero(bug: Bug) -> None:
    change(bug, lambda advantages, batch: advantages * 0)


def change(bug: Bug, to) -> None:
    """Replace the advantages by `to(advantages, batch)`."""
    from rl.algorithms import grpo

    @bug.replaces(grpo, "advantages")
    def changed(advantages, batch, config):
        return to(advantages(batch, config), batch)
