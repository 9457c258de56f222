"""A conversation finds the backends that hold its prefix."""

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
