"""What a request may take: memory for bodies and answers, and the bodies that are read of an ASGI server."""

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from gateway.core.errors import BodyEncoded, BodyTooLarge, Draining, OutOfResources
from gateway.downstream.relay import (
    KEY_SHARE,
    BodyLimits,
    CallerGone,
    HeldAnswers,
    Uploads,
    announced_bytes,
    check_encoding,
    read_body,
    run_for_caller,
)
from gateway.pipeline import CallerStalled

MOST = 1_000
SHARE = int(MOST * KEY_SHARE)


def test_one_key_may_take_its_share_and_all_together_everything() -> None:
    uploads = Uploads()
    uploads.take(SHARE, "a", MOST)
    uploads.take(MOST - SHARE, "b", MOST)

    with pytest.raises(OutOfResources):
        uploads.take(1, "b", MOST)


def test_one_key_may_take_no_more_than_its_share() -> None:
    uploads = Uploads()
    uploads.take(SHARE, "a", MOST)

    with pytest.raises(OutOfResources):
        uploads.take(1, "a", MOST)
    uploads.take(MOST - SHARE - 1, "b", MOST)


def test_without_keys_everything_may_be_taken() -> None:
    uploads = Uploads()
    uploads.take(MOST, None, MOST)

    with pytest.raises(OutOfResources):
        uploads.take(1, None, MOST)


def test_what_was_refused_is_counted_until_it_is_released() -> None:
    uploads = Uploads()
    with pytest.raises(OutOfResources):
        uploads.take(MOST + 1, "a", MOST)
    assert uploads.bytes == MOST + 1

    uploads.release(MOST + 1, "a")

    assert uploads.bytes == 0
    uploads.take(SHARE, "a", MOST)


def test_whole_answers_may_take_all_of_their_memory_together() -> None:
    held = HeldAnswers(MOST)
    with held.holding(1):
        assert held.has_room(MOST - 1)
        assert not held.has_room(MOST)


def test_the_only_whole_answer_may_be_of_any_size() -> None:
    assert HeldAnswers(MOST).has_room(10 * MOST)


def test_an_answer_that_could_not_be_sent_is_held_no_longer() -> None:
    held = HeldAnswers(MOST)
    with pytest.raises(OSError, match="gone"), held.holding(MOST):
        raise OSError("gone")

    assert held.bytes == 0


@pytest.mark.parametrize("digits", [b"%d" % (2**64 - 1), b"0" * 9_000 + b"%d" % (2**64 - 1)])
def test_the_length_of_a_body_may_have_any_number_of_zeros_before_it(digits: bytes) -> None:
    assert announced_bytes(digits) == 2**64 - 1


@pytest.mark.parametrize("written", [None, "", " ", "identity", " Identity\t"])
def test_a_body_that_is_not_compressed_may_say_so(written: str | None) -> None:
    check_encoding(written)


@pytest.mark.parametrize("written", ["gzip", "identity, gzip", "x" * 1_000])
def test_any_other_encoding_is_refused_and_named_in_short(written: str) -> None:
    with pytest.raises(BodyEncoded, match=written[:40]) as caught:
        check_encoding(written)

    assert len(caught.value.message) < 200


# ---------------------------------------------------------------- bodies that an ASGI server hands over


async def body_of(
    uploads: Uploads, *parts: bytes, announced: bytes | None = None, ends: bool = True
) -> bytes:
    """Read a body of these parts, behind which the caller leaves unless it `ends`."""
    messages: list[Any] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    if not ends:
        messages[-1] = {"type": "http.disconnect"}
    headers = [] if announced is None else [(b"content-length", announced)]

    async def receive() -> Any:
        return messages.pop(0)

    scope: Any = {"type": "http", "headers": headers}
    limits = BodyLimits(bytes_max=10, together_max=20)
    try:
        return await read_body(scope, receive, limits, uploads, "a")
    finally:
        assert uploads.bytes == 0
        uploads.take(15, "a", 20)  # nothing is counted for the key either
        uploads.release(15, "a")


@pytest.mark.parametrize("parts", [[], [b"0123456789"], [b"01234", b"56789"]])
@pytest.mark.parametrize("announced", [None, b"10", b"ten"])
async def test_a_body_may_be_as_long_as_allowed(parts: Sequence[bytes], announced: bytes | None) -> None:
    assert await body_of(Uploads(), *parts, announced=announced) == b"".join(parts)


@pytest.mark.parametrize("parts", [[b"0123456789x"], [b"01234", b"56789", b"x"]])
async def test_one_that_is_longer_is_refused_where_it_is(parts: Sequence[bytes]) -> None:
    with pytest.raises(BodyTooLarge, match="larger than 10 bytes"):
        await body_of(Uploads(), *parts, ends=False)


async def test_one_that_says_so_is_refused_before_it_is_read() -> None:
    with pytest.raises(BodyTooLarge):
        await body_of(Uploads(), announced=b"11", ends=False)


async def test_one_for_which_there_is_no_room_beside_others_leaves_nothing() -> None:
    uploads = Uploads()
    with pytest.raises(OutOfResources):
        await body_of(uploads, b"0" * 16, ends=False)


async def test_who_leaves_in_its_body_is_gone() -> None:
    with pytest.raises(CallerGone):
        await body_of(Uploads(), b"0123", ends=False)


# ---------------------------------------------------------------- work for a caller


async def run_until(raised: type[Exception]) -> None:
    """Run work that raises `raised`, for a caller that stays."""

    async def work() -> None:
        raise raised()

    async def receive() -> Any:
        await anyio.sleep_forever()

    await run_for_caller(work, receive)


@pytest.mark.parametrize("raised", [Draining, CallerStalled], ids=["error", "stalled"])
async def test_what_work_for_a_caller_raises_is_raised_as_it_is(raised: type[Exception]) -> None:
    with pytest.raises(raised):
        await run_until(raised)


async def test_a_socket_that_is_closed_ends_work_for_its_caller() -> None:
    await run_until(OSError)
