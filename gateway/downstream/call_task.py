"""One task per connection, which answers its chats one after another.

A task and a cancel scope for each chat would cost more than to receive it.
"""

import asyncio
from collections.abc import Awaitable
from typing import Any, Protocol

import anyio


class Answerable(Protocol):
    """A chat to be answered."""

    scope: anyio.CancelScope
    """Set before `answer`. Cancelling it ends the task as well, since the connection is lost."""

    def answer(self) -> Awaitable[None]:
        """Answer it."""


class CallTask:
    """The task of one connection. It begins with the first chat, and ends with the connection."""

    __slots__ = ("_busy", "_is_over", "_loop", "_next", "_task")

    def __init__(self, loop: asyncio.AbstractEventLoop, busy: set[asyncio.Task[Any]]) -> None:
        """Run in `loop`. While it answers a chat, the task is in `busy`, for which a shutdown waits."""
        self._loop = loop
        self._busy = busy
        self._is_over = False
        self._task: asyncio.Task[None] | None = None
        self._next: asyncio.Future[Answerable | None] | None = None  # while it waits for a chat

    def answer(self, call: Answerable) -> None:
        """Answer a chat, now that the previous one is answered."""
        waiting, self._next = self._next, None
        if waiting is not None and self._task is not None and not waiting.done():
            waiting.set_result(call)
        else:
            self._task = self._loop.create_task(self._run(call))
            self._task.add_done_callback(self._busy.discard)
        self._busy.add(self._task)

    def end(self) -> None:
        """Wait for no more chats. One in progress goes on."""
        self._is_over = True
        waiting, self._next = self._next, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    async def _run(self, first: Answerable) -> None:
        own, call = self._task, first
        assert own is not None
        with anyio.CancelScope() as scope:
            while True:
                call.scope = scope
                await call.answer()
                # If the next chat has come before all was done for this one, it has got another task.
                if self._is_over or self._task is not own:
                    return
                self._busy.discard(own)
                self._next = self._loop.create_future()
                another = await self._next
                if another is None:
                    return
                call = another
