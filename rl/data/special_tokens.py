"""Special tokens: which of them stay in a response's text, and how text that only looks like one is
tokenized.

A policy, an environment or a data set may write "<|im_end|>" as text. In a prompt, this text must not end a
turn. Therefore `hide` marks such text in the content of messages before the chat template renders them: it
replaces the first character of the text by a character that Unicode reserves for internal use. Lengths and
positions stay the same. For example, "<|im_end|>" becomes the noncharacter U+FDD0 followed by "|im_end|>".
`encode` then tokenizes marked text as plain text, and only what the template itself wrote becomes special
tokens. If a text contains no such string, the result is what the tokenizer alone returns.
"""

import copy
import functools
import re
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

FIRST_MARK, NUM_MARKS = 0xFDD0, 32
"""Code point of the first mark, and the number of marks. The marks are noncharacters of Unicode. Each
different first character of the special tokens has its own mark. If a message itself contains a mark, it
becomes U+FFFD."""

_allowed: "weakref.WeakSet[PreTrainedTokenizerBase]" = weakref.WeakSet()


def allow_in_content(tokenizer: PreTrainedTokenizerBase) -> None:
    """From now on, read special tokens in the content of messages as special
    (`data.allow_special_tokens`)."""
    _allowed.add(tokenizer)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of a tokenizer's special tokens."""
    added = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def first_special(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the special token with which a text begins, as a prompt that is rendered already; "" if none."""
    found = _special(tokenizer, len(tokenizer)).pattern.match(text.lstrip())
    return found[0] if found else ""


def hide(value: Any, tokenizer: PreTrainedTokenizerBase, kept: Collection[str] = ()) -> Any:
    """Return a text, or a nested list or dict of texts, with the special tokens in it marked as plain text.

    kept: special tokens that are not marked.
    """
    marked = _special(tokenizer, len(tokenizer))
    return value if tokenizer in _allowed else marked.hide(value, frozenset(kept))


def show(text: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a text in which `hide` has marked special tokens in its original form."""
    return text if text.isascii() else text.translate(_special(tokenizer, len(tokenizer)).first)


def encode(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    add_special_tokens: bool = False,
    offsets: bool = False,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the token ids of texts, int32 [n] each; special tokens that `hide` has marked become plain text.

    offsets: whether to return, as a second list, the first and the end position of each token's characters,
        int64 [n, 2] each.

    Raises ValueError if the tokenizer cannot read a marked special token as plain text.
    """
    if not texts:
        return [], []
    options = {"return_offsets_mapping": True} if offsets else {}
    encoded = tokenizer(
        list(texts),
        add_special_tokens=add_special_tokens,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
        **options,
    )
    ids = [np.array(each, np.int32) for each in encoded["input_ids"]]
    places = [np.array(p, np.int64).reshape(-1, 2) for p in encoded["offset_mapping"]] if offsets else []
    special = _special(tokenizer, len(tokenizer))
    for number, text in enumerate(texts):
        if not text.isascii() and special.marks.search(text):
            ids[number], place = special.encode(text, add_special_tokens)
            places[number : number + 1] = [place] if offsets else []
    return ids, places


def decode_hidden(ids: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of the tokens of a context, int32 [n].

    If plain tokens spell a special token, their text is marked as plain text.
    """
    special = special_ids(tokenizer)
    text = _text(ids, tokenizer)
    is_special = np.isin(ids, list(special))
    known = _special(tokenizer, len(tokenizer))
    if tokenizer in _allowed or len(known.pattern.findall(text)) <= is_special.sum():
        return text
    parts = np.split(ids, np.flatnonzero(np.diff(is_special.astype(int))) + 1)
    texts = [_text(part, tokenizer) for part in parts]
    return "".join(t if p[0] in special else hide(t, tokenizer) for p, t in zip(parts, texts))


def _text(ids: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> str:
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert isinstance(text, str), "a list of texts belongs to a list of lists"
    return text


class _Special:
    """The special tokens of a tokenizer, and their marked forms."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        added, special = tokenizer.added_tokens_decoder, special_ids(tokenizer)
        self._tokens = {token.content: (id, token) for id, token in added.items() if id in special}
        texts = sorted(filter(None, self._tokens), key=len, reverse=True)
        firsts = sorted({text[0] for text in texts})[:NUM_MARKS]
        self.first = {FIRST_MARK + i: first for i, first in enumerate(firsts)}
        """Mark -> the character that it replaces."""
        mark = {first: chr(code) for code, first in self.first.items()}
        self._marked = {text: mark[text[0]] + text[1:] for text in texts if text[0] in mark}
        self.marks = re.compile(f"[{chr(FIRST_MARK)}-{chr(FIRST_MARK + NUM_MARKS - 1)}]")
        self.pattern = re.compile("|".join([*map(re.escape, self._marked), self.marks.pattern]))

    def hide(self, value: Any, kept: frozenset[str]) -> Any:
        if isinstance(value, str):
            if value.isascii() and not any(first in value for first in self.first.values()):
                return value  # a fast way out: the pattern would find nothing, but is slow
            return self.pattern.sub(
                lambda found: found[0] if found[0] in kept else self._marked.get(found[0], "\ufffd"), value
            )
        if isinstance(value, dict):
            return {self.hide(key, kept): self.hide(item, kept) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._hide_items(value, kept))
        return value

    def _hide_items(self, items: Sequence[Any], kept: frozenset[str]) -> list[Any]:
        """Hide the items of a list, for example the parts of a message's content.

        A template may join the texts of parts, so a special token that only the joined text has is marked,
        too.
        """
        hidden = [self.hide(item, kept) for item in items]
        places = [n for n, item in enumerate(items) if isinstance(item, dict) and item.get("type") == "text"]
        texts, each = ["".join(str(part[n].get("text")) for n in places) for part in (items, hidden)]
        if len(places) < 2 or (joined := self.hide(texts, kept)) == each:
            return hidden
        marked, end = "".join(j if j != t else e for j, t, e in zip(joined, texts, each)), 0
        for n in places:
            begin, end = end, end + len(str(items[n].get("text")))
            hidden[n] = {**hidden[n], "text": marked[begin:end]}
        return hidden

    @functools.cached_property
    def _splitting(self) -> tuple[Any, dict[int, int]]:
        """A second tokenizer, and a map from its ids to the ids of the model.

        The second tokenizer has the marked texts as added tokens and reads the special tokens as plain text.
        """
        name = self._tokenizer.name_or_path
        if not self._tokenizer.is_fast:
            raise ValueError(
                f"a message contains the text of a special token, which the tokenizer of {name} cannot read "
                "as plain text; add its tokenizer.json, remove the text, or set "
                "data.allow_special_tokens=true"
            )
        backend = copy.deepcopy(self._tokenizer.backend_tokenizer)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        flags = ("single_word", "lstrip", "rstrip", "normalized")
        for text, marked in self._marked.items():
            options = {flag: getattr(self._tokens[text][1], flag) for flag in flags}
            backend.add_tokens([AddedToken(marked, special=False, **options)])
        return backend, {backend.token_to_id(m): self._tokens[t][0] for t, m in self._marked.items()}

    def encode(self, text: str, add_special_tokens: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids and positions of `rl.data.special_tokens.encode` for one text.

        It swaps special tokens and marked texts, and tokenizes the result with the second tokenizer.
        """
        backend, own = self._splitting
        other = self._marked | {marked: text for text, marked in self._marked.items()}
        # A mark without the rest of its token comes from parts that the template did not join after all.
        other |= {chr(mark): first for mark, first in self.first.items()}
        pattern = "|".join(map(re.escape, sorted(other, key=len, reverse=True)))
        found = backend.encode(
            re.sub(pattern, lambda match: other[match[0]], text), add_special_tokens=add_special_tokens
        )
        plain = [id for id, is_added in zip(found.ids, found.special_tokens_mask) if not is_added]
        if wrong := set(plain) & set(own.values()):
            token, name = self._tokenizer.convert_ids_to_tokens(min(wrong)), self._tokenizer.name_or_path
            raise ValueError(
                f"a message contains the text {token!r}, which the tokenizer of {name} reads as a special "
                "token wherever it is; remove it, or set data.allow_special_tokens=true"
            )
        ids = np.array([own.get(id, id) for id in found.ids], np.int32)
        return ids, np.array(found.offsets, np.int64).reshape(-1, 2)


@functools.lru_cache(maxsize=8)
def _special(tokenizer: PreTrainedTokenizerBase, size: int) -> _Special:
    return _Special(tokenizer)


# ---- responses ----


def decode(token_ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of tokens, including special tokens."""
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    assert isinstance(text, str), "a list of texts belongs to a list of lists"
    return text


def decode_responses(
    responses: Sequence[np.ndarray], tokenizer: PreTrainedTokenizerBase, kept: Collection[int]
) -> list[str]:
    """Return the texts of responses, int32 [n] each, without special tokens except the ids in `kept`."""
    if not kept or not any(np.isin(ids, list(kept)).any() for ids in responses):
        # The empty list is handled here, because some tokenizers return one text for it instead of no text.
        found: list[Any] = list(responses)  # arrays: the library accepts them, but its annotation does not
        return tokenizer.batch_decode(found, skip_special_tokens=True) if responses else []
    dropped = list(special_ids(tokenizer) - set(kept))
    shown: list[Any] = [ids[~np.isin(ids, dropped)] for ids in map(np.asarray, responses)]
    return tokenizer.batch_decode(shown, skip_special_tokens=False)
