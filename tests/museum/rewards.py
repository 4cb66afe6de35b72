"""Exhibits: scores on their way from a reward function to the advantages."""

from dataclasses import replace
from pathlib import Path

from tests.museum.museum import Bug, caught_by, exhibit, replaces

SCORES, SAMPLES, ADVANTAGES = "scores", "tokens and scores of samples", "rewards and advantages"
WRONG = r"CheckFailed: advantage check: sample \d+ .* in the column advantages at its counted token"
WORKER = Path(__file__).parent / "reward_worker.py"
FUNCTION = f"reward.function={WORKER}"
DAPO = ("algorithm=dapo", "dynamic_sampling.prompts_per_round=8")


@exhibit("NVIDIA-NeMo/RL#1026", ranks=2)
@caught_by(SCORES, r"rank \d .*CheckFailed: score check: rank \d got the score .*of another sample")
@replaces("rl.rewards.pool.pool.ScoringPool.score")
def order_of_the_scores_lost(bug: Bug, score, self, samples, **options):
    """A reward model with dynamic batches returned scores in another order than its samples."""
    return score(self, samples, **options)[::-1]


@exhibit("huggingface/trl#3098", ranks=2)
@caught_by(SCORES, r"CheckFailed: score check: sample \d+ .* but the worker of rank \d returned")
@replaces("rl.phases.scorer.gather_columns")
def scores_of_ranks_interleaved(bug: Bug, gather, results, mine, total, device):
    """On several GPUs completions did not belong to the prompts that they were scored with."""
    start = bug.rank * len(mine)
    return gather(results, list(range(start, start + len(mine))), total, device)


@exhibit("verl-project/verl#1031", overrides=(f"{FUNCTION}:voted",))
@caught_by(
    SCORES, r"CheckFailed: score check: rank 0 got the score .* answers, or their texts, were exchanged"
)
@replaces("rl.rewards.pool.pool.ScoringPool.received")
def texts_under_each_others_names(bug: Bug, received, self, worker, message):
    """The texts that a function returned beside its score were filed under wrong names or samples."""
    texts = {"prediction": message.get("feedback"), "feedback": message.get("prediction")}
    received(self, worker, message | texts)


@exhibit("vllm-project/vllm#57846")
@caught_by(SCORES, r"CheckFailed: score check: rank 0 got the score .*of another sample")
def worker_repeats_old_answers(bug: Bug) -> None:
    """After an error a worker's old answer stayed queued, and the next request got it."""
    from rl.rewards.pool.pool import ScoringPool

    kept: list = []
    score = ScoringPool.score

    def remembered(self, samples, **options):
        found = score(self, samples, **options)
        if any(
            sample["response"] is not None for sample in samples
        ):  # else a trial of the rows before the first step
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
    def forgiving(to_scores, self, jobs, **options):
        jobs.outcomes[0] = "the sandbox did not answer"
        return [
            Score({**score.values, "score": 0.0, "failed": 0.0}) if score.values["failed"] else score
            for score in to_scores(self, jobs, **options)
        ]


@exhibit(
    "PrimeIntellect-ai/verifiers#186",
    overrides=("data.prompts_per_step=16", "training.micro_batch_tokens=400", f"{FUNCTION}:later_0"),
    warns=True,
)
@caught_by(
    "constant scores", r"warning: score check: all 64 samples have the score 0, as only 0 of 16 groups before"
)
@replaces("rl.rewards.pool.pool.ScoringPool.score")
def reward_always_0(bug: Bug, score, self, samples, **options):
    """With one option every reward was 0, also of responses that were not truncated."""
    return score(self, samples, **options)


@exhibit("iwangjian/textsum-gan#19", overrides=("model.dtype=bfloat16",))
@caught_by(SCORES, r"CheckFailed: score check: rank 0 got the score .*of another sample")
def values_of_the_answer_before(bug: Bug) -> None:
    """Rewards of one batch were multiplied with the next one."""
    from rl.rewards.pool.worker_process import ScoringWorker

    kept: list = []
    validated = ScoringWorker.validated

    def late(self, line):
        message = validated(self, line)
        if message and "values" in message:
            kept.append(message["values"])
            if bug.is_on:
                bug.acts()
                message["values"] = kept[-2]
        return message

    ScoringWorker.validated = late


@exhibit("kyegomez/swarms#1896", overrides=(f"{FUNCTION}:slow_first",), at=1)
@caught_by(SCORES, r"CheckFailed: score check: rank 0 got the score .*of another sample")
def answers_in_the_order_of_completion(bug: Bug) -> None:
    """Concurrent calls were answered in the order of their ends, so fast answers bore slower calls' names."""
    from rl.rewards.pool.pool import ScoringPool

    ScoringPool.module = "tests.museum.reward_worker"
    bug.replaces(ScoringPool, "score")(lambda score, *args, **options: score(*args, **options))


