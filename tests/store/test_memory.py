"""The ledger's contract: counts go up and down together, and never past a limit."""

from gateway.core.values import Backend, Capacity, Demand, Exclusion, KneeStep, Load
from gateway.ports import Slot
from gateway.store.memory import MemoryLedger

BACKEND = Backend(id="b", url="http://b", capacity=Capacity(context_tokens=100, knee=(KneeStep(None, 2),)))
DEMAND = Demand(seqs=1, prompt_tokens=10, total_tokens=20)


async def test_a_slot_is_taken_and_given_back() -> None:
    ledger = MemoryLedger()

    slot = await ledger.acquire(BACKEND, DEMAND)

    assert isinstance(slot, Slot)
    assert ledger.load("b") == Load(seqs=1, share=500_000)
    await ledger.release(slot)
    assert ledger.load("b") == Load()


async def test_the_knee_holds() -> None:
    ledger = MemoryLedger()
    slots = [await ledger.acquire(BACKEND, DEMAND) for _ in range(3)]

    assert slots[2] is Exclusion.AT_KNEE
    assert ledger.load("b").seqs == 2


async def test_releasing_twice_changes_nothing() -> None:
    ledger = MemoryLedger()
    first, second = [await ledger.acquire(BACKEND, DEMAND) for _ in range(2)]
    assert isinstance(first, Slot)
    assert isinstance(second, Slot)

    await ledger.release(first)
    await ledger.release(first)

    assert ledger.load("b").seqs == 1
    assert await ledger.acquire(BACKEND, DEMAND) is not Exclusion.AT_KNEE


async def test_backends_are_counted_apart() -> None:
    ledger = MemoryLedger()
    await ledger.acquire(BACKEND, DEMAND)

    assert ledger.load("other") == Load()
    assert set(ledger.loads()) == {"b"}
