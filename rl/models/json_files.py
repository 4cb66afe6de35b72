"""The JSON files of a model directory, and the types of the values that the libraries and this program read.

Without this check, a value of a wrong type would end the run later, in a library whose message names no file
and no key.
"""

import contextlib
import difflib
import itertools
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
READ = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("processor_config.json", "chat_template.json"),
)
"""Files with a JSON object that transformers or vLLM read if they exist."""
POINTER = b"version https://git-lfs.github.com/spec/"
"""Beginning of the text file that Git LFS (large file storage) puts in place of a large file."""
DTYPES = ("auto", "float64", "float32", "float16", "bfloat16")
TEXTS = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja")
"""Other files that transformers or vLLM read if they exist. They treat a file that cannot be opened as
missing."""


OTHER_KEYS = ("added_tokens_decoder", "weight_map", "id2label", "label2id", "auto_map")
"""Objects with keys that the user chooses."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any, least: int = 0, below: int = 2**31) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < below


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(element) is kind for element in value)


def _is_token(value: Any) -> bool:
    return all(_is_whole(id) for id in (value if isinstance(value, list) else [value]))


KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    r"architectures": ("a list with one name", lambda v: _is_list(v, str) and len(v) == 1),
    r"layer_types": ("a list of names", lambda v: _is_list(v, str)),
    r"mlp_only_layers|no_rope_layers": ("a list of integers", lambda v: _is_list(v, int)),
    r"model_type|hidden_act(ivation)?|tokenizer_class|transformers_version": (
        "a text",
        lambda v: isinstance(v, str),
    ),
    r"(text|vision|quantization)_config|rope_(parameters|scaling)|added_tokens_decoder": (
        "an object",
        lambda v: isinstance(v, dict),
    ),
    r"(torch_)?dtype": (f"one of {', '.join(DTYPES)}", lambda v: v in DTYPES),
    r"(padding|truncation)_side": ("left or right", lambda v: v in ("left", "right")),
    r"num_hidden_layers|depth": ("an integer from 1 to 9999", lambda v: _is_whole(v, 1, 10_000)),
    r"num_(nextn_predict_layers|mtp_modules|(local_)?experts(_per_tok)?)|mtp_num_hidden_layers"
    r"|n_((routed|shared)_experts|group)|topk_group|first_k_dense_replace|experts_per_token": (
        "an integer from 0 to 9999",
        lambda v: _is_whole(v, 0, 10_000),
    ),
    r"shared_(expert_)?intermediate_size|sliding_window": ("an integer of at least 0", _is_whole),
    r"num_(attention|key_value)_heads|(hidden|vocab|patch|\w*intermediate|\w*merge)_size|(\w+_)?head_dim"
    r"|max_position_embeddings|full_attention_interval|linear_(num_(key|value)_heads|conv_kernel_dim)"
    r"|\w+_lora_rank|rotary_dim|r": ("an integer of at least 1", lambda v: _is_whole(v, 1)),
    r"\w+_eps|rope_theta|rope_local_base_freq|factor|\w+_(multiplier|scaling_factor|rotary_factor)"
    r"|logits_scaling|original_max_position_embeddings|query_pre_attn_scalar|swiglu_limit|model_max_length": (
        "a positive number",
        lambda v: _is_number(v) and v > 0,
    ),
    r"lora_alpha|temperature|top_[kp]|min_p|repetition_penalty|max_(new_tokens|length)": (
        "a number",
        _is_number,
    ),
    r"use_\w+|tie_\w+|\w+_bias|norm_topk_prob|add_[be]os_token|do_sample|output_(hidden_states|attentions|scores)"
    r"|clean_up_tokenization_spaces|split_special_tokens": ("true or false", lambda v: isinstance(v, bool)),
    r"pad_token_id": ("a token id", lambda v: v == -1 or _is_token(v)),
    r"\w+_token_id": ("a token id, or a list of them", _is_token),
    r"chat_template": ("a text", lambda v: isinstance(v, str | dict) or _is_list(v, dict)),
    r"(bos|eos|pad|unk)_token": ("a text", lambda v: isinstance(v, str | dict)),
}
"""Pattern of keys -> the type of their values, in words and as a test; the first matching pattern decides."""


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; its values have the types of KINDS.

    Raises a ValueError that names the file, and also the key if a value has a wrong type.
    """
    content = _read(path)
    try:
        found = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}; copy it again.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds {_short(found)}, not a JSON object; copy it again.")
    check_types(found, path)
    return found


def _read(path: Path) -> bytes:
    refuse_pointer(path)
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # a read may wait for ever
            raise ValueError(
                f"{path} is not a file but a FIFO, socket or device; put the model's file there."
            )
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; copy it again.") from error


def similar_beside(path: Path, fits: Callable[[Path], bool]) -> str:
    """Return "did you mean ...? If not, " for a missing path whose directory has a similar name, else "".

    fits: whether an entry of the directory can be meant.
    """
    entries: list[str] = []
    with contextlib.suppress(OSError), os.scandir(path.parent) as found:
        entries = [entry.name for entry in itertools.islice(found, 10_000) if entry.name != path.name]
    near = [path.with_name(name) for name in difflib.get_close_matches(path.name, entries)]
    meant = next(filter(fits, near), None)
    return f"did you mean {meant}? If not, " if meant else ""


def refuse_pointer(path: Path) -> None:
    """Raise ValueError for a file that Git LFS has not fetched; a file that cannot be opened passes."""
    with contextlib.suppress(OSError):
        if path.is_file() and path.open("rb").read(len(POINTER)) == POINTER:
            raise ValueError(
                f"{path} is a Git LFS pointer instead of the file; run git lfs pull in its directory."
            )


def check_types(values: dict[str, Any], path: Path, prefix: str = "") -> None:
    """Raise ValueError for the first value that does not have its type in KINDS; null is not checked."""
    for key, value in values.items():
        for pattern, (words, fits) in KINDS.items():
            if value is not None and re.fullmatch(pattern, key):
                if not fits(value):
                    raise ValueError(f"{path}: {prefix}{key}={_short(value)} must be {words}.")
                break
        if isinstance(value, dict) and key not in OTHER_KEYS:
            check_types(value, path, f"{prefix}{key}.")


def check_files(directory: str | Path) -> None:
    """Raise ValueError for a file of a model directory that is unreadable or has a value of a wrong type."""
    for name in (*READ, *TEXTS):
        path = Path(directory, name)
        if os.path.lexists(path):
            read_object(path) if name in READ else _read(path)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
