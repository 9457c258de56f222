"""Real servers for the tests of this folder.

What a script does on each supported server is shown in tests/store. Here, most tests are of what is done with
it, and run on the newest server only.
"""

from collections.abc import Callable, Iterator

import pytest
from support.redis_server import shared_servers


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Return a function that gives the URL of a leg's server, for all tests of this folder."""
    with shared_servers(tmp_path_factory.mktemp) as servers:
        yield servers
