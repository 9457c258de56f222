"""Facts on their way: written and read, checked, kept for as long as they count; over real servers."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import anyio
import pytest
from support.redis_server import RedisServer, limited

from gateway.core.class_counts import TextKind
from gateway.core.conversations import Conversations
from gateway.core.facts import STARTED_MAX, Attempts, Blocked, Facts, Learned, Ratio
from gateway.core.health import State, Verdict
from gateway.core.load import Load
from gateway.ports import Slot
from gateway.store.connections import StoreAway
from gateway.store.facts import BYTES_MAX, REASON_CHARS_MAX, Exchange, PeerFacts, decode, encode
from gateway.store.leases import HeartbeatReply
from gateway.store.redis import RedisLedger

FULL = Facts(
    verdicts={
        "light-0": Verdict(3, State.EJECTED, "3 requests failed", 4.5, 2),
        "push": Verdict(1, State.DRAINING, "the engine is stopping", 60.0),
    },
    attempts={"light-0": Attempts(900, 3)},
    learned=Learned({TextKind.LATIN: Ratio(200, 0.03125), TextKind.CYRILLIC: Ratio(1, -0.25)}, 34),
    started={("gemma-4", "short_chat", "team a"): 123_456, ("gemma-4", "short_chat", None): 7},
    long_waiting={"push": 2},
    reading={"push": 12.5},
    knee_shares={"light-0": 900_000},
    blocked={"push": Blocked(2.5, Load(seqs=2, share=500_000, kv_blocks=700))},
    conversations=Conversations(-(2**63), {"push": ((1, -5), (3, 2**63 - 1)), "light-0": ((2, 0),)}),
)
WITHIN_S = 20.0

Store = Any  # tests/store/conftest.py
Connect = Callable[..., RedisLedger]


# ------------------------------------------------------------------ written and read


@pytest.mark.parametrize("facts", [Facts(), FULL], ids=["nothing", "everything"])
def test_what_is_written_is_read(facts: Facts) -> None:
    assert decode(encode(facts)) == facts


def test_what_has_no_bound_is_told_as_far_as_it_is_read() -> None:
    verdict = Verdict(1, State.EJECTED, "out for the 10,001st time", 90_000.0, 10_001)
    reading = {"a": 1e9, "b": 1 / 3}
    told = decode(encode(Facts(verdicts={"a": verdict}, long_waiting={"a": 10_001}, reading=reading)))

    assert told is not None
    assert told.verdicts["a"] == replace(verdict, left_s=86_400.0, ejections=10_000)
    assert told.long_waiting == {"a": 10_000}
    assert told.reading == {"a": 86_400.0, "b": 0.333}


def test_a_fleet_that_is_down_is_told_in_full() -> None:
    """That is when all that there is to tell is longest, and when peers need it most."""
    names = [f"backend-{number}" for number in range(200)]
    verdict = Verdict(1, State.EJECTED, "r" * REASON_CHARS_MAX, 86_399.125, 10_000)
    facts = Facts(
        verdicts=dict.fromkeys(names, verdict),
        attempts=dict.fromkeys(names, Attempts(10**9, 10**9)),
        started={("gemma-4", "short_chat", f"{number:0200}"): 10**12 for number in range(STARTED_MAX)},
        long_waiting=dict.fromkeys(names, 10_000),
        reading=dict.fromkeys(names, 86_399.125),
        knee_shares=dict.fromkeys(names, 900_000),
    )
    assert decode(encode(facts)) == facts


def test_members_that_came_later_are_not_needed() -> None:
    assert decode('{"v": 1}') == Facts()
    assert decode('{"v": 1, "something new": [1, 2], "margin": 5}') == Facts(learned=Learned(p99_tokens=5))
    assert decode('{"v": 1, "ratios": {"runes": [5, 0.1]}}') == Facts()


@pytest.mark.parametrize("text", ['{"v": 2}', '{"v": 2, "verdicts": "in another form"}', '{"v": 0}'])
def test_other_versions_say_nothing(text: str) -> None:
    assert decode(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "\ufffd\ufffd",
        "\ud800",
        "null",
        "[]",
        "{}",
        '{"v": "1"}',
        '{"v": 1',
        '{"v": 1, "verdicts": []}',
        '{"v": 1, "verdicts": {"a": {"number": 1, "state": "up", "reason": "", "left_s": 1}}}',
        '{"v": 1, "verdicts": {"a": {"number": 0, "state": "ejected", "reason": "", "left_s": 1}}}',
        '{"v": 1, "verdicts": {"a": {"number": 1, "state": "ejected", "reason": "", "left_s": -1}}}',
        '{"v": 1, "verdicts": {"a": {"number": 1, "state": "ejected", "reason": "", "left_s": 1e999}}}',
        '{"v": 1, "verdicts": {"a": {"number": 1, "state": "ejected", "reason": 5, "left_s": 1}}}',
        '{"v": 1, "attempts": {"a": [1]}}',
        '{"v": 1, "attempts": {"a": [1, -1]}}',
        '{"v": 1, "ratios": {"latin": [10, NaN]}}',
        '{"v": 1, "ratios": {"latin": [10, 5.0]}}',
        '{"v": 1, "ratios": {"latin": [1000000000, 0.1]}}',
        '{"v": 1, "started": [["m", "c", "k", 1.5]]}',
        '{"v": 1, "started": [["m", "c", "k", 100000000000000000000]]}',
        '{"v": 1, "started": [["m", "c"]]}',
        '{"v": 1, "long_waiting": {"push": -1}}',
        '{"v": 1, "long_waiting": {"push": true}}',
        '{"v": 1, "reading": {"push": -1}}',
        '{"v": 1, "blocked": {"push": [1, 1, -1, 0]}}',
        '{"v": 1, "blocked": {"push": [1, 1, 1]}}',
        '{"v": 1, "reading": {"push": 1e999}}',
        '{"v": 1, "x": "' + "x" * BYTES_MAX + '"}',
        '{"v": 1, "x": "' + "\u00e9" * (BYTES_MAX // 2) + '"}',
    ],
)
def test_what_no_gateway_wrote_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(text)


def test_nesting_that_is_too_deep_for_the_interpreter_is_refused() -> None:
    """It is for CPython up to 3.13; later ones can read this."""
    text = '{"v": 1, "x": ' + "[" * 20_000 + "]" * 20_000 + "}"
    try:
        found = decode(text)
    except ValueError:
        found = Facts()
    assert found == Facts()


def test_a_reason_is_short_and_printable() -> None:
    reason = "line\nfeed \x1b[31m\u202e\ud800" + "x" * 1_000
    facts = decode(encode(Facts(verdicts={"a": Verdict(1, State.EJECTED, reason, 1.0)})))
    hostile = {"number": 1, "state": "ejected", "reason": "a\nb" + "x" * 1_000, "left_s": 1}
    other = decode(json.dumps({"v": 1, "verdicts": {"a": hostile}}))

    assert facts is not None
    assert other is not None
    assert facts.verdicts["a"].reason.startswith("line feed  [31m  x")
    for read in (facts, other):
        assert read.verdicts["a"].reason.isprintable()
        assert len(read.verdicts["a"].reason) <= REASON_CHARS_MAX


# ------------------------------------------------------------------ kept for as long as they count


class Site:
    """One end of the exchange, and what came of it."""

    def __init__(self, ttl_s: float = 15.0) -> None:
        self.pokes = 0
        self.heard: list[Mapping[str, Facts]] = []
        self.facts = FULL
        self.exchange = Exchange(ttl_s, self._poke)
        self.exchange.join(lambda: self.facts, self.heard.append)

    def _poke(self) -> None:
        self.pokes += 1


def saying(tokens: int = 0) -> Facts:
    return Facts(started={("m", "c", None): tokens})


def told(owner: str, left_s: float = 15.0, facts: Facts | None = None) -> PeerFacts:
    return PeerFacts(owner, left_s, encode(facts or saying()))


def test_nothing_is_said_before_somebody_has_something_to_say() -> None:
    exchange = Exchange(15.0, lambda: None)

    assert exchange.outgoing() == ("", False)
    exchange.incoming([told("a")], 3.0)
    assert exchange.ages(4.0) == {"a": 1.0}


def test_what_is_urgent_is_urgent_until_it_has_been_sent() -> None:
    site = Site()
    assert site.exchange.outgoing() == (encode(FULL), False)
    site.exchange.publish_now()
    assert site.pokes == 1

    _, is_urgent = site.exchange.outgoing()
    assert is_urgent
    site.exchange.not_sent(is_urgent)

    assert site.exchange.outgoing()[1]
    assert not site.exchange.outgoing()[1]


def test_what_becomes_urgent_while_something_else_is_under_way_stays_so() -> None:
    site = Site()
    _, is_urgent = site.exchange.outgoing()
    site.exchange.publish_now()
    site.exchange.not_sent(is_urgent)

    assert site.exchange.outgoing()[1]


def test_facts_are_told_again_only_when_there_is_news() -> None:
    site = Site()
    site.exchange.incoming([told("a")], 0.0)
    site.exchange.fade(14.9)
    assert [list(facts) for facts in site.heard] == [["a"]]
    site.exchange.fade(15.0)
    site.exchange.fade(16.0)
    assert [list(facts) for facts in site.heard] == [["a"], []]


LIVES: dict[str, tuple[list[tuple[float, list[PeerFacts] | None]], list[str]]] = {
    "there": ([(0, [told("a"), told("b")])], ["a", "b"]),
    "renewed": ([(0, [told("a")]), (10, [told("a")]), (20, None)], ["a"]),
    "until-its-time-is-over": ([(0, [told("a")]), (14.9, None)], ["a"]),
    "and-not-longer": ([(0, [told("a")]), (15, None)], []),
    "its-time-by-the-server-s-clock": ([(0, [told("a", 3.0)]), (3, None)], []),
    "but-no-longer-than-a-lease": ([(0, [told("a", 1e9)]), (15, None)], []),
    "a-server-that-lost-everything-is-no-news-of-it": ([(0, [told("a")]), (10, [])], ["a"]),
    "until-then": ([(0, [told("a")]), (10, []), (15, [told("b")])], ["b"]),
    "what-cannot-be-read-says-nothing": ([(0, [told("a")]), (1, [PeerFacts("a", 15.0, "junk")])], []),
    "nor-does-another-version": ([(0, [PeerFacts("a", 15.0, '{"v": 9}')])], []),
}


@pytest.mark.parametrize(("script", "expected"), LIVES.values(), ids=LIVES.keys())
def test_what_others_say_counts_while_they_are_there(
    script: list[tuple[float, list[PeerFacts] | None]], expected: list[str]
) -> None:
    site = Site()
    for now, said in script:
        if said is None:
            site.exchange.fade(now)
        else:
            site.exchange.incoming(said, now)

    assert list(site.heard[-1]) == expected


def test_what_cannot_be_read_is_complained_of_once(caplog: pytest.LogCaptureFixture) -> None:
    site = Site()
    for number in range(5):
        site.exchange.incoming([PeerFacts(f"gateway\n{number}", 15.0, f"junk {number}"), told("b")], 0.0)

    (complaint,) = caplog.records
    assert complaint.levelno == logging.ERROR
    assert r"the facts from gateway 'gateway\n0' cannot be read" in complaint.message
    assert list(site.heard[-1]) == ["b"]


def test_facts_that_are_too_long_are_not_sent(caplog: pytest.LogCaptureFixture) -> None:
    site = Site()
    site.facts = Facts(long_waiting={f"{number:0100}": 1 for number in range(BYTES_MAX // 100)})
    site.exchange.publish_now()

    assert [site.exchange.outgoing() for _ in range(2)] == [("", False)] * 2
    assert len(caplog.records) == 1


def test_facts_may_be_as_long_as_they_are_read_and_no_longer() -> None:
    def named(chars: int, char: str = "k") -> Facts:
        return Facts(started={("m", "c", char * chars): 1})

    site = Site()
    most = BYTES_MAX - len(encode(named(0)))
    site.facts = named(most)
    text, _ = site.exchange.outgoing()
    assert decode(text) == site.facts
    with pytest.raises(ValueError, match="longer than"):
        decode(text + " ")
    for too_long in (named(most + 1), named(most // 2 + 1, "\u00e9")):  # of two bytes each
        site.facts = too_long
        assert site.exchange.outgoing() == ("", False)


# ------------------------------------------------------------------ over real servers


class Gateway:
    """A gateway process's ledger, what it says, and what it hears."""

    def __init__(self, ledger: RedisLedger) -> None:
        self.ledger = ledger
        self.facts = saying()
        self.heard: Mapping[str, Facts] = {}
        self._changed = anyio.Event()
        ledger.exchange.join(lambda: self.facts, self._hear)

    def _hear(self, facts: Mapping[str, Facts]) -> None:
        self.heard = facts
        self._changed.set()
        self._changed = anyio.Event()

    async def hears(self, facts: Mapping[str, Facts]) -> None:
        with anyio.fail_after(WITHIN_S):
            while self.heard != facts:
                await self._changed.wait()


