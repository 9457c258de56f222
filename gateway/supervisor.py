"""Supervises several gateway processes on one port: starts, watches, replaces and stops them.

The parent serves nothing. It holds the listening socket, so that a connection waiting to be accepted
outlives a crashed worker; each worker is a fresh interpreter (worker.py) that inherits the socket. Workers
share limits through the store; if none is configured, one is started for them.

The parent controls a worker through its standard input: first its order, a line of JSON; then a byte, to
drain; then another, to exit at once. EOF, however the parent ended, also means to drain. The worker replies
on its standard output with a single line: a `Report`. If it serves, its event loop then sends bytes: signs of
life.
"""

import json
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from gateway import interpreters
from gateway.clock import SystemClock
from gateway.core.errors import ConfigError, StartupBlocked
from gateway.core.value import valueclass
from gateway.events import about
from gateway.exiting import FAILURE, STOP_S, TOLD_S, signals_heard
from gateway.reload import LOOK_S, in_thread
from gateway.settings import Settings, beside, load
from gateway.settings.files import read
from gateway.sockets import bind, require_free, url_of
from gateway.store.keeper import next_pause_s, start_store
from gateway.store.process_name import process_name
from gateway.tasks import TasksBeside
from gateway.telemetry import logs

log = logging.getLogger("gateway.supervisor")

END_S = TOLD_S + STOP_S + 5.0
"""Time beyond its drain, or to exit at once, after which a worker is killed: what its own steps may take, and
a choice of 5 s for the rest."""

BEAT_S = 5.0
"""Interval between two signs of life of a worker. A choice: they cost nothing."""

SILENT_LOOKS = 24
"""After so many intervals in a row without a sign of life, the first of which is its report, a worker is
killed: two minutes. A choice, far beyond any computation of a worker that is merely busy, and a hundred times
what a start computes. Intervals are counted, each of which this process was awake to see, and not time: where
the machine or the container was suspended, nothing has been missed."""

REPORT_BYTES_MAX = 1_000_000
"""Maximum size of a worker's report, which is one line. A choice that bounds memory: a report is a few
addresses or a list of mistakes."""

HASH_SEEDS = 2**32
"""How many values PYTHONHASHSEED has. Workers share one, unknown to callers, so that they know conversations
by the same keys (`core.conversations`)."""

STOP = b"!"
REREAD = b"r"


@valueclass(frozen=True, slots=True)
class Order:
    """A worker's configuration at startup.

    Attributes:
        number: Its number, from 0.
        workers: Number of workers.
        config: The configuration file.
        source: Contents of the file when the parent was started, so that all workers start alike.
        changed: Its current contents, as far as they can take effect at run time; None: unchanged.
        log_level: Minimum log level.
        listen_fd: File descriptor of the listening socket for applications.
        beat_s: Interval between its signs of life.
        store_url: The store for shared limits, if the file names none.
        name: What the store calls it.
        former: The name of the worker that it replaces, which has ended; "" for the first.
    """

    number: int
    workers: int
    config: str
    source: str
    log_level: str
    listen_fd: int
    store_url: str | None
    changed: str | None = None
    beat_s: float = BEAT_S
    name: str = ""
    former: str = ""


@valueclass(frozen=True, slots=True)
class Report:
    """A worker's single reply: it accepts connections, or its configuration is unusable.

    Attributes:
        admin_url: Base URL for operators; None if that listener is off.
        error: What is wrong, one problem per line; None if it serves.
    """

    admin_url: str | None = None
    error: str | None = None


@valueclass(frozen=True, slots=True)
class Serving:
    """Workers that accept connections.

    Attributes:
        url: Base URL for applications.
        workers: Number of workers.
        admin_urls: Base URL for operators of each worker; empty if that listener is off.
    """

    url: str
    workers: int
    admin_urls: tuple[str, ...]


