"""A hook of mkdocs: add the pages to the site that are generated and not stored in docs/."""

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from tools.docs.generate import config_page  # noqa: E402
from tools.docs.matrix import matrix_page  # noqa: E402


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add config.md, the page of all keys, and matrix.md, the page of pairs of features."""
    files.append(File.generated(config, "config.md", content=config_page()))
    files.append(File.generated(config, "matrix.md", content=matrix_page()))
    return files
