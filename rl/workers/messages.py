"""Texts in the messages of a worker. Only the standard library is imported, so that a worker starts fast."""

import traceback

MAX_ERROR_CHARS = 4000


def explain(error: BaseException) -> str:
    """Format a traceback; the middle of a very long one is left out."""
    traceback.clear_frames(error.__traceback__)  # they may hold the objects that filled the memory
    try:
        text = "".join(traceback.format_exception(error)).rstrip()
    except MemoryError:
        text = "MemoryError"
    if len(text) > MAX_ERROR_CHARS:
        text = f"{text[: MAX_ERROR_CHARS // 4]}\n[...]\n{text[-MAX_ERROR_CHARS * 3 // 4 :]}"
    return encodable(text)


def last_sentence(text: str) -> str:
    """Return a failure as one line: the exception of a traceback of `explain` without its frames."""
    lines = text.splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
    after = lines[frames[-1] + 1 :] if frames else lines
    return " ".join(" ".join(after or lines[-1:]).split())[:MAX_ERROR_CHARS]


def too_slow(timeout_s: float) -> str:
    return f"the call took longer than the limit of {timeout_s:g} s"


def encodable(text: str) -> str:
    """Replace lone surrogates by `?`, so that the text can be encoded as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")
