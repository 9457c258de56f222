"""What a chunk that is relayed unparsed leaves behind."""

import asyncio

from gateway.pipeline.chunk_fast_path import ChunkFastPath, NullCounter
from gateway.pipeline.deadline import Deadline, Deadlines


async def test_a_chunk_that_is_recognized_is_counted_and_is_a_sign_of_life() -> None:
    deadline, counter = Deadline(Deadlines(asyncio.get_running_loop()), at=10.0), NullCounter()
    chunks = ChunkFastPath(
        lambda data, start, end: data if data == b"known" else None, counter, deadline, 30.0, lambda: 100.0
    )

    assert chunks.match(b"other", 0, 5) is None
    assert (chunks.chunks, counter.chunks, deadline.at) == (0, 0, 10.0)

    assert chunks.match(b"known", 0, 5) == b"known"
    assert (chunks.chunks, counter.chunks, deadline.at) == (1, 1, 130.0)
