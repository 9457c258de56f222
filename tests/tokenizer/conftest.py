"""A small vocabulary of Gemma's kind, built and loaded."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.vocabulary import gemma_like
from tokenizers import Tokenizer

from gateway.tokenizer import Vocabulary, build, load


@pytest.fixture(scope="session")
def document() -> dict[str, Any]:
    """The tokenizer.json as a value. Shared: copy before changing."""
    return gemma_like()


@pytest.fixture(scope="session")
def source(document: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    path.write_text(json.dumps(document))
    return path


@pytest.fixture(scope="session")
def rank_file(source: Path) -> Path:
    path = source.with_name("small.tiktoken")
    build(source, path)
    return path


@pytest.fixture(scope="session")
def vocabulary(rank_file: Path) -> Vocabulary:
    return load(rank_file)


@pytest.fixture(scope="session")
def true_count(source: Path) -> Callable[[str], int]:
    """Counts as Hugging Face's own library does."""
    tokenizer = Tokenizer.from_file(str(source))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