@exhibit("NVIDIA-NeMo/RL#3794", overrides=DAPO)
@caught_by(
    SAMPLES, r"CheckFailed: sample check: sample \d+ \(prompt \d+\) no longer has the score that was made"
)
def scores_of_the_unfiltered_batch(bug: Bug) -> None:
    """Dynamic sampling put the scores of all drawn samples in place of the kept samples' scores."""
    unfiltered(bug, "scores", "rewards")


@exhibit("eyalmazuz/MolGen#5", overrides=(*DAPO, "model.dtype=bfloat16"))
@caught_by(ADVANTAGES, r"CheckFailed: reward check: sample \d+ .* has the reward .*, but its score")
def rewards_of_the_unfiltered_batch(bug: Bug) -> None:
    """The tokens of the last batch were combined with the first rewards of a longer list."""
    unfiltered(bug, "rewards")


def unfiltered(bug: Bug, *names: str) -> None:
    """Filter the first group out, and replace columns of the others by columns of the first samples."""
    from rl.algorithms import dapo
    from rl.data.batch import Batch

    @bug.replaces(dapo, "grpo")
    def not_the_first(grpo, scores, groups, **options):
        return grpo(scores, groups, **options) * (groups > 0)

    @bug.replaces(Batch, "keep_groups")
    def kept(keep, self, groups):
        found = keep(self, groups)
        for name in names:
            setattr(found, name, getattr(self, name)[: len(found)].clone())
        return found


@exhibit("CarperAI/trlx#401", overrides=("model.dtype=bfloat16",))
@caught_by(SAMPLES, r"CheckFailed: sample check: sample 0 .* no longer has the tokens and the ending")
@replaces("rl.phases.phases.Phases.generate")
def end_trimmed_before_the_update(bug: Bug, generate, self, *args, **options):
    """Trimming responses between generation and training removed their end."""
    import torch

    batch = generate(self, *args, **options)
    last = int(batch.lengths[0]) - 1
    keep = torch.arange(len(batch.mask)) != last
    columns = {name: value[keep] for name, value in batch.columns().items() if len(value) == len(keep)}
    return replace(batch, response_ids=[batch.response_ids[0][:-1], *batch.response_ids[1:]], **columns)


@exhibit("fla-org/flash-linear-attention#1073")
@caught_by(ADVANTAGES, WRONG)
def advantages_with_the_wrong_sign(bug: Bug) -> None:
    """The loss was negated twice and pushed the policy away from good responses."""
    change(bug, lambda advantages, batch: -advantages)


@exhibit("amazon-science/reskill#12", overrides=("model.dtype=bfloat16",))
@caught_by(ADVANTAGES, WRONG)
def advantages_of_the_whole_batch(bug: Bug) -> None:
    """Advantages were whitened over the batch, so groups influenced each other."""

    def whitened(advantages, batch):
        rewards = batch.rewards
        return ((rewards - rewards.mean()) / rewards.std()).repeat_interleave(batch.lengths)

    change(bug, whitened)


@exhibit("ServiceNow/PipelineRL#54")
@caught_by(ADVANTAGES, WRONG)
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
@caught_by(ADVANTAGES, WRONG)
def advantages_zero_everywhere(bug: Bug) -> None:
    """Every advantage was 0."""
    change(bug, lambda advantages, batch: advantages * 0)


@exhibit("NovaSky-AI/SkyRL#1305", overrides=("algorithm=ppo", "model.dtype=bfloat16"))
@caught_by(ADVANTAGES, r"CheckFailed: advantage check: advantages of \d+ counted tokens have the mean")
@replaces("rl.algorithms.ppo.whiten")
def mean_of_the_advantages_with_padding(bug: Bug, whiten, advantages, mask):
    """Normalised advantages did not have the mean 0, because the mean counted padding."""
    return whiten(advantages, mask) + 0.05 * mask


@exhibit("medipixel/rl_algorithms#179", overrides=("algorithm=ppo",))
@caught_by(
    ADVANTAGES, r"CheckFailed: advantage check: sample \d+ .* in the column returns at its counted token"
)
@replaces("rl.algorithms.ppo.gae")
def lambda_of_gae_ignored(bug: Bug, gae, *columns, lam, **options):
    """Generalised advantages were computed with a default in place of the configured lambda."""
    return gae(*columns, lam=0.95, **options)


