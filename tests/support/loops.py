"""The event loops that tests run on."""

import pytest


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def on_both_loops(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Tests of pytest run on asyncio's own loop, the gateway on uvloop: its transports and timers are others.

    For modules that say `anyio_backend = on_both_loops`.
    """
    return "asyncio", {"use_uvloop": request.param}
