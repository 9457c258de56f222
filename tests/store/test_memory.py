"""The ledger's contract: counts go up and down together, and never past a limit."""

from dataclasses import replace

import pytest

from gateway.core.values import UNLIMITED, Exclusion, Load
from gateway.ports import Slot
from gateway.store.memory import MemoryLedger

CLAIM = Load(seqs=1, share=500_000, kv_blocks=10, long_seqs=1, long_unanswered=1, prefill_ms=700)
FREE = Load(UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED)
LIMITS = replace(FREE, share=1_000_000)


async def take(ledger: MemoryLedger, claim: Load = CLAIM, limits: Load = LIMITS) -> Slot:
    slot = await ledger.acquire("b", claim, limits)
    assert isinstance(slot, Slot)
    return slot


async def test_a_slot_is_taken_and_given_back() -> None:
    ledger = MemoryLedger()

    slot = await take(ledger)

    assert ledger.load("b") == CLAIM
    await ledger.release(slot)
    assert ledger.load("b") == Load()


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (replace(FREE, seqs=1), Exclusion.AT_KNEE),
        (replace(FREE, share=999_999), Exclusion.AT_KNEE),
        (replace(FREE, kv_blocks=19), Exclusion.KV_FULL),
        (replace(FREE, long_seqs=1), Exclusion.LONG_FULL),
        (replace(FREE, long_unanswered=1), Exclusion.LONG_PREFILL),
        (replace(FREE, prefill_ms=1_399), Exclusion.PREFILL_BUSY),
    ],
    ids=["seqs", "knee", "kv", "long", "long-prefill", "prefill"],
)
async def test_every_counter_has_a_limit_of_its_own(limits: Load, reason: Exclusion) -> None:
    ledger = MemoryLedger()
    await take(ledger, limits=FREE)

    assert await ledger.acquire("b", CLAIM, limits) is reason
    assert ledger.load("b") == CLAIM


async def test_a_counter_that_is_not_asked_for_is_not_checked() -> None:
    ledger = MemoryLedger()
    await take(ledger)

    chat = Load(seqs=1, share=1)
    assert isinstance(await ledger.acquire("b", chat, Load(seqs=UNLIMITED, share=1_000_000)), Slot)


async def test_the_prompt_is_outstanding_until_the_first_token() -> None:
    ledger = MemoryLedger()
    slot = await take(ledger)

    await ledger.answered(slot)
    await ledger.answered(slot)

    assert ledger.load("b") == Load(seqs=1, share=500_000, kv_blocks=10, long_seqs=1)
    await ledger.release(slot)
    assert ledger.load("b") == Load()


async def test_releasing_twice_changes_nothing() -> None:
    ledger = MemoryLedger()
    first, _ = await take(ledger), await take(ledger)

    await ledger.release(first)
    await ledger.release(first)
    await ledger.answered(first)

    assert ledger.load("b") == CLAIM


async def test_backends_are_counted_apart() -> None:
    ledger = MemoryLedger()
    await take(ledger)

    assert ledger.load("other") == Load()
    assert set(ledger.loads()) == {"b"}
