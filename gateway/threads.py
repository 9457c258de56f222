"""Threads of their own, which the end of the process does not wait for, as it would for those of a pool."""

import asyncio
import errno
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def in_own(loop: asyncio.AbstractEventLoop, name: str, function: Callable[[], T]) -> asyncio.Future[T]:
    """Return what `function` returns or raises, once it has: in a thread of that name, however long it takes.

    Raises:
        OSError: no thread is left: the system has as many processes and threads as it may.
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
        with suppress(RuntimeError):  # the loop is closed by now
            loop.call_soon_threadsafe(tell, result, failure)

    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error
    return answer
