"""The event loops that tests run on.

By default that is asyncio's own, as where uvloop is not to be had. The gateway runs on uvloop: its transports
and timers are others. Modules choose by `anyio_backend = on_both_loops`, or `on_uvloop`.
"""

import pytest


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def on_both_loops(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """For what uses transports itself."""
    return "asyncio", {"use_uvloop": request.param}


@pytest.fixture(params=[True], ids=["uvloop"])
def on_uvloop(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """For long modules about whole requests, which tests in tests/e2e make on asyncio's loop, too."""
    return "asyncio", {"use_uvloop": request.param}
