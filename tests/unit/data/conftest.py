from pathlib import Path

import pytest

from rl.data.prompts import load_tokenizer
from tools.make_toy import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory) -> Path:
    """Return a directory with the toy's tokenizer, which no test may change."""
    path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def tokenizer(tokenizer_dir):
    """Return the toy's tokenizer, which the test may change."""
    return load_tokenizer(tokenizer_dir)
