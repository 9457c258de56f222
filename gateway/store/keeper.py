"""Supervises an embedded Valkey server: restarts it when it exits, always at the same address."""

import logging
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path

import anyio
from anyio.abc import TaskGroup, TaskStatus

from gateway.core.errors import ConfigError, StartupBlocked
from gateway.events import about
from gateway.store.embedded import temporary_folder, valkey_in
from gateway.tasks import TasksBeside

log = logging.getLogger("gateway.store")

GOOD_SPELL_S = 60.0
"""A server that ran for this long before it exited is restarted without a pause. A choice, as for workers
(docs/scaling.md)."""

PAUSE_S = 0.5
PAUSE_MAX_S = 30.0
"""The first pause before a restart, and the longest: each is twice the one before. A choice: soon after a
chance failure, seldom while the disk stays full."""


def next_pause_s(before_s: float, lived_s: float) -> float:
    """Return the pause before restarting a server that ran for `lived_s`, after a pause of `before_s`."""
    if lived_s >= GOOD_SPELL_S:
        return 0.0
    return min(PAUSE_MAX_S, max(PAUSE_S, 2 * before_s))


async def keep_store(folder: Path | None, *, task_status: TaskStatus[str]) -> None:
    """Run a server until cancelled; report its URL, which never changes, once it responds.

    It stores its data in `folder`, or nothing if that is None.

    Raises:
        ConfigError: the first start failed.
    """
    pause_s, is_first = 0.0, True
    with temporary_folder() if folder is None else nullcontext(folder) as where:
        while True:
            started_at = anyio.current_time()
            try:
                async with valkey_in(where, is_temporary=folder is None, keeps=folder is not None) as valkey:
                    if is_first:
                        task_status.started(valkey.url)
                        is_first = False
                    else:
                        log.warning("the embedded store runs again", extra=about("embedded_store_started"))
                    reason = await valkey.ended()
            except (ConfigError, OSError) as error:
                if is_first:
                    kind = type(error) if isinstance(error, ConfigError) else StartupBlocked
                    raise kind(f"{error}; or name a `store:` in the configuration") from error
                reason = str(error)
            pause_s = next_pause_s(pause_s, anyio.current_time() - started_at)
            log.error(
                "the embedded store %s; it is started again in %g s",
                reason,
                pause_s,
                extra=about("embedded_store_ended", reason=reason, again_s=pause_s),
            )
            await anyio.sleep(pause_s)


async def start_store(tasks: TaskGroup, folder: Path | None, stops: AsyncIterator[object]) -> str | None:
    """Run a store in `tasks`, and return its URL once it responds: up to two minutes later, if it has to load
    a lot from `folder`. Return None if one of `stops` comes first: then there is no store, or it is about to
    be cancelled.

    Raises:
        ConfigError: it cannot be started.
    """
    url, is_told = None, False

    async def wait_told() -> None:
        nonlocal is_told
        await anext(stops)
        is_told = True
        race.cancel_scope.cancel()

    async with TasksBeside(ConfigError) as race:
        race.start_soon(wait_told)
        url = await tasks.start(keep_store, folder)
    return None if is_told else url
