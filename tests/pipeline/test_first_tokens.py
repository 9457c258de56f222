"""Prompt work that shows no first token counts for as long as it should take, not for the whole answer."""

from dataclasses import replace

import anyio
import pytest
from support.world import DONE, HELLO, POLICY, ROLE, STOP, WHOLE, Caller, Script, World

from gateway.clock import SystemClock
from gateway.core.backends import Gates, Pool
from gateway.core.errors import AtCapacity, UpstreamFailed
from gateway.core.load import Load
from gateway.core.perf import PerfModel
from gateway.core.policy import Waiting, Weights
from gateway.core.request import Endpoint, Prompt, Request
from gateway.pipeline.first_tokens import OVERHEAD_S, FirstTokens
from gateway.ports import Slot
from gateway.store.memory import MemoryLedger

PERF = PerfModel(t_fixed=0, t_mem=0, kv_read=0, kv_span=0, t_seq=0, t_tok=0.01, t_attn=0, sharp=1)
READING_S = 1.0  # 100 tokens


def measured(world: World) -> None:
    """Give the backends a latency model, and the chat pool a bound on prompt work."""
    world.policy = replace(
        POLICY,
        backends={name: replace(one, perf=PERF) for name, one in POLICY.backends.items()},
        pools={**POLICY.pools, "light": replace(POLICY.pools["light"], gates=Gates(prefill_s=0.5))},
    )


def patient(world: World) -> None:
    """Let every class wait for a minute."""
    (model,) = POLICY.models
    classes = [replace(one, waiting=Waiting(max_wait_s=60.0)) for one in model.classes]
    world.policy = replace(world.policy, models=(replace(model, classes=tuple(classes)),))


async def after(world: World, seconds: float) -> Load:
    """Return what is in flight on light-0 when that much time has passed."""
    world.clock.time += seconds
    await world.pipeline.first_tokens.tell()
    return world.ledger.load("light-0")


