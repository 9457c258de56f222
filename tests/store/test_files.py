"""Files in a real store: whole or not there, each its owner's, bounded, and gone when their time is over."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.batch_world import BYTES_MAX, BatchWorld

from gateway.core.batches import BatchStatus
from gateway.core.errors import StoreUnavailable
from gateway.core.files import FileRefusal, NewFile
from gateway.store.files import PIECE_BYTES

FILE = NewFile("file-1", "alice", "in.jsonl")
COSTS = 1024


@pytest.fixture
async def files(store: Any) -> AsyncIterator[BatchWorld]:
    world = BatchWorld(store.url, store.prefix, store.redis)
    yield world
    await world.aclose()


async def test_a_file_is_seen_once_it_is_whole(files: BatchWorld) -> None:
    content = bytes(range(256)) * 10_000
    pieces = [content[at : at + PIECE_BYTES] for at in range(0, len(content), PIECE_BYTES)]
    assert len(pieces) == 3
    for number, piece in enumerate(pieces):
        assert await files.files.write(FILE, number * PIECE_BYTES, piece, BYTES_MAX) is None
        assert await files.files.get("file-1") is None
    await files.redis.hset(files.key("file", "file-1"), "created", 1)  # the upload took long
    whole = await files.files.close(FILE, 3600)

    assert whole == await files.files.get("file-1")
    assert (whole.new, whole.size_bytes) == (FILE, len(content))
    assert whole.expires_at - whole.created_at == 3600
    assert await files.read("file-1") == content
    for offset in (1, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES + 5):
        end = (offset // PIECE_BYTES + 1) * PIECE_BYTES
        assert await files.files.read("file-1", offset) == content[offset:end]
        assert await files.files.read("file-1", offset, 100) == content[offset : min(offset + 100, end)]
    assert await files.files.read("file-1", len(content)) == b""


async def test_what_is_repeated_changes_nothing(files: BatchWorld) -> None:
    for _ in range(2):
        assert await files.files.write(FILE, 0, b"abc", BYTES_MAX) is None
    for _ in range(2):
        assert await files.files.write(FILE, 3, b"de", BYTES_MAX) is None
    first = await files.files.close(FILE, 3600)
    assert await files.files.close(FILE, 7200) == first
    assert await files.read("file-1") == b"abcde"
    assert await files.used() == 5 + COSTS
    assert await files.files.delete("file-1") is True
    assert await files.files.delete("file-1") is False
    assert await files.used() == 0


async def test_many_small_files_that_expire_together_are_forgotten_together(files: BatchWorld) -> None:
    small = [NewFile(f"small-{number}", "alice", "in.jsonl") for number in range(50)]
    for one in small:
        await files.files.write(one, 0, b"abc", BYTES_MAX)
        await files.files.close(one, 3600)
    for one in small:
        await files.expire_file(one.id)
    await files.files.write(NewFile("file-2", "bob", "in.jsonl"), 0, b"abc", BYTES_MAX)
    assert await files.used() == 0


async def test_an_upload_that_was_lost_is_not_taken_for_whole(files: BatchWorld) -> None:
    await files.files.write(FILE, 0, b"abc", BYTES_MAX)
    with pytest.raises(StoreUnavailable):
        await files.files.write(FILE, 4, b"efg", BYTES_MAX)
    await files.expire_file("file-1")
    with pytest.raises(StoreUnavailable):
        await files.files.write(FILE, 3, b"def", BYTES_MAX)
    with pytest.raises(StoreUnavailable):
        await files.files.close(FILE, 3600)
    assert await files.used() == 0


async def test_bytes_are_counted_per_key_from_the_first_on(files: BatchWorld) -> None:
    other = NewFile("file-2", "alice", "b")
    assert await files.files.write(FILE, 0, b"x" * 500, 500 + COSTS) is None
    assert await files.files.write(FILE, 500, b"x", 500 + COSTS) is FileRefusal.TOO_MANY_BYTES
    assert await files.files.write(other, 0, b"", 500 + COSTS) is FileRefusal.TOO_MANY_BYTES
    assert await files.files.write(NewFile("file-3", "bob", "b"), 0, b"x" * 500, 500 + COSTS) is None
    assert await files.files.write(NewFile("file-4", None, "b"), 0, b"x" * 500, 500 + COSTS) is None
    assert await files.used() == 500 + COSTS
    await files.files.delete("file-1")  # one that is open is forgotten too
    assert "listed" not in await files.names()  # it never was
    assert await files.files.write(other, 0, b"", 500 + COSTS) is None


async def test_a_file_whose_time_is_over_is_gone_with_all_its_pieces(files: BatchWorld) -> None:
    await files.upload(b"x" * (2 * PIECE_BYTES + 1), "file-1")
    await files.upload(b"y", "file-2")
    await files.expire_file("file-1")
    assert await files.files.get("file-1") is None
    await files.files.write(NewFile("file-3", "bob", "b"), 0, b"z", BYTES_MAX)
    assert await files.read("file-1") == b""
    assert await files.used() == 1 + COSTS
    for id in ("file-2", "file-3"):
        await files.files.delete(id)
    assert await files.names() <= {"arrivals", "listed"}


async def test_few_large_files_that_expire_together_are_forgotten_one_by_one(files: BatchWorld) -> None:
    large = ("large-1", "large-2")
    for id in large:
        await files.upload(b"x", id)
    for id in large:
        await files.redis.hset(files.key("file", id), "bytes", 799 * PIECE_BYTES)
        await files.expire_file(id)
    for left in (1, 0):
        await files.files.write(NewFile("other", "bob", "b"), 0, b"z", BYTES_MAX)
        assert await files.redis.exists(*(files.key("file", id) for id in large)) == left


async def test_a_file_that_a_batch_reads_outlives_its_time(files: BatchWorld) -> None:
    batches = files.open()
    made = await files.batch(batches)
    await files.expire_file("file-1")
    assert await files.files.delete("file-1") is FileRefusal.IN_USE
    claim = await batches.take()
    assert claim is not None
    assert await files.read("file-1") != b""
    await batches.cancel(made.id)
    await batches.move(claim, BatchStatus.CANCELLING, BatchStatus.CANCELLED)
    await files.expire_file("file-1")
    await batches.take()
    assert await files.read("file-1") == b""


async def test_files_whose_time_is_over_but_that_batches_read_hold_no_other_up(files: BatchWorld) -> None:
    for number in range(100):  # as many as are looked at together
        await files.upload(b"x", f"file-{number}")
        await files.redis.hset(files.key("file", f"file-{number}"), "uses", 1)
        await files.expire_file(f"file-{number}")
    await files.upload(b"y", "last", "bob")
    await files.expire_file("last")
    for _ in range(2):
        await files.files.write(NewFile("other", "carol", "b"), 0, b"z", BYTES_MAX)
    assert await files.used("=bob") == 0
    assert await files.used() == 100 * (1 + COSTS)


async def test_files_are_paged_in_the_order_of_their_uploads(files: BatchWorld) -> None:
    for number in range(5):
        await files.upload(b"x", f"file-{number}")
    await files.upload(b"x", "file-theirs", "bob")

    async def page(after: str | None, *, ascending: bool, limit: int = 2, purpose: str | None = None) -> Any:
        found = await files.files.page(
            "alice", after=after, ascending=ascending, purpose=purpose, limit=limit
        )
        return None if found is None else [file.id for file in found]

    assert await page(None, ascending=False) == ["file-4", "file-3"]
    assert await page("file-3", ascending=False) == ["file-2", "file-1"]
    assert await page("file-3", ascending=True) == ["file-4"]
    assert await page(None, ascending=True, limit=10) == [f"file-{number}" for number in range(5)]
    assert await page(None, ascending=True, purpose="batch_output") == []
    assert await page("file-theirs", ascending=True) is None

    for id in ("file-3", "file-2"):  # deleted as they are listed
        await files.files.delete(id)
    assert await page("file-3", ascending=False) == ["file-1", "file-0"]
    assert await page("file-2", ascending=True) == ["file-4"]
    await files.files.delete("file-theirs")
    assert await page("file-theirs", ascending=True) is None
    assert await page("file-none", ascending=True) is None
    assert 0 < await files.redis.pttl(files.key("listed", "files", "=alice", "file-3")) <= 600_000
