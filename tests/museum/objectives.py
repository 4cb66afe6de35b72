"""Exhibits: the loss, its denominators, its log-probs, and the update."""

from dataclasses import replace

from tests.museum.museum import Bug, caught_by, exhibit, replaces
from tests.toy import FROM_DATA, SFT, UNSCORED

OBJECTIVE = "objective"
FIRST = "first update"
TOKENS = "counted tokens"
ADVANTAGES = "rewards and advantages"
REJECTED = ("rollout_correction.reject=token-k2", "rollout_correction.reject_high=[1.0e-13]")
"""Masks most tokens of a healthy run: differences of log-probs are about 1e-6."""
KL = ("objective.kl_coef=0.1",)
LABELS = ("algorithm=kto", "data.train=[TOY/labels.parquet]", "training.prompts_per_minibatch=0", *FROM_DATA)
TEACHER = ("teacher.path=POLICY", *UNSCORED)


@exhibit("huggingface/trl#4975", at=0)
@caught_by(OBJECTIVE, r"CheckFailed: objective check: .*masked tokens, such as tool output, have a gradient")
def masked_tokens_in_the_mean(bug: Bug) -> None:
    """One path of the loss ignored the mask of tool output and trained on it."""
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


@exhibit("huggingface/trl#6369", overrides=REJECTED)
@caught_by(TOKENS, r"WrongTokens: an update counted 0\.\d+ times")
@replaces("rl.phases.minibatches.MinibatchPlan.totals")
def masked_tokens_in_the_denominator(bug: Bug, totals, self, batch):
    """Tokens that were masked for truncation still counted in the denominator of the loss."""
    return replace(totals(self, batch), num_tokens=float(len(batch.mask)))


@exhibit("huggingface/trl#6439", overrides=REJECTED, warns=True)
@caught_by(TOKENS, r"warning: update check: no token of the batch counts in the loss")
@replaces("rl.objectives.rollout_correction.reject")
def every_token_masked(bug: Bug, reject, old, rollout, lengths, mask, **options):
    """All tokens of a batch were masked, so that the update had no effect."""
    return mask * 0


@exhibit("huggingface/trl#6121", overrides=("objective.entropy_coef=0.01",), at=0)
@caught_by(OBJECTIVE, r"CheckFailed: objective check: .*masked tokens, such as tool output, have a gradient")
@replaces("rl.phases.policy_gradient.aggregate")
def entropy_of_masked_tokens(bug: Bug, aggregate, losses, *, mask, **options):
    """The entropy included padding and became negative."""
    import torch

    is_entropy = losses.is_leaf and losses.requires_grad
    return aggregate(losses, mask=torch.ones_like(mask) if is_entropy else mask, **options)


@exhibit("verl-project/verl#3287", overrides=REJECTED)
@caught_by(
    TOKENS, r"WrongTokens: an update counted .*rank 0 counted \d+ of \d+ tokens, not those of its samples"
)
@replaces("rl.training.engine.with_columns")
def mask_shifted_by_one_token(bug: Bug, with_columns, row, batch):
    """The loss mask began one token late, so the first token of a response was not learned."""
    micro = with_columns(row, batch)
    micro.columns["mask"] = micro.columns["mask"].roll(1)
    return micro


@exhibit("OpenRLHF/OpenRLHF#1297", overrides=("training.prompts_per_minibatch=2",))
@caught_by("mini-batches", r"CheckFailed: mini-batch check: sample \d+ .*is in 0 mini-batches instead of 1")
def mini_batch_left_out(bug: Bug) -> None:
    """The last batch of rollouts was generated and never trained on."""
    plans(bug, lambda found: found[:-1])


@exhibit("openpsi-project/ReaLHF#66", overrides=("training.prompts_per_minibatch=2",))
@caught_by("mini-batches", r"CheckFailed: mini-batch check: sample \d+ .*is in 2 mini-batches instead of 1")
def mini_batch_used_twice(bug: Bug) -> None:
    """Batches were split into wrong mini-batches in PPO and GRPO."""
    plans(bug, lambda found: [*found, found[0]])


def plans(bug: Bug, change) -> None:
    from rl.phases.minibatches import MinibatchPlanner

    @bug.replaces(MinibatchPlanner, "new_plans")
    def changed(plan, self, batch):
        return change(plan(self, batch))


