"""What every test shares: one event loop, asyncio's."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
