"""What several of these tests run on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.redis_server import RedisServer, own_server


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RedisServer]:
    """A Valkey of the test's own, which keeps what it is told through a restart."""
    folder = tmp_path / "store"
    folder.mkdir()
    with own_server("valkey-9", folder, keeps=True) as server:
        yield server