@exhibit("verl-project/verl#6497", overrides=("objective.advantage=gdpo", "training.tp=2"), ranks=2)
@caught_by(ADVANTAGES, WRONG)
def rewards_normalised_over_tokens(bug: Bug) -> None:
    """Advantages of responses were normalised over tokens, so longer ones counted more often."""
    change(bug, lambda advantages, batch: advantages / advantages.std())


def change(bug: Bug, to) -> None:
    """Replace the advantages by `to(advantages, batch)`."""
    from rl.algorithms import grpo

    @bug.replaces(grpo, "advantages")
    def changed(advantages, batch, config):
        return to(advantages(batch, config), batch)


@exhibit("huggingface/trl#6533", ranks=2, overrides=("model.dtype=bfloat16",))
@caught_by(SCORES, r"CheckFailed: score check: sample \d+ .* but the worker of rank \d returned")
@replaces("rl.phases.scorer.gather_columns")
def one_score_for_all_samples(bug: Bug, gather, results, *rest):
    """A reward function returned one number, which was given to all completions of a rank."""
    return gather(results[:1] * len(results), *rest)


@exhibit("CJReinforce/PURE#19", overrides=("algorithm=remax",))
@caught_by(ADVANTAGES, r"CheckFailed: baseline check: sample \d+ \(prompt \d+\) has the baseline")
@replaces("rl.phases.phases.Phases.greedy_rewards")
def baselines_of_other_prompts(bug: Bug, greedy_rewards, self, prompts):
    """The greedy responses of the baseline did not answer the prompts of the samples."""
    return greedy_rewards(self, prompts).roll(1)


@exhibit(
    "verl-project/verl#1984",
    overrides=("objective.reward_kl.coef=0.05", "objective.reward_kl.controller=adaptive"),
)
@caught_by("KL penalty", r"CheckFailed: coefficient check: objective.reward_kl has the coefficient")
@replaces("rl.objectives.kl_controller.AdaptiveKL.update")
def adaptive_KL_moves_by_another_count(bug: Bug, update, self, current_kl, num_samples):
    """The controller counted in another unit than its horizon."""
    update(self, current_kl, num_samples * 6)


@exhibit(
    "huggingface/trl#5352",
    overrides=(
        "reward.sources={addition: [{function: TOY/reward.py:score}, {function: rl.rewards.exact:score}]}",
        "reward.in_process=true",
    ),
)
@caught_by(SCORES, r"CheckFailed: score check: sample \d+ .* weights \[1.0, 1.0\] make")
@replaces("rl.rewards.mixture._combine")
def weighted_scores_divided_by_the_weights(bug: Bug, combine, scorers, results, key):
    """The reward was not the weighted sum of the functions."""
    from rl.rewards.score import sealed

    found = combine(scorers, results, key)
    return sealed(replace(found, values=found.values | {"score": found.values["score"] / 2}), key)


@exhibit("THUDM/slime#2234", ranks=2, overrides=("reward.model.path=TOY/classifier", "reward.model.coef=1.0"))
@caught_by(SCORES, r"CheckFailed: score check: the reward model reads other tokens for sample \d+")
@replaces("rl.phases.scorer.gather_by_rank")
def conversations_in_the_order_of_the_ranks(bug: Bug, gather, mine):
    """A reward belonged to whichever sample had its place on the rank."""
    from rl.runtime.collectives import gather_objects

    return [item for own in gather_objects(mine) for item in own]


@exhibit(
    "AVSLab/bsk_rl#294",
    overrides=(
        f"reward.sources={{addition: [{{function: TOY/reward.py:score}}, {{function: {WORKER}:voted}}]}}",
        "reward.in_process=true",
    ),
)
@caught_by(SCORES, r"CheckFailed: score check: sample \d+ .* has the acc .*, but its reward functions gave")
@replaces("rl.rewards.mixture._combine")
def accuracy_of_the_last_function(bug: Bug, combine, *args):
    """The last of several functions overwrote the value of the first."""
    found = combine(*args)
    last = [value for name, value in found.values.items() if name.endswith("/acc")][-1]
    return replace(found, values=found.values | {"acc": last})


@exhibit("pytorch/rl#3542", overrides=("reward.function=rl.rewards.exact:score",), at=0)
@caught_by(SCORES, r"CheckFailed: score check: reward.function=\S+ gives '70' the score 1 for the ground")
@replaces("rl.rewards.exact.score")
def answer_that_contains_the_truth(bug: Bug, score, prompt, response, ground_truth, **options):
    """An answer was right if it had the ground truth somewhere in it."""
    return {**score(prompt, response, ground_truth, **options), "score": float(ground_truth in response)}
