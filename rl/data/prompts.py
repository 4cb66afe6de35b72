"""Reads prompts from files with verl's columns, applies the chat template, and tokenizes them.

The column `prompt` has a list of {role, content} messages, or a string. Optional columns are `data_source`,
`reward_model` {style, ground_truth}, `extra_info`, `tools` (schemas that the chat template renders), and for
agents `agent_name`, `tools_kwargs` and `interaction_kwargs`. Other columns are read only if a key names the
column of the ground truth; they become entries of `extra_info`. `rl.data.messages` describes messages,
`rl.data.reading` the file formats. Every error in the data is a ValueError that names the file and the row.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rl.data.chat_template import template_of
from rl.data.messages import COLUMNS, INPUTS, MessageReader, Messages, tools_of
from rl.data.reading import FileRow, describe, read_rows
from rl.data.special_tokens import encode, hide, show
from rl.models.json_files import check_files, read_object

if TYPE_CHECKING:  # a run without images does not import this module
    from rl.data.images import ImageReader, PromptImage

log = logging.getLogger(__name__)

SAMPLE = "What is 2 + 2?\n\tAnswer  at once: caf\u00e9, \u4f60\u597d, x_1=3.14; don't 1234567"
"""Text that is tokenized to compare a loaded tokenizer with its file."""
AGENT_COLUMNS = ("agent_name", "tools_kwargs", "interaction_kwargs")
"""verl's columns for environments; verl also reads them from `extra_info`."""
OPTIONAL = ("data_source", "reward_model", "extra_info", *COLUMNS, *AGENT_COLUMNS)
"""Columns beside the prompt or conversation that are read if they exist."""

GROUND_TRUTH = "reward_model.ground_truth"
"""Path of the ground truth in verl's columns."""

VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""Files that may hold a tokenizer's vocabulary."""


