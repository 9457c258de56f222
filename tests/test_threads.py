"""What is decoded on the event loop, and what beside it."""

import threading

import anyio
import anyio.to_thread

from gateway.threads import DECODERS, INLINE_BYTES, decoded


async def test_little_is_decoded_at_once_and_much_in_a_thread() -> None:
    own = threading.get_ident()

    assert await decoded(INLINE_BYTES, threading.get_ident) == own
    assert await decoded(INLINE_BYTES + 1, threading.get_ident) != own


async def test_few_threads_decode_at_once() -> None:
    begun, may_end = threading.Semaphore(0), threading.Event()

    def decode() -> None:
        begun.release()
        may_end.wait()

    async with anyio.create_task_group() as tasks:
        for _ in range(DECODERS + 3):
            tasks.start_soon(decoded, INLINE_BYTES + 1, decode)
        for _ in range(DECODERS):
            await anyio.to_thread.run_sync(begun.acquire)
        await anyio.wait_all_tasks_blocked()
        more = begun.acquire(blocking=False)
        may_end.set()

    assert not more
