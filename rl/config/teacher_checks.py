"""Checks of the section `teacher` by itself."""

from rl.config.options import ConfigError
from rl.config.schema import Config


def check_teacher(config: Config) -> None:
    """Raise ConfigError for teachers, a template or shares that do not work."""
    _check_models(config)
    _check_shares(config)


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
    teacher, prompts = config.teacher, config.data.prompts_per_step
    if teacher.student_share + teacher.teacher_share > 1 + 1e-9:
        raise ConfigError(
            f"teacher.student_share={teacher.student_share} and teacher.teacher_share="
            f"{teacher.teacher_share} are more than 1 together; lower one of them."
        )
    in_every_step = config.rollout.carry_over or config.roles.is_on
    if in_every_step and teacher.student_share * prompts < 1 - 1e-6:
        raise ConfigError(
            f"teacher.student_share={teacher.student_share} of data.prompts_per_step={prompts} leaves steps "
            "without a prompt for the policy, which generates in each with roles or rollout.carry_over; use "
            f"{1 / prompts:g} or more."
        )
    if teacher.teacher_share and len(teacher.paths) != 1:
        raise ConfigError(
            f"teacher.teacher_share={teacher.teacher_share} needs one teacher with a path, which generates; "
            f"here are {len(teacher.paths)}; use 0."
        )
    if teacher.divergence == "jensen_shannon" and not 0 < teacher.beta < 1:
        raise ConfigError(
            f"teacher.beta={teacher.beta} makes the mixture of jensen_shannon equal to one model; use a "
            "number between 0 and 1, or another teacher.divergence."
        )