@dataclass(frozen=True, eq=False)  # eq would compare arrays, which has no single truth value
class Prompt:
    """One prompt, ready for the engine and for the reward function."""

    index: int
    """Index of the row in the concatenation of the files, counted before any prompt was dropped."""
    token_ids: np.ndarray
    """Tokens of the rendered prompt, with the generation prompt, after truncation: np.int32 [P]."""
    text: str
    """The rendered prompt before truncation; the reward function gets it as `prompt`."""
    data_source: str
    """Column `data_source`, or the name of the file without its extension."""
    ground_truth: Any
    """`reward_model.ground_truth` or the value at data.ground_truth_key; None without one."""
    extra_info: dict[str, Any]
    """Column `extra_info`, or {}, with the row's columns of AGENT_COLUMNS. With data.ground_truth_key also
    the row's columns that nothing else reads."""
    response_ids: np.ndarray | None = None
    """np.int32 [R], only for sft. For a target: its tokens without special tokens, then the end-of-sequence
    token. For a conversation: the tokens from the first to the last token with a loss."""
    response_mask: np.ndarray | None = None
    """np.float32 [R], only for conversations: 1 for the tokens of `response_ids` with a loss."""
    messages: Messages | None = None
    """The messages as `rl.data.messages` reads them, before rendering. None if the prompt is a string or
    belongs to a conversation of sft."""
    tools: tuple[dict[str, Any], ...] = ()
    """Schemas of the tools that the template renders with the messages."""
    source: int = 0
    """Index of its file in `files`."""
    draw: int = -1
    """Number of prompts that the run had drawn before this one; -1 if the run does not number its draws."""
    place: str = ""
    """Its file and row, for error messages."""
    images: tuple["PromptImage", ...] = ()
    """Its images in order (`rl.data.images`). `token_ids` contains all tokens of each image."""

    @property
    def placed_pixels(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Result of `rl.data.images.placed_pixels` for its images; None if it has no images."""
        if not self.images:
            return None
        from rl.data.images import placed_pixels

        return placed_pixels(self.images)

    @property
    def rendered_ids(self) -> np.ndarray:
        """Tokens of the prompt with only one token for each image, as the chat template writes it, int32."""
        kept = np.ones(len(self.token_ids), bool)
        for image in self.images:
            kept[image.offset + 1 : image.offset + image.num_tokens] = False
        return self.token_ids[kept]

    @classmethod
    def of_tokens(cls, token_ids: np.ndarray) -> "Prompt":
        """Return a prompt made of tokens, int32 [P], without text, messages or ground truth."""
        return cls(-1, token_ids, "", "", None, {})


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face checkpoint directory without access to the hub.

    Raises ValueError if `path` is not a directory or holds no tokenizer.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(
            f"model.path={str(path)!r} is not a directory: download the checkpoint first "
            "(hf download NAME --local-dir DIR) and name its directory."
        )
    try:
        if not any(entry.is_file() for pattern in VOCABULARIES for entry in path.glob(pattern)):
            raise FileNotFoundError("there is no file with a vocabulary")  # transformers would make one up
        return _as_its_file_says(AutoTokenizer.from_pretrained(str(path), local_files_only=True), path)
    except Exception as error:  # transformers may raise anything; the user must learn which directory it was
        check_files(path)
        found = ", ".join(sorted(entry.name for entry in path.iterdir())) or "nothing"
        raise ValueError(
            f"{path} holds no usable tokenizer (tokenizer.json, tokenizer_config.json, config.json), only "
            f"{found}: {type(error).__name__}: {' '.join(str(error).split())[:300]}; "
            "copy the files of the model's tokenizer into it."
        ) from error


def _as_its_file_says(tokenizer: PreTrainedTokenizerBase, path: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer, or one made from tokenizer.json alone if the two split SAMPLE differently.

    The tokenizer classes of transformers 5 replace parts of tokenizer.json by their own settings. For
    example, the config of DeepSeek-R1-Distill-Llama names the class LlamaTokenizer, which drops every space
    (transformers #45488).
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        return tokenizer
    own = Tokenizer.from_file(str(file))
    own.no_truncation()
    own.no_padding()
    expected = own.encode(SAMPLE, add_special_tokens=False).ids
    if tokenizer.encode(SAMPLE, add_special_tokens=False) == expected:
        return tokenizer
    plain = PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
    if plain.encode(SAMPLE, add_special_tokens=False) != expected:
        raise ValueError("transformers splits text into other tokens than tokenizer.json does")
    log.warning("%s: %s changes tokenizer.json; the file is used as it is", path, type(tokenizer).__name__)
    return plain


def load_prompts(
    files: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_key: str,
    string_prompts: str = "plain",
    max_prompt_tokens: int,
    overlong: str,
    ground_truth_key: str = "",
    response_key: str | None = None,
    max_prompts: int = 0,
    images: "ImageReader | None" = None,
) -> list[Prompt]:
    """Read `files` in order and tokenize the prompts.

    prompt_key: column with the prompts. Messages are rendered with the chat template and the generation
        prompt. They may be a conversation of several turns, but the last message must not be one of the
        assistant. Strings get the tokenizer's special tokens, unless they begin with its BOS token.
    string_prompts: "user" makes a string the message of a user.
    overlong: what to do with prompts of more than `max_prompt_tokens` tokens: "error", "drop" or
        "truncate_left".
    ground_truth_key: column with the ground truth, or a dotted path into a column; the file's other columns
        then belong to `extra_info`. "" stands for `reward_model.ground_truth`.
    response_key: None for RL. For sft, the column with the target, or a dotted path into a column, such as
        `extra_info.answer`. "" stands for `reward_model.ground_truth`.
    max_prompts: maximum number of rows to read, before overlong prompts are dropped; 0 reads all.
    images: reader for the images of the rows; None if the rows have no images.

    Raises ValueError for an invalid file, a missing column, a prompt or target that is not text, a tokenizer
    that cannot render messages, and for overlong prompts if `overlong` is "error".
    """
    target_path = None if response_key is None else (response_key or GROUND_TRUTH).split(".")
    inputs = (prompt_key, *(target_path or [])[:1], *([images.column] if images else []))
    required = {prompt_key: "name the column with the prompt in data.prompt_key"}
    if ground_truth_key:
        remedy = "name the column with the reference answer in data.ground_truth_key"
        required.setdefault(ground_truth_key.split(".")[0], remedy)
    rows = read_rows(
        files,
        required=required,
        optional=[*OPTIONAL, *(INPUTS if prompt_key == "instruction" else ()), *inputs[1:]],
        reads_all=bool(ground_truth_key),
        max_rows=max_prompts,
    )
    reader = MessageReader(
        template_of(tokenizer), reads_images=images is not None, reads_strings=string_prompts == "user"
    )
    chats = [read_prompt(row, prompt_key, reader) for row in rows]
    pictures: list[Sequence[PromptImage]] = [images.of(row) if images else () for row in rows]
    if images:
        chats = [images.anchored(*each) for each in zip(chats, pictures, rows)]
        if not any(pictures):
            log.warning("no row of %s has images in column %r", ", ".join(map(str, files)), images.column)
    tools = [tools_of(row) for row in rows]
    texts, token_ids = render(chats, tools, rows, reader, column=prompt_key)
    if images:
        expanded = [images.expanded(*each) for each in zip(token_ids, pictures, rows)]
        token_ids, pictures = [ids for ids, _ in expanded], [placed for _, placed in expanded]
    response_ids: Sequence[np.ndarray | None] = [None] * len(rows)
    if target_path is not None:
        response_ids = tokenize_targets([_target(row, target_path) for row in rows], tokenizer)
    lengths = np.array([len(ids) for ids in token_ids])
    kept = within_limit(lengths, limit=max_prompt_tokens, overlong=overlong)
    return [
        Prompt(
            index=index,
            token_ids=token_ids[index][-max_prompt_tokens:],
            text=show(texts[index], tokenizer),
            response_ids=response_ids[index],
            messages=chat if isinstance(chat := chats[index], list) else None,
            tools=tuple(tools[index]),
            images=tuple(pictures[index]),
            **fields_of(rows[index], ground_truth_key, inputs),
        )
        for index in np.flatnonzero(kept).tolist()
    ]


def fields_of(row: FileRow, ground_truth_key: str = "", inputs: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields of a Prompt that are read from the row without tokenizing anything.

    ground_truth_key: as for `load_prompts`. inputs: columns of the prompt, which are no `extra_info`.
    """
    read = {*inputs, *OPTIONAL, *INPUTS, ground_truth_key.split(".")[0]}
    others = {name: value for name, value in row.values.items() if name not in read}
    agent = {name: row.values[name] for name in AGENT_COLUMNS if row.values.get(name) is not None}
    return dict(
        data_source=data_source(row),
        ground_truth=value_at(row, (ground_truth_key or GROUND_TRUTH).split(".")),
        extra_info={**(others if ground_truth_key else {}), **(row.values.get("extra_info") or {}), **agent},
        source=row.source,
        place=row.place,
    )


def value_at(row: FileRow, path: Sequence[str]) -> Any:
    """Return the value at a path into a row, such as ["extra_info", "answer"]; None if there is none."""
    value: Any = row.values
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def data_source(row: FileRow) -> str:
    """Return the column `data_source` of a row, or the name of its file without the extension."""
    return str(row.values.get("data_source") or row.file_name)


def num_shared(prompts: Sequence[Any], others: Sequence[Prompt]) -> int:
    """Return how many of `others` also occur in `prompts`, with the same token ids and images.

    Conversations are compared as a whole. Pairs among `prompts` are ignored.
    """
    known = {_content(prompt) for prompt in prompts if isinstance(prompt, Prompt)}
    return sum(_content(other) in known for other in others)


def _content(prompt: Prompt) -> bytes:
    """Return the token ids and images of a prompt as bytes.

    For a conversation, return all of its token ids, because many conversations have the same beginning.
    """
    if prompt.response_mask is None or prompt.response_ids is None:
        return b"".join((prompt.token_ids.tobytes(), *(image.content for image in prompt.images)))
    return np.concatenate([prompt.token_ids, prompt.response_ids]).tobytes()


# ---- messages and text ----


def read_prompt(row: FileRow, column: str, reader: MessageReader) -> Messages | str:
    """Return the chat or the text in a column. Raises ValueError for a chat that ends with an assistant
    message."""
    prompt = reader.read(row, column)
    refuse_answer(prompt, row, column=column)
    return prompt


def refuse_answer(prompt: Messages | str, row: FileRow, *, column: str) -> None:
    """Raise ValueError for a prompt that ends with a message of the assistant."""
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        raise ValueError(
            f"{row.place}: column {column!r} must not end with a message of the assistant; remove that "
            "message, or move it to a column that sft reads by data.response_key."
        )


def render(
    prompts: Sequence[Messages | str],
    tools: Sequence[list[dict]],
    rows: Sequence[FileRow],
    reader: MessageReader,
    *,
    column: str,
) -> tuple[list[str], list[np.ndarray]]:
    """Return the rendered texts of all prompts, and their token ids, int32 [P] each.

    The text of a chat ends with the generation prompt. Special tokens are added only to prompts that are
    strings and do not begin with the BOS token, because a chat template writes its own special tokens.

    Raises ValueError if there is no template, if the template rejects messages or leaves out a part or a
    tool, and for a prompt without tokens or with two BOS tokens.
    """
    texts = []
    for prompt, schemas, row in zip(prompts, tools, rows, strict=True):
        if isinstance(prompt, str) and schemas:
            raise ValueError(
                f"{row.place}: column 'tools' needs messages in column {column!r}, because the chat template "
                "renders tools; write the prompt as messages, or rename the column tools."
            )
        if isinstance(prompt, str):
            texts.append(prompt)
        else:
            texts.append(reader.render(prompt, schemas, row, column=column))
    reader.finish(", ".join(sorted({str(row.path) for row in rows})))
    bos = reader.tokenizer.bos_token
    bare = [isinstance(prompt, str) and not (bos and prompt.startswith(bos)) for prompt in prompts]
    token_ids: list[np.ndarray] = [np.empty(0, dtype=np.int32)] * len(texts)
    for is_bare in (False, True):
        indices = [i for i in range(len(texts)) if bare[i] == is_bare]
        encoded, _ = encode([texts[i] for i in indices], reader.tokenizer, add_special_tokens=is_bare)
        for i, ids in zip(indices, encoded, strict=True):
            if len(ids) == 0:
                raise ValueError(f"{rows[i].place}: the prompt in column {column!r} is empty.")
            refuse_two_bos(ids, reader.tokenizer, f"{rows[i].place}: the prompt in column {column!r}")
            token_ids[i] = ids
    return texts, token_ids


# ---- tokens ----


def end_token_ids(model: str) -> set[int]:
    """Return the ids at which vLLM ends a response, besides the tokenizer's eos.

    They are read from generation_config.json, or from config.json if the model has no generation_config.json.
    """
    path = Path(model, "generation_config.json")
    if path.exists():
        value = read_object(path).get("eos_token_id")
    else:
        value = GenerationConfig.from_model_config(AutoConfig.from_pretrained(model)).eos_token_id
    return set(value if isinstance(value, list) else [] if value is None else [value])


def refuse_two_bos(ids: np.ndarray, tokenizer: PreTrainedTokenizerBase, owner: str) -> None:
    """Raise ValueError if the ids begin with two BOS tokens. owner: the subject of the error message."""
    if tokenizer.bos_token_id is not None and (ids[:2] == tokenizer.bos_token_id).sum() == 2:
        raise ValueError(
            f"{owner} begins with two BOS tokens ({tokenizer.bos_token}); remove the one in the text, or "
            "that of the chat template."
        )


def tokenize_targets(targets: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """Return the token ids of the targets, np.int32 [R] each, ending with one end-of-sequence token.

    If the text already ends with this token, ignoring blanks, no second one is added. Other special tokens in
    the text become plain text, except the tokens that the chat template writes around reasoning and calls,
    for example <think>.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} needs an eos_token, which ends each response."
        )
    eos = np.array([tokenizer.eos_token_id], dtype=np.int32)
    end = tokenizer.eos_token
    texts = [text.rstrip().removesuffix(end) if text.rstrip().endswith(end) else text for text in targets]
    marks = template_of(tokenizer).turn_marks[0]
    texts = [hide(text, tokenizer, marks) for text in texts]
    return [np.concatenate([ids, eos]) for ids in encode(texts, tokenizer)[0]]


def _target(row: FileRow, path: list[str]) -> str:
    """Return the sft target of a row: the string or number at `path`, such as ["extra_info", "answer"]."""
    value = value_at(row, path)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        remedy = "name the column with the target in data.response_key"
        if isinstance(value, list) and value and isinstance(value[0], dict):
            remedy = "append these messages to the prompt's, and name their column in data.messages_key"
        raise ValueError(
            f"{row.place}: {'.'.join(path)} must be the target text, not {describe(value)}; {remedy}."
        )
    return value


# ---- length ----


def within_limit(
    lengths: np.ndarray,
    *,
    limit: int,
    overlong: str,
    noun: str = "prompts",
    limit_key: str = "data.max_prompt_tokens",
    kept_part: str = "last",
    truncation: str = "truncate_left",
) -> np.ndarray:
    """Return which sequences to keep, bool [N]. If `overlong` truncates sequences, all of them are kept.

    lengths: int [N], the number of tokens of each sequence.
    truncation: the value of `overlong` that truncates sequences.
    noun, limit_key, kept_part: words for error messages: the kind of the sequences, the config key of
        `limit`, and which tokens of a truncated sequence the caller keeps.

    Raises ValueError for a limit < 1 and for an unknown `overlong`. If a sequence is too long, raises
    ValueError if `overlong` is "error", or if "drop" would drop all sequences.
    """
    if limit < 1:
        raise ValueError(f"{limit_key}={limit} must be at least 1.")
    if overlong not in ("error", "drop", truncation):
        raise ValueError(f"data.overlong_prompts={overlong!r}: choose error, drop or {truncation}.")
    fits = lengths <= limit
    if fits.all():
        return fits
    summary = (
        f"{(~fits).sum()} of {len(lengths)} {noun} have more than {limit_key}={limit} tokens, "
        f"the longest {lengths.max()}"
    )
    if overlong == "error":
        raise ValueError(
            f"{summary}: raise the limit, or set data.overlong_prompts=drop or ={truncation}, which keeps "
            f"their {kept_part} tokens."
        )
    if overlong == "drop" and not fits.any():
        raise ValueError(
            f"{summary}: data.overlong_prompts=drop would drop all. Raise the limit or choose {truncation}."
        )
    log.info("%s; data.overlong_prompts=%s", summary, overlong)
    return fits if overlong == "drop" else np.ones_like(fits)
