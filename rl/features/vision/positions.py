"""Rotary positions of prompts with images: time, row and column of each token (M-RoPE).

A token of text has one position on all three axes. The tokens of an image that begins at position p have
p, p + row and p + column. The text after the image continues from p + the larger number of rows or columns.
For example, after an image of 2 x 3 tokens at position 10 the text continues at 13 (arXiv:2409.12191,
section 2.1; `get_rope_index` of transformers). Plain numpy.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rl.data.images import PromptImage


def image_positions(length: int, images: Sequence[PromptImage]) -> tuple[np.ndarray, int]:
    """Return the positions of tokens from 0 on, int64 [3, length], and the position of the next token."""
    parts, done, position = [], 0, 0

    def text(end: int) -> None:
        nonlocal done, position
        parts.append(np.broadcast_to(np.arange(position, position + end - done), (3, end - done)))
        done, position = end, position + end - done

    for image in images:
        text(image.offset)
        rows, columns = (size // image.format.merge for size in image.grid)
        parts.append(np.indices((1, rows, columns)).reshape(3, -1) + position)
        done, position = done + rows * columns, position + max(rows, columns)
    text(length)
    return np.concatenate(parts, axis=1), position


def row_positions(
    num_tokens: int, starts: np.ndarray, lengths: np.ndarray, images: Sequence[Sequence[PromptImage]]
) -> np.ndarray:
    """Return the positions of a packed row, int64 [3, num_tokens]; 0 for padding.

    starts: positions in the row of each sample's first token and of its first response token, int64 [2, B].
    lengths: numbers of tokens of each prompt and each response, int64 [2, B]. images:
    images of each sample, in the order of their tokens.
    """
    out = np.zeros((3, num_tokens), np.int64)
    for (first, answer), (prompt, response), own in zip(starts.T, lengths.T, images, strict=True):
        before = [image for image in own if image.offset < prompt]
        given = [replace(image, offset=image.offset - int(prompt)) for image in own[len(before) :]]
        out[:, first : first + prompt], position = image_positions(int(prompt), before)
        out[:, answer : answer + response] = image_positions(int(response), given)[0] + position
    return out
