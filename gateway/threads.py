"""Threads: dedicated daemon threads, which, unlike those of a pool, do not delay the end of the process; and
those of the pool, for what would hold up the event loop.
"""

import asyncio
import errno
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import anyio
from anyio.lowlevel import RunVar

T = TypeVar("T")

INLINE_BYTES = 65_536
"""As much is decoded on the event loop; more in a thread. A choice: an event of an answer, 200 bytes, takes
13 us."""


DECODERS = 2
"""Maximum threads that decode at once. A choice: each that computes delays the event loop by 5 ms now and
then."""

_decoders: RunVar[anyio.CapacityLimiter] = RunVar("_decoders")


async def decoded(size_bytes: int, function: Callable[[], T]) -> T:
    """Run a function that decodes so many bytes: at once, or in a thread of the pool."""
    if size_bytes <= INLINE_BYTES:
        return function()
    try:
        limiter = _decoders.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(DECODERS)
        _decoders.set(limiter)
    return await anyio.to_thread.run_sync(function, limiter=limiter)


async def beside(function: Callable[[], T]) -> T:
    """Run a function that may take long in a thread of the pool; here, if no thread can be started."""
    try:
        return await anyio.to_thread.run_sync(function)
    except RuntimeError:
        return function()


def in_own(loop: asyncio.AbstractEventLoop, name: str, function: Callable[[], T]) -> asyncio.Future[T]:
    """Run `function` in a new thread called `name`, and return a future of its result.

    Raises:
        OSError: no thread can be started: a limit on processes and threads is reached.
    """
    answer: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: Exception | None) -> None:
        if answer.done():  # cancelled
            return
        if error is None:
            answer.set_result(result)  # type: ignore[arg-type]  # it is what was returned
        else:
            answer.set_exception(error)

    def work() -> None:
        result, failure = None, None
        try:
            result = function()
        except Exception as error:  # noqa: BLE001 - it is for whoever waits
            failure = error
        with suppress(RuntimeError):  # the loop is already closed
            loop.call_soon_threadsafe(tell, result, failure)

    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error
    return answer
