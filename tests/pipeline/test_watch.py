"""What the pipeline sees of its backends: steps, and what follows from them. The clock is the test's."""

from collections.abc import Sequence
from dataclasses import replace

import anyio
import pytest
from support.world import DONE, HELLO, POLICY, ROLE, STOP, WHOLE, Caller, Script, World

from gateway.core import admission
from gateway.core.backends import JobRoom, Spill
from gateway.core.health import EngineSample, Outcome
from gateway.core.knee_estimate import StepFit, Uncertainty
from gateway.core.kv import KvFormula
from gateway.core.load import Demand, Load
from gateway.core.policy import Policy
from gateway.core.tpot_control import DECIDE_S, WINDOW_S, Move
from gateway.core.usage import Usage
from gateway.core.waiting import Ticket
from gateway.pipeline.watch import JUDGED_S
from gateway.ports import Slot, StreamTransform, UpstreamResponse
from gateway.store.memory import MemoryLedger

USAGE = (
    b'data: {"model":"served","choices":[],'
    b'"usage":{"prompt_tokens":101,"total_tokens":1001,"completion_tokens":%d}}\n\n'
)


def promising(tpot_s: float | None) -> Policy:
    """Return the policy with a target for the chat pool."""
    return replace(
        POLICY, pools={**POLICY.pools, "light": replace(POLICY.pools["light"], tpot_target_s=tpot_s)}
    )


