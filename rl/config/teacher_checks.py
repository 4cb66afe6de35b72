"""Checks of the section `teacher`: is it read, and does it fit the rest of the config?"""

from rl.config.options import ConfigError
from rl.config.schema import Config, algorithm_of, needs_feedback, needs_sampling_masks, uses_teacher
from rl.config.teachers import Teacher

OF_DISTILL = ("divergence", "beta", "top_k", "student_share", "teacher_share", "gpu_memory_utilization")
"""Keys that only distill reads."""


def check_teacher(config: Config) -> None:
    """Raise ConfigError for the first setting that has no effect or does not work."""
    teacher, name = config.teacher, f"algorithm={config.algorithm}"
    default = Teacher()
    changed = [key for key in vars(teacher) if getattr(teacher, key) != getattr(default, key)]
    distils = "teacher" in algorithm_of(config).needs
    if not uses_teacher(config):
        raise ConfigError(
            f"teacher.{changed[0]} is set, but {name} does not distill and teacher.advantage_coef is 0; set "
            "one of them, or leave it out."
        )
    if distils and teacher.advantage_coef and config.objective.chosen[1] is None:
        raise ConfigError(
            f"teacher.advantage_coef={teacher.advantage_coef} has no effect with {name}, which has no "
            "advantages; leave it out."
        )
    missing = {} if distils else dict.fromkeys(OF_DISTILL, "algorithm=distill")
    if teacher.divergence != "jensen_shannon":
        missing.setdefault("beta", "teacher.divergence=jensen_shannon")
    if not teacher.teacher_share:
        missing.setdefault("gpu_memory_utilization", "teacher.teacher_share")
    if teacher.self_taught == "none":
        missing |= dict.fromkeys(("template", "max_prompt_tokens"), "teacher.self_taught")
    for key in (key for key in changed if key in missing):
        raise ConfigError(
            f"teacher.{key}={getattr(teacher, key)!r} has no effect without {missing[key]}; leave it out."
        )
    _check_models(config)
    _check_shares(config)
    _check_combinations(config, distils)
    if teacher.divergence == "jensen_shannon" and not 0 < teacher.beta < 1:
        raise ConfigError(
            f"teacher.beta={teacher.beta} makes the mixture of jensen_shannon equal to one model; use a "
            "number between 0 and 1, or another teacher.divergence."
        )


def _check_models(config: Config) -> None:
    teacher = config.teacher
    for source, path in teacher.sources.items():
        if not isinstance(path, str) or not path:
            raise ConfigError(
                f"teacher.sources.{source}={path!r} must be the path of a checkpoint, which teaches the "
                "prompts of this data_source."
            )
    if teacher.self_taught == "none":
        if not teacher.paths:
            raise ConfigError(
                "teacher.path is empty, and so is teacher.sources, but the run learns from a teacher; set "
                "one of them, or teacher.self_taught."
            )
        return
    if teacher.paths:
        raise ConfigError(
            f"teacher.self_taught={teacher.self_taught} makes the policy its own teacher, but "
            f"{teacher.paths[0]} is one too; leave out one of them."
        )
    try:
        texts = [teacher.template.format(prompt=p, ground_truth="", feedback="") for p in ("", "x")]
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"teacher.template cannot be formatted ({type(error).__name__}: {error}); its fields are "
            "{prompt}, {ground_truth} and {feedback}, and any other brace must be doubled."
        ) from error
    if texts[0] == texts[1]:
        raise ConfigError(
            "teacher.template lacks {prompt}, so the teacher would not see the question; add {prompt} to it."
        )


def _check_shares(config: Config) -> None:
    teacher = config.teacher
    if teacher.student_share + teacher.teacher_share > 1 + 1e-9:
        raise ConfigError(
            f"teacher.student_share={teacher.student_share} and teacher.teacher_share="
            f"{teacher.teacher_share} are more than 1 together; lower one of them."
        )
    if teacher.teacher_share and len(teacher.paths) != 1:
        raise ConfigError(
            f"teacher.teacher_share={teacher.teacher_share} needs one teacher with a path, which generates; "
            f"here are {len(teacher.paths)}; use 0."
        )
    if needs_feedback(config):
        selects = not {"dynamic_sampling", "implicit_reward"}.isdisjoint(algorithm_of(config).needs)
        if selects or teacher.student_share < 1:
            what = f"algorithm={config.algorithm}" if selects else f"student_share={teacher.student_share}"
            raise ConfigError(
                f"teacher.template has {{feedback}}, which cannot be combined with {what}, because samples "
                "are then selected or added after their scores; leave it out of the template."
            )


def _check_combinations(config: Config, distils: bool) -> None:
    """Raise ConfigError for keys that cannot be combined with a teacher."""
    teacher, loss = config.teacher, config.objective.chosen[1]
    if not distils and loss is None:
        raise ConfigError(
            f"teacher.advantage_coef={teacher.advantage_coef} is added to advantages, which "
            f"algorithm={config.algorithm} does not have; use algorithm=distill."
        )
    if teacher.advantage_coef and loss is not None and loss.per_sample:
        raise ConfigError(
            f"teacher.advantage_coef={teacher.advantage_coef} gives one advantage per token, but "
            f"objective.loss={config.objective.loss} requires one per sample; use objective.loss=ppo."
        )
    others = {
        "the section roles": config.roles.is_on,
        "rollout.carry_over=true": config.rollout.carry_over,
        "the section agents": config.agents.is_on,
        f"run.mode={config.run.mode}": config.run.mode not in ("train", "check"),
        f"model.numerics={config.model.numerics}": config.model.numerics != "fast",
        f"training.router_replay={config.training.router_replay}": config.training.router_replay != "none",
    }
    for key in (key for key, is_set in others.items() if is_set):
        raise ConfigError(
            f"{key} cannot be combined with the section teacher, whose passes do not support it; leave out "
            "one of the two."
        )
    if needs_sampling_masks(config):
        rollout = config.rollout
        raise ConfigError(
            f"rollout.top_p={rollout.top_p}, top_k={rollout.top_k}, min_p={rollout.min_p} truncate the "
            "policy's distribution, but the teacher's is that of the whole vocabulary; sample from the whole "
            "distribution (1, 0, 0), or set rollout.biased_truncation=true."
        )
