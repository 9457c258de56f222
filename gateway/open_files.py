"""How many files and connections this process may have open, and how many it has.

A request in flight has two connections, and Linux starts a process with room for 1,024 files: so 500 callers
would be all. The kernel lets every process have as many as its hard limit says, mostly 524,288 or more, if it
asks; the low number is only for programs that use select(2). So a gateway asks, as Go's programs and most
servers do.
"""

import logging
import os
import resource
from contextlib import suppress

import anyio

from gateway.events import about

log = logging.getLogger("gateway.process")

ENOUGH = 1_048_576
"""Where the hard limit is higher than this, or there is none."""

LOOK_S = 5.0
SHORT_ABOVE = 0.9
"""Share of the limit, above which few are left."""

_FOLDER = "/proc/self/fd"


def raise_limit() -> int:
    """Let this process, and those it starts, have as many files as the system allows; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS has limits that it does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class OpenFiles:
    """Says when few are left: beyond the limit, new connections are closed without a word."""

    def __init__(self) -> None:
        """Take it that many are left."""
        self._is_short = False

    async def run(self) -> None:
        """Look until cancelled, where the system can tell."""
        while os.path.isdir(_FOLDER):  # noqa: ASYNC240 - never on a disk
            self.look()
            await anyio.sleep(LOOK_S)

    def look(self) -> None:
        """Write a line if few are left, or are no longer."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        try:
            count = len(os.listdir(_FOLDER))
        except OSError:  # it cannot even be opened to be looked at
            count = limit
        was_short, self._is_short = self._is_short, 0 < limit * SHORT_ABOVE < count
        if self._is_short and not was_short:
            log.error(
                "%d of at most %d files and connections are open: beyond that, callers are not answered",
                count,
                limit,
                extra=about("open_files_short", open=count, limit=limit),
            )
        elif was_short and not self._is_short:
            log.warning(
                "%d of at most %d files and connections are open",
                count,
                limit,
                extra=about("open_files_enough", open=count, limit=limit),
            )
