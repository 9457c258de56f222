"""Where a body is read: by the event loop, or in a thread."""

import json
import threading

import pytest

from gateway.downstream.reading import INLINE_BYTES, BodyReaders

TEXT = b"a river runs past an old mill " * 50_000


@pytest.mark.parametrize(
    ("bodies", "is_quick"),
    [
        ([], True),
        ([b"{}"], True),
        ([TEXT[:INLINE_BYTES]], True),
        ([TEXT[: INLINE_BYTES + 1]], False),
        ([TEXT[:INLINE_BYTES], b"{}"], False),
        ([json.dumps([{"role": "user"}] * 1_000).encode()], True),
        ([json.dumps([{"role": "user"}] * 1_001).encode()], False),
        ([json.dumps([{"role": "user"}] * 900).encode()] * 2, False),
        ([json.dumps([0] * 200_000).encode()], False),
    ],
    ids=["none", "short", "text", "long-text", "with-a-record", "items", "many-items", "together", "values"],
)
async def test_what_is_quickly_read_is_read_at_once(bodies: list[bytes], is_quick: bool) -> None:
    read_by = await BodyReaders().run(threading.get_ident, *bodies)
    assert (read_by == threading.get_ident()) is is_quick
