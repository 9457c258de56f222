"""A conversation finds the backends that hold its prefix."""

import pytest

from gateway.core.request import Prefixes
from gateway.store.prefixes import HOLDERS_MAX, MemoryPrefixIndex

SYSTEM, FIRST, SECOND, THIRD, FOURTH = (1, 0.5), (2, 0.6), (3, 0.7), (4, 0.9), (5, 1.0)


def test_the_next_turn_finds_the_replica_of_the_last() -> None:
    index = MemoryPrefixIndex()
    index.remember((SYSTEM, FIRST), "light-1")

    assert index.held((SYSTEM, FIRST, SECOND, THIRD)) == {"light-1": 0.6}


def test_another_conversation_shares_the_system_prompt_only() -> None:
    index = MemoryPrefixIndex()
    index.remember((SYSTEM, FIRST), "light-1")
    index.remember((SYSTEM, (9, 1.0)), "light-0")

    assert index.held((SYSTEM, FIRST, SECOND)) == {"light-0": 0.5, "light-1": 0.6}


def test_a_message_that_is_replaced_each_time_costs_no_more_than_itself() -> None:
    index = MemoryPrefixIndex()
    index.remember((SYSTEM, FIRST, SECOND, (8, 1.0)), "light-1")

    assert index.held((SYSTEM, FIRST, SECOND, (9, 1.0))) == {"light-1": 0.7}
    assert index.held((SYSTEM, FIRST, (7, 1.0))) == {"light-1": 0.5}


SHARED: Prefixes = ((1, 0.5), (8, 1.0))
PARTING = {
    "one conversation": ([(SYSTEM, FIRST)], 0.0),
    "its next turn": ([(SYSTEM, FIRST), (SYSTEM, FIRST, SECOND, THIRD)], 0.0),
    "the same again": ([(SYSTEM, FIRST), (SYSTEM, FIRST)], 0.0),
    "another one": ([(SYSTEM, FIRST), (SYSTEM, (9, 1.0))], 0.5),
    "and its next turn": ([(SYSTEM, FIRST), (SYSTEM, (9, 1.0)), (SYSTEM, (9, 0.8), (10, 1.0))], 0.5),
    "one that is all they share": ([(SYSTEM,)], 0.5),
}
REMINDED: Prefixes = ((1, 0.2), (2, 0.4), (20, 1.0))  # ends in what the next turn has no more
REMINDED_AGAIN: Prefixes = ((1, 0.1), (2, 0.3), (3, 0.5), (4, 0.8), (21, 1.0))
"""Conversations that an engine has read which does not go on anywhere, and what it has of `SHARED` then."""


@pytest.mark.parametrize(("conversations", "share"), PARTING.values(), ids=PARTING)
def test_an_engine_may_keep_what_conversations_share_only_once_two_have_parted(
    conversations: list[Prefixes], share: float
) -> None:
    index = MemoryPrefixIndex()
    for one in conversations:
        index.remember(one, "light-0", resumes_anywhere=False)

    assert index.held(SHARED).get("light-0", 0.0) == share
    assert index.held(conversations[-1])["light-0"] == conversations[-1][-1][1]


def test_an_agent_that_drops_its_reminders_is_found_where_its_last_turn_left_the_one_before() -> None:
    """Which is a turn later than with an engine that goes on anywhere."""
    later = ((1, 0.1), (2, 0.2), (3, 0.3), (4, 0.6), (5, 0.7), (6, 0.8), (22, 1.0))
    found = []
    for resumes_anywhere in (True, False):
        index = MemoryPrefixIndex()
        index.remember(REMINDED, "light-0", resumes_anywhere=resumes_anywhere)
        found.append(index.held(REMINDED_AGAIN))
        index.remember(REMINDED_AGAIN, "light-0", resumes_anywhere=resumes_anywhere)
        found.append(index.held(later))

    assert found == [{"light-0": 0.3}, {"light-0": 0.6}, {}, {"light-0": 0.2}]


def test_conversations_have_parted_on_the_backend_that_has_read_both() -> None:
    index = MemoryPrefixIndex()
    index.remember((SYSTEM, FIRST), "light-0", resumes_anywhere=False)
    index.remember((SYSTEM, SECOND), "light-1", resumes_anywhere=False)

    assert index.held(SHARED) == {}


def test_what_nobody_holds() -> None:
    assert MemoryPrefixIndex().held((SYSTEM, FIRST)) == {}


def test_a_request_without_messages_leaves_no_trace() -> None:
    index = MemoryPrefixIndex()
    index.remember((), "light-0")

    assert index.held(()) == {}


def test_the_oldest_is_forgotten() -> None:
    index = MemoryPrefixIndex(entries_max=2)
    index.remember((SYSTEM,), "light-0")
    index.remember((SECOND,), "light-0")
    index.remember((SYSTEM,), "light-0")  # used again
    index.remember((THIRD,), "light-0")

    assert index.held((SYSTEM,)) == {"light-0": 0.5}
    assert index.held((SECOND,)) == {}


def test_a_shared_prefix_has_several_holders_but_not_every_one() -> None:
    index = MemoryPrefixIndex()
    for number in range(HOLDERS_MAX + 2):
        index.remember((SYSTEM,), f"b{number}")

    assert set(index.held((SYSTEM,))) == {f"b{number}" for number in range(2, HOLDERS_MAX + 2)}


def test_all_replicas_of_a_pool_hold_a_shared_prefix() -> None:
    index = MemoryPrefixIndex()
    pool = [f"b{number}" for number in range(20)]
    for name in pool * 2:
        index.remember((SYSTEM, FIRST), name)

    assert index.held((SYSTEM, SECOND)) == dict.fromkeys(pool, 0.5)


def test_a_process_that_has_ended_holds_nothing_and_the_next_one_what_it_has_seen() -> None:
    index = MemoryPrefixIndex()
    index.remember((SYSTEM, FIRST), "light-0")
    index.remember((SYSTEM, SECOND), "light-1")

    index.forget("light-0")
    assert index.held((SYSTEM, FIRST, SECOND)) == {"light-1": 0.7}

    index.remember((SYSTEM, THIRD), "light-0")
    assert index.held((SYSTEM, FIRST, SECOND, THIRD)) == {"light-0": 0.9, "light-1": 0.7}
    assert index.held((SYSTEM, FIRST)) == {"light-0": 0.5, "light-1": 0.5}


def test_processes_that_have_ended_take_no_place_among_the_holders() -> None:
    index = MemoryPrefixIndex()
    index.remember((SYSTEM,), "light-0")
    for _ in range(HOLDERS_MAX):
        index.forget("light-1")
        index.remember((SYSTEM,), "light-1")

    assert set(index.held((SYSTEM,))) == {"light-0", "light-1"}


def test_a_backend_that_holds_nothing_can_be_forgotten() -> None:
    MemoryPrefixIndex().forget("light-0")
