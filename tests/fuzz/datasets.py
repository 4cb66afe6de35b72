"""Data sets of prompts, conversations, pairs and labelled responses in random forms and file formats."""

import atexit
import functools
import json
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM
from transformers.utils import logging

from rl.config.checks import check
from rl.config.schema import load_config
from rl.data.prompts import load_tokenizer
from rl.engines.inputs import Inputs
from tests.chat_templates import TOKENS, tokenizer_of
from tests.fuzz.cases import Case, Silent
from tests.fuzz.conversations import Conversation, conversation
from tools.tiny_models import save_tiny

TASKS = ("prompts", "prompts", "chats", "chats", "pairs", "labels")
FORMATS = ("jsonl", "parquet", "datasets parquet", "saved", "arrow", "json", "jsonl with BOM", "csv")
TRUTHS: tuple[Any, ...] = (
    {"style": "rule", "ground_truth": "42"},
    '{"style": "rule", "ground_truth": "42"}',
    "42",
    None,
    {"ground_truth": 10**400},
    {"ground_truth": None},
    [1],
    {},
)
OVERRIDES = {
    "prompts": ["algorithm=grpo", "reward.function=rl.rewards.exact:score"],
    "chats": ["algorithm=sft", "data.messages_key=messages"],
    "pairs": ["algorithm=dpo"],
    "labels": ["algorithm=kto"],
}


@functools.cache
def model_directory(family: str) -> Path:
    """Return a tiny model with the tokenizer and chat template of a family; made once per process."""
    directory = Path(tempfile.mkdtemp(prefix="fuzz-model-"))
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(directory, ignore_errors=True))
    save_tiny("Qwen2ForCausalLM", directory, seed=0)
    tokenizer = tokenizer_of(family)
    tokenizer.save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    # As transformers reads it back: its class for Qwen 2 adds <|endoftext|> where a family has none.
    model.resize_token_embeddings(len(load_tokenizer(directory)))
    model.config.max_position_embeddings = 16384
    model.save_pretrained(directory)
    ids = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(TOKENS[family][3])]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return directory


logging.disable_progress_bar()
logging.set_verbosity_error()
for _family in TOKENS:  # before any case is forked
    model_directory(_family)


def case(rng: random.Random, directory: Path) -> Case:
    task, family = rng.choice(TASKS), rng.choice(list(TOKENS))
    form = FORMATS[0] if rng.random() < 0.4 else rng.choice(FORMATS)
    deviates = rng.random() < 0.75
    rows, chats, notes = [], [], set()
    for number in range(rng.randrange(1, 5)):
        row, chat = _row(rng, task, deviates=deviates and (number == 0 or rng.random() < 0.3))
        rows.append(row)
        chats.append(chat)
        notes |= set(chat.deviations)
    if deviates and rng.random() < 0.3 and task == "prompts":
        truth = rng.choice(TRUTHS)
        notes.add(f"reward_model={truth!r:.40}")
        for row in rows:
            row["reward_model"] = truth
    path, written = _write(rng, form, rows, directory)
    what = f"{task}, {family}, {form}: " + ("; ".join(sorted(notes)) or "plain")
    if not written:
        return Case(f"{what} (the writer refused these rows)", lambda: "nothing written")
    plain = all(chat.is_plain for chat in chats) and not notes and form in FORMATS[:5]
    # Mistral's template joins a turn otherwise than a generation; DeepSeek's opens reasoning in a generation.
    plain &= family not in ("mistral", "deepseek-v3") or task == "prompts"
    return Case(what, lambda: _read(task, family, path, chats), valid=True if plain else None)


def _row(rng: random.Random, task: str, *, deviates: bool) -> tuple[dict, Conversation]:
    num = rng.choice((1, 1, 2)) if deviates else 0
    ends = "user" if task == "prompts" else "assistant"
    calls = deviates and task in ("chats", "prompts") and rng.random() < 0.35
    chat = conversation(rng, ends=ends, num_deviations=num, calls=calls)
    if task in ("prompts", "chats"):
        row = {"prompt" if task == "prompts" else "messages": chat.messages}
        if task == "prompts":
            row["reward_model"] = {"style": "rule", "ground_truth": "42"}
    else:
        answer = chat.messages[-1:] if isinstance(chat.messages, list) else chat.messages
        before = chat.messages[:-1] if isinstance(chat.messages, list) else "question"
        if not isinstance(chat.messages, list):
            chat.marks.clear()
        row = {"prompt": before}
        if task == "pairs":
            row |= {"chosen": answer, "rejected": [{"role": "assistant", "content": "rejected answer"}]}
        else:
            row |= {"completion": answer, "label": True}
    if chat.tools is not None:
        row["tools"] = chat.tools
    return row, chat


def _write(rng: random.Random, form: str, rows: list[dict], directory: Path) -> tuple[Path, bool]:
    """Write the rows; return the file, and whether the library that writes the format could."""
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Both libraries take the columns of the first row.
    with_all_columns = [dict.fromkeys(name for each in rows for name in each) | row for row in rows]
    try:
        if form in ("jsonl", "jsonl with BOM"):
            path = directory / "rows.jsonl"
            lines = "\n".join(json.dumps(row, ensure_ascii=rng.random() < 0.5) for row in rows)
            encoding = "utf-8-sig" if form.endswith("BOM") else "utf-8"
            path.write_bytes(lines.encode(encoding, "surrogatepass"))
        elif form == "json":
            path = directory / "rows.json"
            path.write_text(json.dumps(rows))
        elif form == "csv":
            path = directory / "rows.csv"
            path.write_text("\n".join(["prompt", *(json.dumps(row) for row in rows)]))
        elif form == "parquet":
            path = directory / "rows.parquet"
            pq.write_table(pa.Table.from_pylist(with_all_columns), path)
        else:
            made = datasets.Dataset.from_list(with_all_columns)
            path = directory / {"datasets parquet": "rows.parquet", "saved": "saved", "arrow": "made"}[form]
            if form == "datasets parquet":
                made.to_parquet(str(path))
            else:
                made.save_to_disk(str(path))
            if form == "arrow":
                path = next(path.glob("*.arrow"))
    except Exception:  # not the program's: the rows have no form in this format
        return directory / "none", False
    return path, True


def _read(task: str, family: str, path: Path, chats: list[Conversation]) -> str:
    """Read the file as a run does, and compare what the policy reads with the marks of the rows."""
    config = load_config(
        None,
        [
            f"model.path={model_directory(family)}",
            f"data.train=[{path}]",
            "data.max_prompt_tokens=4000",
            "rollout.max_response_tokens=4000",
            "model.dtype=float32",
            "run.name=fuzz",
            *OVERRIDES[task],
        ],
    )
    check(config)
    inputs = Inputs(config, 1)
    tokenizer = inputs.tokenizer
    if len(inputs.prompts) != len(chats):
        raise Silent(f"{len(chats)} rows became {len(inputs.prompts)} samples")
    for found, chat in zip(inputs.prompts, chats):
        text = found.text
        for name in ("token_ids", "response_ids", "prompt_ids", "chosen_ids"):
            if getattr(found, name, None) is not None:
                text += tokenizer.decode(getattr(found, name).tolist())
        if lost := [mark for mark in chat.marks if mark not in text]:
            raise Silent(f"{', '.join(lost)} of {json.dumps(chat.messages)[:600]} is not in {text[:900]!r}")
    return f"{len(chats)} rows"
