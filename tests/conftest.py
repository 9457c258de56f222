"""What every test shares: one event loop, asyncio's."""

import pytest
from support import browser, node_sdk
from support.redis_server import LEGS, legs


def pytest_report_header() -> list[str]:
    """Say against which servers the shared store is tested, and with what the gateway is."""
    missing = [leg for leg in LEGS if leg not in legs()]
    note = f"; no build of {', '.join(missing)} for this Python" if missing else ""
    return [f"store: {', '.join(legs())}{note}", node_sdk.described(), browser.described()]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