async def serve(
    settings: Settings,
    environ: Mapping[str, str],
    workers: int,
    log_level: str,
    *,
    ready: Callable[[Serving], None],
) -> int:
    """Run `workers` until SIGTERM or SIGINT, then drain them; a second signal ends them at once.

    SIGHUP makes them reload their configuration. A signal that arrives before their store is running ends it
    at once.

    `ready` is called once, when all of them accept connections. Returns the exit status: 1 if a worker did
    not stop as ordered.

    Raises:
        ConfigError: no gateway can be built from these settings, an address cannot be bound, or there is
            no store for the workers to share.
    """
    settings.require(environ)
    for number in range(workers):  # each has an admin port
        own = settings.for_worker(number, workers, None)
        if settings.named.jobs_folder is not None:
            require_free(own.admin)  # before a folder is made, or read for minutes
    with (
        signals_heard() as (signals, hints),
        bind(*settings.listen) as listen,  # from here on, connections wait for any live worker
    ):
        order = Order(
            0, workers, str(settings.path), settings.source.decode(), log_level, listen.fileno(), None
        )

        url_here = url_of(listen)

        def announce(admin_urls: tuple[str, ...]) -> None:
            ready(Serving(url_here, workers, admin_urls))

        # A connection that nobody will accept is to be refused, as soon as the last worker has let go, too.
        group = WorkerGroup(_end_s(settings), announce, on_last_started=listen.close)
        async with TasksBeside(ConfigError) as tasks:
            tasks.start_soon(logs.run, SystemClock())
            if settings.document.store is None:
                url = await start_store(tasks, settings.named.jobs_folder, signals)
                order = replace(order, store_url=url)
            if settings.document.store is not None or order.store_url is not None:
                tasks.start_soon(_pass_on, signals, settings, environ, group)
                tasks.start_soon(_pass_hints_on, hints, settings, environ, group)
                if settings.document.reload.watch:
                    tasks.start_soon(_follow, settings, environ, group)
                await group.run(order)
    log.info("stopped", extra=about("stopped"))
    return 0 if group.ended_well else 1


