"""Exhibits: the loss, its denominators, its log-probs, and the update."""

from dataclasses import replace

from tests.museum.museum import Bug, exhibit

OBJECTIVE = "objective"
FIRST = "first update"
TOKENS = "counted tokens"
REJECTED = ("rollout_correction.reject=token-k2", "rollout_correction.reject_high=[1.0e-13]")
"""Masks most tokens of a healthy run: differences of log-probs are about 1e-6."""
KL = ("objective.kl_coef=0.1",)


@exhibit(
    name="masked tokens in the mean",
    peer="huggingface/trl#4975",
    saw="One path of the loss ignored the mask of tool output and trained on it.",
    caught_by=OBJECTIVE,
    expects=r"CheckFailed: objective check: .*masked tokens, such as tool output, have a gradient",
    at=0,
)
def masked_in_mean(bug: Bug) -> None:
    from rl.phases import policy_gradient

    @bug.replaces(policy_gradient, "aggregate")
    def all_tokens(aggregate, losses, *, mask, **options):
        import torch

        return aggregate(losses, mask=torch.ones_like(mask), **options)

    from rl.objectives.losses import ppo

    @bug.replaces(ppo, "ppo")
    def unmasked(loss, logprobs, old_logprobs, advantages, mask, **options):
        import torch

        return loss(logprobs, old_logprobs, advantages, torch.ones_like(mask), **options)


@exhibit(
    name="masked tokens in the denominator",
    peer="huggingface/trl#6369",
    saw="Tokens that were masked for truncation still counted in the denominator of the loss.",
    caught_by=TOKENS,
    expects=r"WrongTokens: an update counted 0\.\d+ times",
    overrides=REJECTED,
)
def masked_in_denominator(bug: Bug) -> None:
    from rl.phases.minibatches import MinibatchPlan

    @bug.replaces(MinibatchPlan, "totals")
    def all_tokens(totals, self, batch):
        return replace(totals(self, batch), num_tokens=float(len(batch.mask)))


@exhibit(
    name="entropy of masked tokens",
    peer="huggingface/trl#6121",
    saw="The entropy included padding and became negative.",
    caught_by=OBJECTIVE,
    expects=r"CheckFailed: objective check: .*masked tokens, such as tool output, have a gradient",
    overrides=("objective.entropy_coef=0.01",),
    at=0,
)
def entropy_of_masked(bug: Bug) -> None:
    from rl.phases import policy_gradient

    @bug.replaces(policy_gradient, "aggregate")
    def some(aggregate, losses, *, mask, **options):
        import torch

        is_entropy = losses.is_leaf and losses.requires_grad
        return aggregate(losses, mask=torch.ones_like(mask) if is_entropy else mask, **options)


@exhibit(
    name="mask shifted by one token",
    peer="verl-project/verl#3287",
    saw="The loss mask began one token late, so the first token of a response was not learned.",
    caught_by=TOKENS,
    expects=r"WrongTokens: an update counted .*rank 0 counted \d+ of \d+ tokens, not those of its samples",
    overrides=REJECTED,
)
def shifted_mask(bug: Bug) -> None:
    from rl.training import engine

    @bug.replaces(engine, "with_columns")
    def shifted(with_columns, row, batch):
        micro = with_columns(row, batch)
        micro.columns["mask"] = micro.columns["mask"].roll(1)
        return micro


@exhibit(
    name="mini-batch left out",
    peer="OpenRLHF/OpenRLHF#1297",
    saw="The last batch of rollouts was generated and never trained on.",
    caught_by="mini-batches",
    expects=r"CheckFailed: mini-batch check: sample \d+ of 16 is in 0 mini-batches instead of 1",
    overrides=("training.prompts_per_minibatch=2",),
)
def left_out(bug: Bug) -> None:
    plans(bug, lambda found: found[:-1])


@exhibit(
    name="mini-batch used twice",
    peer="openpsi-project/ReaLHF#66",
    saw="Batches were split into wrong mini-batches in PPO and GRPO.",
    caught_by="mini-batches",
    expects=r"CheckFailed: mini-batch check: sample \d+ of 16 is in 2 mini-batches instead of 1",
    overrides=("training.prompts_per_minibatch=2",),
)
def used_twice(bug: Bug) -> None:
    plans(bug, lambda found: [*found, found[0]])


def plans(bug: Bug, change) -> None:
    from rl.phases.minibatches import MinibatchPlanner

    @bug.replaces(MinibatchPlanner, "new_plans")
    def changed(plan, self, batch):
        return change(plan(self, batch))


@exhibit(
    name="sign of the KL term",
    peer="qiancheng0/ToolRL#52",
    saw="The KL loss was maximised, and training collapsed.",
    caught_by=OBJECTIVE,
    expects=r"CheckFailed: objective check: .*nats above its reference changes the loss by -",
    overrides=KL,
    at=0,
)
def kl_sign(bug: Bug) -> None:
    of_kl(bug, -1)


@exhibit(
    name="KL counted twice in the loss",
    peer="OpenRLHF/OpenRLHF#768",
    saw="The KL term was in the reward and again in the loss.",
    caught_by=OBJECTIVE,
    expects=r"CheckFailed: objective check: .*nats above its reference changes the loss by",
    overrides=KL,
    at=0,
)
def kl_twice(bug: Bug) -> None:
    of_kl(bug, 2)


