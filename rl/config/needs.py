"""Whether a run of a config learns, and whether it needs an engine, rewards, a reference, a teacher, ..."""

from rl.config.declarations import Algorithm, describe
from rl.config.schema import Config


def algorithm_of(config: Config) -> Algorithm:
    """Return the declarations of the algorithm's file."""
    return describe(config.algorithm)


def learns(config: Config) -> bool:
    """Return whether models learn in this mode, or would in the run that it stores samples for."""
    return config.run.mode != "evaluate"


def learns_from_samples(config: Config) -> bool:
    """Return whether the algorithm trains on responses that the policy generates."""
    return "samples" in algorithm_of(config).needs


def needs_sampling_masks(config: Config) -> bool:
    """Return whether the policy's distributions are renormalised over the tokens that the engine kept."""
    return learns_from_samples(config) and config.rollout.truncates and not config.rollout.biased_truncation


def generates_batches(config: Config) -> bool:
    """Return whether the policy generates the samples of the steps."""
    return learns_from_samples(config) and config.run.mode not in ("evaluate", "train_only")


def needs_engine(config: Config) -> bool:
    """Return whether a generation engine is built, for training or for validation."""
    return generates_batches(config) or generates_held_out(config)


def has_prediction_head(config: Config) -> bool:
    """Return whether the trainer holds the policy's head for multi-token prediction."""
    return config.training.mtp.head_lr > 0 or config.rollout.draft.method == "mtp"


def validates(config: Config) -> bool:
    """Return whether the run validates on held-out prompts."""
    return bool(config.data.val and config.validation.every) and config.run.mode != "train_only"


def generates_held_out(config: Config) -> bool:
    """Return whether validation generates and scores responses."""
    return validates(config) and (config.validation.greedy or config.validation.samples_per_prompt > 0)


def needs_reward(config: Config) -> bool:
    """Return whether responses are scored, in training or in validation."""
    return scores_training(config) or generates_held_out(config)


def scores_training(config: Config) -> bool:
    """Return whether responses to the training prompts are scored."""
    learns = "reward" in algorithm_of(config).needs or needs_feedback(config)
    return learns and config.run.mode not in ("evaluate", "train_only")


def needs_reference(config: Config) -> bool:
    """Return whether the policy that the run starts from is kept."""
    objective = config.objective
    return "reference" in algorithm_of(config).needs or objective.kl_coef > 0 or objective.reward_kl.coef > 0


def keeps_reference(config: Config) -> bool:
    """Return whether the policy that the run starts from is kept, as a reference or as a teacher."""
    is_teacher = uses_teacher(config) and config.teacher.self_taught == "initial"
    return needs_reference(config) or is_teacher


def uses_teacher(config: Config) -> bool:
    """Return whether the policy learns from the section `teacher`."""
    if not learns(config):
        return False
    return "teacher" in algorithm_of(config).needs or config.teacher.advantage_coef > 0


def learns_from_data(config: Config) -> bool:
    """Return whether the algorithm trains on the data's own responses."""
    shares = config.teacher.student_share + config.teacher.teacher_share
    return "responses" in algorithm_of(config).needs or (
        "teacher" in algorithm_of(config).needs and shares < 1 - 1e-9
    )


def needs_feedback(config: Config) -> bool:
    """Return whether the prompt of a self-taught policy has what the reward function says."""
    teacher = config.teacher
    return uses_teacher(config) and teacher.self_taught != "none" and "{feedback}" in teacher.template


def needs_early_logprobs(config: Config) -> bool:
    """Return whether something reads the old policy's log-probs before the first update of a step.

    If nothing does, a step with one update needs no separate forward pass: the update's own forward pass uses
    the same weights. Early readers are the KL penalty in the reward, some advantage estimators, losses
    that select tokens, rejections (they change the loss denominators), an adaptive weight of the entropy
    bonus (it needs the entropy), and algorithms that declare "old_logprobs" in NEEDS.
    """
    estimator, loss = config.objective.chosen
    return (
        "old_logprobs" in algorithm_of(config).needs
        or config.objective.reward_kl.coef > 0
        or config.teacher.advantage_coef > 0
        or (estimator is not None and not estimator.columns.isdisjoint({"old_logprobs", "sum_p_squared"}))
        or (loss is not None and "selected_tokens" in loss.columns)
        or bool(config.rollout_correction.rejections)
        or config.objective.adaptive_entropy.target > 0
    )
