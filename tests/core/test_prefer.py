"""`Prefer`, by RFC 7240: what callers write, and what is made of it."""

import pytest

from gateway.core.prefer import WAIT_MAX_S, Preference, preference

ASYNC = Preference(respond_async=True)
NOTHING = Preference()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (None, NOTHING),
        ("", NOTHING),
        ("respond-async", ASYNC),
        ("Respond-Async", ASYNC),
        ("  respond-async\t", ASYNC),
        ('respond-async=""', ASYNC),  # an empty value is none
        ("respond-async=", ASYNC),
        ("respond-async; why=not", ASYNC),
        ("respond-async;;", ASYNC),
        ("respond-async, wait=10", Preference(True, 10)),
        ("wait=10,respond-async", Preference(True, 10)),
        ("RESPOND-ASYNC , WAIT = 10", Preference(True, 10)),
        ('respond-async, wait="10"', Preference(True, 10)),
        (r'respond-async, wait="1\0"', Preference(True, 10)),
        ("respond-async, wait=0", Preference(True, 0)),
        ("respond-async, wait=5, wait=60", Preference(True, 5)),  # the first instance counts
        ("wait=10", Preference(False, 10)),
        # what is not known
        ("return=minimal, handling=lenient", NOTHING),
        ("return=minimal, respond-async", ASYNC),
        ('foo="a, respond-async", bar', NOTHING),
        ('foo="a \\", respond-async", wait=3', Preference(False, 3)),
        ("respond-asynchronously", NOTHING),
        # what is malformed
        ("respond-async=yes", NOTHING),
        ("respond async", NOTHING),
        ('"respond-async"', NOTHING),
        ("=respond-async", NOTHING),
        ('foo="open, respond-async', NOTHING),
        ("respond-async, wait=soon", ASYNC),
        ("respond-async, wait=-1", ASYNC),
        ("respond-async, wait=1.5", ASYNC),
        ("respond-async, wait=²", ASYNC),
        ("respond-async, wait", ASYNC),
        (", ,respond-async,,", ASYNC),
    ],
)
def test_what_is_preferred(written: str | None, expected: Preference) -> None:
    assert preference(written) == expected


@pytest.mark.parametrize(
    ("wanted", "granted_s", "applied"),
    [
        (None, 0, "respond-async"),
        (0, 0, "respond-async, wait=0"),
        (WAIT_MAX_S, WAIT_MAX_S, f"respond-async, wait={WAIT_MAX_S}"),
        (WAIT_MAX_S + 1, WAIT_MAX_S, "respond-async"),  # nobody is told that it was waited for as long
    ],
)
def test_what_is_said_to_be_applied_is_what_is_done(wanted: int | None, granted_s: int, applied: str) -> None:
    asked = Preference(True, wanted)

    assert (asked.granted_s, asked.applied) == (granted_s, applied)


def test_a_number_without_end_is_a_long_wait() -> None:
    assert preference("respond-async, wait=" + "9" * 10_000).granted_s == WAIT_MAX_S


def test_a_hostile_header_is_read_in_no_time() -> None:
    """No pattern goes back over what it has seen: 64 KiB are what a request's headers may have."""
    for hostile in ('a="' * 20_000, "a;" * 30_000, "\\" * 60_000, " " * 60_000 + "a", "a=" * 30_000):
        assert preference(hostile) == NOTHING
