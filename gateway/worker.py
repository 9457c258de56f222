"""One of several gateway processes on a port: `python -m gateway.worker NUMBER`.

Started by supervisor.py, which documents the protocol between the two. The number is only for people who look
at process lists.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from gateway import app, process, settings
from gateway.core.errors import ConfigError
from gateway.exiting import RELOAD_SIGNAL, STOP_SIGNALS, bounded_exit
from gateway.standard_streams import full_disk_told
from gateway.supervisor import REREAD, STOP, Order, Report
from gateway.tasks import TasksBeside
from gateway.telemetry import logs

STDIN, STDOUT, STDERR = 0, 1, 2
"""File descriptors, by POSIX."""


def main() -> int:
    """Serve as ordered on standard input. Return the exit status."""
    for number in (*STOP_SIGNALS, RELOAD_SIGNAL):
        # From here on, the parent handles them for all workers. Not SIG_IGN, which a command of a box would
        # inherit, and what it starts: an engine that cannot be stopped.
        signal.signal(number, lambda *_: None)
    reports = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)  # anything else that is printed must not be taken for the report
    written, heard = _order()
    if written is None:
        return 0  # the parent has already exited
    order = Order(**json.loads(written))

    def report(said: Report) -> None:
        with suppress(OSError):  # the parent has exited, which ends this process soon
            os.write(reports, json.dumps(asdict(said)).encode() + b"\n")

    logs.set_up(order.log_level, worker=order.number)
    try:
        loaded = settings.load(order.config, source=order.source.encode())
        own = loaded.for_worker(order.number, order.workers, order.store_url)
        if order.changed is not None:
            new = settings.load(order.config, source=order.changed.encode())
            # Later changes are compared with the configuration that all workers were started with.
            own = replace(settings.beside(loaded, own, new), tree=loaded.tree)
        with socket.socket(fileno=order.listen_fd) as listen:
            gateway = partial(app.Gateway, own, os.environ, name=order.name, former=order.former)
            process.run(_serve, gateway, listen, heard, report, partial(_beat, reports, order.beat_s))
    except ConfigError as error:
        report(Report(error=str(error)))
        return process.status_of(error)
    return 0


async def _serve(
    build: Callable[[], app.Gateway],
    listen: socket.socket,
    heard: bytes,
    report: Callable[[Report], None],
    beat: Callable[[], Coroutine[Any, Any, None]],
) -> None:
    def ready(running: app.Running) -> None:
        report(Report(admin_url=running.admin_url))
        tasks.start_soon(beat)

    gateway = build()
    hints_out, hints = anyio.create_memory_object_stream[None](1)
    async with hints_out, hints, TasksBeside(ConfigError) as tasks:
        tasks.start_soon(app.reread_on, hints, gateway)
        await app.serve_until(_told(heard, hints_out), gateway, ready=ready, listen=listen)


async def _beat(reports: int, every_s: float) -> None:
    """Give signs of life until cancelled. The parent may be suspended, and read none for long."""
    os.set_blocking(reports, False)
    while True:
        with suppress(OSError):
            os.write(reports, b".")
        await anyio.sleep(every_s)


def _order() -> tuple[bytes | None, bytes]:
    """Return the order, or None at EOF; and the bytes received behind it."""
    heard = b""
    while b"\n" not in heard:
        more = os.read(STDIN, 65_536)
        if not more:
            return None, b""
        heard += more
    order, _, rest = heard.partition(b"\n")
    return order, rest


async def _told(heard: bytes, hints: MemoryObjectSendStream[None]) -> AsyncIterator[None]:
    """Yield for each stop byte in `heard`, then for each one received. EOF counts as one if it is the first.

    Requests to reload go to `hints`, where several may be merged.
    """
    is_told = False
    while True:
        if REREAD in heard:
            with suppress(anyio.WouldBlock):
                hints.send_nowait(None)
        for _ in range(heard.count(STOP)):
            is_told = True
            yield
        await anyio.wait_readable(STDIN)
        heard = os.read(STDIN, 64)
        if not heard:
            break
    if not is_told:
        yield
    await anyio.sleep_forever()


if __name__ == "__main__":
    with bounded_exit(), full_disk_told():
        sys.exit(main())
