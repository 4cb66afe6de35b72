"""Chat templates of families, with branches removed or changed, and conversations with many forms."""

import random
import re
import shutil
from pathlib import Path

from tests.chat_templates import TOKENS, template, tokenizer_of
from tests.fuzz import datasets
from tests.fuzz.cases import Case
from tests.fuzz.conversations import conversation

PATCHES = {
    "ignores tools": lambda rng, text: re.sub(r"\{%-?\s*if tools\b", "{%- if false and tools", text),
    "ignores calls": lambda rng, text: text.replace("tool_calls", "no_tool_calls"),
    "ignores reasoning": lambda rng, text: text.replace("reasoning_content", "no_reasoning"),
    "drops system": lambda rng, text: text.replace("'system'", "'nobody'").replace('"system"', '"nobody"'),
    "drops tool results": lambda rng, text: text.replace("'tool'", "'nobody'").replace('"tool"', '"nobody"'),
    "upper case": lambda rng, text: re.sub(
        r"(message\.content|message\[['\"]content['\"]\])", r"\1|upper", text
    ),
    "truncates": lambda rng, text: re.sub(
        r"(message\.content|message\[['\"]content['\"]\])", r"\1[:12]", text
    ),
    "trims": lambda rng, text: re.sub(r"(message\.content|message\[['\"]content['\"]\])", r"\1|trim", text),
    "says the content twice": lambda rng, text: re.sub(
        r"\{\{-?\s*(message\.content|message\[['\"]content['\"]\])\s*-?\}\}", r"{{ \1 }}{{ \1 }}", text
    ),
    "raises": lambda rng, text: "{{ raise_exception('no') }}" + text,
    "syntax": lambda rng, text: text[: rng.randrange(1, len(text))],
    "constant": lambda rng, text: "hello",
    "time of day": lambda rng, text: "{{ strftime_now('%H:%M:%S') }}" + text,
    "last only": lambda rng, text: "{{ messages[-1].content }}",
    "whole": lambda rng, text: text,
}


def case(rng: random.Random, directory: Path) -> Case:
    family = rng.choice(list(TOKENS))
    name = rng.choice(list(PATCHES))
    task = rng.choice(("prompts", "chats"))
    deviations = rng.choice((0, 0, 1))
    chat = conversation(
        rng,
        ends="user" if task == "prompts" else "assistant",
        num_deviations=deviations,
        calls=rng.random() < 0.5,
    )
    model = directory / "model"
    shutil.copytree(datasets.model_directory(family), model)
    changed = PATCHES[name](rng, template(family))
    tokenizer = tokenizer_of(family)
    tokenizer.chat_template = changed
    tokenizer.save_pretrained(model)
    row: dict = {"prompt" if task == "prompts" else "messages": chat.messages}
    if task == "prompts":
        row["reward_model"] = {"ground_truth": "42"}
    if chat.tools is not None:
        row["tools"] = chat.tools
    path, written = datasets._write(rng, "jsonl", [row], directory)
    what = f"{task}, {family}, template {name}: " + ("; ".join(chat.deviations) or "plain")
    if name == "upper case" and changed != template(family):  # GLM's has another form
        chat.marks[:] = [mark.upper() for mark in chat.marks]

    def run() -> str:
        original = datasets.model_directory
        datasets.model_directory = lambda family: model
        try:
            return datasets._read(task, family, path, [chat])
        finally:
            datasets.model_directory = original

    return Case(what, run)
