"""Rotary positions of prompts with images: time, row and column of each token (M-RoPE).

A token of text has one position on all three axes. The tokens of an image that begins at position p have p,
p + row and p + column; the text after it continues from p + the larger number of rows or columns
(arXiv:2409.12191, section 2.1; `get_rope_index` of transformers). Plain numpy.
"""

from collections.abc import Sequence

import numpy as np

from rl.data.images import Image


def image_positions(length: int, images: Sequence[Image]) -> tuple[np.ndarray, int]:
    """Return the positions of a prompt's tokens, int64 [3, length], and that of the token after it."""
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
    num_tokens: int, starts: np.ndarray, lengths: np.ndarray, images: Sequence[Sequence[Image]]
) -> np.ndarray:
    """Return the positions of a packed row, int64 [3, num_tokens]; 0 for padding.

    starts: positions in the row of each sample's first token and of its first response token, int64 [2, B].
    lengths: numbers of its prompt's and its response's tokens, int64 [2, B]. images: those of each sample.
    """
    out = np.zeros((3, num_tokens), np.int64)
    for (first, answer), (prompt, response), own in zip(starts.T, lengths.T, images, strict=True):
        out[:, first : first + prompt], position = image_positions(int(prompt), own)
        out[:, answer : answer + response] = np.arange(position, position + response)
    return out
