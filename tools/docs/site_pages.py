"""Hooks of mkdocs: add the pages that are generated and not stored in docs/, and link papers to arXiv."""

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from tools.docs.api import api_page  # noqa: E402
from tools.docs.generate import config_page  # noqa: E402
from tools.docs.matrix import matrix_page  # noqa: E402


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add config.md, the page of all keys, matrix.md, of pairs of features, and api.md, of classes."""
    files.append(File.generated(config, "api.md", content=api_page()))
    files.append(File.generated(config, "config.md", content=config_page()))
    files.append(File.generated(config, "matrix.md", content=matrix_page()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Link the numbers of arXiv, which have four and five digits, outside of code and of other links."""
    parts = re.split(r"(```.*?```|`[^`]*`|\[[^\]]*\]\([^)]*\))", markdown, flags=re.DOTALL)
    number = re.compile(r"(?<![\d.])\d{4}\.\d{5}(?![\d.]*\d)")
    parts[::2] = [
        number.sub(lambda m: f"[{m[0]}](https://arxiv.org/abs/{m[0]})", part) for part in parts[::2]
    ]
    return "".join(parts)
