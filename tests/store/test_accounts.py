"""An account between two commands: what it lets a process do by itself, and what it tells the server."""

import asyncio
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from gateway.core.admission import COUNTERS
from gateway.core.load import UNLIMITED, Load
from gateway.store.accounts import PEAK_TICKS, Account, PendingSlot
from gateway.store.leases import Freed, Order, Reply

CLAIM = Load(seqs=1, share=2, kv_blocks=3, long_seqs=1, long_unanswered=1, prefill_ms=4)
FOUR = Load(4, 8, 12, 4, 4, 16)
FIVE = Load(5, 10, 15, 5, 5, 20)
LIMITS = Load(9, 18, 27, 9, 9, 36)
EIGHT = Load(8, 16, 24, 8, 8, 32)  # the limits, less room for one more
NOTHING = Load()


async def ordered(
    account: Account, used: Load = CLAIM, claim: Load | None = CLAIM, *, waits: bool = False
) -> Order:
    outcome = asyncio.get_running_loop().create_future()
    claims = [] if claim is None else [PendingSlot(claim, LIMITS, outcome)]
    return account.order(used, claims, waits=waits, may_keep=True, now=100.0)


def reply(**changes: Any) -> Reply:
    usual = Reply(
        is_known=True,
        version=1,
        keeping=0,
        may_keep=True,
        others=NOTHING,
        others_kept=NOTHING,
        kept=FIVE,
        outcomes=(),
    )
    return replace(usual, **changes)


async def with_surplus(claim: Load = CLAIM) -> Account:
    """Return an account with five slots, of which one is used."""
    account = Account("b", count(1))
    await ordered(account, claim=claim)
    account.settled(reply(), 100.0)
    return account


async def test_a_slot_is_taken_from_the_grant_only_while_that_is_certain() -> None:
    account = await with_surplus()
    assert account.covers(CLAIM, CLAIM, LIMITS, 100.0)
    assert not account.covers(CLAIM, CLAIM, LIMITS, 100.1)  # it heard nothing since
    assert not account.covers(FIVE, CLAIM, LIMITS, 100.0)
    await ordered(account)
    assert not account.covers(CLAIM, CLAIM, LIMITS, 100.0)  # a command is under way
    account.settled(reply(may_keep=False), 100.0)
    assert not account.covers(CLAIM, CLAIM, LIMITS, 100.0)  # it was granted none


@pytest.mark.parametrize("name", COUNTERS)
async def test_a_limit_that_has_fallen_below_that_of_the_surplus_counts(name: str) -> None:
    account = await with_surplus()
    lower = replace(LIMITS, **{name: getattr(EIGHT, name) - 1})
    assert account.covers(CLAIM, CLAIM, replace(LIMITS, **{name: getattr(EIGHT, name)}), 100.0)
    assert not account.covers(CLAIM, CLAIM, lower, 100.0)
    assert account.covers(CLAIM, replace(CLAIM, **{name: 0}), lower, 100.0)  # which takes nothing of it


@pytest.mark.parametrize("name", COUNTERS)
async def test_what_is_freed_is_kept_where_there_may_be_surplus_of_it(name: str) -> None:
    account = await with_surplus(replace(CLAIM, **{name: 0}))
    assert account.may_keep(replace(CLAIM, **{name: 0}))
    assert not account.may_keep(CLAIM)


async def test_surplus_stays_below_the_limits_by_room_for_one_more() -> None:
    order = await ordered(Account("b", count(1)))
    assert order.ceiling == EIGHT
    order = await ordered(await with_surplus(), claim=FOUR)
    assert order.ceiling == FIVE  # the lower of those of all claims
    order = await ordered(Account("b", count(1)), claim=replace(LIMITS, share=UNLIMITED))
    assert order.ceiling == Load(0, 0, 0, 0, 0, 0)
    account = await with_surplus(FOUR)
    account.settled(reply(may_keep=False), 100.0)
    assert (await ordered(account)).ceiling == EIGHT  # there is no surplus any more, nor what limited it


async def test_only_who_has_requests_and_has_made_a_claim_may_have_surplus() -> None:
    assert not (await ordered(Account("b", count(1)), claim=None)).may_keep
    assert (await ordered(await with_surplus(), claim=None)).may_keep
    assert not (await ordered(await with_surplus(), NOTHING, claim=None)).may_keep
    assert (await ordered(await with_surplus(), NOTHING)).may_keep


async def test_who_wants_and_who_waits_keeps_no_surplus() -> None:
    account = await with_surplus()
    assert account.covers(FOUR, CLAIM, LIMITS, 100.0)  # so many were in use at once
    order = await ordered(account)
    assert (order.may_keep, order.waits, order.kept) == (True, False, FIVE)
    account.settled(reply(), 100.0)

    order = await ordered(account, waits=True)
    assert (order.may_keep, order.waits, order.kept) == (False, True, CLAIM)
    account.settled(reply(), 100.0)

    account.waiters = 1
    order = await ordered(account)
    assert (order.may_keep, order.waits, order.kept) == (False, True, CLAIM)
    account.settled(reply(), 100.0)

    account.waiters, account.is_wanted = 0, True
    order = await ordered(account)
    assert (order.may_keep, order.waits, order.kept) == (False, False, CLAIM)
    account.settled(reply(), 100.0)
    assert (await ordered(account)).may_keep  # it has given up what was wanted