@exhibit("qiancheng0/ToolRL#52", overrides=KL, at=0)
@caught_by(OBJECTIVE, r"CheckFailed: objective check: .*the gradient for logprobs is -?[\d.e-]+ instead of")
def sign_of_the_KL_term(bug: Bug) -> None:
    """The KL loss was maximised, and training collapsed."""
    of_kl(bug, -1)


@exhibit("OpenRLHF/OpenRLHF#768", overrides=KL, at=0)
@caught_by(OBJECTIVE, r"CheckFailed: objective check: .*the gradient for logprobs is -?[\d.e-]+ instead of")
def KL_counted_twice_in_the_loss(bug: Bug) -> None:
    """The KL term was in the reward and again in the loss."""
    of_kl(bug, 2)


def of_kl(bug: Bug, factor: float) -> None:
    from rl.phases import policy_gradient

    @bug.replaces(policy_gradient, "kl")
    def scaled(kl, *args, **options):
        return factor * kl(*args, **options)


@exhibit("RLinf/RLinf#129", overrides=("objective.reward_kl.coef=0.1",))
@caught_by("KL penalty", r"CheckFailed: KL penalty check: the penalty was already subtracted")
@replaces("rl.phases.phases.Phases.apply_kl_penalty")
def KL_penalty_subtracted_twice(bug: Bug, apply, self, batch):
    """A wrong parameter reached the KL penalty of the reward."""
    apply(self, batch)
    apply(self, batch)


@exhibit("THUDM/slime#179", overrides=("model.dtype=bfloat16", "rollout_correction.truncate_tokens=2.0"))
@caught_by("loss weights", r"CheckFailed: loss weight check: a token has the importance weight")
@replaces("rl.objectives.rollout_correction.token_weights")
def importance_weights_inverted(bug: Bug, weights, old_logprobs, rollout_logprobs, mask, **options):
    """The correction for the engine used the wrong pair of log-probs."""
    return weights(rollout_logprobs, old_logprobs, mask, **options)


@exhibit(
    "NVIDIA-NeMo/RL#2269",
    overrides=(
        "model.dtype=bfloat16",
        "rollout_correction.icepop_low=0.99",
        "rollout_correction.icepop_high=1.01",
        "rollout_correction.icepop_level=prefix",
    ),
)
@caught_by("loss weights", r"CheckFailed: loss weight check: a token has the importance weight")
@replaces("rl.objectives.rollout_correction._prefix_means")
def sums_of_log_ratios_instead_of_means(bug: Bug, means, x, lengths, mask):
    """The weight was the product of the ratios instead of their geometric mean."""
    return means(x * lengths.repeat_interleave(lengths), lengths, mask)


@exhibit(
    "verl-project/verl#3984",
    overrides=(
        "model.dtype=bfloat16",
        "rollout_correction.reject=token-k2,sample-k2",
        "rollout_correction.reject_high=5e-5",
        "data.prompts_per_step=16",
    ),
)
@caught_by("loss weights", r"CheckFailed: rejection check: \d+ of \d+ tokens count, the first with sample-k2")
@replaces("rl.objectives.rollout_correction.reject")
def criterion_of_the_tokens_left_by_another(bug: Bug, reject, old, rollout, lengths, mask, **options):
    """Later code got the mask that the rejection had already reduced."""
    if options["level"] == "sequence":
        mask = bug.passed
    bug.passed = reject(old, rollout, lengths, mask, **options)
    return bug.passed


@exhibit("huggingface/trl#4857", overrides=("objective.off_policy_mask=0.01",), at=0)
@caught_by(OBJECTIVE, r"CheckFailed: objective check: .* off_policy_mask=0.01: the loss ppo differs")
@replaces("rl.phases.policy_gradient.off_policy_mask")
def off_policy_mask_without_the_log_probs_of_the_engine(
    bug: Bug, mask_of, logprobs, sampling, *args, **options
):
    """The mask read the trainer's log-probs, so a difference to the engine masked nothing."""
    return mask_of(logprobs, logprobs, *args, **options)


@exhibit(
    "thinking-machines-lab/tinker-cookbook#904",
    overrides=(
        "algorithm=distill",
        *TEACHER,
        "teacher.student_share=0.5",
        "data.response_key=reward_model.ground_truth",
    ),
)
@caught_by("groups", r"CheckFailed: group check: sample \d+ .* its context is another prompt's")
@replaces("rl.data.batch.Batch.keep_groups")
def list_beside_the_groups_in_the_old_order(bug: Bug, keep_groups, self, groups):
    """Groups got new numbers, so that other prompts and teachers were looked up by them."""
    return replace(keep_groups(self, groups), prompts=[self.prompts[group] for group in sorted(groups)])


