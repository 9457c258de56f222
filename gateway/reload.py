"""Reloads the configuration at run time: read, check, compare, and apply it atomically.

An invalid file changes nothing. Requests in flight continue under their policy; queued ones are decided
again. Settings that are read only at startup are reported, and keep their values.
"""

import errno
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from gateway import open_files, settings
from gateway.core.errors import ConfigError
from gateway.core.reloads import Reload, Version
from gateway.events import about
from gateway.ports import Clock
from gateway.settings import Document, Settings
from gateway.settings.files import read

log = logging.getLogger("gateway.config")

T = TypeVar("T")
_SIGNAL = "signal"

VERSIONS_KEPT = 10
"""Earlier configurations that can be rolled back to. A choice: each is a whole file in memory."""

LOOK_S = 1.0
"""Polling interval of the file. A choice: a change is applied once two polls agree, because editors take a
while."""

UNREADABLE_LOOKS = 5
"""Failed polls in a row before a warning. A choice: until then, the file may be in the process of being
replaced."""


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Run a function in a thread.

    Raises:
        OSError: no thread can be started: a limit on processes and threads is reached.
    """
    try:
        return await anyio.to_thread.run_sync(partial(function, *args), abandon_on_cancel=True)
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error


class Reloader:
    """Holds the configuration in force, and replaces it. One per process."""

    def __init__(
        self,
        started: Settings,
        environ: Mapping[str, str],
        prepare: Callable[[Settings], Callable[[], Awaitable[None]]],
        in_flight: Callable[[], Mapping[str, int]],
        clock: Clock,
        on_reload: Callable[[Reload], None],
    ) -> None:
        """Begin with `started` in force.

        Args:
            started: The configuration that the process was started with.
            environ: Source of `${VAR}` and secrets.
            prepare: Returns a function that applies valid settings and cannot fail; raises ConfigError if
                they cannot be applied. Called in a thread; changes nothing itself.
            in_flight: Returns the number of running requests per backend.
            clock: Source of times.
            on_reload: Called with the result of every attempt.
        """
        self._started = started
        self._environ = environ
        self._prepare = prepare
        self._in_flight = in_flight
        self._clock = clock
        self._on_reload = on_reload
        self._turn = anyio.Lock()
        self._versions = deque([Version(started.version, started.source, clock.wall(), "start")])
        self._refused: bytes | None = None  # the last one tried, if it was invalid
        self._has_failed = False  # the last one tried was not applied, or could not be read
        self.running = started

    @property
    def versions(self) -> Sequence[Version]:
        """Recent configurations, the current one first."""
        return tuple(self._versions)

    @property
    def path(self) -> Path:
        """The configuration file."""
        return self.running.path

    async def plan(self, source: bytes) -> Reload:
        """Return what another configuration would change, without applying it."""
        try:
            return (await self.preview(source))[1]
        except ConfigError as error:
            return Reload(error=str(error))

    async def preview(self, source: bytes, name: str = "") -> tuple[Settings, Reload]:
        """Return the settings of another configuration and what it would change, without applying it.

        `name`: what errors call its file, if it is not the one in use.

        Raises:
            ConfigError: it is invalid.
            OSError: this cannot be determined at the moment.
        """
        in_flight = self._in_flight()
        return await in_thread(self._beside, source, in_flight, name)  # may take 50 ms

    async def put(
        self, source: bytes, by: str = "put", check: Callable[[str], None] = lambda _: None
    ) -> Reload:
        """Apply a configuration and write it to the file, for the next start and for other processes.

        `check` may raise to prevent this. It is called with each version that is replaced: the one in force,
        when this process can change it no more, and what another process or an editor has written to the
        file since, unless it was refused.

        Raises:
            OSError: the file cannot be written. Nothing has changed.
            Exception: raised by `check`. Nothing has changed.
        """

        def check_written(written: bytes) -> None:
            if written not in (self._versions[0].source, self._refused):
                check(settings.version_of(written))

        async with self._turn:
            check(self._versions[0].id)
            return await self._replace(source, by, partial(_write, self.path, source, check_written))

    async def reread(self) -> Reload:
        """Read the file and apply it, because a signal asks for that. Keys in files are read again, too."""
        try:
            async with self._turn:  # not read before: `put` may be about to replace the file
                return await self._replace(await in_thread(read, self.path), _SIGNAL)
        except OSError as error:
            return self._not_read(error, _SIGNAL)

    async def watch(self) -> None:
        """Apply the file whenever it changes, until cancelled."""
        before: bytes | None = None
        in_vain = 0
        while True:
            await anyio.sleep(LOOK_S)
            try:
                async with self._turn:  # not read before, as in `reread`
                    source = await in_thread(read, self.path)
                    if source == before and source != self._refused and self._is_news(source):
                        await self._replace(source, "file")
            except OSError as error:
                if open_files.are_used_up(error):
                    continue  # which says nothing about the file
                in_vain += 1
                if in_vain == UNREADABLE_LOOKS:
                    self._not_read(error, "file")
            else:
                before, in_vain = source, 0

    def _not_read(self, error: OSError, by: str) -> Reload:
        found = Reload(error=f"{self.path}: cannot be read: {error.strerror}")
        _refuse(found.error, by)
        self._has_failed = True
        self._on_reload(found)
        return found

    def _is_news(self, source: bytes) -> bool:
        """Return whether this differs from the configuration in force, or was restored after a failure."""
        return self._has_failed or source != self._versions[0].source

    async def _replace(self, source: bytes, by: str, write: Callable[[], None] | None = None) -> Reload:
        """Apply a configuration. Requires the lock."""
        try:
            wanted, found, put_in_force = await self._prepared(source)
            if write is not None:  # only after all checks, because the next start reads it
                await anyio.to_thread.run_sync(write)
            await put_in_force()
        except ConfigError as error:
            self._refused, self._has_failed = source, True
            found = Reload(error=str(error))
            _refuse(str(error), by)
        else:
            is_news = self._has_failed or by == _SIGNAL  # who sends one wants to see that it has arrived
            self._refused, self._has_failed = None, False
            self.running = wanted
            if wanted.version != self._versions[0].id:
                self._versions.appendleft(
                    Version(wanted.version, source, self._clock.wall(), by, found.changes.at_start)
                )
                while len(self._versions) > VERSIONS_KEPT + 1:
                    self._versions.pop()
                is_news = True
            if is_news:
                _say(found, by)
        self._on_reload(found)
        return found

    async def _prepared(self, source: bytes) -> tuple[Settings, Reload, Callable[[], Awaitable[None]]]:
        """Return what `_replace` needs. Nothing has changed yet, so whatever goes wrong refuses the file.

        Raises:
            ConfigError: the configuration cannot be used.
            OSError: this cannot be determined at the moment.
        """
        try:
            wanted, found = await self.preview(source)
            return wanted, found, await in_thread(self._prepare, wanted)
        except (ConfigError, OSError):
            raise
        except Exception as error:
            log.exception("a configuration could not be examined", extra=about("internal_error"))
            raise ConfigError(
                f"{self.path}: the gateway failed on it ({type(error).__name__}), which is its own fault"
            ) from error

    def _beside(self, source: bytes, in_flight: Mapping[str, int], name: str) -> tuple[Settings, Reload]:
        new = settings.load(self.path, self._environ, source=source, name=name)
        wanted = settings.beside(self._started, self.running, new)
        wanted.require(self._environ, at_start=False)
        own = {name: getattr(self.running.document, name) for name in settings.LIVE}
        # Settings specific to one of several processes, such as a port, are not a change.
        changes = settings.changes(self._written.model_copy(update=own), new.document, in_flight)
        # Missing secrets of sections that are read only at startup affect the next start, and nothing now.
        warnings = sorted((*new.warnings, *new.unmet(self._environ)))
        return wanted, Reload(new.version, changes, tuple(str(one) for one in warnings))

    @cached_property
    def _written(self) -> Document:
        """The file's contents at startup; only needed from the first reload on.

        Of several processes, one that is started again later has a newer `source`.
        """
        return Document.model_validate(self._started.tree.data)


def _refuse(reason: str, by: str) -> None:
    log.error(
        "the new configuration was refused, the old one stays in force (%s): %s",
        by,
        reason,
        extra=about("config_refused", by=by, reason=reason),
    )


def _say(found: Reload, by: str) -> None:
    log.info(
        "configuration %s is in force (%s)",
        found.version,
        by,
        extra=about("config_applied", version=found.version, by=by),
    )
    for change in found.changes.now:
        log.info("configuration: %s", change, extra=about("config_change", change=str(change)))
    for section in found.changes.at_start:
        log.warning(
            "configuration: the change to %s takes effect only after a restart",
            section,
            extra=about("config_needs_restart", section=str(section)),
        )


def _write(path: Path, source: bytes, check: Callable[[bytes], None]) -> None:
    """Replace the file atomically. A symbolic link is preserved.

    `check` gets the contents that are replaced, if they can be read, and may raise to prevent that.
    """
    real = path.resolve()
    with NamedTemporaryFile(dir=real.parent, prefix=f".{real.name}.", delete=False) as file:
        try:
            file.write(source)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, real.stat().st_mode & 0o777)
            with suppress(OSError):
                check(read(real))
            os.replace(file.name, real)
        except BaseException:
            os.unlink(file.name)
            raise
