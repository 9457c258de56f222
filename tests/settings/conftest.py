"""A valid configuration to bend, and a way to write and read bent ones."""

from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import dedent

import pytest

from gateway.settings import CheckReport, Settings, check, load

PLAIN = """\
tokenizer: approximate
backends:
  light: {url: http://127.0.0.1:9001, profile: h100-tp1-light}
  push: {url: http://127.0.0.1:9002, profile: h100-tp2-push}
pools:
  light: [light]
  push: [push]
models:
  gemma-4:
    classes:
      - {class: image, when: {images: true}, pools: [light]}
      - {class: long_document, when: {prompt_tokens: ">= 16000"}, pools: [push]}
      - {class: short_chat, pools: [light, push]}
"""

Write = Callable[[str], Path]
Load = Callable[..., Settings]
Check = Callable[..., CheckReport]


@pytest.fixture(scope="session")
def plain() -> str:
    """A configuration with nothing wrong and nothing doubtful in it."""
    return PLAIN


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str) -> Path:
        path = tmp_path / "gateway.yaml"
        path.write_text(dedent(text), encoding="utf-8")
        return path

    return written


@pytest.fixture
def loaded(write: Write) -> Load:
    def read(text: str, environ: Mapping[str, str] | None = None) -> Settings:
        return load(write(text), environ or {})

    return read


@pytest.fixture
def checked(write: Write) -> Check:
    def read(text: str, environ: Mapping[str, str] | None = None) -> CheckReport:
        return check(write(text), environ or {})

    return read
