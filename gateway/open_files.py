"""The limit on open files, and how much of it is used.

A request in flight has two connections, and Linux starts processes with a limit of 1,024 open files, which is
reached with 500 callers. A process may raise it to its hard limit, usually 524,288 or more; the low default
exists only for programs that use select(2). So the gateway raises it, like Go programs and most servers.
"""

import errno
import logging
import os
import resource
from contextlib import suppress

import anyio

from gateway.events import about

log = logging.getLogger("gateway.process")

ENOUGH = 1_048_576
"""Used if the hard limit is higher, or unlimited. A choice: Linux's own ceiling for a process
(`fs.nr_open`)."""

LOOK_S = 5.0
"""Interval between checks. A choice: listing the descriptors takes longer the more there are."""

SHORT_ABOVE = 0.9
"""Share of the limit above which a warning is logged. A choice: early enough to act."""

_FOLDER = "/proc/self/fd"


def are_used_up(error: OSError) -> bool:
    """Return whether an error says that this process, or the system, can open no more files."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def raise_limit() -> None:
    """Raise the limit of this process and its children as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS does not report its effective limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit() -> int:
    """Return how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH if soft == resource.RLIM_INFINITY else soft


def has_folder() -> bool:
    """Return whether the system says which files a process has open. This takes none itself."""
    return os.path.isdir(_FOLDER)


def used() -> tuple[int, int]:
    """Return how many files are open, and how many may be: as many, if none is left to count them with."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        return len(os.listdir(_FOLDER)), limit
    except OSError:
        return limit, limit


class OpenFiles:
    """Warns when few file descriptors are left: beyond the limit, new connections are closed silently."""

    def __init__(self) -> None:
        """Assume that many are left."""
        self._is_short = False

    async def run(self) -> None:
        """Check periodically until cancelled, if the system supports it."""
        while has_folder():
            self.look()
            await anyio.sleep(LOOK_S)

    def look(self) -> None:
        """Log when few are left, and when that is over."""
        count, limit = used()
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