@exhibit("huggingface/trl#5413", overrides=("training.prompts_per_minibatch=2",))
@caught_by(FIRST, r"CheckFailed: first update check|LogprobMismatch: .* divided by 0\.5,")
def old_log_probs_of_the_step_before(bug: Bug) -> None:
    """A ratio of the first iteration was kept and used again later."""
    from rl.phases.old_logprobs import OldLogprobs

    kept: dict = {}
    fill = OldLogprobs.fill

    def remembered(self, batch, logprobs, *rest):
        weights = kept.setdefault("first", logprobs.clone())
        if bug.is_on:
            bug.acts()
            logprobs = weights[: len(logprobs)] if len(weights) >= len(logprobs) else logprobs * 0.5
        fill(self, batch, logprobs, *rest)

    OldLogprobs.fill = remembered


@exhibit("tensorforce/tensorforce#312", overrides=("training.prompts_per_minibatch=2",))
@caught_by("ratios", r"CheckFailed: ratio check: after an update that moved weights, \d+ outputs are exactly")
def ratio_always_1(bug: Bug) -> None:
    """The old distribution was computed again with every mini-batch, so nothing was ever clipped."""
    old_is_new(bug, "logprobs")


@exhibit(
    "XueZeyue/DanceGRPO#114",
    overrides=("training.epochs=2", "training.tp=2", "model.dtype=bfloat16"),
    ranks=2,
)
@caught_by("ratios", r"CheckFailed: ratio check: after an update that moved weights, \d+ outputs are exactly")
def ratio_always_1_in_the_second_epoch(bug: Bug) -> None:
    """New and old log-probs came from the same pass."""
    old_is_new(bug, "logprobs")


@exhibit(
    "tensorflow/agents#352",
    overrides=("algorithm=ppo", "training.prompts_per_minibatch=2", "model.dtype=bfloat16"),
)
@caught_by("ratios", r"CheckFailed: ratio check: after an update that moved weights, \d+ outputs are exactly")
def old_values_computed_again(bug: Bug) -> None:
    """Clipping of values had no effect, because the old values were predicted again with the new weights."""
    old_is_new(bug, "values")


def old_is_new(bug: Bug, output: str) -> None:
    """Compute the old outputs of a model again before each of its updates."""
    from rl.training.engine import TrainingEngine

    @bug.replaces(TrainingEngine, "update")
    def updated(update, self, batch, plan, loss, **options):
        if output in (options["outputs"] or ()):
            index = batch.tokens_of([i for rank in plan for micro in rank for i in micro])
            (found,) = self.forward(batch, [plan], (output,))
            name = f"old_{output}"
            if name in batch.columns():
                batch.column(name)[index] = found[index]
        return update(self, batch, plan, loss, **options)


@exhibit("hpcaitech/ColossalAI#3622", overrides=("algorithm=ppo",))
@caught_by(FIRST, r"CheckFailed: first update check: .*\|value - old value\|")
@replaces("rl.phases.inference.Inference.values")
def values_of_the_wrong_positions(bug: Bug, values, self, batch):
    """Values were taken from the wrong part of the sequences."""
    values(self, batch)
    batch.extra["old_values"] = batch.extra["old_values"].roll(1)


@exhibit("InternLM/xtuner#2095", overrides=("model.dtype=bfloat16",))
@caught_by(TOKENS, r"WrongTokens: an update counted 1 times .*, not those of its samples,")
@replaces("rl.training.engine.with_columns")
def advantages_shifted_in_packing(bug: Bug, with_columns, row, batch):
    """Advantages of packed samples were one position longer than their tokens, and shifted."""
    micro = with_columns(row, batch)
    if "advantages" in micro.columns:
        micro.columns["advantages"] = micro.columns["advantages"].roll(1)
    return micro


@exhibit("NVIDIA/NeMo-Aligner#228", overrides=KL)
@caught_by("passes of other models", r"LogprobMismatch: reference check: sample \d+ .* with this sample")
@replaces("rl.phases.inference.Inference._pass")
def reference_log_probs_of_another_order(bug: Bug, run, self, *args, of_reference=False, **options):
    """Log-probs of the reference did not match the log-probs of the policy's own forward pass."""
    found = run(self, *args, of_reference=of_reference, **options)
    return tuple(column.flip(0) for column in found) if of_reference else found


