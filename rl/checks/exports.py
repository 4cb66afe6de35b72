"""Compares an exported checkpoint, loaded and run by transformers, with the policy."""

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rl.checks.logprobs import rounding_limit
from rl.checks.transformers_pass import random_batch
from rl.data.chat_template import CALL, QUESTION, REPLY, TOOL
from rl.models.placement import count_experts
from rl.objectives.segments import segment_sum
from rl.training.engine import TrainingEngine
from rl.training.micro_batch_plans import plan_minibatch

TEXT = "Na\u00efve 3.14\n\tdef f(x): <s> </s> \u4e16\u754c"
TURN = {"role": "assistant", "content": "answer"}
CHATS = {
    "a question": [QUESTION],
    "a chat": [{"role": "system", "content": "rules"}, QUESTION, TURN, QUESTION],
    "a turn with reasoning": [QUESTION, TURN | {"reasoning_content": "thought"}, QUESTION],
    "a call": [QUESTION, TURN | {"content": "", "tool_calls": [CALL]}, REPLY],
}
MAX_CHECKED = 4 << 30
"""Maximum number of parameters of an exported model that is compared. Rank 0 loads the model in float32 into
host memory."""


def wrong_export(policy: TrainingEngine, source: str, directory: Path) -> str | None:
    """Return on rank 0 how an export differs from the policy, or its texts from the source's; None if they
    agree.

    source: the model directory from which the policy was loaded. Collective over the world.
    """
    problem = wrong_forward(policy, directory)
    return problem if dist.get_rank() else wrong_texts(source, str(directory)) or problem


def wrong_texts(source: str, directory: str) -> str:
    """Return how the tokenizer or processor of an export differs from the source's; "" if it does not."""
    from transformers import AutoProcessor, AutoTokenizer

    for kind in (AutoTokenizer, AutoProcessor):
        theirs, own = (_texts(kind, path) for path in (source, directory))
        for name in theirs:
            if theirs[name] != own.get(name):
                return f"{name} of {kind.__name__} differs from {source}'s, because the export lacks a file"
    return ""


def _texts(kind: Any, path: str) -> dict[str, Any]:
    """Return description -> output of a tokenizer or processor, for example "the tokens of a text" ->
    tokens."""
    found: dict[str, Any] = {}
    loaded = _outcome(lambda: kind.from_pretrained(path, local_files_only=True))
    if isinstance(loaded, str):
        return {"an error in loading": loaded}
    tokenizer = getattr(loaded, "tokenizer", loaded)
    found["the vocabulary"] = _outcome(tokenizer.get_vocab)
    found["the tokens of a text"] = _outcome(lambda: tokenizer(TEXT)["input_ids"])
    for name, messages in CHATS.items():
        for tools, thinks in itertools.product((None, [TOOL]), (None, True, False)):
            more = {} if thinks is None else {"enable_thinking": thinks}
            for begins in (True, False):
                options: dict = dict(tools=tools, tokenize=False, add_generation_prompt=begins, **more)
                render = partial(loaded.apply_chat_template, messages, **options)
                found[f"the rendering of {name} with {options}"] = _outcome(render)
    return found


def _outcome(call: Callable[[], Any]) -> Any:
    """Return the value of a call, or the name of the type of the error that it raises.

    Any type may occur, because templates and libraries may raise any error.
    """
    try:
        return call()
    except Exception as error:
        return type(error).__name__


def wrong_forward(policy: TrainingEngine, directory: Path) -> str | None:
    """Return on rank 0 how the log-probs of transformers differ from the policy's; None if they agree.

    transformers loads the checkpoint, and both compute the log-probs of random tokens. Models that read
    images, and models with more than MAX_CHECKED parameters, are not compared. If the model has routed
    experts, the sample with the largest difference is left out, because a rounding error may send its tokens
    to other experts. Collective over the world.
    """
    hf, weights = policy.weight_map.hf, policy.weight_map.weights
    if "vision_config" in hf or sum(weight.num_elements for weight in weights) > MAX_CHECKED:
        return None
    batch = random_batch(hf["vocab_size"])
    plan = plan_minibatch(batch, list(range(len(batch))), dp=policy.grid.dp, max_tokens=4096)
    (found,) = policy.forward(batch, [plan], ("logprobs",))
    if dist.get_rank():
        return None
    with tempfile.TemporaryDirectory() as name:
        out = Path(name, "logprobs.npy")
        temperature = str(policy.spec.temperature)
        command = [sys.executable, "-m", "rl.checks.transformers_pass", str(directory), temperature, str(out)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode < 0:
            signal = -done.returncode
            print(f"warning: export check: the pass of transformers was ended by signal {signal}", flush=True)
            return None
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
            return f"transformers does not load the files: {said[-1]}"
        expected = torch.from_numpy(np.load(out))
    gaps, lengths = segment_sum((found.double() - expected).abs(), batch.lengths), batch.lengths.double()
    if count_experts(weights):
        worst = int((gaps / lengths.clamp(min=1)).argmax())
        gaps[worst], lengths[worst] = 0, 0
    gap = float(gaps.sum() / lengths.sum())
    limit = rounding_limit(hf, policy.weight_map.dtype) * max(1.0, float(expected.abs().mean()))
    if gap <= limit:
        return None
    return (
        f"transformers computes log-probs from the files that differ from the policy's by {gap:.3g} nats per "
        f"token, more than rounding ({limit:.2g})"
    )
