"""Rows of the data sets that `lockstep data` knows: a record as published -> a row with verl's columns.

Each function raises ValueError for a record that does not belong to its data set, which stops the
preparation, and Unusable for a record with a known defect, which is counted and dropped. The instruction in
each prompt asks for the form that the reward function named in the section expects.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rl.rewards.math import last_boxed

Row = dict[str, Any]


class Unusable(Exception):
    """Raised for a record that cannot be used; the message is the same for all records with that defect."""


def verl_row(
    data_source: str, content: str, ability: str, ground_truth: Any, extra_info: Row, *, style: str = "rule"
) -> Row:
    """Return the columns that training reads, for a prompt of one user message."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": content}],
        "ability": ability,
        "reward_model": {"style": style, "ground_truth": ground_truth},
        "extra_info": extra_info,
    }


# ---- gsm8k: rl.rewards.gsm8k ----

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def gsm8k_row(record: Mapping[str, Any], *, split: str, index: int) -> Row:
    """Return the row of a problem. Raises ValueError if its answer does not end in `#### number`."""
    question, answer = record["question"], record["answer"]
    _, separator, number = answer.rpartition("####")
    if not separator or not number.strip():
        raise ValueError(f"the answer does not end in '#### number': {answer[-60:]!r}")
    return verl_row(
        "openai/gsm8k",
        f"{question} {GSM8K_INSTRUCTION}",
        "math",
        number.strip().replace(",", ""),
        {"split": split, "index": index, "answer": answer, "question": question},
    )


# ---- math: rl.rewards.math ----

MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def math_row(record: Mapping[str, Any], *, split: str, index: int) -> Row:
    """Return the row of a problem of Hendrycks MATH (arXiv:2103.03874)."""
    problem, solution = _text(record, "problem"), _text(record, "solution")
    answer = last_boxed(solution)
    if answer is None:
        answer = record.get("answer")
    if answer is None or not str(answer).strip():
        raise Unusable("the solution has no \\boxed answer")
    return verl_row(
        "DigitalLearningGmbH/MATH-lighteval",  # verl's name for it
        f"{problem} {MATH_INSTRUCTION}",
        "math",
        str(answer).strip(),
        {
            "split": split,
            "index": index,
            "answer": solution,
            "question": problem,
            "level": str(record.get("level", "")),
            "type": str(record.get("type", record.get("subject", ""))),
        },
    )


# ---- geo3k: rl.rewards.math ----

GEO3K_INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
    "The reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in "
    "\\boxed{}."
)


def geo3k_row(record: Mapping[str, Any], *, split: str, index: int) -> Row:
    """Return the row of a problem of Geometry3K with its images (hiyouga/geometry3k), as in verl.

    Raises ValueError if it has another number of images than of anchors.
    """
    problem, answer, images = _text(record, "problem"), _text(record, "answer"), record.get("images") or []
    if problem.count("<image>") != len(images):
        raise ValueError(f"{problem.count('<image>')} anchors <image> and {len(images)} images")
    info = {"split": split, "index": index, "answer": answer, "question": problem}
    row = verl_row("hiyouga/geometry3k", f"{problem} {GEO3K_INSTRUCTION}", "math", answer, info)
    return row | {"images": images}


# ---- dapo-math and aime: rl.rewards.dapo ----

DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'
"""Text around each problem of BytedTsinghua-SIA/DAPO-Math-17k as published."""


