"""The section of the configuration for teachers."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from rl.config.ranges import AT_LEAST_ONE, FRACTION, NOT_NEGATIVE


@dataclass
class Teacher:
    """Models from which the policy learns token by token, with algorithm=distill or beside a reward."""

    path: str = ""
    """Hugging Face checkpoint of the teacher, a frozen model on the training grid. With another tokenizer
    than the policy's, `advantage_coef` compares spans of text. Empty: the teachers of `sources`, or the
    policy itself by `self_taught`."""
    sources: dict[str, Any] = field(default_factory=dict)
    """Paths of further teachers by `data_source`. Prompts of other sources have the teacher of `path`;
    without one they are refused."""
    self_taught: Literal["none", "present", "initial"] = "none"
    """The teacher is the policy itself with a prompt made from `template` (SDPO, SDFT), with its present
    weights or with the initial ones of the run."""
    template: str = "{prompt}\n\nReference answer: {ground_truth}\n\nAnswer in your own words.\n"
    """self_taught: prompt of the teacher, or its last user message if the prompt is a chat. {prompt},
    {ground_truth} and {feedback}, the text that the reward function returns as `feedback`, are filled in."""
    max_prompt_tokens: Annotated[int, AT_LEAST_ONE] = 4096
    """self_taught: maximum number of tokens of the teacher's prompt. Of a longer prompt, the last tokens are
    kept."""
    divergence: Literal["reverse_kl", "forward_kl", "jensen_shannon"] = "reverse_kl"
    """distill: divergence of the policy p and the teacher q at each token. reverse_kl: KL(p || q).
    forward_kl: KL(q || p)."""
    beta: Annotated[float, FRACTION] = 0.5
    """jensen_shannon: weight of the teacher in the mixture, above 0 and below 1."""
    top_k: Annotated[int, NOT_NEGATIVE] = 0
    """distill: compare the probabilities of the teacher's k most probable tokens, and the sum of all others
    as one more token. 0: the whole vocabulary."""
    student_share: Annotated[float, FRACTION] = 1.0
    """distill: share of the prompts with a response of the policy itself (GKD's lambda). The teacher responds
    to `teacher_share`, and the rest has the data's responses (data.response_key)."""
    teacher_share: Annotated[float, FRACTION] = 0.0
    """distill: share of the prompts to which the teacher responds, with a generation engine of its own. For
    one teacher with a path."""
    gpu_memory_utilization: Annotated[float, FRACTION] = 0.2
    """teacher_share: fraction of a GPU's memory for that engine, which stays there. No effect on CPU."""
    advantage_coef: Annotated[float, NOT_NEGATIVE] = 0.0
    """Policy gradients: add this much of log(q / p) of each token (of its span of text, if the tokenizers
    differ) to its advantage, with the policy p before the step's updates. 0: no teacher."""

    @property
    def paths(self) -> list[str]:
        """Return the checkpoints of all teachers, each once."""
        return list(dict.fromkeys(path for path in (self.path, *self.sources.values()) if path))
