"""The report of `run.mode=check` as text: samples with their masks, the phases and the verdicts."""

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from rl.data.batch import Batch
from rl.data.special_tokens import decode, special_ids
from rl.features.first_step.verdicts import Facts, Verdict

NUM_SAMPLES = 2
"""Number of printed samples, each of another group."""
SHOWN_TOKENS = 400
"""Maximum tokens of a part of a sample to print it whole. For example, of a prompt with 5,000 tokens only
both ends are printed."""
STYLES = {"ok": "green", "look": "yellow", "wrong": "bold red"}
KINDS = {
    "prompt": "blue",
    "response": "green",
    "response, not learned from": "strike green",
    "given, not learned from": "yellow",
}
"""Parts of a sample, with their styles."""


def report(facts: Facts, found: list[Verdict]) -> Iterator[Text | Table]:
    """Yield the parts of the report: samples, phases, verdicts."""
    if facts.batch is not None and len(facts.batch):
        groups = facts.batch.groups.tolist()
        firsts = sorted({group: groups.index(group) for group in reversed(groups)}.values())
        for sample in firsts[:NUM_SAMPLES]:
            yield sample_text(facts.batch, sample, facts.tokenizer)
    if facts.phases:
        columns = list(next(iter(facts.phases.values())))
        table = Table("phase", *columns, box=None)
        for name, values in facts.phases.items():
            table.add_row(name, *(f"{values[column]:.3g}" for column in columns))
        yield table
    for verdict in found:
        line = Text(f"{verdict.level:5} ", style=STYLES[verdict.level])
        line.append(f"{verdict.name}: ", style="bold").append(verdict.text, style="default not bold")
        if verdict.remedy:
            line.append(f"\n      -> {verdict.remedy}", style="default not bold")
        yield line


def sample_text(batch: Batch, sample: int, tokenizer: PreTrainedTokenizerBase) -> Text:
    """Return a sample's tokens as text with special tokens visible; the parts are named and coloured."""
    start, end = int(batch.offsets[sample]), int(batch.offsets[sample + 1])
    learned = (batch.column("mask")[start:end] > 0).tolist()
    turns = [1] * (end - start) if batch.turns is None else batch.turns[start:end].tolist()
    kinds = ["prompt"] * len(batch.prompt_ids[sample])
    for is_learned, turn in zip(learned, turns, strict=True):
        own = "response" if is_learned else "response, not learned from"
        kinds.append(own if turn > 0 else "given, not learned from")
    ids = [*batch.prompt_ids[sample].tolist(), *batch.response_ids[sample].tolist()]
    score = "" if batch.scores is None else f", score {float(batch.scores[sample]):g}"
    text = Text(f"Sample {sample}, {len(ids)} tokens{score}\n", style="bold")
    special, first = special_ids(tokenizer), 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or kinds[at] != kinds[first]:
            text.append(f"[{kinds[first]}, {at - first} tokens] ", style="default not bold dim")
            part, style, half = ids[first:at], f"not bold {KINDS[kinds[first]]}", SHOWN_TOKENS // 2
            if len(part) > SHOWN_TOKENS:
                _append(text, part[:half], tokenizer, special, style)
                text.append(" [...] ", style="not bold dim")
                part = part[-half:]
            _append(text, part, tokenizer, special, style)
            text.append("\n")
            first = at
    return text


def _append(
    text: Text, ids: list[int], tokenizer: PreTrainedTokenizerBase, special: set[int], style: str
) -> None:
    """Append tokens to the text, special tokens in reverse colours."""
    first = 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or (ids[at] in special) != (ids[first] in special):
            shown = style + " reverse" if ids[first] in special else style
            text.append(decode(ids[first:at], tokenizer), style=shown)
            first = at
