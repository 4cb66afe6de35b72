"""The site of docs/, built as tools/docs/mkdocs.yml says: no warning, and nothing from another host."""

import os
import re
import subprocess
import sys

from tests.spawn import ROOT

LOADED = re.compile(r"<(?:script|img|iframe|source)[^>]* src=\"(https?:)?//|<link[^>]* href=\"(https?:)?//")


def test_the_site_builds_without_a_warning(tmp_path):
    site = [
        "--strict",
        "--config-file",
        ROOT / "tools" / "docs" / "mkdocs.yml",
        "--site-dir",
        tmp_path / "site",
    ]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # an announcement of the theme's authors
    command = [sys.executable, "-m", "mkdocs", "build", *site]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 40
    assert [page.name for page in pages if LOADED.search(page.read_text())] == []