def facts_key(store: Store) -> str:
    return f"{{{store.prefix}}}:facts"


async def test_gateways_hear_each_other(store: Store, connect: Connect) -> None:
    here, there = Gateway(connect(store)), Gateway(connect(store))
    here.facts = FULL
    await here.ledger.sync()
    await there.ledger.sync()
    await here.ledger.sync()

    assert there.heard == {here.ledger.owner: FULL}
    assert here.heard == {there.ledger.owner: saying()}
    assert 15_000 < await store.redis.pttl(facts_key(store)) <= 30_001  # outlives what is in it


async def test_what_is_urgent_is_heard_at_once(store: Store, connect: Connect) -> None:
    here, there = (Gateway(connect(store, refresh_s=600.0)) for _ in range(2))
    synced = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(here.ledger.run, lambda failure: synced.set())
        await synced.wait()  # nobody looks again by himself: who comes second has heard of the first
        tasks.start_soon(there.ledger.run)
        await there.hears({here.ledger.owner: saying()})
        here.facts = FULL
        here.ledger.exchange.publish_now()
        await there.hears({here.ledger.owner: FULL})
        tasks.cancel_scope.cancel()


async def test_what_is_urgent_and_was_not_sent_is_heard_at_once_when_it_is(
    store: Store, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = Gateway(connect(store, refresh_s=0.05)), Gateway(connect(store, refresh_s=600.0))
    heartbeat, lost = here.ledger._leases.heartbeat, list[str]()

    async def lose_first(facts: str, *, is_urgent: bool) -> HeartbeatReply:
        if is_urgent and not lost:
            lost.append(facts)
            raise StoreAway("cut off")
        return await heartbeat(facts, is_urgent=is_urgent)

    monkeypatch.setattr(here.ledger._leases, "heartbeat", lose_first)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(there.ledger.run)
        tasks.start_soon(here.ledger.run)
        await there.hears({here.ledger.owner: saying()})
        here.facts = FULL
        here.ledger.exchange.publish_now()
        await there.hears({here.ledger.owner: FULL})
        tasks.cancel_scope.cancel()
    assert lost


async def test_a_gateway_that_is_gone_stops_counting_and_leaves_nothing(
    store: Store, connect: Connect
) -> None:
    here = Gateway(connect(store, ttl_s=0.5))
    dead, left = Gateway(connect(store, ttl_s=0.5)), Gateway(connect(store, ttl_s=0.5))
    for gateway in (dead, left, here):
        await gateway.ledger.sync()
    assert here.heard.keys() == {dead.ledger.owner, left.ledger.owner}
    await left.ledger.aclose()
    there = sorted([here.ledger.owner, dead.ledger.owner])
    assert sorted(await store.redis.hkeys(facts_key(store))) == there

    with anyio.fail_after(WITHIN_S):
        while here.heard:
            await here.ledger.sync()

    assert await store.redis.hkeys(facts_key(store)) == [here.ledger.owner]


async def test_a_gateway_that_comes_back_under_another_name_is_another_one(
    store: Store, connect: Connect
) -> None:
    here, before, after = (Gateway(connect(store)) for _ in range(3))
    for gateway in (before, after, here):
        await gateway.ledger.sync()

    assert len({gateway.ledger.owner for gateway in (here, before, after)}) == 3
    assert here.heard.keys() == {before.ledger.owner, after.ledger.owner}


async def test_a_server_that_lost_everything_is_told_again(store: Store, connect: Connect) -> None:
    here, there = Gateway(connect(store)), Gateway(connect(store))
    for gateway in (there, here):
        await gateway.ledger.sync()
    await store.lose()
    await here.ledger.sync()
    assert here.heard == {there.ledger.owner: saying()}
    there.facts = FULL
    await there.ledger.sync()
    await here.ledger.sync()

    assert here.heard == {there.ledger.owner: FULL}


async def test_facts_that_are_told_no_more_are_gone(store: Store, connect: Connect) -> None:
    here, there = Gateway(connect(store)), Gateway(connect(store))
    here.facts = FULL
    await here.ledger.sync()
    here.facts = replace(FULL, started={("gemma-4", "short_chat", "k" * BYTES_MAX): 1})  # too long to be told
    await here.ledger.sync()
    await there.ledger.sync()

    assert there.ledger.replicas == 2
    assert there.heard == {}


async def test_a_gateway_without_facts_is_counted_and_says_nothing(store: Store, connect: Connect) -> None:
    here, plain = Gateway(connect(store)), connect(store)
    await plain.sync()
    await here.ledger.sync()

    assert here.ledger.replicas == 2
    assert here.heard == {}


@pytest.mark.parametrize(
    ("owner", "text", "complaints"),
    [
        ("other", "junk", 1),
        ("other", b"\xff\xfe\x00", 1),
        ("other", '{"v": 1, "long_waiting": {"push": -5}}', 1),
        ("other", "", 1),
        ("other", '{"v": 2, "of": "another version"}', 0),
        ("other", "x" * BYTES_MAX, 1),
        ("other", "x" * (BYTES_MAX + 1), 0),
        (b"\xff", "junk", 1),
    ],
    ids=["junk", "bytes", "negative", "empty", "another-version", "long", "too-long-to-be-passed-on", "name"],
)
async def test_a_hash_of_junk_harms_nobody(
    store: Store,
    connect: Connect,
    caplog: pytest.LogCaptureFixture,
    owner: Any,
    text: Any,
    complaints: int,
) -> None:
    here, there = Gateway(connect(store)), Gateway(connect(store))
    await there.ledger.sync()
    await store.redis.zadd(f"{{{store.prefix}}}:replicas", {owner: 9e15})
    await store.redis.hset(facts_key(store), mapping={owner: text})
    for _ in range(3):
        await here.ledger.sync()

    assert here.heard == {there.ledger.owner: saying()}
    assert len(caplog.records) == complaints


@pytest.mark.parametrize("count", [1, 100])
async def test_facts_of_nobody_are_thrown_away(store: Store, connect: Connect, count: int) -> None:
    here, there = Gateway(connect(store)), Gateway(connect(store))
    await there.ledger.sync()
    await store.redis.hset(facts_key(store), mapping={f"nobody-{number}": "x" for number in range(count)})
    await here.ledger.sync()
    await there.ledger.sync()
    await here.ledger.sync()

    assert sorted(await store.redis.hkeys(facts_key(store))) == sorted(
        [here.ledger.owner, there.ledger.owner]
    )
    assert here.heard == {there.ledger.owner: saying()}


async def test_a_key_of_another_type_in_their_place_is_replaced(store: Store, connect: Connect) -> None:
    here = Gateway(connect(store))
    await store.redis.set(facts_key(store), "of another type")

    await here.ledger.sync()

    assert await store.redis.hkeys(facts_key(store)) == [here.ledger.owner]


async def test_junk_on_the_channel_harms_nobody(store: Store, connect: Connect) -> None:
    here, there = (Gateway(connect(store, refresh_s=600.0)) for _ in range(2))
    async with anyio.create_task_group() as tasks:
        for gateway in (here, there):
            tasks.start_soon(gateway.ledger.run)
        with anyio.fail_after(WITHIN_S):
            while not here.heard:  # what is said before the other listens is lost, and said again much later
                there.ledger.exchange.publish_now()
                with anyio.move_on_after(0.2):
                    await here.hears({there.ledger.owner: saying()})
        for message in (b"\xff", "", " " * 8, "x y 1 2 3 4 5 6 b", "a b"):
            await store.redis.publish(f"{store.prefix}:freed", message)
        there.facts = FULL
        there.ledger.exchange.publish_now()
        await here.hears({there.ledger.owner: FULL})
        tasks.cancel_scope.cancel()


async def test_what_others_said_fades_while_the_server_is_away(stoppable: Any) -> None:
    here, there = (Gateway(RedisLedger(stoppable.url, ttl_s=1.0, refresh_s=0.05)) for _ in range(2))
    async with anyio.create_task_group() as tasks:
        for gateway in (here, there):
            tasks.start_soon(gateway.ledger.run)
        await here.hears({there.ledger.owner: saying()})
        stoppable.kill()
        await here.hears({})
        stoppable.start()
        there.facts = FULL
        await here.hears({there.ledger.owner: FULL})
        tasks.cancel_scope.cancel()
    for gateway in (here, there):
        await gateway.ledger.aclose()


async def test_the_documented_rights_are_enough(stoppable: RedisServer) -> None:
    async with limited(stoppable) as url:
        here, there = Gateway(RedisLedger(url)), Gateway(RedisLedger(url))
        async with anyio.create_task_group() as tasks:
            for gateway in (here, there):
                tasks.start_soon(gateway.ledger.run)
            await here.hears({there.ledger.owner: saying()})
            slot = await here.ledger.acquire("b", Load(seqs=1), Load(seqs=1))
            assert isinstance(slot, Slot)
            await here.ledger.answered(slot)
            await here.ledger.release(slot)
            there.facts = FULL
            there.ledger.exchange.publish_now()
            await here.hears({there.ledger.owner: FULL})
            tasks.cancel_scope.cancel()
        for gateway in (here, there):
            await gateway.ledger.aclose()
