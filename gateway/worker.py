"""One of several gateway processes on a port: `python -m gateway.worker NUMBER`.

Started by supervisor.py, which says how the two talk; nobody else has a use for it. The number on the
command line is for those who read a list of processes.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import asdict, replace

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from gateway import app, process, settings
from gateway.core.errors import ConfigError
from gateway.settings import Settings
from gateway.supervisor import REREAD, STOP, Order, Report
from gateway.telemetry import logs

STDIN, STDOUT, STDERR = 0, 1, 2


def main() -> int:
    """Serve as ordered on standard input. Returns the exit status."""
    for heard in (*app.STOP_SIGNALS, app.RELOAD_SIGNAL):
        signal.signal(heard, signal.SIG_IGN)  # sent to all processes at once, they are the parent's to hear
    reports = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)  # whatever else is printed is no report
    written, stops = _order()
    if written is None:
        return 0  # the parent is gone already
    order = Order(**json.loads(written))

    def report(said: Report) -> None:
        with suppress(OSError):  # the parent is gone, which ends this process soon
            os.write(reports, json.dumps(asdict(said)).encode() + b"\n")

    logs.set_up(order.log_level, worker=order.number)
    try:
        loaded = settings.load(order.config, source=order.source.encode())
        own = loaded.for_worker(order.number, order.workers, order.store_url)
        if order.changed is not None:
            new = settings.load(order.config, source=order.changed.encode())
            # A later change is compared with what all workers were started with, as the others do.
            own = replace(settings.beside(loaded, own, new), tree=loaded.tree)
        with socket.socket(fileno=order.listen_fd) as listen:
            process.run(_serve, own, listen, stops, report)
    except ConfigError as error:
        report(Report(error=str(error)))
        return process.status_of(error)
    return 0


async def _serve(own: Settings, listen: socket.socket, stops: int, report: Callable[[Report], None]) -> None:
    def ready(running: app.Running) -> None:
        report(Report(admin_url=running.admin_url))

    gateway = app.Gateway(own, os.environ)
    hints_out, hints = anyio.create_memory_object_stream[None](1)
    failure: ConfigError | None = None
    async with hints_out, hints, anyio.create_task_group() as tasks:
        tasks.start_soon(app.reread_on, hints, gateway)
        try:
            await app.serve_until(_told(stops, hints_out), gateway, ready=ready, listen=listen)
        except ConfigError as error:  # carried out by value: the group would wrap it
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


def _order() -> tuple[bytes | None, int]:
    """Return the order, or None if the input ends before it does; and how many stops came with it."""
    heard = b""
    while b"\n" not in heard:
        more = os.read(STDIN, 65_536)
        if not more:
            return None, 0
        heard += more
    order, _, stops = heard.partition(b"\n")
    return order, stops.count(STOP)


async def _told(stops: int, hints: MemoryObjectSendStream[None]) -> AsyncIterator[None]:
    """Yield for each of so many `stops`, then for each that is heard. The parent's end is one if none was.

    That the configuration is to be read again goes into `hints`; once is enough for several.
    """
    for _ in range(stops):
        yield
    is_told = stops > 0
    while True:
        await anyio.wait_readable(STDIN)
        heard = os.read(STDIN, 64)
        if not heard:
            break
        if REREAD in heard:
            with suppress(anyio.WouldBlock):
                hints.send_nowait(None)
        for _ in range(heard.count(STOP)):
            is_told = True
            yield
    if not is_told:
        yield
    await anyio.sleep_forever()


if __name__ == "__main__":
    sys.exit(main())