class Streams:
    """Streams that a test drives chunk by chunk."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.gates: list[tuple[Caller, list[anyio.Event]]] = []

    async def start(self, tasks: anyio.abc.TaskGroup, backend: str, chunks: int) -> None:
        """Start a stream on a backend and see its first token."""
        gates = [anyio.Event() for _ in range(chunks)]
        steps: list[bytes | anyio.Event] = [ROLE + HELLO]
        for gate in gates:
            steps += [gate, HELLO]
        self.world.upstream.scripts.setdefault(backend, []).append(
            Script([*steps, STOP, USAGE % (chunks + 2), DONE])
        )
        caller = Caller()
        self.gates.append((caller, gates))
        tasks.start_soon(self.world.run, self.world.request(), caller)
        await received(caller, 1)

    async def step(self, gap_s: float) -> None:
        """Let every stream have its next chunk, after that time."""
        self.world.clock.time += gap_s
        for caller, gates in self.gates:
            if gates:
                parts = len(caller.parts)
                gates.pop(0).set()
                await received(caller, parts + 1)


async def received(caller: Caller, parts: int) -> None:
    """Return once a caller has got so many parts."""
    with anyio.fail_after(10):
        while len(caller.parts) < parts:
            await anyio.lowlevel.checkpoint()


async def play(world: World, streams: Streams, gaps_s: Sequence[float]) -> None:
    """Let chunks come at these intervals, while the watch looks as often as it would."""
    looked_at = world.clock.now()
    for gap_s in gaps_s:
        await streams.step(gap_s)
        if world.clock.now() - looked_at >= WINDOW_S:
            looked_at = world.clock.now()
            world.pipeline.watch.look()


async def full_backends(world: World, gap_s: float, seconds: float) -> None:
    """Fill both chat servers to their knee of 2, let chunks come at that pace, and end everything."""
    chunks = round(seconds / gap_s)
    streams = Streams(world)
    async with anyio.create_task_group() as tasks:
        for backend in ("light-0", "light-1", "light-0", "light-1"):
            await streams.start(tasks, backend, chunks)
        # What streams gain per chunk is known from streams that have ended: here one token.
        for name in ("light-0", "light-1"):
            watched = world.pipeline.watch._watched[name]
            watched.control = replace(watched.control, ended_tokens=100, ended_chunks=100)
        await play(world, streams, [gap_s] * chunks)


async def test_a_target_that_is_missed_takes_from_the_knee(world: World) -> None:
    world.policy = promising(0.3)

    await full_backends(world, 0.6, DECIDE_S + 3 * WINDOW_S)

    assert world.pipeline.watch.share_max("light-0") == round(0.9 * admission.WHOLE)
    snapshot = world.pipeline.watch.snapshots()["light-0"]
    assert snapshot.tpot_target_s == 0.3
    assert snapshot.share == pytest.approx(0.9)
    assert snapshot.control.tpot_s == pytest.approx(0.6, rel=0.05)
    assert world.pipeline.watch.share_max("push") == admission.WHOLE
    lowered_to = world.pipeline.watch.share_max("light-0")
    assert world.pipeline.watch.shares_max() == {"light-0": lowered_to, "light-1": lowered_to}


@pytest.mark.parametrize(("target_s", "move"), [(0.62, Move.HELD_IN_BAND), (3.0, Move.HELD_AT_LIMIT)])
async def test_a_target_that_is_kept_takes_nothing(world: World, target_s: float, move: Move) -> None:
    world.policy = promising(target_s)
    seen: list[Move] = []
    look = world.pipeline.watch.look

    def look_and_note() -> None:
        look()
        seen.append(world.pipeline.watch.snapshots()["light-0"].control.move)

    world.pipeline.watch.look = look_and_note  # type: ignore[method-assign]

    await full_backends(world, 0.6, DECIDE_S + 5 * WINDOW_S)

    assert world.pipeline.watch.share_max("light-0") == admission.WHOLE
    assert world.pipeline.watch.shares()["light-0"] == admission.WHOLE  # found here, and told
    assert world.pipeline.watch.shares_max() == {}
    assert move in seen


async def test_without_a_target_nothing_is_taken(world: World) -> None:
    await full_backends(world, 3.0, 2 * DECIDE_S)

    assert world.pipeline.watch.share_max("light-0") == admission.WHOLE


async def test_less_of_the_knee_means_that_fewer_start(world: World) -> None:
    """At 90 % of a knee of two, one runs."""
    world.policy = promising(0.3)
    await full_backends(world, 0.6, DECIDE_S + 3 * WINDOW_S)
    streams = Streams(world)

    async with anyio.create_task_group() as tasks:
        for backend in ("light-0", "light-1", "push"):
            await streams.start(tasks, backend, 1)
        await streams.step(0.1)

    served = [target.backend.id for target in world.upstream.targets[-3:]]
    assert served == ["light-0", "light-1", "push"]


async def test_a_target_that_is_withdrawn_gives_the_knee_back_and_wakes_who_waits(world: World) -> None:
    world.policy = promising(0.3)
    await full_backends(world, 0.6, DECIDE_S + 3 * WINDOW_S)
    world.policy = promising(None)
    streams = Streams(world)
    async with anyio.create_task_group() as tasks:
        await streams.start(tasks, "light-0", 1)
        world.clock.time += WINDOW_S
        room, (model,) = world.pipeline.room, world.policy.models
        demand = Demand(seqs=1, prompt_tokens=100, total_tokens=200)
        room.line.enter(Ticket("waits", model.id, world.policy, model.classes[-1], demand, None, 0.0), 0.0)
        wake = room._wake

        world.pipeline.watch.look()

        assert world.pipeline.watch.share_max("light-0") == admission.WHOLE
        assert wake.is_set()
        room.line.leave("waits")
        await streams.step(0.1)


class Unparsed(Caller):
    """Sends the chunks that are recognized as they are."""

    recognized = 0

    async def relay(self, response: UpstreamResponse, transform: StreamTransform) -> None:
        while data := await response.read():
            same = transform.match(data, 0, len(data))
            self.recognized += same is not None
            await self.send(transform.take(data) if same is None else same)


async def test_chunks_that_are_relayed_unparsed_count_like_others(world: World) -> None:
    parsed, unparsed = Caller(), Unparsed()
    seen = []
    for caller in (parsed, unparsed):
        world.answers(light_0=Script([ROLE + HELLO, *[HELLO] * 9, STOP + USAGE % 11 + DONE]))
        await world.run(world.request(), caller)
        world.clock.time += WINDOW_S
        seen.append(world.pipeline.watch._watched["light-0"].meter.close(world.clock.now()))

    assert unparsed.recognized > 1
    assert unparsed.body == parsed.body
    assert seen[0] == seen[1]
    one, other = world.notes.requests
    assert one.chunks == other.chunks


async def test_the_steps_of_a_stream_are_counted_from_its_reads(world: World) -> None:
    """Ten reads after the first token, and two at the end, one of which holds usage alone."""
    streams = Streams(world)
    async with anyio.create_task_group() as tasks:
        await streams.start(tasks, "light-0", 10)
        await play(world, streams, [0.1] * 10)

    watched = world.pipeline.watch._watched["light-0"]
    window = watched.meter.close(world.clock.now())
    assert window is not None
    assert (window.chunks, window.ended_chunks, window.ended_tokens) == (13, 13, 11)
    assert window.decoding_seq_s == pytest.approx(1.0)
    (step,) = POLICY.backends["light-0"].capacity.knee
    assert (watched.shapes[step].prompt_tokens, watched.shapes[step].block_chunks) == (101, 0)


async def test_an_answer_of_two_tokens_says_what_a_step_is(world: World) -> None:
    world.answers(light_0=Script([ROLE + HELLO, HELLO, STOP, USAGE % 2, DONE]))
    await world.run(world.request())
    world.clock.time += WINDOW_S

    watched = world.pipeline.watch._watched["light-0"]
    window = watched.meter.close(world.clock.now())
    assert window is not None
    assert (window.ended_tokens, len(watched.shapes)) == (1, 1)


async def test_an_answer_of_one_token_says_nothing_of_the_steps_between_tokens(world: World) -> None:
    world.answers(light_0=Script([ROLE + HELLO, STOP, USAGE % 1, DONE]))
    await world.run(world.request())
    world.clock.time += WINDOW_S

    watched = world.pipeline.watch._watched["light-0"]
    window = watched.meter.close(world.clock.now())
    assert window is not None
    assert (window.ended_chunks, window.ended_tokens, watched.shapes) == (0, 0, {})


async def test_what_a_stream_holds_of_the_kv_cache_bounds_how_many_fit(world: World) -> None:
    light, kv = POLICY.backends["light-0"], KvFormula(sliding_layers=1, global_layers=1)
    light = replace(light, capacity=replace(light.capacity, kv=kv))
    world.policy = replace(POLICY, backends={**POLICY.backends, "light-0": light})
    world.answers(light_0=Script([ROLE + HELLO, HELLO, STOP, USAGE % 900, DONE]))
    await world.run(world.request())

    (shape,) = world.pipeline.watch._watched["light-0"].shapes.values()
    assert shape.block_chunks / shape.chunks == kv.blocks(101 + 900)


async def test_answers_in_one_piece_are_in_flight_and_show_nothing(world: World) -> None:
    gate = anyio.Event()
    world.answers(light_0=Script([gate, WHOLE]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(stream=False))
        await anyio.wait_all_tasks_blocked()
        world.clock.time += 3.0
        gate.set()

    window = world.pipeline.watch._watched["light-0"].meter.close(world.clock.now())
    assert window is not None
    assert (window.hidden_seq_s, window.chunks) == (3.0, 0)


async def test_what_reveals_no_steps_counts_none_however_it_is_answered(world: World) -> None:
    watch, slot = world.pipeline.watch, Slot("1", "light-0", Load(seqs=2))
    attempt = watch.opened(POLICY.backends["light-0"], slot, _DEMAND, is_visible=False)
    for _ in range(2):
        attempt.answered()
        attempt.chunk()
        attempt.counter.chunks += 1
        attempt.counted(1)
    world.clock.time += 3.0
    attempt.ended(Usage(100, 50))

    watched = watch._watched["light-0"]
    window = watched.meter.close(world.clock.now())
    assert window is not None
    assert (window.hidden_seq_s, window.chunks, window.ended_chunks, window.ended_tokens) == (6.0, 0, 0, 0)
    assert watched.shapes == {}


async def test_a_stream_is_answered_once(world: World) -> None:
    watch, slot = world.pipeline.watch, Slot("1", "light-0", Load(seqs=1))
    attempt = watch.opened(POLICY.backends["light-0"], slot, _DEMAND, is_visible=True)
    attempt.counter.chunks += 1  # before the first token: none of its own
    attempt.counted(1)
    for _ in range(2):
        attempt.answered()
    attempt.counter.chunks += 4
    attempt.counted(4)
    world.clock.time += 3.0
    attempt.ended(Usage(100, 5))

    window = watch._watched["light-0"].meter.close(world.clock.now())
    assert window is not None
    assert (window.waiting_seq_s, window.decoding_seq_s) == (0.0, 3.0)
    assert (window.chunks, window.ended_chunks, window.ended_tokens) == (4, 4, 4)


async def test_an_attempt_that_fails_leaves_nothing_in_flight(world: World) -> None:
    world.answers(light_0=Script(status=500), light_1=Script([ROLE + HELLO, STOP, DONE]))

    await world.run(world.request())

    assert [attempt.outcome for attempt in world.notes.attempts] == [Outcome.FAILED, Outcome.OK]
    for name in ("light-0", "light-1"):
        world.clock.time += 3.0
        window = world.pipeline.watch._watched[name].meter.close(world.clock.now())
        assert window is not None
        assert window.in_flight_seq_s == 0.0


class SharedLedger(MemoryLedger):
    """A ledger whose backends other gateways use as well."""

    is_local = False
    elsewhere = Load()

    def others(self, backend_id: str) -> Load:
        return self.elsewhere


async def test_what_other_gateways_run_fills_a_backend_too() -> None:
    """Half of the knee is taken elsewhere: with the own stream it is full, and the target counts."""
    ledger = SharedLedger()
    ledger.elsewhere = Load(seqs=1, share=admission.WHOLE // 2)
    world = World(ledger)
    world.policy = promising(0.3)
    streams = Streams(world)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.pipeline.room.run)
        await streams.start(tasks, "light-0", 90)
        watched = world.pipeline.watch._watched["light-0"]
        watched.control = replace(watched.control, ended_tokens=100, ended_chunks=100)
        await play(world, streams, [0.6] * 90)
        with anyio.fail_after(10):
            while not world.notes.requests:
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()

    assert world.pipeline.watch.share_max("light-0") < admission.WHOLE
    (estimate,) = world.pipeline.watch.snapshots()["light-0"].knees.values() or [None]
    assert estimate is not None
    assert estimate.doubt is Uncertainty.HIDDEN


async def test_what_other_gateways_run_is_known_as_soon_as_a_request_joins_it() -> None:
    ledger = SharedLedger()
    ledger.elsewhere = Load(seqs=2, share=admission.WHOLE // 2)
    world = World(ledger)
    watch, slot = world.pipeline.watch, Slot("1", "light-0", Load(seqs=1))
    watch.opened(POLICY.backends["light-0"], slot, _DEMAND, is_visible=True).answered()
    world.clock.time += 3.0

    window = watch._watched["light-0"].meter.close(world.clock.now())
    assert window is not None
    assert window.hidden_seq_s == 6.0


async def test_what_was_measured_on_a_server_says_nothing_of_the_one_in_its_place(world: World) -> None:
    await lowered(world)
    watch = world.pipeline.watch
    watch.forget("light-0")
    watch.forget("push")  # which has served nothing

    assert watch.share_max("light-0") == admission.WHOLE
    assert set(watch.snapshots()) == {"light-1"}


async def test_the_watch_looks_by_itself(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.pipeline.watch.WINDOW_S", 0.001)
    watch, slot = world.pipeline.watch, Slot("1", "light-0", Load(seqs=1))
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch.run)
            for _ in range(2):
                watch.opened(POLICY.backends["light-0"], slot, _DEMAND, is_visible=True)
                watch._watched = {"elsewhere": watch._watched["light-0"]}
                while watch._watched:
                    await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()


async def fit_beside(running: int) -> tuple[StepFit, Uncertainty | None]:
    """Run a stream on a backend whose engine said for a minute that it has so many, of one that is ours."""
    world = World()
    for at in range(61):
        engine = EngineSample(at=float(at), running=running, waiting=0)
        world.counts.observe(engine, Load(seqs=1), POLICY.backends["light-0"])
    world.counts.seqs_taken.clear()  # else they would start elsewhere
    streams = Streams(world)
    async with anyio.create_task_group() as tasks:
        await streams.start(tasks, "light-0", 90)
        await play(world, streams, [0.6] * 90)

    (estimate,) = world.pipeline.watch.snapshots()["light-0"].knees.values()
    return world.pipeline.watch._watched["light-0"].fit, estimate.doubt


async def test_what_others_without_a_gateway_run_there_is_hidden() -> None:
    """With one more than ours, half of the batch is; one less takes nothing from it."""
    (alone, _), (beside, doubt), (fewer, _) = [await fit_beside(running) for running in (1, 2, 0)]

    assert doubt is Uncertainty.HIDDEN
    assert beside != alone == fewer


@pytest.mark.parametrize(
    ("is_job", "is_spill", "is_full"),
    [(False, False, False), (True, False, True), (False, True, True)],
)
async def test_a_backend_is_full_for_jobs_and_spills_with_what_they_leave_free(
    world: World, is_job: bool, is_spill: bool, is_full: bool
) -> None:
    """One of them runs, and half of the knee is not for them: with it they have all that they may."""
    pool = replace(
        POLICY.pools["light"], tpot_target_s=0.3, jobs=JobRoom(reserve=0.5), spill=Spill(reserve=0.5)
    )
    world.policy = replace(POLICY, pools={**POLICY.pools, "light": pool})
    watch, demand = world.pipeline.watch, replace(_DEMAND, is_job=is_job)
    slot = Slot("1", "light-0", Load(seqs=1, share=admission.WHOLE // 2))
    attempt = watch.opened(POLICY.backends["light-0"], slot, demand, is_visible=True, is_spill=is_spill)
    attempt.answered()
    watched = watch._watched["light-0"]
    watched.control = replace(watched.control, ended_tokens=100, ended_chunks=100)
    for _ in range(round((DECIDE_S + 3 * WINDOW_S) / WINDOW_S)):
        for _ in range(round(WINDOW_S / 0.6)):
            world.clock.time += 0.6
            attempt.chunk()
        watch.look()

    assert (watch.share_max("light-0") < admission.WHOLE) == is_full


async def lowered(world: World) -> int:
    """Let a target be missed until it has taken from the knee; return the share in force."""
    world.policy = promising(0.3)
    await full_backends(world, 0.6, DECIDE_S + 3 * WINDOW_S)
    return world.pipeline.watch.share_max("light-0")


async def test_gateways_keep_to_the_lowest_share_that_one_of_them_found(world: World) -> None:
    own = await lowered(world)
    watch = world.pipeline.watch
    assert watch.shares()["light-0"] == own < admission.WHOLE

    watch.note_shares({"light-0": own - 1})
    assert watch.share_max("light-0") == own - 1
    assert watch.shares()["light-0"] == own  # told is what was found here

    watch.note_shares({"light-0": own + 1})
    assert watch.share_max("light-0") == own
    world.clock.time += WINDOW_S
    watch.look()
    assert watch.shares()["light-0"] == own


async def test_a_gateway_that_cannot_judge_follows_those_that_can(world: World) -> None:
    own = await lowered(world)
    watch = world.pipeline.watch
    woken: list[bool] = []
    watch.on_share_raised(lambda: woken.append(True))
    windows = round(JUDGED_S / WINDOW_S)
    for number in range(windows):
        assert number > windows / 2 or "light-0" in watch.shares()
        world.clock.time += WINDOW_S
        watch.look()  # it is not full, so nothing is judged
    assert "light-0" not in watch.shares()
    assert not woken

    watch.note_shares({"light-0": own + 50_000, "push": 1})

    assert watch.share_max("light-0") == own + 50_000
    assert watch.share_max("push") == admission.WHOLE  # no target is configured there
    world.clock.time += WINDOW_S
    watch.look()
    watch.note_shares({})
    assert watch.share_max("light-0") == own + 50_000  # it goes on from there


async def test_a_gateway_that_has_judged_nothing_yet_follows_those_that_have(world: World) -> None:
    world.policy = promising(0.3)
    watch = world.pipeline.watch
    watch.note_shares({"light-0": 500_000})
    assert watch.share_max("light-0") == 500_000  # before its first request, too

    world.answers(light_0=Script([ROLE + HELLO, STOP, DONE]))
    await world.run(world.request())
    watch.look()  # its first window has just begun

    assert watch.share_max("light-0") == 500_000
    assert "light-0" not in watch.shares()


async def test_more_of_the_knee_found_elsewhere_wakes_who_waits(world: World) -> None:
    own = await lowered(world)
    watch = world.pipeline.watch
    watch.note_shares({"light-0": own - 2})
    woken: list[bool] = []
    watch.on_share_raised(lambda: woken.append(True))

    watch.note_shares({"light-0": own - 2})
    watch.note_shares({"light-0": own - 3})
    assert not woken
    watch.note_shares({"light-0": own - 1})
    watch.note_shares({})
    assert len(woken) == 2


async def test_a_backend_that_left_the_policy_is_forgotten(world: World) -> None:
    world.answers(light_0=Script([ROLE + HELLO, STOP, DONE]))
    await world.run(world.request())
    assert "light-0" in world.pipeline.watch.snapshots()

    world.policy = replace(
        world.policy,
        backends={name: one for name, one in world.policy.backends.items() if name != "light-0"},
        pools={name: replace(pool, backends=("light-1",)) for name, pool in world.policy.pools.items()},
    )
    world.pipeline.watch.look()

    assert "light-0" not in world.pipeline.watch._watched


async def test_a_slot_that_was_never_answered_is_only_waited_for(world: World) -> None:
    backend = world.policy.backends["light-0"]
    ticket_demand = admission.claim(backend.capacity, _DEMAND)
    attempt = world.pipeline.watch.opened(
        backend, Slot("1", "light-0", ticket_demand), _DEMAND, is_visible=True
    )
    world.clock.time += 3.0
    attempt.chunk()  # before the first token: none of its own
    attempt.ended(None)

    window = world.pipeline.watch._watched["light-0"].meter.close(world.clock.now())
    assert window is not None
    assert (window.waiting_seq_s, window.decoding_seq_s, window.chunks) == (3.0, 0.0, 0)


_DEMAND = Demand(seqs=1, prompt_tokens=100, total_tokens=200)