@exhibit("huggingface/trl#702", overrides=KL)
@caught_by("passes of other models", r"LogprobMismatch: reference check: .* are exactly the policy's")
@replaces("rl.phases.inference.Inference._pass")
def reference_pass_with_the_policy(bug: Bug, run, self, *args, of_reference=False, **options):
    """The KL divergence was always 0, because the active model and the reference were the same."""
    return run(self, *args, **options)


@exhibit("alibaba/ROLL#407")
@caught_by(
    "schedule of the learning rate",
    r"WrongLearningRate: the schedule gives the policy the learning rate 0 in step 2 of",
)
@replaces("rl.training.learning_rate.learning_rate")
def learning_rate_0(bug: Bug, learning_rate, *args):
    """The schedule was planned for too few steps; 38 % of the training had a learning rate of 0."""
    return 0.0


@exhibit("huggingface/open-r1#295")
@caught_by(
    "movement",
    r"CheckFailed: movement check: the gradient norm is .* changed no weight|WrongStep: an update did",
)
@replaces("rl.training.engine.clip_and_step")
def weights_do_not_move(bug: Bug, step, optimizer, norm):
    """The gradient had a norm, but the weights stayed as they were."""
    optimizer.step_with_ready_grads = lambda: True
    step(optimizer, norm)


@exhibit("OpenRLHF/OpenRLHF#1272", overrides=("algorithm=dapo",))
@caught_by("groups", r"CheckFailed: group check: all samples of prompt \d+ have the same score")
def filtered_groups_are_trained_on(bug: Bug) -> None:
    """Groups of equal continuous rewards passed the filter of dynamic sampling and were trained on."""
    from rl.algorithms import dapo
    from rl.checks.grades import Grades
    from rl.phases.scorer import Scorer

    Grades._is_filed = lambda *_: True  # as if the reward function had returned equal scores

    @bug.replaces(dapo, "grpo")
    def always(grpo, *args, **options):
        return grpo(*args, **options) + 1

    @bug.replaces(Scorer, "score")
    def same_in_a_group(score, self, batch, **options):
        columns, answers = score(self, batch, **options)
        columns["score"][batch.groups == 0] = 0.5
        return columns, answers


@exhibit("allenai/tango#152", resumes=True)
@caught_by("metric log", r"metric log check: step 2 was logged before")
@replaces("rl.run.run_log._open_metrics")
def step_logged_twice(bug: Bug, open_metrics, config, last_step, fence):
    """After a resume the steps since the checkpoint were logged again."""
    from rl.run_directory.metric_log import MetricLog

    log = MetricLog(config.run.dir, resume_step=last_step)
    log.write(last_step, {})
    return log


@exhibit("inclusionAI/AReno#68", overrides=("training.prompts_per_minibatch=2",), at=0)
@caught_by(OBJECTIVE, r"CheckFailed: objective check: .*instead of .* the clip range 0\.8 to 1\.2")
@replaces("rl.objectives.losses.ppo.masked_log_ratio")
def ratio_to_the_present_policy(bug: Bug, log_ratio, logprobs, old_logprobs, mask):
    """The ratio was that to the present policy, so it was 1 and the clip never acted."""
    return log_ratio(logprobs, logprobs.detach(), mask)


@exhibit("huggingface/trl#5815", overrides=("objective.loss=gspo", "model.dtype=bfloat16"), ranks=2, at=0)
@caught_by(OBJECTIVE, r"CheckFailed: objective check: .*objective.loss=gspo.* the gradient for logprobs is")
@replaces("rl.objectives.losses.gspo.sample_mean")
def sum_of_log_ratios_of_a_sample(bug: Bug, sample_mean, x, mask, lengths):
    """The log-ratio of a sample was the sum of its tokens' log-ratios instead of their mean."""
    return sample_mean(x, mask, lengths) * lengths


@exhibit("alibaba/ROLL#3", overrides=("algorithm=ppo",))
@caught_by("foresight", r"CheckFailed: value check: .*the critic sees the token that it rates")
@replaces("rl.training.model.ValueModel._postprocess")
def values_read_one_token_late(bug: Bug, postprocess, model, hidden_states, *, labels, **options):
    """Values were read from the first response token to the last, instead of one token before each."""
    late = replace(labels, predict_at=labels.predict_at + 1)
    return postprocess(model, hidden_states, labels=late, **options)