async def test_an_answer_in_one_piece_counts_as_read_when_it_should_be(world: World) -> None:
    measured(world)
    gate = anyio.Event()
    world.answers(light_0=Script([gate, WHOLE]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(stream=False))
        await anyio.wait_all_tasks_blocked()
        due_s = OVERHEAD_S + READING_S

        assert (await after(world, due_s - 0.01)).prefill_ms == 1_000
        answered = await after(world, 0.02)
        assert (answered.prefill_ms, answered.seqs) == (0, 1)
        gate.set()


@pytest.mark.parametrize(
    ("affinity", "tokens", "prefill_ms"),
    [(0.2, 1_000, 2_500), (0.0, 1_000, 10_000), (0.2, 999, 9_990)],
    ids=["cached", "told-that-nothing-is", "short"],
)
async def test_what_a_backend_has_seen_of_a_conversation_is_not_read_again(
    world: World, affinity: float, tokens: int, prefill_ms: int
) -> None:
    measured(world)
    world.estimates.tokens = tokens
    world.policy = replace(world.policy, weights=Weights(prefix_affinity=affinity))
    gate = anyio.Event()
    world.answers(light_0=Script([WHOLE]))
    await world.run(world.request(stream=False, prefixes=((1, 1.0),)))
    world.answers(light_0=Script([gate, WHOLE]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(stream=False, prefixes=((1, 0.75), (2, 1.0))))
        await anyio.wait_all_tasks_blocked()

        assert world.ledger.load("light-0").prefill_ms == prefill_ms
        gate.set()


@pytest.mark.parametrize("seen", [0.75, 0.0], ids=["its-conversation", "another-s"])
async def test_a_request_stays_with_the_busy_backend_that_has_its_conversation(
    world: World, seen: float
) -> None:
    """Although the other one of its pool has room: its prompt would be read there as a whole."""
    measured(world)
    patient(world)
    world.estimates.tokens = 1_000
    for _ in range(2):
        world.answers(light_0=Script([WHOLE]), light_1=Script([WHOLE]))
    await world.run(world.request(stream=False, prefixes=((1, 1.0),)))
    most = Load(99, 10**6, 10**6, 99, 99, 10**6)
    held = await world.ledger.acquire("light-0", Load(seqs=2, share=10**6), most)
    async with anyio.create_task_group() as tasks:
        callers: list[Caller] = []

        async def call() -> None:
            prefixes = ((1 if seen else 3, seen or 0.75), (2, 1.0))
            callers.append(await world.run(world.request(stream=False, prefixes=prefixes)))

        tasks.start_soon(call)
        await anyio.wait_all_tasks_blocked()
        assert len(world.pipeline.room.line) == bool(seen)
        await world.ledger.release(held)  # type: ignore[arg-type]

    assert callers[0].headers["x-gateway-backend"] == ("light-0" if seen else "light-1")


async def test_what_a_backend_lost_while_a_request_waited_is_read_again(world: World) -> None:
    """It has restarted: its prompt work counts in full, where the rest waits for its turn."""
    measured(world)
    world.policy = replace(world.policy, pools={**world.policy.pools, "light": Pool("light", ("light-0",))})
    world.estimates.tokens = 1_000
    gate = anyio.Event()
    world.answers(light_0=Script([WHOLE]))
    await world.run(world.request(stream=False, prefixes=((1, 1.0),)))
    most = Load(99, 10**6, 10**6, 99, 99, 10**6)
    held = [await world.ledger.acquire(name, Load(seqs=2, share=10**6), most) for name in ("light-0", "push")]
    world.answers(light_0=Script([gate, WHOLE]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(stream=False, prefixes=((1, 0.75), (2, 1.0))))
        await anyio.wait_all_tasks_blocked()
        assert len(world.pipeline.room.line) == 1
        world.pipeline.forget_prefixes("light-0")
        await world.ledger.release(held[0])  # type: ignore[arg-type]
        await anyio.wait_all_tasks_blocked()

        assert world.ledger.load("light-0").prefill_ms == 10_000
        gate.set()


async def test_a_retry_knows_what_backends_have_now(world: World) -> None:
    measured(world)
    patient(world)
    world.estimates.tokens = 1_000
    gates = anyio.Event(), anyio.Event()
    world.answers(light_0=Script([WHOLE]))
    await world.run(world.request(stream=False, prefixes=((1, 1.0),)))
    most = Load(99, 10**6, 10**6, 99, 99, 10**6)
    held = await world.ledger.acquire("light-0", Load(seqs=2, share=10**6), most)
    world.answers(light_0=Script([gates[1], WHOLE]), light_1=Script([gates[0], UpstreamFailed("broke")]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(stream=False, prefixes=((1, 0.75), (2, 1.0))))
        await anyio.wait_all_tasks_blocked()
        world.clock.time += 8.0  # longer than it stays for light-0
        world.pipeline.room.look()
        await anyio.wait_all_tasks_blocked()
        assert world.ledger.load("light-1").prefill_ms == 10_000
        await world.ledger.release(held)  # type: ignore[arg-type]
        world.pipeline.forget_prefixes("light-0")
        gates[0].set()
        await anyio.wait_all_tasks_blocked()

        assert world.ledger.load("light-0").prefill_ms == 10_000
        gates[1].set()


async def test_what_was_outstanding_is_read_first(world: World) -> None:
    measured(world)
    gate = anyio.Event()
    held = await world.ledger.acquire("light-0", Load(prefill_ms=3_000), Load(prefill_ms=10_000))
    world.policy = replace(world.policy, pools=POLICY.pools)
    world.answers(light_0=Script([gate, WHOLE]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(stream=False))
        await anyio.wait_all_tasks_blocked()
        assert (await after(world, OVERHEAD_S + READING_S)).prefill_ms == 4_000
        assert (await after(world, 3.0)).prefill_ms == 3_000
        gate.set()
    await world.ledger.release(held)  # type: ignore[arg-type]


async def test_a_prompt_whose_work_is_unknown_counts_as_unread_to_its_end(world: World) -> None:
    gates = Gates(long_prompt_tokens=2_000, long_prefills=1)
    world.policy = replace(
        POLICY, pools={**POLICY.pools, "light": replace(POLICY.pools["light"], gates=gates)}
    )
    world.estimates.tokens = 2_000
    gate = anyio.Event()
    world.answers(light_0=Script([gate, WHOLE]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(stream=False))
        await anyio.wait_all_tasks_blocked()
        assert (await after(world, 60.0)).long_unanswered == 1
        gate.set()


async def test_a_request_that_has_ended_is_not_told_of(world: World) -> None:
    measured(world)
    world.answers(light_0=Script([WHOLE]))

    await world.run(world.request(stream=False))

    assert (await after(world, 0.0)) == Load()
    assert not world.pipeline.first_tokens._due  # dropped at its end, not when it would have been due


async def test_a_stream_of_one_prompt_shows_its_own(world: World) -> None:
    measured(world)
    gate = anyio.Event()
    world.answers(light_0=Script([ROLE + HELLO, gate, STOP, DONE]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request())
        await anyio.wait_all_tasks_blocked()
        assert world.ledger.load("light-0").prefill_ms == 0
        assert not world.pipeline.first_tokens._due
        gate.set()


async def test_the_first_tokens_of_long_prompts_teach_how_long_others_wait(world: World) -> None:
    measured(world)
    (model,) = POLICY.models
    classes = [replace(one, waiting=Waiting(max_wait_s=10.0), pools=("light",)) for one in model.classes]
    gates = Gates(long_prompt_tokens=2_000, long_prefills=1)
    light = replace(POLICY.pools["light"], backends=("light-0",), gates=gates)
    world.policy = replace(
        world.policy,
        models=(replace(model, classes=tuple(classes)),),
        pools={**POLICY.pools, "light": light},
    )
    world.estimates.tokens = 2_000  # 20 s
    first, second = anyio.Event(), anyio.Event()
    async with anyio.create_task_group() as tasks:
        world.answers(light_0=Script([first, ROLE + HELLO, STOP, DONE]))
        tasks.start_soon(world.run, world.request())
        await anyio.wait_all_tasks_blocked()
        world.clock.time += 60.0
        first.set()
        await anyio.wait_all_tasks_blocked()
        world.answers(light_0=Script([second, ROLE + HELLO, STOP, DONE]))
        tasks.start_soon(world.run, world.request())
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(AtCapacity, match=r"position 1, about 48\.6 s to wait") as refused:
            await world.run(world.request())
        second.set()

    assert refused.value.retry_after_s == 49


@pytest.mark.parametrize(("seqs", "prompts", "prefill_ms"), [(2, 1, 1_000), (2, 2, 2_000)])
async def test_different_prompts_are_each_read(
    world: World, seqs: int, prompts: int, prefill_ms: int
) -> None:
    measured(world)
    gate = anyio.Event()
    event = b'data: {"model":"served","choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
    ends = b"".join(
        b'data: {"model":"served","choices":[{"index":%d,"text":"","finish_reason":"stop"}]}\n\n' % index
        for index in range(2)
    )
    world.answers(light_0=Script([gate, event, gate, ends, DONE]))
    request = Request(
        endpoint=Endpoint.COMPLETIONS,
        model="gemma-4",
        prompt=Prompt(),
        stream=True,
        seqs=seqs,
        choices=2,
        prompts=prompts,
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, request)
        await anyio.wait_all_tasks_blocked()
        assert world.ledger.load("light-0").prefill_ms == prefill_ms
        gate.set()


async def test_one_that_is_due_before_all_others_is_told_then() -> None:
    ledger, told = MemoryLedger(), anyio.Event()
    tokens = FirstTokens(ledger, SystemClock())
    room = Load(prefill_ms=10**6)
    late = await ledger.acquire("late", Load(prefill_ms=900_000), room)
    soon = await ledger.acquire("soon", Load(prefill_ms=1), room)
    assert isinstance(late, Slot)
    assert isinstance(soon, Slot)
    ledger.on_freed(lambda backend: told.set())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tokens.run)
        for slot in (late, soon):
            await anyio.wait_all_tasks_blocked()
            tokens.expect(slot)
        with anyio.fail_after(10):
            await told.wait()
        tasks.cancel_scope.cancel()
    assert (ledger.load("soon").prefill_ms, ledger.load("late").prefill_ms) == (0, 900_000)
