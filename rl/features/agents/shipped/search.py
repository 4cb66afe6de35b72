"""Tool: search over a local index of texts with BM25 (the package bm25s, extra `search`).

python -m rl.features.agents.shipped.search TEXTS.jsonl INDEX        rows {"text": ..., "title": ...}

agents:
  tools: [{function: rl.features.agents.shipped.search:search, kwargs: {index: INDEX}}]
"""

import functools
import json
import sys

import bm25s


@functools.cache
def _load(index: str) -> bm25s.BM25:
    return bm25s.BM25.load(index, load_corpus=True, mmap=True)  # workers share its pages


def search(query: str, *, index: str, count: int = 3) -> str:
    """Search a collection of texts and return the best matches.

    Args:
        query: key words, or a question
    """
    retriever = _load(index)
    tokens = bm25s.tokenize([query], show_progress=False)
    count = min(count, len(retriever.corpus))
    texts, scores = retriever.retrieve(tokens, k=count, show_progress=False)
    found = [text for text, score in zip(texts[0], scores[0], strict=True) if score > 0]
    shown = ["\n".join(filter(None, [text.get("title"), text["text"]])) for text in found]
    return "\n\n".join(f"[{i}] {text}" for i, text in enumerate(shown, 1)) or "nothing found"


def build_index(path: str, index: str) -> None:
    """Write an index of the texts in a JSONL file to the directory `index`."""
    with open(path, encoding="utf-8") as lines:
        texts = [json.loads(line) for line in lines]
    retriever = bm25s.BM25(corpus=texts, backend="numpy")
    indexed = (f"{text.get('title', '')} {text['text']}" for text in texts)
    retriever.index(bm25s.tokenize(list(indexed), show_progress=False), show_progress=False)
    retriever.save(index, show_progress=False)


if __name__ == "__main__":
    build_index(*sys.argv[1:])