@exhibit("verl-project/verl#7110", overrides=("algorithm=ppo",), ranks=2, at=0)
@caught_by(OBJECTIVE, r"CheckFailed: objective check: .*the loss critic differs from its formula")
@replaces("rl.phases.updates.value_loss")
def value_loss_averaged_in_each_micro_batch(bug: Bug, value_loss, values, *rest, **options):
    """The value loss was not scaled for the accumulation over micro-batches."""
    losses, stats = value_loss(values, *rest, **options)
    return losses / len(values), stats


@exhibit("NovaSky-AI/SkyRL#1504", overrides=(*SFT, "model.dtype=bfloat16"), ranks=2, at=0)
@caught_by(OBJECTIVE, r"CheckFailed: objective check: .*the loss sft differs from its formula")
@replaces("rl.algorithms.sft.aggregate")
def supervised_loss_averaged_in_each_micro_batch(bug: Bug, aggregate, losses, mask, *rest, **options):
    """Gradients of SFT depended on the size of the micro-batches."""
    return aggregate(losses, mask, *rest, **{**options, "num_tokens": float(mask.sum())})


@exhibit("modelscope/ms-swift#5270", overrides=("objective.top_entropy=0.2",), ranks=2)
@caught_by(
    "selected tokens", r"CheckFailed: selection check: \d+ tokens are selected by objective.top_entropy"
)
@replaces("rl.objectives.top_entropy.select_tokens")
def entropies_compared_within_a_sample(bug: Bug, select, entropy, mask, **options):
    """The threshold of the entropy was that of a part of the batch."""
    import torch

    return torch.cat([select(*part, **options) for part in zip(entropy.split(6), mask.split(6))])


@exhibit("huggingface/trl#1380", overrides=LABELS, ranks=2)
@caught_by(TOKENS, r"CheckFailed: loss check: on rank \d the loss gets kl")
@replaces("rl.phases.updates.mismatch_kl")
def reference_point_of_few_samples(bug: Bug, mismatch_kl, *args):
    """KTO's estimate of the divergence came from one or two samples of a rank."""
    return mismatch_kl(*args) + 0.1 * bug.rank


@exhibit("huggingface/trl#1380", overrides=LABELS, ranks=2)
@caught_by(TOKENS, r"CheckFailed: loss check: on rank \d the loss gets num_samples")
@replaces("rl.phases.minibatches.MinibatchPlan.totals")
def samples_of_one_rank_in_the_denominator(bug: Bug, totals, self, batch):
    """The loss was averaged over the samples of a rank instead of the whole batch."""
    found = totals(self, batch)
    return replace(found, num_samples=found.num_samples / 2)


@exhibit("radixark/miles#1345", overrides=("algorithm=distill", *TEACHER, "rollout.temperature=0.7"), at=0)
@caught_by("models", r"CheckFailed: model check: .* of the teacher .* are \(1.0, ")
@replaces("rl.engines.engines.ModelSpec")
def teacher_at_another_temperature(bug: Bug, spec, path, hf, dtype, **options):
    """The teacher scored at a fixed temperature, and the samples had another."""
    learns = options["optimizer"] is not None
    return spec(path, hf, dtype, **options if learns else {**options, "temperature": 1.0})


@exhibit(
    "NVIDIA/TensorRT-LLM#15833",
    overrides=("algorithm=distill", *TEACHER, "teacher.top_k=4", "training.tp=2"),
    ranks=2,
    at=0,
)
@caught_by("head and its gradients", r"WrongHead: head check: the 4 tokens of teacher.top_k are not")
@replaces("rl.features.teachers.divergence.top_k")
def most_probable_tokens_counted_from_0_on_each_rank(bug: Bug, top_k, hidden, weight, softmax, k):
    """The first row of a rank's part of the vocabulary was computed wrongly."""
    ids, log_q = top_k(hidden, weight, softmax, k)
    return ids % len(weight), log_q


