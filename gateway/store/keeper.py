"""A Valkey of the gateway's own, kept running: started again when it ends, always at the same address."""

import logging
from contextlib import nullcontext
from pathlib import Path

import anyio
from anyio.abc import TaskStatus

from gateway.core.errors import ConfigError, NotYet
from gateway.events import about
from gateway.store.embedded import temporary_folder, valkey_in

log = logging.getLogger("gateway.store")

GOOD_SPELL_S = 60.0
"""What lives this long after its start ended for a reason of its own, and is started again at once."""

PAUSE_S = 0.5
PAUSE_MAX_S = 30.0


def next_pause_s(before_s: float, lived_s: float) -> float:
    """Return how long to wait before starting again what lived for `lived_s`, after a pause of `before_s`."""
    if lived_s >= GOOD_SPELL_S:
        return 0.0
    return min(PAUSE_MAX_S, max(PAUSE_S, 2 * before_s))


async def keep_store(folder: Path | None, *, task_status: TaskStatus[str]) -> None:
    """Run a store until cancelled; report its URL once it answers. It is always at that URL.

    It keeps its data in `folder`, or, if that is None, nothing.

    Raises:
        ConfigError: it cannot be started the first time.
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
                    kind = type(error) if isinstance(error, ConfigError) else NotYet
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
