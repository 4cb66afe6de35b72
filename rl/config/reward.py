"""The section `reward`: reward functions, a reward model and a judge."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from rl.config.ranges import AT_LEAST_ONE, FINITE, NOT_ABOVE_TWO, NOT_NEGATIVE, POSITIVE, PROBABILITY


@dataclass
class RewardModel:
    path: str = ""
    """Hugging Face checkpoint of a sequence classifier with one label; its number is added to the score.
    Empty: none."""
    coef: Annotated[float, FINITE] = 1.0
    """Weight of that number."""


@dataclass
class Judge:
    path: str = ""
    """Hugging Face checkpoint of a language model that grades responses, generated with vLLM. Empty: none."""
    gpu_memory_utilization: Annotated[float, PROBABILITY] = 0.2
    """Fraction of a GPU's memory for the judge, which stays there; its layout is `rollout.tp`. No effect on
    CPU."""
    template: str = (
        "Question:\n{prompt}\n\nAnswer:\n{response}\n\nReference answer:\n{ground_truth}\n\n"
        "Grade the answer from 0 (wrong) to 10 (right). End with 'Grade: <number>'."
    )
    """User message to the judge; {prompt}, {response} and {ground_truth} are filled in. The {response} of a
    trajectory with environments is the conversation from its first turn on."""
    parser: str = "rl.rewards.judge:grade"
    """Function `parse(text) -> float` of the judge's answer, as `package.module:name` or
    `path/to/file.py:name`. A sample fails if the function raises, or returns no finite float32."""
    coef: Annotated[float, FINITE] = 1.0
    """Weight of its number in the score."""
    max_prompt_tokens: Annotated[int, AT_LEAST_ONE] = 4096
    """Maximum tokens of a message to the judge; a sample with a longer one counts as failed."""
    max_response_tokens: Annotated[int, AT_LEAST_ONE] = 512
    """Maximum tokens of an answer of the judge."""
    temperature: Annotated[float, NOT_ABOVE_TWO] = 0.0
    """Temperature of the judge's answer; 0 is greedy."""


@dataclass
class Reward:
    function: str = "rl.rewards.exact:score"
    """Reward function `score(prompt, response, ground_truth, **extra) -> float | dict`, sync or async, as
    `package.module:name` or `path/to/file.py:name`. Its keywords are `prompt` (rendered text), `response`,
    `ground_truth`, `data_source`, `extra_info` (a dict: the column; with `data.ground_truth_key` also the
    columns that nothing else reads) and `reward.kwargs`. A dict needs `score`; `acc` is logged as accuracy,
    `pred` (text) is the answer for maj@k, `feedback` (text) goes to `teacher.template`, and other numbers are
    logged as `reward/<name>/mean`."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments passed to every call of the reward function."""
    failure_score: Annotated[float, FINITE] = 0.0
    """Score of a sample if its reward function raised, hung or died (`reward/failures` counts these samples),
    and of a failed trajectory with `agents.on_failure` zero."""
    max_failed_share: Annotated[float, PROBABILITY] = 0.9
    """The run ends if the scoring of a larger share of the last 64 or more training samples failed: it would
    learn from `reward.failure_score`. 1: never."""
    sources: dict[str, Any] = field(default_factory=dict)
    """Other reward functions by `data_source`: a list of {function, weight, kwargs}; the score is their
    weighted sum."""
    workers: Annotated[int, NOT_NEGATIVE] = 0
    """Number of processes per rank that call the reward function. 0: one per core of the rank."""
    in_process: bool = False
    """Call the reward function in the rank's own process, so that `breakpoint()` stops there
    (docs/debugging.md). It has no limits of time and memory there, and an exception ends the run."""
    timeout_s: Annotated[float, POSITIVE] = 30.0
    """Maximum time to score one sample, in seconds; then the process is killed and the sample counts as
    failed."""
    memory_mib: Annotated[int, NOT_NEGATIVE] = 4096
    """Address space of a scoring process, in MiB. A reward function that imports torch needs more than the
    default. 0: no limit."""
    variables: list[str] = field(default_factory=list)
    """Names of environment variables that the scoring processes inherit, as `agents.variables`."""
    keep_special_tokens: list[str] = field(default_factory=lambda: ["auto"])
    """Special tokens that stay in the text of a response for graders and environments: auto (tokens that the
    chat template writes around reasoning, channels and calls), all, or names, for example `[<think>]`. Ends
    of turns never stay."""
    overlong_buffer_tokens: Annotated[int, NOT_NEGATIVE] = 0
    """Soft overlong punishment (DAPO): number of tokens before `rollout.max_response_tokens` over which the
    reward falls linearly. 0: none."""
    overlong_penalty: Annotated[float, NOT_NEGATIVE] = 1.0
    """Amount by which the reward has fallen at the limit."""
    model: RewardModel = field(default_factory=RewardModel)
    judge: Judge = field(default_factory=Judge)