@exhibit("NVIDIA-NeMo/RL#1578", ranks=2, overrides=("training.tp=2", "rollout.top_k=4"), at=0)
@caught_by("head and its gradients", r"WrongHead: head check: .* under sampling masks differ from float64")
@replaces("rl.features.sampling_masks.trainer.LocalMasks")
def whole_vocabulary_of_a_rank_without_kept_tokens(bug: Bug, masks, index, is_cut, ends, rows):
    """With tensor parallelism top-k was applied to each rank's part of the vocabulary."""
    import torch

    return masks(index, torch.tensor(ends).diff() > 0, ends, rows)


@exhibit(
    "THU-BPM/RLCSD#6",
    overrides=(
        "teacher.self_taught=present",
        "teacher.advantage_coef=0.5",
        "teacher.template={prompt}{ground_truth}",
        "teacher.max_prompt_tokens=24",
    ),
)
@caught_by("tokens of prompts", r"ValueError: context check: the teacher reads sample \d+ \(prompt \d+\)")
@replaces("rl.features.teachers.teaching.in_context")
def teacher_reads_another_context(bug: Bug, in_context, prompt, *args, **options):
    """The teacher's log-probs belonged to other contexts than the responses."""
    return in_context(replace(prompt, ground_truth=f"{prompt.ground_truth}1"), *args, **options)


@exhibit(
    "verl-project/verl#7769",
    overrides=("algorithm=distill", *TEACHER, "teacher.top_k=4", "rollout.temperature=0.6"),
)
@caught_by(
    "passes of other models", r"LogprobMismatch: reference check: .* has logprobs of .* \(teacher.top_k\)"
)
@replaces("rl.features.teachers.teaching.top_k")
def top_k_of_the_teacher_at_temperature_1(bug: Bug, top_k, hidden, weight, softmax, k):
    """The teacher's temperature was 1 whatever the samples had."""
    return top_k(hidden, weight, replace(softmax, temperature=1.0), k)


@exhibit(
    "redai-studio/Relax#287",
    overrides=(
        "algorithm=distill",
        *UNSCORED,
        "teacher.self_taught=initial",
        "teacher.template={prompt}{ground_truth}",
        "teacher.max_prompt_tokens=24",
    ),
)
@caught_by(
    "passes of other models", r"LogprobMismatch: reference check: .* changed between that pass and the"
)
@replaces("rl.features.teachers.teaching.head_rows")
def head_of_the_teacher_overwritten(bug: Bug, head_rows, weight, wanted, group):
    """The teacher's memory was used for other tensors before the policy learned from the teacher."""
    return weight.detach()


@exhibit("huggingface/trl#1911", overrides=LABELS)
@caught_by(
    TOKENS, r"CheckFailed: loss check: sample \d+ .*has no response to another prompt of its mini-batch"
)
@replaces("rl.phases.phases.mismatch")
def estimate_of_matching_responses(bug: Bug, mismatch, batch, parts):
    """Responses were exchanged in a way that left some with their own prompt."""
    return mismatch(batch, [[i] for part in parts for i in part])


@exhibit("huggingface/trl#1615", overrides=("algorithm=sppo",))
@caught_by(
    ADVANTAGES, r"CheckFailed: advantage check: sample \d+ .* has the label .* but algorithm=sppo makes it"
)
@replaces("rl.algorithms.sppo.win_rates")
def win_rates_with_a_tie_too_many(bug: Bug, win_rates, scores, groups):
    """The targets of SPPO were not those of the paper; here each response also meets itself."""
    return 0.5 + (win_rates(scores, groups) - 0.5) * 3 / 4


@exhibit("meta-pytorch/torchforge#571", overrides=("training.epochs=2", "training.prompts_per_minibatch=0"))
@caught_by("ratios", r"CheckFailed: ratio check: old_logprobs were computed in update 2 of their step")
@replaces("rl.phases.old_logprobs.OldLogprobs.may_defer")
def old_logprobs_of_each_update(bug: Bug, may_defer, self, batch):
    """The old log-probs were those of the update itself, so that the ratio was always 1."""
    return True


@exhibit("PKU-Alignment/align-anything#216", overrides=(*LABELS, "training.epochs=2"))
@caught_by(TOKENS, r"CheckFailed: loss check: the loss gets kl=.*, an estimate that was not computed after")
@replaces("rl.phases.updates.Updates._mismatch_kl")
def estimate_of_older_weights(bug: Bug, estimate, self, mismatched, plan):
    """KTO's estimate was that of another batch than the update's; here of another pass over the batch."""
    if not hasattr(bug, "kept"):
        bug.kept = estimate(self, mismatched, plan)
    return bug.kept