class WorkerGroup:
    """The workers of one port.

    Attributes:
        ended_well: Whether every worker that was told to stop exited by itself, with status 0.
        command: The command line of a worker, without its number.
    """

    def __init__(
        self,
        end_s: float,
        ready: Callable[[tuple[str, ...]], None],
        *,
        on_last_started: Callable[[], None] = lambda: None,
    ) -> None:
        """Call `ready` once, with the workers' URLs for operators, when all of them accept connections.

        Args:
            end_s: How long each may take to exit by itself.
            ready: See above.
            on_last_started: Called during a stop, perhaps twice, once no further worker will be started.
        """
        self.end_s = end_s
        self._on_last_started = on_last_started
        self._starting = 0
        self.ended_well = True
        self.command = interpreters.command("gateway.worker")
        self._environ = {**os.environ, "PYTHONHASHSEED": _hash_seed(os.environ)}
        self._ready = ready
        self._is_ready = False
        self._processes: dict[int, Process] = {}
        self._accepting: dict[int, str | None] = {}
        self._stops = 0
        self._stopping = anyio.Event()
        self._failure: ConfigError | None = None
        self._source: str | None = None  # current contents of the file, if known

    async def run(self, order: Order) -> None:
        """Run the workers, restarting each that exits; return when all have exited after `stop`.

        Raises:
            ConfigError: a worker could not use its configuration at the first start.
        """
        async with anyio.create_task_group() as tasks:
            for number in range(order.workers):
                tasks.start_soon(self._keep, replace(order, number=number))
        if self._failure is not None:
            raise self._failure

    async def reread(self, new: Settings | None) -> None:
        """Make all workers reload their configuration; those started later get `new`."""
        self.follow(new)
        await self._tell_all(REREAD)

    def follow(self, new: Settings | None) -> None:
        """Give this configuration to workers started from now on; None: it is invalid.

        Workers that have not applied it may still drain for as long as before, so `end_s` is only extended.
        """
        if new is not None:
            self._source = new.source.decode()
            self.end_s = max(self.end_s, _end_s(new))

    async def stop(self) -> None:
        """Make all workers drain; the second time, exit at once. Returns when all can have heard it."""
        self._stops += 1
        self._stopping.set()
        self._let_go()
        for number in self._processes.keys() - self._accepting.keys():
            _end_loading(self._processes[number])
        await self._tell_all(STOP)

    def _let_go(self) -> None:
        if self._stopping.is_set() and not self._starting:
            self._on_last_started()

    def kill(self) -> None:
        """Kill all workers that have not stopped."""
        for number, process in self._processes.items():
            log.error(
                "worker %d did not stop when told to: killed",
                number,
                extra=about("worker_killed", worker=number),
            )
            _kill(process)

    async def _tell_all(self, words: bytes) -> None:
        """Tell all workers at the same time: one that is frozen may still have to read its order."""
        async with anyio.create_task_group() as tasks:
            for process in self._processes.values():
                tasks.start_soon(_tell, process, words)

    async def _keep(self, order: Order) -> None:
        pause_s = 0.0
        while not self._stopping.is_set():
            started_at = anyio.current_time()
            order = replace(order, name=process_name(), former=order.name)
            error: Exception | None
            try:
                status, error = await self._live(order)
            except OSError as failure:  # no memory, or the process limit is reached
                status, error = FAILURE, OSError(f"it cannot be started: {failure}")
            if self._stopping.is_set():
                self._note_end(order.number, status)
            elif isinstance(error, ConfigError) and not self._is_ready:
                self._give_up(error)
            else:
                pause_s = next_pause_s(pause_s, anyio.current_time() - started_at)
                said = f"{_manner(status)}: {error}" if error else _manner(status)
                log.error(
                    "worker %d ended (%s): started again in %g s",
                    order.number,
                    said,
                    pause_s,
                    extra=about("worker_ended", worker=order.number, reason=said, again_s=pause_s),
                )
                with anyio.move_on_after(pause_s):
                    await self._stopping.wait()

    async def _started(self, command: Sequence[str], listen_fd: int) -> Process:
        self._starting += 1
        try:
            return await interpreters.start(command, env=self._environ, pass_fds=(listen_fd,))
        finally:
            self._starting -= 1
            self._let_go()

    async def _live(self, order: Order) -> tuple[int, ConfigError | None]:
        """Run one worker to its end. Return its exit status, and the error in its configuration, if any."""
        said = None
        command = [*self.command, str(order.number)]
        async with await self._started(command, order.listen_fd) as process:
            self._processes[order.number] = process
            try:
                if self._stops:
                    _end_loading(process)
                order = replace(order, changed=self._source)
                told = json.dumps(asdict(order)).encode() + b"\n" + STOP * self._stops
                async with self._watched(order, process, anyio.sleep_forever):
                    await _tell(process, told)
                    report = await _report(process)
                if report is not None and report.error is None:
                    self._accepts(order, process.pid, report.admin_url)
                elif report is not None:
                    said = report.error
                assert process.stdout is not None
                async with self._watched(order, process, process.stdout.receive):
                    status = await process.wait()
            finally:
                del self._processes[order.number]
                self._accepting.pop(order.number, None)
        if said is None:
            return status, None
        return status, StartupBlocked(said) if status == FAILURE else ConfigError(said)

    @asynccontextmanager
    async def _watched(
        self, order: Order, process: Process, hear: Callable[[], Awaitable[object]]
    ) -> AsyncIterator[None]:
        """Kill a process that gives no sign of life for long while the block runs; `hear` waits for one."""
        async with TasksBeside() as tasks:
            tasks.start_soon(self._kill_if_silent, order, process, hear)
            yield

    async def _kill_if_silent(
        self, order: Order, process: Process, hear: Callable[[], Awaitable[object]]
    ) -> None:
        missed = 0
        while missed < SILENT_LOOKS:
            missed += 1
            with anyio.move_on_after(order.beat_s):
                try:
                    await hear()
                except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                    return  # it is ending
                missed = 0
        log.error(
            "worker %d has given no sign of life for %g s: killed",
            order.number,
            missed * order.beat_s,
            extra=about("worker_silent", worker=order.number, silent_s=missed * order.beat_s),
        )
        _kill(process)

    def _accepts(self, order: Order, pid: int, admin_url: str | None) -> None:
        self._accepting[order.number] = admin_url
        where = admin_url or "off"
        log.info(
            "worker %d (pid %d) accepts connections, operators: %s",
            order.number,
            pid,
            where,
            extra=about("worker_started", worker=order.number, pid=pid, admin_url=admin_url),
        )
        if not self._is_ready and len(self._accepting) == order.workers:
            self._is_ready = True
            urls = (self._accepting[number] for number in range(order.workers))
            self._ready(tuple(url for url in urls if url is not None))

    def _give_up(self, error: ConfigError) -> None:
        self._failure = error  # the others would report the same
        self._stopping.set()
        for process in self._processes.values():
            _kill(process)  # its start was not announced yet

    def _note_end(self, number: int, status: int) -> None:
        if status not in (0, -signal.SIGTERM) and self._failure is None:
            self.ended_well = False
            log.error(
                "worker %d ended (%s) instead of draining",
                number,
                _manner(status),
                extra=about("worker_ended", worker=number, reason=_manner(status)),
            )


