"""The ledger's contract, one table over every implementation: counts go up and down together, and never
past a limit."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
from support.redis_server import legs

from gateway import ports
from gateway.core.decision import Exclusion
from gateway.core.load import UNLIMITED, Load
from gateway.ports import Slot
from gateway.store.fallback import FallbackLedger, Mode
from gateway.store.memory import MemoryLedger, OnFreed
from gateway.store.redis import RedisLedger

OpenStore = Callable[[str], Awaitable[Any]]
CLAIM = Load(seqs=1, share=500_000, kv_blocks=10, long_seqs=1, long_unanswered=1, prefill_ms=700)
FREE = Load(UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED)
LIMITS = replace(FREE, share=1_000_000)


class Ledger(ports.Ledger, Protocol):
    """What every implementation can do."""

    def loads(self) -> Mapping[str, Load]: ...
    def on_freed(self, callback: OnFreed) -> None: ...


@pytest.fixture(params=["memory", *legs(), "fallback", "alone"])
async def ledger(
    request: pytest.FixtureRequest, open_store: OpenStore, tmp_path: Path
) -> AsyncIterator[Ledger]:
    if request.param == "memory":
        yield MemoryLedger()
        return
    if request.param == "alone":
        shared = RedisLedger(f"unix://{tmp_path}/nothing.sock")
    else:
        store = await open_store("valkey-9" if request.param == "fallback" else request.param)
        shared = RedisLedger(store.url, prefix=store.prefix)
    built = FallbackLedger(shared, replicas_min=1) if request.param in {"fallback", "alone"} else shared
    yield built
    if isinstance(built, FallbackLedger):
        assert built.mode is (Mode.ALONE if request.param == "alone" else Mode.SHARED)
    await shared.aclose()


async def take(ledger: Ledger, claim: Load = CLAIM, limits: Load = LIMITS) -> Slot:
    slot = await ledger.acquire("b", claim, limits)
    assert isinstance(slot, Slot)
    return slot


async def test_a_slot_is_taken_and_given_back(ledger: Ledger) -> None:
    slot = await take(ledger)

    assert (slot.backend, slot.load) == ("b", CLAIM)
    assert ledger.load("b") == ledger.loads()["b"] == CLAIM
    await ledger.release(slot)
    assert ledger.load("b") == ledger.loads()["b"] == Load()


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (replace(FREE, seqs=1), Exclusion.AT_KNEE),
        (replace(FREE, share=999_999), Exclusion.AT_KNEE),
        (replace(FREE, kv_blocks=19), Exclusion.KV_FULL),
        (replace(FREE, long_seqs=1), Exclusion.LONG_FULL),
        (replace(FREE, long_unanswered=1), Exclusion.LONG_PREFILL),
        (replace(FREE, prefill_ms=1_399), Exclusion.PREFILL_BUSY),
        (replace(FREE, share=1, kv_blocks=1), Exclusion.AT_KNEE),
        (Load(), Exclusion.AT_KNEE),
    ],
    ids=["seqs", "knee", "kv", "long", "long-prefill", "prefill", "first-of-two", "none-at-all"],
)
async def test_every_counter_has_a_limit_of_its_own(ledger: Ledger, limits: Load, reason: Exclusion) -> None:
    slot = await take(ledger, limits=FREE)

    assert await ledger.acquire("b", CLAIM, limits) is reason
    assert ledger.load("b") == CLAIM
    await ledger.release(slot)
    assert ledger.load("b") == Load()


async def test_up_to_the_limit_and_not_beyond(ledger: Ledger) -> None:
    slots = [await take(ledger), await take(ledger)]

    assert await ledger.acquire("b", CLAIM, LIMITS) is Exclusion.AT_KNEE
    await ledger.release(slots[0])
    slots.append(await take(ledger))
    assert ledger.load("b") == CLAIM + CLAIM


async def test_a_claim_beyond_the_whole_limit_is_refused_by_an_empty_backend(ledger: Ledger) -> None:
    assert await ledger.acquire("b", CLAIM, replace(FREE, kv_blocks=9)) is Exclusion.KV_FULL
    assert ledger.load("b") == Load()


async def test_a_counter_that_is_not_asked_for_is_not_checked(ledger: Ledger) -> None:
    await take(ledger)

    chat = Load(seqs=1, share=1)
    assert isinstance(await ledger.acquire("b", chat, Load(seqs=UNLIMITED, share=1_000_000)), Slot)


async def test_large_counters_are_exact(ledger: Ledger) -> None:
    large = Load(seqs=1, kv_blocks=2**52)
    await take(ledger, large, FREE)
    slot = await take(ledger, replace(large, kv_blocks=2**52 - 1), FREE)

    assert await ledger.acquire("b", Load(kv_blocks=1), FREE) is Exclusion.KV_FULL
    assert ledger.load("b").kv_blocks == 2**53 - 1
    await ledger.release(slot)
    assert ledger.load("b") == large


async def test_the_prompt_is_outstanding_until_the_first_token(ledger: Ledger) -> None:
    slot = await take(ledger)
    limits = replace(FREE, long_unanswered=1)
    assert await ledger.acquire("b", CLAIM, limits) is Exclusion.LONG_PREFILL

    await ledger.answered(slot)
    await ledger.answered(slot)

    assert ledger.load("b") == Load(seqs=1, share=500_000, kv_blocks=10, long_seqs=1)
    other = await take(ledger, limits=limits)
    await ledger.release(slot)
    assert ledger.load("b") == CLAIM
    await ledger.release(other)
    assert ledger.load("b") == Load()


async def test_releasing_twice_changes_nothing(ledger: Ledger) -> None:
    first, _ = await take(ledger), await take(ledger)

    await ledger.release(first)
    await ledger.release(first)
    await ledger.answered(first)

    assert ledger.load("b") == CLAIM


async def test_backends_are_counted_apart(ledger: Ledger) -> None:
    await take(ledger)

    assert ledger.load("other") == Load()
    assert ledger.loads()["b"] == CLAIM


async def test_whoever_waits_is_told_what_has_become_free(ledger: Ledger) -> None:
    await ledger.release(await take(ledger))  # one without a store has noticed that now
    freed: list[str] = []
    ledger.on_freed(freed.append)
    slot = await take(ledger)
    assert freed == []

    await ledger.answered(slot)
    assert freed == ["b"]
    await ledger.release(slot)
    assert freed == ["b", "b"]
    await ledger.release(slot)
    assert freed == ["b", "b"]


async def test_what_became_free_can_be_taken_by_whoever_is_told(ledger: Ledger) -> None:
    await ledger.release(await take(ledger))  # one without a store has noticed that now
    seen: list[Load] = []
    ledger.on_freed(lambda backend: seen.append(ledger.load(backend)))
    slot = await take(ledger)

    await ledger.release(slot)

    assert seen == [Load()]