def of_kl(bug: Bug, factor: float) -> None:
    from rl.phases import policy_gradient

    @bug.replaces(policy_gradient, "kl")
    def scaled(kl, *args, **options):
        return factor * kl(*args, **options)


@exhibit(
    name="KL penalty subtracted twice",
    peer="RLinf/RLinf#129",
    saw="A wrong parameter reached the KL penalty of the reward.",
    caught_by="KL penalty",
    expects=r"CheckFailed: KL penalty check: the penalty was already subtracted",
    overrides=("objective.reward_kl.coef=0.1",),
)
def penalty_twice(bug: Bug) -> None:
    from rl.phases.phases import Phases

    @bug.replaces(Phases, "apply_kl_penalty")
    def twice(apply, self, batch):
        apply(self, batch)
        apply(self, batch)


@exhibit(
    name="importance weights inverted",
    peer="THUDM/slime#179",
    saw="The correction for the engine used the wrong pair of log-probs.",
    caught_by="loss weights",
    expects=r"CheckFailed: loss weight check: a token has the importance weight",
    overrides=("model.dtype=bfloat16", "rollout_correction.truncate_tokens=2.0"),
)
def inverted(bug: Bug) -> None:
    from rl.objectives import rollout_correction

    @bug.replaces(rollout_correction, "token_weights")
    def upside_down(weights, old_logprobs, rollout_logprobs, mask, **options):
        return weights(rollout_logprobs, old_logprobs, mask, **options)


@exhibit(
    name="old log-probs of the step before",
    peer="huggingface/trl#5413",
    saw="A ratio of the first iteration was kept and used again later.",
    caught_by=FIRST,
    expects=r"CheckFailed: first update check|LogprobMismatch|CheckFailed: likelihood check",
    overrides=("training.prompts_per_minibatch=2",),
)
def stale_old(bug: Bug) -> None:
    from rl.phases.inference import Inference

    kept: dict = {}
    fill = Inference.fill_old_logprobs

    def remembered(self, batch, logprobs, *rest, **options):
        weights = kept.setdefault("first", logprobs.clone())
        if bug.is_on:
            bug.acts()
            logprobs = weights[: len(logprobs)] if len(weights) >= len(logprobs) else logprobs * 0.5
        fill(self, batch, logprobs, *rest, **options)

    Inference.fill_old_logprobs = remembered


@exhibit(
    name="reference log-probs of another order",
    peer="NVIDIA/NeMo-Aligner#228",
    saw="Log-probs of the reference did not match those of the policy's own forward pass.",
    caught_by="likelihoods",
    expects=r"CheckFailed: likelihood check: reference policy / rollout|LogprobMismatch: before the first",
    overrides=(*KL, "data.prompts_per_step=32", "training.micro_batch_tokens=400"),
)
def other_reference(bug: Bug) -> None:
    from rl.phases.inference import Inference

    @bug.replaces(Inference, "_pass")
    def reordered(run, self, *args, of_reference=False, **options):
        found = run(self, *args, of_reference=of_reference, **options)
        return tuple(column.flip(0) for column in found) if of_reference else found


@exhibit(
    name="learning rate 0",
    peer="alibaba/ROLL#407",
    saw="The schedule was planned for too few steps; 38 % of the training had a learning rate of 0.",
    caught_by="learning rate",
    expects=r"CheckFailed: learning rate check: 0\.0 in step 2",
)
def no_rate(bug: Bug) -> None:
    from rl.training import schedule

    @bug.replaces(schedule, "learning_rate")
    def ended(learning_rate, *args):
        return 0.0


@exhibit(
    name="weights do not move",
    peer="huggingface/open-r1#295",
    saw="The gradient had a norm, but the weights stayed as they were.",
    caught_by="movement",
    expects=r"CheckFailed: movement check: the gradient norm is .* changed no weight",
)
def frozen(bug: Bug) -> None:
    from rl.training import engine

    @bug.replaces(engine, "clip_and_step")
    def nothing(step, optimizer, norm):
        pass


@exhibit(
    name="filtered groups are trained on",
    peer="OpenRLHF/OpenRLHF#1272",
    saw="Groups of equal continuous rewards passed the filter of dynamic sampling and were trained on.",
    caught_by="groups",
    expects=r"CheckFailed: group check: all samples of group \d have the score 0\.5",
    overrides=("algorithm=dapo",),
)
def filtered(bug: Bug) -> None:
    from rl.algorithms import dapo
    from rl.phases.phases import Phases

    @bug.replaces(dapo, "grpo")
    def always(grpo, *args, **options):
        return grpo(*args, **options) + 1

    @bug.replaces(Phases, "score_samples")
    def same_in_a_group(score, self, batch):
        score(self, batch)
        batch.scores[batch.groups == 0] = batch.rewards[batch.groups == 0] = 0.5


@exhibit(
    name="step logged twice",
    peer="allenai/tango#152",
    saw="After a resume the steps since the checkpoint were logged again.",
    caught_by="metric log",
    expects=r"metric log check: step 2 was logged before",
    resumes=True,
    at=0,
)
def logged_twice(bug: Bug) -> None:
    from rl.run import run_log

    @bug.replaces(run_log, "_open_metrics")
    def all_kept(open_metrics, config, last_step, fence):
        from rl.run_directory.metric_log import MetricLog

        log = MetricLog(config.run.dir, resume_step=last_step)
        log.write(last_step, {})
        return log