async def _pass_on(
    signals: AsyncIterator[signal.Signals], settings: Settings, environ: Mapping[str, str], group: WorkerGroup
) -> None:
    await anext(signals)
    log.info("draining all workers; a second signal cuts off what is in flight", extra=about("draining"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(group.stop)
        group.follow(await _newest(settings, environ))  # it says how long they may drain
        with anyio.move_on_after(group.end_s + END_S):
            await anext(signals)
            tasks.start_soon(group.stop)
            await anyio.sleep(END_S)
        group.kill()


async def _pass_hints_on(
    hints: AsyncIterator[signal.Signals], settings: Settings, environ: Mapping[str, str], group: WorkerGroup
) -> None:
    async for _ in hints:
        await group.reread(await _newest(settings, environ))


async def _follow(settings: Settings, environ: Mapping[str, str], group: WorkerGroup) -> None:
    """Read the file whenever it changes, as the workers do, because later workers start with it."""
    before = seen = settings.source
    while True:
        await anyio.sleep(LOOK_S)
        with suppress(OSError):  # it is being replaced
            source = await in_thread(read, settings.path)
            if source == before and source != seen:
                group.follow(await in_thread(_usable, settings, environ, source))
                seen = source
            before = source


def _hash_seed(environ: Mapping[str, str]) -> str:
    """Return the environment's seed, or a new one if Python would take that for "another in each process"."""
    given = environ.get("PYTHONHASHSEED", "")
    return str(secrets.randbelow(HASH_SEEDS)) if given in ("", "random") else given


def _end_s(settings: Settings) -> float:
    return settings.document.shutdown.notice_s + settings.document.shutdown.drain_s


async def _newest(settings: Settings, environ: Mapping[str, str]) -> Settings | None:
    """Return what is in the file now, if workers started with `settings` can use it. They log any errors."""
    try:
        return await in_thread(_usable, settings, environ, await in_thread(read, settings.path))
    except OSError:
        return None


def _usable(settings: Settings, environ: Mapping[str, str], source: bytes) -> Settings | None:
    """Return the configuration in `source` if workers started with `settings` can use it, or else None.

    A fault of the gateway's own means that they cannot: it must not end all of them.
    """
    try:
        new = load(settings.path, environ, source=source)
        beside(settings, settings, new).require(environ)
    except Exception:  # noqa: BLE001 - the workers log it
        return None
    return new


async def _tell(process: Process, words: bytes) -> None:
    assert process.stdin is not None
    gone = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError)
    with suppress(*gone):  # its exit is handled elsewhere
        await process.stdin.send(words)


async def _report(process: Process) -> Report | None:
    """Return a worker's report; None if it exits without one."""
    assert process.stdout is not None
    try:
        line = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", REPORT_BYTES_MAX)
    except anyio.IncompleteRead:
        return None
    return Report(**json.loads(line))


def _end_loading(process: Process) -> None:
    """End a worker if its program is still being loaded; once it can be told to drain, it ignores this."""
    with suppress(ProcessLookupError):
        process.terminate()


def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()


def _manner(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    with suppress(ValueError):  # not every signal has a name
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"