def competition_problem(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return problem and answer, both stripped, of a record of DAPO-Math-17k or of an AIME collection.

    The problem is in `prompt` (messages or a string), `problem` or `question`, with or without the published
    text around it; the answer is in `reward_model.ground_truth`, `answer`, `label` or `solution`. Names are
    not case-sensitive.
    """
    fields = {key.lower(): value for key, value in record.items()}
    problem = next((fields[key] for key in ("problem", "question", "prompt") if fields.get(key)), None)
    if isinstance(problem, list) and problem and isinstance(problem[-1], dict):
        problem = problem[-1].get("content")
    if not isinstance(problem, str) or not problem.strip():
        raise ValueError(f"no text in problem, question or prompt, only the keys {', '.join(record)}")
    answer = (fields.get("reward_model") or {}).get("ground_truth")
    for key in ("answer", "label", "solution"):
        answer = fields.get(key) if answer is None else answer
    if answer is None or not str(answer).strip():
        raise ValueError(
            f"no reward_model.ground_truth, answer, label or solution, only the keys {', '.join(record)}"
        )
    return problem.strip().removeprefix(DAPO_PREFIX).removesuffix(DAPO_SUFFIX).strip(), str(answer).strip()


def dapo_row(problem: str, answer: str, *, split: str, index: int, data_source: str = "math_dapo") -> Row:
    """Return a row with the instruction of DAPO-Math-17k, which verl also uses for AIME."""
    extra_info = {"split": split, "index": index, "question": problem}
    return verl_row(data_source, f"{DAPO_PREFIX}{problem}{DAPO_SUFFIX}", "math", answer, extra_info)


def aime_answer(answer: str) -> str:
    """Return an AIME answer as a plain integer: 073, 73.0, $73$, 73^\\circ are 73. Raises ValueError."""
    match = re.fullmatch(r"\$?\s*0*(\d{1,3})(?:\.0+)?(?:\^\{?\\circ\}?)?\s*\$?", answer.strip())
    if match is None:
        raise ValueError(f"answer={answer[:60]!r} must be an integer from 0 to 999")
    return match[1]


# ---- countdown: rl.rewards.countdown ----


def countdown_problems(*, seed: int) -> Iterator[tuple[list[int], int]]:
    """Yield distinct solvable (numbers, target) without end.

    3 or 4 numbers in 1..99 and a target in 10..99, as in Jiayi-Pan/Countdown-Tasks-3to4 (TinyZero). The
    target is computed from all numbers, each used once, in an order that differs from the listed one.
    """
    rng = np.random.default_rng(seed)
    seen = set()
    while True:
        numbers = rng.integers(1, 100, size=rng.integers(3, 5)).tolist()
        target = _combine(numbers, rng)
        key = (*sorted(numbers), target)
        # A target among the numbers would be a solution by itself if not all numbers must be used.
        if target is None or not 10 <= target <= 99 or target in numbers or key in seen:
            continue
        seen.add(key)
        yield numbers, target


def _combine(numbers: list[int], rng: np.random.Generator) -> int | None:
    """Return the value of a random expression of the numbers, or None if a division leaves a remainder."""
    values = list(numbers)
    while len(values) > 1:
        left = values.pop(rng.integers(len(values)))
        right = values.pop(rng.integers(len(values)))
        operation = "+-*/"[rng.integers(4)]
        if operation == "/" and (right == 0 or left % right):
            return None
        values.append(
            {"+": left + right, "-": left - right, "*": left * right, "/": left // (right or 1)}[operation]
        )
    return values[0]


def countdown_row(numbers: list[int], target: int, *, split: str, index: int) -> Row:
    """Return TinyZero's question, which asks for the expression in <answer>."""
    content = (
        f"Using the numbers {numbers}, create an equation that equals {target}. You can use the operations "
        "+, -, * and / and parentheses, and must use each number exactly once. Think first, between <think> "
        "and </think>. Then give the left side of the equation between <answer> and </answer>, for example "
        "<answer> (1 + 2) / 3 </answer>."
    )
    ground_truth = {"target": target, "numbers": numbers}
    return verl_row("countdown", content, "math", ground_truth, {"split": split, "index": index})


# ---- hh-rlhf: reward models and dpo ----

_TURN = re.compile(r"\n\n(Human|Assistant):")


def hh_rlhf_row(record: Mapping[str, Any], *, split: str, index: int) -> Row:
    """Return the row of a pair of transcripts of Anthropic/hh-rlhf (arXiv:2204.05862).

    The row has the columns `chosen` and `rejected` beside verl's; `reward_model.ground_truth` is the chosen
    response. Pairs that differ before the last turn, or with empty or repeated turns, are Unusable.
    """
    before, chosen = _split_transcript(_text(record, "chosen"))
    other_before, rejected = _split_transcript(_text(record, "rejected"))
    if before != other_before:
        raise Unusable("the transcripts differ before the last turn")
    if not chosen or not rejected:
        raise Unusable("a response is empty")
    if chosen == rejected:
        raise Unusable("both responses are the same")
    extra_info = {"split": split, "index": index}
    row = verl_row("Anthropic/hh-rlhf", "", "alignment", chosen, extra_info, style="model")
    return {**row, "prompt": _turns(before), "chosen": chosen, "rejected": rejected}


def _split_transcript(transcript: str) -> tuple[str, str]:
    """Return the text before the assistant's last turn, and that turn."""
    before, separator, response = transcript.rpartition("\n\nAssistant:")
    if not separator:
        raise ValueError(f"the transcript has no turn of the assistant: {transcript[:60]!r}")
    return before, response.strip()


def _turns(transcript: str) -> list[Row]:
    """Return the messages of a transcript whose turns alternate, beginning and ending with the human's."""
    start, *parts = _TURN.split(transcript)
    speakers, texts = parts[::2], [text.strip() for text in parts[1::2]]
    if start.strip() or speakers != ["Human", "Assistant"] * (len(speakers) // 2) + ["Human"]:
        raise Unusable("the turns before the response do not alternate")
    if not all(texts):
        raise Unusable("a turn before the response is empty")
    roles = {"Human": "user", "Assistant": "assistant"}
    return [{"role": roles[speaker], "content": text} for speaker, text in zip(speakers, texts, strict=True)]


# ---- code: rl.rewards.code ----

CODE_STDIN_INSTRUCTION = (
    "Write a Python program that solves the problem. It reads its input from standard input and writes its "
    "output to standard output. Put the complete program into one ```python block at the end of your "
    "response."
)
CODE_FUNCTION_INSTRUCTION = (
    "Write a Python function `{name}` that solves the problem, as a method of a class Solution where the "
    "starter code has one. Put the complete code into one ```python block at the end of your response."
)


def code_row(record: Mapping[str, Any], *, split: str, index: int, data_source: str = "code") -> Row:
    """Return the row of a problem of APPS (arXiv:2105.09938), TACO (2312.14852) or CodeContests (2203.07814).

    The problem is in `question`, `problem` or `description`. The tests are in `input_output`, an object or
    its JSON with inputs, outputs and, for functions, fn_name, or in public_tests, private_tests and
    generated_tests. The ground truth is the JSON of {inputs, outputs[, fn_name]}.
    """
    problem = next((record[key] for key in ("question", "problem", "description") if record.get(key)), None)
    if not isinstance(problem, str):
        raise ValueError(f"no text in question, problem or description, only the keys {', '.join(record)}")
    tests = _tests(record)
    starter, name = str(record.get("starter_code") or ""), tests.get("fn_name")
    parts = [problem.strip()]
    if starter.strip():
        parts.append(f"Starter code:\n```python\n{starter.rstrip()}\n```")
    parts.append(CODE_FUNCTION_INSTRUCTION.format(name=name) if name else CODE_STDIN_INSTRUCTION)
    extra_info = {"split": split, "index": index, "difficulty": str(record.get("difficulty") or "")}
    return verl_row(data_source, "\n\n".join(parts), "code", json.dumps(tests), extra_info)


def _tests(record: Mapping[str, Any]) -> Row:
    """Return {inputs, outputs[, fn_name]} of a record. Raises Unusable if there are none."""
    tests = record.get("input_output")
    if tests is None and any(key in record for key in _CONTEST_TESTS):
        tests = _contest_tests(record)
    if isinstance(tests, str) and tests.strip():
        try:
            tests = json.loads(tests)
        except ValueError as error:  # invalid JSON, or an integer of more than 4,300 digits
            raise Unusable("the tests are not JSON that Python reads") from error
    if not tests:
        raise Unusable("there are no tests")
    if not isinstance(tests, dict):
        raise ValueError(
            f"input_output must be an object with inputs and outputs, not {type(tests).__name__}"
        )
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not inputs or not outputs:
        raise Unusable("there are no tests")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise Unusable("inputs and outputs of the tests do not match")
    name = tests.get("fn_name")
    return {"inputs": inputs, "outputs": outputs, **({"fn_name": name} if name else {})}


_CONTEST_TESTS = ("public_tests", "private_tests", "generated_tests")


def _contest_tests(record: Mapping[str, Any]) -> Row:
    """Return all tests of CodeContests, in groups {input: [...], output: [...]} or [{input, output}, ...]."""
    tests: Row = {"inputs": [], "outputs": []}
    for group in (record.get(key) or [] for key in _CONTEST_TESTS):
        for name in ("input", "output"):
            values = group.get(name, []) if isinstance(group, Mapping) else [test[name] for test in group]
            tests[f"{name}s"] += values
    return tests


def _text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key} must be text, not {type(value).__name__}; the keys are {', '.join(record)}")
    return value
