"""What gateways tell each other of long conversations: each answer once, the latest, and for a while."""

import os
import subprocess
import sys

import pytest

from gateway.core.conversations import HASHING, TOLD_MAX, TOLD_S, Answered, Conversations


def test_what_was_answered_lately_is_told() -> None:
    answered = Answered()
    answered.note(11, "light-0", 0.0)
    answered.note(12, "light-1", 1.0)
    answered.note(13, "light-0", 2.0)

    told = answered.told(3.0)
    assert told == Conversations(HASHING, {"light-0": ((1, 11), (3, 13)), "light-1": ((2, 12),)})
    assert list(told.since(Conversations())) == [("light-0", 11), ("light-1", 12), ("light-0", 13)]


def test_what_was_told_before_is_not_new() -> None:
    answered = Answered()
    answered.note(11, "light-0", 0.0)
    before = answered.told(0.0)
    answered.note(12, "light-1", 1.0)

    assert list(answered.told(1.0).since(before)) == [("light-1", 12)]
    assert list(answered.told(1.0).since(answered.told(1.0))) == []


def test_a_conversation_that_moved_is_told_where_it_was_last() -> None:
    answered = Answered()
    answered.note(11, "light-1", 0.0)
    answered.note(11, "light-0", 1.0)

    assert list(answered.told(1.0).since(Conversations())) == [("light-1", 11), ("light-0", 11)]


def test_it_is_told_for_a_while() -> None:
    answered = Answered()
    answered.note(11, "light-0", 0.0)
    answered.note(12, "light-0", 5.0)

    assert answered.told(TOLD_S).answered == {"light-0": ((1, 11), (2, 12))}
    assert answered.told(TOLD_S + 0.1).answered == {"light-0": ((2, 12),)}
    assert answered.told(TOLD_S + 5.1).answered == {}


def test_only_so_many_are_told() -> None:
    answered = Answered()
    for key in range(TOLD_MAX + 10):
        answered.note(key, "light-0", 0.0)

    assert [key for _, key in answered.told(0.0).answered["light-0"]] == list(range(10, TOLD_MAX + 10))


def test_what_a_backend_no_longer_holds_is_not_told() -> None:
    answered = Answered()
    answered.note(11, "light-0", 0.0)
    answered.note(12, "light-1", 0.0)
    answered.forget("light-0")
    answered.note(13, "light-0", 0.0)

    assert answered.told(0.0).answered == {"light-1": ((2, 12),), "light-0": ((3, 13),)}


def hashing(seed: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", "from gateway.core.conversations import HASHING; print(HASHING)"],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.parametrize(("seed", "are_alike"), [("4026531840", True), ("7", False)])
def test_processes_with_the_same_seed_hash_alike(seed: str, are_alike: bool) -> None:
    assert (hashing("4026531840") == hashing(seed)) is are_alike