async def test_surplus_that_was_not_needed_for_a_while_is_given_back() -> None:
    account = await with_surplus()
    assert account.covers(FOUR, CLAIM, LIMITS, 100.0)
    assert account.covers(CLAIM, CLAIM, LIMITS, 100.0)
    for kept in (FIVE, CLAIM):
        for _ in range(PEAK_TICKS):
            account.tick(CLAIM)
        assert (await ordered(account)).kept == kept
        account.settled(reply(), 100.0)
    for _ in range(PEAK_TICKS):
        account.tick(FIVE)
    assert (await ordered(account)).kept == FIVE  # which was in use a moment ago


async def test_of_every_counter_is_kept_what_so_many_sequences_need_and_at_least_what_is_used() -> None:
    account = await with_surplus()
    account.settled(reply(kept=Load(4, 10, 13, 4, 4, 16)), 100.0)
    assert (await ordered(account, Load(3, 9, 1, 1, 1, 1))).kept == Load(3, 9, 10, 3, 3, 12)
    account.settled(reply(kept=NOTHING), 100.0)
    assert (await ordered(account, NOTHING)).kept == NOTHING


async def test_what_was_granted_and_is_no_surplus_is_given_back_as_it_is_freed() -> None:
    account = await with_surplus()
    assert account.covers(FOUR, CLAIM, LIMITS, 100.0)
    account.settled(reply(may_keep=False), 100.0)
    assert (await ordered(account)).kept == CLAIM


async def test_requests_that_an_order_tells_of_count_no_longer_as_placed_since() -> None:
    account = await with_surplus()
    account.placed = 3
    await ordered(account)
    assert account.placed == 0


async def test_what_another_wanted_is_forgotten_when_there_is_none() -> None:
    account = await with_surplus()
    await ordered(account)
    account.is_wanted = True
    account.settled(reply(may_keep=False), 100.0)
    assert not account.is_wanted
    assert not account.may_keep(CLAIM)


async def test_after_a_failure_nothing_is_certain() -> None:
    account = await with_surplus()
    await ordered(account)
    account.failed(CLAIM)
    assert not account.covers(CLAIM, CLAIM, LIMITS, 100.0)
    assert not account.may_keep(CLAIM)
    assert not account.is_behind(CLAIM)  # so that it does not ask again and again
    assert account.is_behind(NOTHING)
    order = await ordered(account, claim=None)
    assert (order.may_keep, order.kept) == (False, CLAIM)


async def test_the_server_is_behind_if_it_counts_anything_else_than_the_use_or_a_grant_above_it() -> None:
    account = await with_surplus()
    assert not account.is_behind(CLAIM)
    assert account.is_behind(EIGHT)
    await ordered(account)
    account.settled(reply(may_keep=False), 100.0)
    assert account.is_behind(CLAIM)
    assert not account.is_behind(FIVE)


@pytest.mark.parametrize("name", ["is_due", "is_under_way", "asked", "told", "waiters", "keeps"])
def test_an_account_of_which_something_is_left_to_do_is_not_empty(name: str) -> None:
    account = Account("b", count(1))
    assert account.is_empty(NOTHING)
    assert not account.is_empty(CLAIM)
    setattr(account, name, 1)
    assert not account.is_empty(NOTHING)


async def test_the_server_is_asked_again_by_who_is_looked_at_or_has_surplus() -> None:
    account = Account("b", count(1))
    assert not account.tick(NOTHING)
    account.is_looked_at = True
    assert account.tick(NOTHING)
    assert not account.tick(NOTHING)

    account = await with_surplus()
    assert not account.tick(CLAIM)  # just settled
    assert account.tick(CLAIM)
    assert account.tick(CLAIM)


async def test_those_that_do_not_give_back_are_not_waited_for_until_later() -> None:
    account = Account("b", count(1))
    account.settled(reply(keeping=2), 100.0)
    assert account.may_find_more(100.0)
    account.not_given_back(101.0)
    assert (await ordered(account)).deaf == 2
    assert not account.may_find_more(100.9)
    assert account.may_find_more(101.0)
    account.settled(reply(keeping=3), 100.5)
    assert account.may_find_more(100.9)  # one more has some
    account.not_given_back(100.0)
    assert (await ordered(account)).deaf == 0


async def test_what_is_told_twice_counts_once() -> None:
    account = Account("b", count(1))
    account.settled(reply(version=7, others=FIVE), 100.0)
    account.heard(Freed("b", "other", 7, CLAIM))  # the reply was later
    assert account.others == FIVE
    for _ in range(2):
        account.heard(Freed("b", "other", 8, CLAIM))
    assert account.others == FOUR
    account.heard(Freed("b", "other", 9, LIMITS))
    assert account.others == NOTHING
    # A server that has lost its data counts from the beginning.
    account.settled(reply(version=1, others=FIVE), 101.0)
    account.heard(Freed("b", "other", 2, CLAIM))
    assert account.others == FOUR


def test_whoever_waits_for_news_is_told_of_each() -> None:
    account = Account("b", count(1))
    for version in (1, 2):
        news = account.news
        assert not news.is_set()
        account.heard(Freed("b", "other", version, CLAIM))
        assert news.is_set()


@pytest.mark.parametrize("name", ["others", "others_kept"])
async def test_capacity_that_nobody_told_of_is_noticed(name: str) -> None:
    account = Account("b", count(1))
    assert not account.settled(reply(**{name: FIVE}), 100.0)
    assert not account.settled(reply(**{name: FIVE}), 100.0)
    assert account.settled(reply(**{name: CLAIM}), 100.0)
