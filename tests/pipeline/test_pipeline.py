"""One request through the pipeline, with scripted backends. Every test ends with nothing in flight."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import anyio
import pytest
from support.world import (
    ABORT,
    CRASH,
    CRASH_OF_0_33,
    DONE,
    HELLO,
    POLICY,
    ROLE,
    STOP,
    USAGE,
    WHOLE,
    Caller,
    Estimates,
    Incoming,
    Script,
    ScriptedResponse,
    ScriptedUpstream,
    Step,
    World,
    event,
)

from gateway.core import admission
from gateway.core.answers import MESSAGE_CHARS_MAX
from gateway.core.backends import Backend, Capacity, KneeStep, Modalities, Pool, Timeouts
from gateway.core.blame import PAUSE_S, REPEATED_S
from gateway.core.decision import Exclusion
from gateway.core.errors import (
    AtCapacity,
    BackendRejected,
    ChoicesMissing,
    ContextExceeded,
    Draining,
    GatewayError,
    InvalidRequest,
    ModelNotFound,
    NoBackend,
    UpstreamBusy,
    UpstreamFailed,
    UpstreamLost,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from gateway.core.health import (
    PROBATION_SEQS,
    RETRY_AFTER_UNKNOWN_MAX_S,
    BackendStatus,
    EngineSample,
    Outcome,
    ProbeFault,
    State,
)
from gateway.core.load import Demand, Load
from gateway.core.policy import Bound, Comparison, Policy, RetryPolicy, TrafficClass, Waiting, When
from gateway.core.refusals import KEPT_S, REFUSED_S
from gateway.core.request import NO_CHANGES, Changes, Endpoint, Estimate, Prompt, Request, Turn
from gateway.core.usage import Ending, Usage
from gateway.pipeline import CallerStalled, failures
from gateway.ports import Arrival, Slot, StreamTransform, Target, UpstreamResponse
from gateway.store.memory import MemoryLedger

GOOD = Script([ROLE + HELLO, STOP, DONE])


def public(data: bytes) -> bytes:
    return data.replace(b'"model":"served"', b'"model":"gemma-4"')


@pytest.fixture(autouse=True)
def _nothing_leaks(world: World) -> Iterator[None]:
    yield
    for name in world.policy.backends:
        assert world.ledger.load(name) == Load(), name


async def test_a_stream_is_relayed_read_by_read(world: World) -> None:
    world.answers(light_0=GOOD)

    caller = await world.run(world.request())

    assert caller.parts == [public(ROLE + HELLO), public(STOP), DONE]
    assert caller.status == 200
    assert caller.headers == {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
        "x-request-id": "req-1",
        "x-gateway-class": "short_chat",
        "x-gateway-prompt-tokens": "100",
        "x-gateway-queue-ms": "0",
        "x-gateway-pool": "light",
        "x-gateway-backend": "light-0",
    }
    assert world.upstream.closed == ["light-0"]
    assert world.fleet.reports == [("light-0", Outcome.OK)]
    (record,) = world.notes.requests
    assert (record.ending, record.chunks) == (Ending.COMPLETED, 3)


async def test_a_stream_that_ends_within_its_only_event_begins_all_the_same(world: World) -> None:
    last = event(delta={"content": "hello"}, finish_reason="stop")
    world.answers(light_0=Script([ROLE, last.rstrip()]))

    caller = await world.run(world.request())

    assert (caller.status, caller.body) == (200, public(ROLE + last) + DONE)


async def test_what_a_begun_stream_owes_at_its_end_comes_alone(world: World) -> None:
    last = event(delta={"content": "hello"}, finish_reason="stop")
    world.answers(light_0=Script([ROLE + HELLO, last.rstrip()]))

    caller = await world.run(world.request())

    assert caller.body == public(ROLE + HELLO + last) + DONE


async def test_nothing_reaches_the_caller_before_the_first_content(world: World) -> None:
    gate = anyio.Event()
    world.answers(light_0=Script([b": keep-alive\n\n", ROLE, gate, HELLO, STOP + DONE]))
    caller = Caller()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(), caller)
        await anyio.wait_all_tasks_blocked()
        assert caller.status == 0
        gate.set()

    assert caller.parts[0] == b": keep-alive\n\n" + public(ROLE + HELLO)


async def test_a_whole_answer_is_relayed_under_the_public_name(world: World) -> None:
    world.answers(light_0=Script([WHOLE[:30], WHOLE[30:]]))

    caller = await world.run(world.request(stream=False))

    assert json.loads(caller.body)["model"] == "gemma-4"
    assert caller.headers["content-type"] == "application/json"
    assert int(caller.headers["content-length"]) == len(caller.body)
    assert world.estimates.observed == [101]
    assert world.notes.requests[0].first_byte_at == world.clock.now()


@pytest.mark.parametrize(("dropped", "named"), [((), None), (("priority", "rid"), "priority, rid")])
async def test_the_caller_is_told_which_members_were_removed(
    world: World, dropped: tuple[str, ...], named: str | None
) -> None:
    world.answers(light_0=GOOD)

    caller = await world.run(world.request(), dropped=dropped)

    assert caller.headers.get("x-gateway-dropped") == named


async def test_a_record_says_what_was_asked_and_by_when_it_was_due(world: World) -> None:
    world.answers(light_0=GOOD)
    await world.run(world.request())
    with pytest.raises(ModelNotFound):
        await world.run(replace(world.request(), model="another"))

    decided, unknown = world.notes.requests
    assert decided.asked is not None
    assert decided.decision is not None
    assert decided.asked.estimate == decided.decision.estimate
    assert decided.due_s is not None
    assert (unknown.asked, unknown.due_s) == (None, None)


async def test_the_backend_gets_its_own_name_for_the_model_and_our_request_id(world: World) -> None:
    world.answers(light_0=GOOD)

    await world.run(world.request())

    target = world.upstream.targets[0]
    assert json.loads(target.body) == {"model": "served"}
    assert dict(target.headers) == {b"x-request-id": b"req-1"}


async def test_nothing_is_learned_about_text_from_a_prompt_with_tools(world: World) -> None:
    world.answers(light_0=Script([WHOLE]))

    await world.run(
        world.request(stream=False, prompt=Prompt(turns=(Turn("user", ("hi",)),), tools_json="[{}]"))
    )

    assert world.estimates.observed == []


async def test_nothing_is_learned_from_a_prompt_that_the_engine_cuts(world: World) -> None:
    world.answers(light_0=Script([WHOLE]))

    await world.run(world.request(stream=False), members={"truncate_prompt_tokens": 20})

    assert world.estimates.observed == []


@pytest.mark.parametrize(("prompts", "observed"), [(1, [101]), (2, [])])
async def test_usage_of_a_completion_is_learned_from_if_it_has_one_prompt(
    world: World, prompts: int, observed: list[int]
) -> None:
    choices = [{"index": index, "text": "hello", "finish_reason": "stop"} for index in range(prompts)]
    world.answers(light_0=Script([json.dumps({**json.loads(WHOLE), "choices": choices}).encode()]))
    asked = world.request(
        stream=False,
        choices=prompts,
        prompts=prompts,
        seqs=prompts,
        prompt=Prompt(raw_texts=("hi",) * prompts),
    )

    await world.run(replace(asked, endpoint=Endpoint.COMPLETIONS))

    assert world.estimates.observed == observed


async def test_usage_is_learned_from_and_hidden_from_who_did_not_ask(world: World) -> None:
    world.answers(light_0=Script([ROLE + HELLO, STOP, USAGE, DONE]))

    caller = await world.run(world.request(), usage_injected=True)

    assert b'"usage"' not in caller.body
    assert world.estimates.observed == [101]
    usage = world.notes.requests[0].usage
    assert usage is not None
    assert usage.completion_tokens == 2


# ---------------------------------------------------------------- moving on


@pytest.mark.parametrize(
    ("first", "outcome"),
    [
        pytest.param(Script(opening=UpstreamUnreachable("x")), Outcome.UNREACHABLE, id="refused"),
        pytest.param(Script(opening=UpstreamLost("x")), Outcome.UNREACHABLE, id="broke-before-status"),
        pytest.param(Script(opening=UpstreamTimeout("x")), Outcome.TIMEOUT, id="timed-out"),
        pytest.param(Script([b"boom"], status=500), Outcome.FAILED, id="500"),
        pytest.param(
            Script([b'{"error":{"message":"cannot schedule new futures after shutdown"}}'], status=500),
            Outcome.DRAINING,
            id="stopping",
        ),
        pytest.param(Script([b'{"error":{"message":"busy"}}'], status=503), Outcome.BUSY, id="503"),
        pytest.param(
            Script(
                [
                    b'data: {"error": {"object": "error", "message": "The request queue is full.", '
                    b'"type": "SERVICE_UNAVAILABLE", "param": null, "code": 503}}\n\n',
                    DONE,
                ]
            ),
            Outcome.BUSY,
            id="503-in-a-stream",
        ),
        pytest.param(Script([b'{"error":"Unauthorized"}'], status=401), Outcome.MISCONFIGURED, id="401"),
        pytest.param(
            Script([b'{"error":{"message":"no model"}}'], status=404), Outcome.MISCONFIGURED, id="404"
        ),
        pytest.param(Script([ROLE, ABORT, DONE]), Outcome.DRAINING, id="abort-before-content"),
        pytest.param(Script([CRASH, DONE]), Outcome.FAILED, id="crash-as-only-event"),
        pytest.param(Script([b"<html>"]), Outcome.FAILED, id="garbage"),
        pytest.param(Script([]), Outcome.FAILED, id="nothing"),
        pytest.param(Script([ROLE, UpstreamFailed("broke")]), Outcome.FAILED, id="broke-before-content"),
    ],
)
async def test_a_failure_before_the_first_content_moves_to_the_next(
    world: World, first: Script, outcome: Outcome
) -> None:
    world.answers(light_0=first, light_1=GOOD)

    caller = await world.run(world.request())

    assert caller.status == 200
    assert caller.headers["x-gateway-backend"] == "light-1"
    assert caller.body == public(ROLE + HELLO + STOP) + DONE
    assert world.fleet.reports == [("light-0", outcome), ("light-1", Outcome.OK)]
    failed, answered = world.notes.requests[0].attempts
    assert (failed.backend, answered.backend) == ("light-0", "light-1")
    assert failed.detail


async def test_an_attempt_that_failed_says_what_was_wrong_with_tls(world: World) -> None:
    failure = UpstreamUnreachable("It cannot be reached.")
    failure.cause = "TLS: certificate has expired"
    world.answers(light_0=Script(opening=failure), light_1=GOOD)

    await world.run(world.request())

    assert world.notes.requests[0].attempts[0].detail == "It cannot be reached (TLS: certificate has expired)"


async def test_a_stream_that_never_begins_is_not_kept_without_limit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.pipeline.attempt.ANSWER_BYTES_MAX", 1_000)
    world.answers(light_0=Script([*[b": ping\n\n"] * 200, anyio.Event()]), light_1=GOOD)

    with anyio.fail_after(3):
        caller = await world.run(world.request())

    assert caller.headers["x-gateway-backend"] == "light-1"
    assert world.fleet.reports[0] == ("light-0", Outcome.FAILED)


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b'{"error":{"message":"x"}}',
        b'{"choices":[]}',
        WHOLE.replace(b'"stop"', b"null"),
        WHOLE.replace(b'"stop"', b'"abort"'),
    ],
    ids=["garbage", "error-under-200", "no-choices", "unfinished", "abort"],
)
async def test_a_whole_answer_that_is_none_moves_to_the_next(world: World, body: bytes) -> None:
    world.answers(light_0=Script([body]), light_1=Script([WHOLE]))

    caller = await world.run(world.request(stream=False))

    assert caller.headers["x-gateway-backend"] == "light-1"
    assert world.notes.requests[0].first_byte_at == world.clock.now()  # that of the attempt that answered


NGINX_413 = Script([b"<html><head><title>413 Request Entity Too Large</title></head></html>"], status=413)


async def test_a_body_that_a_proxy_refuses_goes_to_another_backend(world: World) -> None:
    world.answers(light_0=NGINX_413, light_1=GOOD)

    caller = await world.run(world.request())

    assert caller.headers["x-gateway-backend"] == "light-1"
    assert world.fleet.reports == [("light-0", Outcome.REJECTED), ("light-1", Outcome.OK)]


async def test_a_body_that_all_of_them_refuse_is_too_large(world: World) -> None:
    world.answers(light_0=NGINX_413, light_1=NGINX_413, push=NGINX_413)

    with pytest.raises(BackendRejected) as refused:
        await world.run(world.request())

    assert (refused.value.status, refused.value.code) == (413, "request_too_large")
    assert len(world.upstream.targets) == 3
    assert world.notes.requests[0].ending is Ending.REJECTED


async def test_a_body_that_an_engine_refuses_goes_nowhere_else(world: World) -> None:
    world.answers(light_0=Script([b'{"error":{"message":"too many images"}}'], status=413), light_1=GOOD)

    with pytest.raises(BackendRejected, match="too many images"):
        await world.run(world.request())

    assert len(world.upstream.targets) == 1


@pytest.mark.parametrize(
    ("first", "told"),
    [
        pytest.param(Script(status=500), [(0, True), (1, True)], id="failed"),
        pytest.param(Script(status=503), [(0, True), (1, False), (1, True)], id="waits-on"),
    ],
)
async def test_who_asks_is_told_of_each_slot_before_anything_is_sent_and_of_its_loss(
    world: World, first: Script, told: Sequence[tuple[int, bool]]
) -> None:
    held = await fill(world, "light-0", 1) + await fill(world, "light-1", 1)
    world.answers(light_0=first, light_1=GOOD)
    heard = list[tuple[int, bool]]()

    await world.pipeline.run(
        Incoming(world.request()),
        Caller(),
        on_admitted=lambda is_admitted: heard.append((len(world.upstream.targets), is_admitted)),
    )

    assert heard == told
    for slot in held:
        await world.ledger.release(slot)


async def test_attempts_are_bounded(world: World) -> None:
    world.answers(light_0=Script(status=500), light_1=Script(status=502), push=Script(status=500))

    with pytest.raises(UpstreamFailed):
        await world.run(world.request())

    assert len(world.upstream.targets) == 3
    assert world.notes.requests[0].ending is Ending.FAILED


@pytest.mark.parametrize(
    "then",
    [Script([b'{"error":{"message":"busy"}}'], status=503), Script(opening=UpstreamUnreachable("x"))],
    ids=["busy", "away"],
)
async def test_a_request_that_kills_an_engine_is_told_so_though_the_next_one_is_busy(
    world: World, then: Script
) -> None:
    """Its job would not count the failure otherwise, and kill the engine for ever."""
    world.answers(light_0=Script(opening=UpstreamLost("x")), light_1=then, push=then)

    with pytest.raises(UpstreamLost):
        await world.run(world.request())

    assert len(world.upstream.targets) == 3


@pytest.mark.parametrize(
    "crash",
    [
        pytest.param(Script([CRASH]), id="0.32"),
        pytest.param(Script([b"data: ", CRASH_OF_0_33, b"\n\n"]), id="0.33"),
        pytest.param(Script([CRASH_OF_0_33], status=500), id="0.33-before-the-stream"),
    ],
)
async def test_a_request_that_kills_engines_is_not_shown_a_third(world: World, crash: Script) -> None:
    world.answers(light_0=crash, light_1=crash, push=GOOD)

    with pytest.raises(UpstreamFailed):
        await world.run(world.request())

    assert [target.backend.id for target in world.upstream.targets] == ["light-0", "light-1"]
    assert world.fleet.reports == [("light-0", Outcome.FAILED), ("light-1", Outcome.FAILED)]


async def test_a_request_that_takes_connections_with_it_is_not_shown_a_third_engine(world: World) -> None:
    world.answers(
        light_0=Script(opening=UpstreamLost("x")), light_1=Script(opening=UpstreamLost("x")), push=GOOD
    )

    with pytest.raises(UpstreamLost):
        await world.run(world.request())

    assert [target.backend.id for target in world.upstream.targets] == ["light-0", "light-1"]


@pytest.mark.parametrize("status", [404, 500])
async def test_what_every_backend_refuses_alike_is_the_requests_fault(world: World, status: int) -> None:
    world.answers(light_0=Script(status=status), light_1=Script(status=status), push=Script(status=status))

    with pytest.raises(UpstreamFailed):
        await world.run(world.request())

    assert {outcome for _, outcome in world.fleet.reports} == {Outcome.REJECTED}


@pytest.mark.parametrize(
    ("answer", "counted"),
    [
        (Script(status=500), [Outcome.FAILED, Outcome.REJECTED, Outcome.REJECTED, Outcome.FAILED]),
        (Script([CRASH_OF_0_33], status=500), [Outcome.FAILED] * 4),
        (Script(status=404), [Outcome.MISCONFIGURED] * 4),
    ],
    ids=["failure", "crash", "misconfigured"],
)
async def test_where_only_one_could_be_asked_a_failing_request_counts_once_however_often_it_is_sent(
    world: World, answer: Script, counted: list[Outcome]
) -> None:
    """A crash always counts, and so does what no request is at fault for."""
    world.fleet.known |= {name: BackendStatus(state=State.DOWN) for name in ("light-1", "push")}
    for text in ("poison", "poison", "poison", "another"):
        world.answers(light_0=answer)
        with pytest.raises(UpstreamFailed):
            await world.run(world.request(), members={"user": text})

    assert [outcome for _, outcome in world.fleet.reports] == counted


async def test_what_tells_a_request_from_others_is_computed_once(world: World) -> None:
    """It takes long for a long body, while every stream stands still."""
    assembled: list[str] = []

    class Noted(Incoming):
        def body_for(self, served_model: str, changes: Changes = NO_CHANGES) -> bytes:
            assembled.append(served_model)
            return super().body_for(served_model, changes)

    world.fleet.known |= {name: BackendStatus(state=State.DOWN) for name in ("light-1", "push")}
    world.answers(light_0=Script(status=500))
    with pytest.raises(UpstreamFailed):
        await world.pipeline.run(Noted(world.request()), Caller())

    assert assembled == ["served", ""]


async def test_a_failure_is_held_against_a_backend_as_soon_as_another_answers(world: World) -> None:
    gate = anyio.Event()
    world.answers(light_0=Script(status=500), light_1=Script([ROLE + HELLO, gate, STOP + DONE]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request())
        await anyio.wait_all_tasks_blocked()
        assert world.fleet.reports == [("light-0", Outcome.FAILED)]
        gate.set()


WIDE = replace(
    POLICY,
    backends={
        name: replace(backend, capacity=Capacity(context_tokens=32_768, knee=(KneeStep(None, 8),)))
        for name, backend in POLICY.backends.items()
    },
)


def patient(policy: Policy, max_wait_s: float) -> Policy:
    """Return the policy with classes whose requests wait for so long."""
    (model,) = policy.models
    waits = tuple(replace(one, waiting=replace(one.waiting, max_wait_s=max_wait_s)) for one in model.classes)
    return replace(policy, models=(replace(model, classes=waits),))


async def fail_in_a_row(world: World) -> None:
    """Put light-0 in doubt."""
    for text in ("a", "b", "c"):
        world.answers(light_0=Script(status=500), light_1=GOOD)
        await world.run(world.request(), members={"user": text})


async def test_where_different_requests_fail_in_a_row_the_next_ones_go_to_a_replica(world: World) -> None:
    await fail_in_a_row(world)
    world.answers(light_1=GOOD)
    await world.run(world.request(), members={"user": "d"})

    asked = [target.backend.id for target in world.upstream.targets]
    assert asked == ["light-0", "light-1"] * 3 + ["light-1"]
    (decision,) = [record.decision for record in world.notes.requests[3:]]
    assert decision is not None
    (passed_over,) = [one for one in decision.candidates if one.backend == "light-0"]
    assert passed_over.excluded is Exclusion.UNHEALTHY

    world.clock.time += PAUSE_S
    world.answers(light_0=GOOD)  # it is tried again, and answers
    await world.run(world.request(), members={"user": "e"})
    world.answers(light_0=Script(status=500), light_1=GOOD)
    await world.run(world.request(), members={"user": "f"})

    assert [target.backend.id for target in world.upstream.targets[7:]] == ["light-0", "light-0", "light-1"]


@pytest.mark.parametrize("how", ["drained", "down", "swapped-out"])
async def test_one_in_doubt_is_not_passed_over_for_a_replica_that_takes_nothing(
    world: World, how: str
) -> None:
    if how == "drained":
        drained = replace(POLICY.backends["light-1"], drain=True)
        world.policy = replace(POLICY, backends={**POLICY.backends, "light-1": drained})
        world.pipeline.policy_changed()
    elif how == "down":
        world.fleet.known["light-1"] = BackendStatus(state=State.DOWN)
    else:
        world.objections = {"light-1": (Exclusion.SWAPPED_OUT, "its box serves another model")}
    for text in ("a", "b", "c", "d"):
        world.answers(light_0=Script(status=500), push=GOOD)
        await world.run(world.request(), members={"user": text})

    assert [target.backend.id for target in world.upstream.targets] == ["light-0", "push"] * 4


async def test_one_in_doubt_that_is_down_is_not_tried(world: World) -> None:
    await fail_in_a_row(world)
    world.clock.time += PAUSE_S
    world.fleet.known |= {name: BackendStatus(state=State.DOWN) for name in ("light-0", "push")}
    world.answers(light_0=GOOD, light_1=Script(status=500))
    with anyio.fail_after(10), pytest.raises(UpstreamFailed):
        await world.run(world.request())  # it does not wait for it either

    assert asked(world)[6:] == ["light-1"]


async def test_one_in_doubt_that_serves_no_requests_anyway_is_said_to_do_so(world: World) -> None:
    await fail_in_a_row(world)
    world.objections = {"light-0": (Exclusion.SWAPPED_OUT, "its box serves another model")}
    world.answers(light_1=GOOD)
    await world.run(world.request())

    decision = world.notes.requests[-1].decision
    assert decision is not None
    assert {one.backend: one.excluded for one in decision.candidates}["light-0"] is Exclusion.SWAPPED_OUT


async def failed_everywhere(world: World, text: str) -> GatewayError:
    """Return what a caller is told whose request all backends fail."""
    world.answers(light_0=Script(status=500), light_1=Script(status=500), push=Script(status=500))
    with pytest.raises(UpstreamFailed) as caught:
        await world.run(world.request(), members={"user": text})
    return caught.value


async def test_where_all_fail_every_request_callers_are_told_to_wait_as_long_as_that_has_lasted(
    world: World,
) -> None:
    for text in ("a", "b"):
        assert (await failed_everywhere(world, text)).retry_after_s is None
    world.clock.time += 4
    for text in ("b", "b"):  # it may be that request
        assert (await failed_everywhere(world, text)).retry_after_s is None
    assert (await failed_everywhere(world, "c")).retry_after_s == 4
    world.clock.time += 50
    assert (await failed_everywhere(world, "c")).retry_after_s == RETRY_AFTER_UNKNOWN_MAX_S
    unreachable = Script(opening=UpstreamUnreachable("It cannot be reached."))  # which says nothing of them
    world.answers(light_0=Script(status=500), light_1=unreachable, push=Script(status=500))
    with pytest.raises(UpstreamFailed) as caught:
        await world.run(world.request(), members={"user": "f"})
    assert caught.value.retry_after_s is None
    world.answers(light_0=Script(status=500), light_1=GOOD)
    await world.run(world.request(), members={"user": "d"})
    assert (await failed_everywhere(world, "e")).retry_after_s is None  # one of them has answered another


BUSY_ANSWER = b'{"error":{"message":"The request queue is full."}}'


def asked(world: World) -> list[str]:
    return [target.backend.id for target in world.upstream.targets]


async def test_one_that_refuses_is_not_asked_first_for_a_moment(world: World) -> None:
    """Otherwise it would have the most room, and every request would go there first."""
    world.answers(light_0=Script([BUSY_ANSWER], status=503), light_1=GOOD)
    await world.run(world.request())
    world.answers(light_1=GOOD)
    await world.run(world.request())
    assert asked(world) == ["light-0", "light-1", "light-1"]
    decision = world.notes.requests[-1].decision
    assert decision is not None
    last = decision.candidates.eligible[-1]
    assert (last.backend, last.detail) == ("push", "")
    refuses = decision.candidates.eligible[-2]
    assert (refuses.backend, refuses.detail) == (
        "light-0",
        "it has just refused a request because of load: others come first",
    )

    world.clock.time += REFUSED_S
    world.answers(light_0=Script([BUSY_ANSWER], status=429), light_1=GOOD)
    await world.run(world.request())
    assert asked(world)[3:] == ["light-0", "light-1"]


async def test_one_that_refuses_is_asked_by_whom_the_others_fail(world: World) -> None:
    world.fleet.known["push"] = BackendStatus(state=State.DOWN)
    world.answers(light_0=Script([BUSY_ANSWER], status=503), light_1=GOOD)
    await world.run(world.request())
    world.answers(light_1=Script(status=500), light_0=GOOD)
    await world.run(world.request())
    assert asked(world) == ["light-0", "light-1", "light-1", "light-0"]


async def test_one_that_refuses_is_asked_while_the_others_are_full(world: World) -> None:
    """It may have room for this request, or by now."""
    world.answers(light_0=Script([BUSY_ANSWER], status=503), light_1=GOOD)
    await world.run(world.request())
    held = await fill(world, "light-1")
    world.answers(light_0=GOOD)
    await world.run(world.request())
    assert asked(world) == ["light-0", "light-1", "light-0"]
    for slot in held:
        await world.ledger.release(slot)


@pytest.mark.parametrize(
    ("said", "told_s"),
    [
        pytest.param({"light_0": "30", "light_1": "5", "push": "20"}, 5, id="the-first-of-several"),
        pytest.param({"light_0": None, "light_1": "5", "push": "20"}, 1, id="one-says-nothing"),
        pytest.param({"light_0": "30", "light_1": "30", "push": "garbage"}, 1, id="one-says-nothing-clear"),
        pytest.param(
            {name: "Mon, 12 Jan 1970 13:47:00 GMT" for name in ("light_0", "light_1", "push")}, 20, id="date"
        ),
    ],
)
async def test_a_caller_is_told_when_the_first_of_those_that_refused_may_be_asked_again(
    world: World, said: dict[str, str | None], told_s: int
) -> None:
    for name, value in said.items():
        world.answers(**{name: Script([BUSY_ANSWER], status=429, retry_after=value)})
    with pytest.raises(UpstreamBusy) as refused:
        await world.run(world.request())
    assert refused.value.retry_after_s == told_s


async def test_one_that_says_when_to_ask_it_again_is_not_asked_first_until_then(world: World) -> None:
    world.answers(light_0=Script([BUSY_ANSWER], status=429, retry_after="20"), light_1=GOOD)
    await world.run(world.request())
    for passed_s, first in ((19.0, "light-1"), (1.0, "light-0")):
        world.clock.time += passed_s
        world.answers(**{first.replace("-", "_"): GOOD})
        await world.run(world.request())
        assert asked(world)[-1] == first


async def refused_everywhere(world: World) -> None:
    """Have both replicas refuse, and requests tried twice only."""
    world.policy = replace(POLICY, retry=RetryPolicy(attempts_max=2))
    world.pipeline.policy_changed()
    world.answers(**{name: Script([BUSY_ANSWER], status=503) for name in ("light_0", "light_1")})
    with pytest.raises(UpstreamBusy):
        await world.run(world.request())


async def test_the_last_attempt_is_not_lost_on_one_that_refuses(world: World) -> None:
    await refused_everywhere(world)
    world.clock.time += REFUSED_S
    world.answers(light_0=Script([BUSY_ANSWER], status=503), push=GOOD)
    await world.run(world.request())
    assert asked(world)[2:] == ["light-0", "push"]


async def test_one_that_has_begun_to_answer_another_is_asked_by_the_last_attempt(world: World) -> None:
    """That answer may take minutes."""
    await refused_everywhere(world)
    world.clock.time += REFUSED_S
    gate = anyio.Event()
    world.answers(light_0=Script([ROLE + HELLO, gate, STOP + DONE]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request())
        await anyio.wait_all_tasks_blocked()
        world.answers(light_0=GOOD, light_1=Script(status=500))
        await world.run(world.request(), arrival=Arrival("req-2", 1_000_000.0, 10.0))
        gate.set()

    assert asked(world)[2:] == ["light-0", "light-1", "light-0"]


async def test_one_that_refuses_is_asked_last_if_no_other_takes_the_request(world: World) -> None:
    await refused_everywhere(world)
    world.fleet.known["push"] = BackendStatus(state=State.DOWN)
    world.answers(light_0=Script([BUSY_ANSWER], status=503), light_1=GOOD)
    await world.run(world.request())
    assert asked(world)[2:] == ["light-0", "light-1"]


async def test_who_has_waited_for_the_others_does_not_wait_as_long_for_one_that_refuses(
    world: World,
) -> None:
    world.policy = replace(patient(POLICY, 30.0), retry=RetryPolicy(attempts_max=2))
    world.pipeline.policy_changed()
    world.answers(light_0=Script([BUSY_ANSWER], status=503), light_1=GOOD, push=Script(status=500))
    await world.run(world.request())
    held = [slot for name in ("light-0", "light-1") for slot in await fill(world, name)]
    told: list[GatewayError] = []

    async def ask() -> None:
        with pytest.raises(AtCapacity) as caught:
            await world.run(world.request())
        told.append(caught.value)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            assert asked(world) == ["light-0", "light-1", "push"]
            world.clock.time += 30.0
            world.pipeline.room.look()
            while [one.tries for one in world.pipeline.room.line.waiters(world.clock.now())] != [1]:
                await anyio.lowlevel.checkpoint()  # until light-0 will do, too
            world.clock.time += 0.5
            world.pipeline.room.look()
            while not told:
                await anyio.lowlevel.checkpoint()
            assert told[0].code == "waited_too_long"

    for slot in held:
        await world.ledger.release(slot)


BUSY = Script([BUSY_ANSWER], status=503)


@asynccontextmanager
async def refused_by_the_only_one(
    world: World, comes: anyio.Event | None = None
) -> AsyncIterator[anyio.Event]:
    """Have light-0 run one request, up to the event, and refuse the next, once `comes`; others are down."""
    world.policy = patient(POLICY, 60.0)
    world.pipeline.policy_changed()
    world.fleet.known |= {name: BackendStatus(state=State.DOWN) for name in ("light-1", "push")}
    ends = anyio.Event()
    world.answers(light_0=Script([ROLE + HELLO, ends, STOP + DONE]))
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.run, world.request())
            await anyio.wait_all_tasks_blocked()
            world.answers(light_0=BUSY if comes is None else replace(BUSY, steps=[comes, BUSY_ANSWER]))
            arrival = Arrival("refused", 1_000_000.0, 10.0)
            tasks.start_soon(partial(world.run_to_any_end, world.request(), arrival=arrival))
            await anyio.wait_all_tasks_blocked()
            assert asked(world) == ["light-0"] * 2
            yield ends


async def test_who_is_refused_by_the_only_backend_is_answered_once_one_has_ended_there(world: World) -> None:
    async with refused_by_the_only_one(world) as ends:
        world.clock.time += 3.0
        world.answers(light_0=GOOD)
        ends.set()

    record = world.notes.requests[-1]
    assert record.ending is Ending.COMPLETED
    assert [attempt.outcome for attempt in record.attempts] == [Outcome.BUSY, Outcome.OK]
    assert record.queue_s == 3.0


async def test_who_is_refused_asks_again_from_time_to_time_however_often_it_is_refused(world: World) -> None:
    """Another's requests may have filled the backend, and have ended."""
    most = POLICY.retry.attempts_max
    async with refused_by_the_only_one(world) as ends:
        for _ in range(most):
            world.answers(light_0=BUSY)
            world.clock.time += REFUSED_S
            world.pipeline.room.look()
            await anyio.wait_all_tasks_blocked()
        assert len(asked(world)) == 2 + most
        world.answers(light_0=GOOD)
        world.clock.time += REFUSED_S
        world.pipeline.room.look()
        await anyio.wait_all_tasks_blocked()
        assert world.notes.requests[0].attempts[-1].outcome is Outcome.OK  # while the first still runs
        ends.set()

    assert len(world.notes.requests[0].attempts) == most + 2


async def test_who_is_refused_is_looked_for_when_it_may_ask_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "REFUSED_S", 0.05)
    looks, look = 0, world.pipeline.room.look

    def counted() -> None:
        nonlocal looks
        looks += 1
        look()

    monkeypatch.setattr(world.pipeline.room, "look", counted)
    async with refused_by_the_only_one(world) as ends:
        before = looks
        while looks < before + 10:  # all are too early; what else looks does so seconds apart
            await anyio.lowlevel.checkpoint()
        assert len(asked(world)) == 2
        world.answers(light_0=GOOD)
        world.clock.time += REFUSED_S
        while not world.notes.requests:
            await anyio.lowlevel.checkpoint()
        ends.set()


async def test_a_refusal_that_is_long_ago_is_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "REFUSED_S", 0.01)
    world.answers(light_0=BUSY, light_1=GOOD)
    await world.run(world.request())
    refusals = world.pipeline._failures.refusals
    assert refusals.known
    world.clock.time += KEPT_S
    with anyio.fail_after(10):
        while refusals.known:
            await anyio.lowlevel.checkpoint()

    assert world.pipeline._failures._next_look is None


async def test_who_is_refused_waits_no_longer_than_its_class_allows(world: World) -> None:
    async with refused_by_the_only_one(world) as ends:
        world.clock.time += 60.0
        world.pipeline.room.look()
        await anyio.wait_all_tasks_blocked()
        ends.set()

    record = world.notes.requests[0]
    assert (record.status, record.error_code) == (429, "waited_too_long")
    assert record.queue_s is None


async def test_a_refusal_that_takes_long_is_part_of_the_wait(world: World) -> None:
    """As that of a proxy that has waited for room itself."""
    comes = anyio.Event()
    async with refused_by_the_only_one(world, comes) as ends:
        for more_s, has_ended in [(59.0, False), (2.0, True)]:
            world.clock.time += more_s
            comes.set()
            world.pipeline.room.look()
            await anyio.wait_all_tasks_blocked()
            assert bool(world.notes.requests) == has_ended
        ends.set()

    record = world.notes.requests[0]
    assert (record.status, record.error_code) == (429, "waited_too_long")


async def test_who_is_refused_remembers_that_under_another_policy(world: World) -> None:
    async with refused_by_the_only_one(world) as ends:
        world.policy = replace(world.policy, version=f"{world.policy.version}-2")
        world.pipeline.policy_changed()
        await anyio.wait_all_tasks_blocked()
        assert len(asked(world)) == 2
        world.answers(light_0=GOOD)
        ends.set()

    assert world.notes.requests[-1].ending is Ending.COMPLETED


async def test_who_has_been_refused_often_does_not_ask_all_the_others_that_refuse(world: World) -> None:
    names = [f"light-{number}" for number in range(6)]
    most = POLICY.retry.attempts_max
    backends = {name: replace(POLICY.backends["light-0"], id=name, url=f"http://{name}") for name in names}
    world.policy = replace(
        patient(POLICY, 60.0),
        pools={**POLICY.pools, "light": Pool("light", tuple(names))},
        backends={**POLICY.backends, **backends},
    )
    world.pipeline.policy_changed()
    world.fleet.known = {name: world.fleet.known["light-0"] for name in names}
    held = {name: (await fill(world, name, 1))[0] for name in names}
    for name in names[:-1]:
        world.answers(**{name: BUSY})
    world.answers(**{names[-1]: GOOD})
    await world.run(world.request())
    assert asked(world) == names  # of which none was known to refuse

    for name in names[:most]:
        world.answers(**{name: BUSY})
    world.answers(**{names[most]: GOOD, names[-1]: BUSY})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(world.run, world.request()))
        await anyio.wait_all_tasks_blocked()
        assert asked(world)[len(names) :] == [names[-1], *names[: most - 1]]
        await world.ledger.release(held.pop(names[most]))
    assert asked(world)[-1] == names[most]
    for slot in held.values():
        await world.ledger.release(slot)


async def test_who_is_refused_beside_one_that_has_ended_meanwhile_asks_again(world: World) -> None:
    """Its own refusal is still under way then, and says nothing of a backend that runs nothing."""
    comes = anyio.Event()
    async with refused_by_the_only_one(world, comes) as ends:
        ends.set()
        await anyio.wait_all_tasks_blocked()
        world.answers(light_0=GOOD)
        comes.set()
    assert world.notes.requests[-1].ending is Ending.COMPLETED


async def test_who_comes_before_a_backend_has_noted_an_end_asks_again(world: World) -> None:
    async with refused_by_the_only_one(world) as ends:
        world.answers(light_0=BUSY)
        ends.set()
        await anyio.wait_all_tasks_blocked()
        assert len(asked(world)) == 3  # it is asked no more for a moment
        world.answers(light_0=GOOD)
        world.clock.time += REFUSED_S
        world.pipeline.room.look()

    assert world.notes.requests[-1].ending is Ending.COMPLETED


async def test_who_is_refused_by_a_backend_that_runs_nothing_is_told_so(world: World) -> None:
    """Also after a wait, as it had answered another: that no slot became free would be untrue."""
    async with refused_by_the_only_one(world) as ends:
        world.answers(light_0=BUSY)
        ends.set()
        await anyio.wait_all_tasks_blocked()
        world.clock.time += 60.0
        world.pipeline.room.look()

    record = next(one for one in world.notes.requests if one.id == "refused")
    assert (record.status, record.error_code, len(record.attempts)) == (503, "upstream_busy", 2)


async def test_what_is_refused_where_others_end_is_not_asked_for_ever(world: World) -> None:
    """As streams, by one that takes none: whoever else has ended there says nothing of them."""
    most = POLICY.retry.attempts_max
    async with refused_by_the_only_one(world) as ends:
        world.answers(light_0=BUSY)
        ends.set()
        await anyio.wait_all_tasks_blocked()
        for _ in range(most - 1):
            world.answers(light_0=GOOD)
            await world.run(world.request(), arrival=Arrival("other", 1_000_000.0, 10.0))
            world.answers(light_0=BUSY)
            world.clock.time += REFUSED_S
            world.pipeline.room.look()
            await anyio.wait_all_tasks_blocked()

    record = next(one for one in world.notes.requests if one.id == "refused")
    assert (record.error_code, len(record.attempts)) == ("upstream_busy", 1 + most)


async def test_who_is_refused_where_another_has_room_goes_there(world: World) -> None:
    held = await fill(world, "light-0", 1)
    world.fleet.known["light-1"] = BackendStatus(state=State.DOWN)
    world.answers(light_0=BUSY, push=GOOD)
    await world.run(world.request())
    assert asked(world) == ["light-0", "push"]
    for slot in held:
        await world.ledger.release(slot)


async def test_one_in_doubt_is_tried_by_few_at_a_time(world: World) -> None:
    world.policy = WIDE
    world.pipeline.policy_changed()
    await fail_in_a_row(world)
    world.clock.time += PAUSE_S
    gate = anyio.Event()
    for _ in range(5):
        world.answers(light_0=Script([gate]), light_1=Script([ROLE + HELLO, gate, STOP + DONE]))

    async with anyio.create_task_group() as tasks:
        for number in range(5):
            arrival = Arrival(f"req-{number}", 1_000_000.0, 10.0)
            tasks.start_soon(partial(world.run, world.request(), arrival=arrival))
        await anyio.wait_all_tasks_blocked()
        asked = [target.backend.id for target in world.upstream.targets[6:]]
        assert asked.count("light-0") == PROBATION_SEQS
        tasks.cancel_scope.cancel()


async def test_who_waits_for_one_in_doubt_starts_there_once_it_has_begun_to_answer(world: World) -> None:
    """Its requests may run for minutes, and the queue is not to wait for the end of one."""
    world.policy = WIDE
    world.pipeline.policy_changed()
    await fail_in_a_row(world)
    world.clock.time += PAUSE_S
    held = [*await fill(world, "light-1", 8), *await fill(world, "push", 8)]
    begins, ends = anyio.Event(), anyio.Event()
    for _ in range(5):
        world.answers(light_0=Script([begins, ROLE + HELLO, ends, STOP + DONE]))

    async with anyio.create_task_group() as tasks:
        for number in range(5):
            arrival = Arrival(f"req-{number}", 1_000_000.0, 10.0)
            tasks.start_soon(partial(world.run, world.request(), arrival=arrival))
        await anyio.wait_all_tasks_blocked()
        assert world.ledger.load("light-0").seqs == PROBATION_SEQS
        begins.set()
        await anyio.wait_all_tasks_blocked()
        assert world.ledger.load("light-0").seqs == 5
        ends.set()
    for slot in held:
        await world.ledger.release(slot)


async def test_who_waits_for_one_in_doubt_starts_there_when_its_pause_is_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "PAUSE_S", 0.5)
    world.policy = patient(POLICY, 60.0)
    world.pipeline.policy_changed()
    await fail_in_a_row(world)
    world.clock.time += PAUSE_S - 1
    held = [*await fill(world, "light-1"), *await fill(world, "push")]
    world.answers(light_0=GOOD)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request())
        with anyio.fail_after(4):
            await anyio.wait_all_tasks_blocked()
            world.clock.time += 1  # before the look that the last failure has planned
            while len(world.notes.requests) < 4:
                await anyio.lowlevel.checkpoint()

    assert world.notes.requests[3].backend == "light-0"
    for slot in held:
        await world.ledger.release(slot)


async def test_who_waits_for_one_in_doubt_starts_there_when_the_doubt_is_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The few that it was given read their prompts for longer than a doubt lasts."""
    monkeypatch.setattr(failures, "REPEATED_S", 0.5)
    world.policy = patient(WIDE, 600.0)
    world.pipeline.policy_changed()
    await fail_in_a_row(world)
    world.clock.time += PAUSE_S
    held = [*await fill(world, "light-1", 8), *await fill(world, "push", 8)]
    gate = anyio.Event()
    for _ in range(PROBATION_SEQS + 1):
        world.answers(light_0=Script([gate, ROLE + HELLO, STOP + DONE]))

    async with anyio.create_task_group() as tasks:
        for number in range(PROBATION_SEQS + 1):
            arrival = Arrival(f"req-{number}", 1_000_000.0, 10.0)
            tasks.start_soon(partial(world.run, world.request(), arrival=arrival))
        with anyio.fail_after(4):
            await anyio.wait_all_tasks_blocked()
            assert world.ledger.load("light-0").seqs == PROBATION_SEQS
            world.clock.time += REPEATED_S  # before the look that the last failure has planned
            while world.ledger.load("light-0").seqs == PROBATION_SEQS:
                await anyio.lowlevel.checkpoint()
        gate.set()
    for slot in held:
        await world.ledger.release(slot)


async def test_a_queue_is_not_swallowed_by_a_backend_that_fails_at_once(world: World) -> None:
    """Its requests wait for the busy one, instead of failing on the other first, all of them."""
    held, others = await fill(world, "light-1"), await fill(world, "push")
    for _ in range(3):
        world.answers(light_0=Script(status=500))

    async with anyio.create_task_group() as tasks:
        for number in range(8):
            world.answers(light_1=GOOD)
            arrival, members = Arrival(f"req-{number}", 1_000_000.0, 10.0), {"user": str(number)}
            tasks.start_soon(partial(world.run, world.request(), arrival=arrival, members=members))
            await anyio.wait_all_tasks_blocked()
        assert len(world.upstream.targets) == 3
        for slot in held:
            await world.ledger.release(slot)

    assert [record.ending for record in world.notes.requests] == [Ending.COMPLETED] * 8
    for slot in others:
        await world.ledger.release(slot)


async def test_no_place_after_a_failure_is_a_429(world: World) -> None:
    held = [*await fill(world, "light-1"), *await fill(world, "push")]
    world.answers(light_0=Script(status=500))

    error = await refused_in_the_end(world)

    assert error.status == 429
    for slot in held:
        await world.ledger.release(slot)


async def test_the_engines_words_stay_out_of_the_record(world: World) -> None:
    body = b'{"error":{"message":"1 validation error: input was: my secret prompt"}}'
    world.answers(light_0=Script([body], status=400))

    with pytest.raises(BackendRejected, match="my secret prompt"):
        await world.run(world.request())

    assert world.notes.requests[0].attempts[0].detail == "status 400"


async def test_the_only_backend_is_not_asked_twice(world: World) -> None:
    world.estimates.tokens = 20_000
    world.answers(push=Script([b'{"error":{"message":"busy"}}'], status=503))

    with pytest.raises(UpstreamBusy) as caught:
        await world.run(world.request())

    assert caught.value.status == 503
    assert caught.value.retry_after_s == 1
    assert len(world.upstream.targets) == 1


async def test_a_backend_that_answers_with_fewer_choices_is_no_worse_for_it(world: World) -> None:
    both = WHOLE.replace(b'"choices": [', b'"choices": [{"finish_reason": "stop"},')
    world.answers(light_0=Script([WHOLE]), light_1=Script([both]))

    caller = await world.run(world.request(stream=False, choices=2))

    assert caller.headers["x-gateway-backend"] == "light-1"
    assert world.fleet.reports == [("light-0", Outcome.UNFIT), ("light-1", Outcome.OK)]


async def test_an_answer_with_fewer_choices_is_not_asked_for_again(world: World) -> None:
    world.estimates.tokens = 20_000
    world.answers(push=Script([WHOLE]))

    with pytest.raises(ChoicesMissing, match="with 1 of 2 choices") as caught:
        await world.run(world.request(stream=False, choices=2))

    assert (caught.value.status, caught.value.code) == (502, "choices_missing")
    assert {(b"x-should-retry", b"false"), (b"x-gateway-backend", b"push")} <= {*caught.value.headers}
    assert len(world.upstream.targets) == 1


@pytest.mark.parametrize("end", [[STOP, DONE], [STOP]], ids=["done", "without-done"])
async def test_a_stream_with_fewer_choices_ends_with_an_error(world: World, end: list[bytes]) -> None:
    world.answers(light_0=Script([ROLE + HELLO, *end]))

    caller = await world.run(world.request(choices=2))

    assert b"with 1 of 2 choices" in caller.body.split(b"\n\n")[-3]
    assert world.fleet.reports == [("light-0", Outcome.UNFIT)]


async def test_a_backends_verdict_on_the_content_is_final(world: World) -> None:
    body = b'{"error":{"message":"served: temperature must be positive","param":"temperature","code":400}}'
    world.answers(light_0=Script([body], status=400))

    with pytest.raises(BackendRejected) as caught:
        await world.run(world.request())

    assert caught.value.status == 400
    assert caught.value.message == "gemma-4: temperature must be positive"
    assert caught.value.param == "temperature"
    assert world.fleet.reports == [("light-0", Outcome.REJECTED)]
    assert world.notes.requests[0].ending is Ending.REJECTED


async def test_so_is_one_in_a_stream_that_has_begun(world: World) -> None:
    """SGLang 0.5.23 compiles a grammar after it has sent the head of the answer."""
    refused = (
        b'data: {"error": {"object": "error", "message": "Failed to compile json grammar: [08:06:24] '
        b'/project/cpp/json_schema_converter.cc:4175: Unsupported type \\"nonsense\\"\\n", '
        b'"type": "BAD_REQUEST", "param": null, "code": 400}}\n\n'
    )
    world.answers(light_0=Script([refused, DONE]))

    with pytest.raises(BackendRejected) as caught:
        await world.run(world.request())

    assert caught.value.status == 400
    assert 'Unsupported type "nonsense"' in caught.value.message
    assert len(world.upstream.targets) == 1
    assert world.fleet.reports == [("light-0", Outcome.REJECTED)]


@pytest.mark.parametrize("read_bytes", [1_000, 60_000, 200_000])
async def test_a_verdict_that_quotes_a_document_is_passed_on_as_it_begins(
    world: World, read_bytes: int
) -> None:
    body = b'{"error":{"message":"content must be a string, input: %b","code":400}}' % (b"river " * 30_000)
    parts = [body[at : at + read_bytes] for at in range(0, len(body), read_bytes)]
    world.answers(light_0=Script(parts, status=400))

    with pytest.raises(BackendRejected) as caught:
        await world.run(world.request())

    assert caught.value.message.startswith("content must be a string, input: river river")
    assert len(caught.value.message) == MESSAGE_CHARS_MAX


# ---------------------------------------------------------------- after the first byte


@pytest.mark.parametrize(
    ("rest", "outcome"),
    [
        pytest.param([UpstreamFailed("broke")], Outcome.FAILED, id="connection-broke"),
        pytest.param([ABORT, DONE], Outcome.DRAINING, id="abort"),
        pytest.param([CRASH, DONE], Outcome.FAILED, id="crash"),
        pytest.param([], Outcome.FAILED, id="clean-end"),
        pytest.param([DONE], Outcome.FAILED, id="done-without-finish"),
        pytest.param([b"data: {nonsense\n\n"], Outcome.FAILED, id="garbage", marks=()),
        pytest.param([STOP[:20]], Outcome.FAILED, id="half-an-event"),
        pytest.param([b'data: {"error":{"message":"x","code":400}}\n\n'], Outcome.FAILED, id="status"),
    ],
)
async def test_after_the_first_byte_a_failure_is_an_error_event(
    world: World, rest: list[bytes], outcome: Outcome
) -> None:
    world.answers(light_0=Script([ROLE + HELLO, *rest]))

    caller = await world.run(world.request())

    assert caller.body.startswith(public(ROLE + HELLO))
    *_, error, done = caller.body.split(b"\n\n")[:-1]
    assert done == b"data: [DONE]"
    fields = json.loads(error.removeprefix(b"data: "))["error"]
    assert fields["code"] == "stream_broken"
    assert "before it answered" not in fields["message"]
    assert len(world.upstream.targets) == 1
    assert world.fleet.reports == [("light-0", outcome)]
    assert world.notes.requests[0].ending is Ending.BROKEN


# ---------------------------------------------------------------- time limits


def impatient(world: World, **limits: float) -> None:
    pools = {
        name: Pool(name, pool.backends, replace(Timeouts(first_byte_s=30, idle_s=30, total_s=30), **limits))
        for name, pool in world.policy.pools.items()
    }
    world.policy = replace(world.policy, pools=pools)


async def test_a_backend_that_never_starts_is_left_for_the_next(world: World) -> None:
    impatient(world, first_byte_s=0.01)
    world.answers(light_0=Script([ROLE, anyio.Event()]), light_1=GOOD)

    caller = await world.run(world.request())

    assert caller.headers["x-gateway-backend"] == "light-1"
    assert world.fleet.reports[0] == ("light-0", Outcome.TIMEOUT)
    assert world.notes.attempts[0].detail == "The backend did not answer within 0.01 s."


@pytest.mark.parametrize("limits", [{"idle_s": 0.01}, {"total_s": 0.05}], ids=["idle", "total"])
async def test_a_stream_that_stands_still_is_broken_off(world: World, limits: dict[str, float]) -> None:
    impatient(world, **limits)
    world.answers(light_0=Script([ROLE + HELLO, anyio.Event()]))

    caller = await world.run(world.request())

    assert b'"code": "stream_broken"' in caller.body
    assert caller.body.endswith(DONE)
    assert world.fleet.reports == [("light-0", Outcome.TIMEOUT)]


class Unwaited(Caller):
    """Is written to without waiting for it to read, as a connection with room in its buffer is."""

    async def relay(self, response: UpstreamResponse, transform: StreamTransform) -> None:
        while not transform.is_over and (data := await response.read()):
            self.parts.append(transform.take(data))


@pytest.mark.parametrize("kind", [Caller, Unwaited])
async def test_every_read_of_a_stream_gives_it_its_idle_time_again(world: World, kind: type[Caller]) -> None:
    impatient(world, idle_s=20)
    gate = anyio.Event()
    world.answers(light_0=Script([ROLE + HELLO, gate, HELLO, anyio.Event()]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(), kind())
        await anyio.wait_all_tasks_blocked()
        (attempt,) = world.pipeline._running["light-0"]
        assert attempt._deadline.at > anyio.current_time() + 10
        attempt._deadline.at = anyio.current_time() + 1
        gate.set()
        await anyio.wait_all_tasks_blocked()
        assert attempt._deadline.at > anyio.current_time() + 10
        tasks.cancel_scope.cancel()


async def test_a_caller_that_does_not_read_is_not_the_backends_fault(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.pipeline.caller.CALLER_STALL_S", 0.05)
    impatient(world, idle_s=0.01)
    world.answers(light_0=Script([ROLE + HELLO, STOP + DONE]))
    caller = Caller(stalls=True)

    with anyio.fail_after(10), pytest.raises(CallerStalled):
        await world.run(world.request(), caller)

    assert world.fleet.reports == [("light-0", Outcome.CANCELLED)]
    assert world.notes.requests[0].ending is Ending.LEFT
    assert world.notes.requests[0].attempts[-1].detail == "the caller read nothing for 0.05 s"


@pytest.mark.parametrize(
    ("limits", "reads"),
    [({"idle_s": 0.05}, [ROLE + HELLO, STOP + DONE]), ({"total_s": 0.05}, [ROLE + HELLO + STOP + DONE])],
    ids=["idle", "total"],
)
async def test_a_slow_caller_does_not_use_up_the_backends_patience(
    world: World, limits: dict[str, float], reads: list[bytes]
) -> None:
    impatient(world, **limits)
    world.answers(light_0=Script(reads))
    caller = Caller()

    async def slowly(_: bytes) -> None:
        await anyio.sleep(0.1)  # twice what the backend may take

    caller.before_send = slowly
    await world.run(world.request(), caller)

    assert world.notes.requests[0].ending is Ending.COMPLETED


async def test_a_caller_that_reads_on_does_not_put_off_the_total_limit(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.pipeline.caller.CALLER_STALL_S", 20)
    impatient(world, total_s=0.05)  # the other limits are longer than a caller may stall
    world.answers(light_0=Script([ROLE + HELLO, HELLO, anyio.Event()]))
    caller = Caller()

    async def slowly(data: bytes) -> None:
        if caller.parts and b"error" not in data:
            await anyio.sleep(0.1)  # the limit passes meanwhile

    caller.before_send = slowly
    with anyio.fail_after(10):
        await world.run(world.request(), caller)

    assert b"did not finish within 0.05 s" in caller.body
    assert b'"code": "stream_broken"' in caller.body


async def test_a_whole_answer_has_only_its_total_limit(world: World) -> None:
    impatient(world, first_byte_s=0, idle_s=0)
    gate = anyio.Event()
    world.answers(light_0=Script([gate, WHOLE]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(stream=False))
        await anyio.wait_all_tasks_blocked()
        for _ in range(3):  # rounds of the event loop, in which the other limits would end it
            await anyio.lowlevel.checkpoint()
        gate.set()

    assert world.fleet.reports == [("light-0", Outcome.OK)]
    assert world.notes.requests[0].ending is Ending.COMPLETED


async def test_a_whole_answer_that_takes_longer_than_that_is_given_up(world: World) -> None:
    impatient(world, total_s=0.01)
    silent = Script([anyio.Event()])
    world.answers(light_0=silent, light_1=silent, push=silent)

    with anyio.fail_after(3), pytest.raises(UpstreamTimeout, match=r"did not answer within 0\.01 s"):
        await world.run(world.request(stream=False))


@pytest.mark.parametrize("kind", [Caller, Unwaited])
@pytest.mark.parametrize("reads", [[ROLE + HELLO + STOP + DONE], [ROLE + HELLO, STOP + DONE]])
async def test_a_body_that_stays_open_after_done_does_not_spoil_the_answer(
    world: World, reads: list[bytes], kind: type[Caller]
) -> None:
    impatient(world, total_s=0.05)
    world.answers(light_0=Script([*reads, anyio.Event()]))

    caller = await world.run(world.request(), kind())

    assert caller.body == public(ROLE + HELLO + STOP) + DONE
    assert world.notes.requests[0].ending is Ending.COMPLETED


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "assembled"])
async def test_what_breaks_behind_done_does_not_spoil_the_answer(world: World, stream: bool) -> None:
    if not stream:
        backend = replace(world.policy.backends["light-0"], quirks=("tool_markup_leaks",))
        world.policy = replace(world.policy, backends={**world.policy.backends, "light-0": backend})
    world.answers(light_0=Script([ROLE + HELLO + STOP + DONE, UpstreamFailed("The connection broke.")]))

    caller = await world.run(world.request(stream=stream, tools=int(not stream)))

    assert b"error" not in caller.body
    assert world.fleet.reports == [("light-0", Outcome.OK)]
    assert [record.ending for record in world.notes.requests] == [Ending.COMPLETED]


async def test_an_answer_whose_last_read_is_too_much_to_be_kept_is_not_complete(world: World) -> None:
    class Keeping(Caller):
        async def send(self, data: bytes) -> None:
            if data.endswith(STOP.replace(b"served", b"gemma-4") + DONE):
                raise UpstreamFailed("The answer of the backend is too long.")
            await super().send(data)

    world.answers(light_0=Script([ROLE + HELLO, STOP + DONE]))
    caller = await world.run(world.request(), Keeping())

    assert b"too long" in caller.parts[-1]
    assert [record.ending for record in world.notes.requests] == [Ending.BROKEN]


async def test_a_caller_that_leaves_with_the_whole_answer_has_not_left(world: World) -> None:
    world.answers(light_0=Script([ROLE + HELLO + STOP + USAGE + DONE, anyio.Event()]))
    caller = Caller()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(), caller)
        await anyio.wait_all_tasks_blocked()
        assert caller.body.endswith(DONE)
        tasks.cancel_scope.cancel()

    assert world.fleet.reports == [("light-0", Outcome.OK)]
    (record,) = world.notes.requests
    assert (record.ending, record.usage) == (Ending.COMPLETED, Usage(101, 2))


async def test_from_an_answer_whose_caller_leaves_at_its_end_is_learned_once(world: World) -> None:
    scope = anyio.CancelScope()

    class Observed(Estimates):
        def observe(self, estimate: Estimate, actual_tokens: int) -> None:
            super().observe(estimate, actual_tokens)
            scope.cancel()

    estimates = world.pipeline._estimator = Observed()
    world.pipeline.cohort.size = 2  # so that requests wait for each other
    world.answers(light_0=Script([ROLE + HELLO + STOP + USAGE + DONE]))
    with scope:
        await world.run(world.request())

    assert scope.cancelled_caught
    assert estimates.observed == [101]
    assert [record.ending for record in world.notes.requests] == [Ending.COMPLETED]


async def test_waiting_requests_leave_a_backend_that_is_lost(world: World) -> None:
    world.answers(light_0=Script([anyio.Event()]), light_1=GOOD)
    caller = Caller()

    with anyio.fail_after(3):  # not after its own time limit
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.run, world.request(), caller)
            await anyio.wait_all_tasks_blocked()
            world.pipeline.abort_attempts("light-0", inf)

    assert caller.headers["x-gateway-backend"] == "light-1"
    assert world.notes.attempts[0].detail == "The backend stopped responding."


async def test_what_is_awaited_of_a_backend_is_its_first_token(world: World) -> None:
    gate, end = anyio.Event(), anyio.Event()
    world.answers(light_0=Script([gate, ROLE + HELLO, end, STOP + DONE]))
    awaited = [world.pipeline.awaited_since("light-0")]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request())
        await anyio.wait_all_tasks_blocked()
        started_at = world.clock.now()
        for event in (gate, end):
            awaited.append(world.pipeline.awaited_since("light-0"))
            event.set()
            await anyio.wait_all_tasks_blocked()

    awaited.append(world.pipeline.awaited_since("light-0"))
    assert awaited == [None, started_at, None, None]


async def test_how_long_the_streams_of_a_backend_have_been_silent(world: World) -> None:
    gates = [anyio.Event() for _ in range(3)]
    steps = [part for gate in gates for part in (gate, HELLO)]
    world.answers(light_0=Script([ROLE, *steps, STOP + DONE]))
    silence_s = partial(world.pipeline.silence_s, "light-0")
    now = asyncio.get_running_loop().time
    assert silence_s() == inf

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request())
        await anyio.wait_all_tasks_blocked()
        assert silence_s() == inf  # its first token is awaited
        for gate in gates:
            before = now()
            gate.set()
            await anyio.wait_all_tasks_blocked()
            if gate is not gates[-1]:
                assert silence_s() <= now() - before
                assert world.pipeline.silence_s("light-1") == inf

    assert silence_s() == inf


@pytest.mark.parametrize("is_read", [True, False])
async def test_a_stream_whose_backend_nobody_listens_to_is_not_said_to_be_silent(
    world: World, is_read: bool
) -> None:
    """Its caller does not read, or has everything, and only the end of the body is missing."""
    end = anyio.Event()
    world.answers(light_0=Script([ROLE + HELLO + STOP + DONE, end]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(), Caller(stalls=not is_read))
        await anyio.wait_all_tasks_blocked()
        assert world.pipeline.silence_s("light-0") == inf
        tasks.cancel_scope.cancel()


async def test_a_stream_already_answered_is_not_abandoned(world: World) -> None:
    gate = anyio.Event()
    world.answers(light_0=Script([ROLE + HELLO, gate, STOP + DONE]))
    caller = Caller()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(), caller)
        await anyio.wait_all_tasks_blocked()
        world.pipeline.abort_attempts("light-0", inf)
        await anyio.wait_all_tasks_blocked()
        gate.set()

    assert caller.body == public(ROLE + HELLO + STOP) + DONE


async def test_a_backend_that_is_gone_gets_no_more_time_than_a_stream_has_anyhow(world: World) -> None:
    impatient(world, idle_s=0.5)
    world.answers(light_0=Script([ROLE + HELLO, anyio.Event()]))

    with anyio.fail_after(3):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.run, world.request())
            await anyio.wait_all_tasks_blocked()
            world.pipeline.abort_attempts("light-0", silence_s=60.0)

    assert world.notes.attempts[0].detail == "The backend did not send anything for 0.5 s."


async def test_a_stream_already_answered_ends_if_a_backend_that_is_gone_stays_silent(world: World) -> None:
    world.answers(light_0=Script([ROLE + HELLO, anyio.Event()]))
    caller = Caller()

    with anyio.fail_after(3):  # not after its own time limit
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.run, world.request(), caller)
            await anyio.wait_all_tasks_blocked()
            world.pipeline.abort_attempts("light-0", silence_s=0.01)

    assert caller.body.startswith(public(ROLE + HELLO))
    assert b"stream_broken" in caller.body
    assert world.notes.attempts[0].detail == "The backend stopped responding."


async def test_a_stream_that_nothing_more_comes_of_says_for_how_long(world: World) -> None:
    """On a backend that hangs, it has the time of any other."""
    impatient(world, idle_s=0.05)
    world.answers(light_0=Script([ROLE + HELLO, anyio.Event()]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request())
        await anyio.wait_all_tasks_blocked()
        world.pipeline.abort_attempts("light-0", inf)

    assert world.notes.attempts[0].detail == "The backend did not send anything for 0.05 s."


# ---------------------------------------------------------------- the end of the process


async def told_after(world: World, request: Request, happens: Callable[[], None]) -> GatewayError:
    """Run a request, let something happen while it waits, and return the error that it is told then."""
    told: list[GatewayError] = []

    async def ask() -> None:
        with pytest.raises(GatewayError) as caught:
            await world.run(request)
        told.append(caught.value)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        assert not told
        happens()
    return told[0]


@pytest.mark.parametrize("attempts_max", [1, 3])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_who_has_no_answer_yet_is_told_that_the_gateway_stops(
    world: World, stream: bool, attempts_max: int
) -> None:
    world.policy = replace(world.policy, retry=RetryPolicy(attempts_max=attempts_max))
    world.answers(light_0=Script([anyio.Event()]), light_1=GOOD)

    told = await told_after(world, world.request(stream=stream), world.pipeline.end)

    assert (type(told), told.code) == (Draining, "draining")
    assert [target.backend.id for target in world.upstream.targets] == ["light-0"]
    assert world.fleet.reports == [("light-0", Outcome.CANCELLED)]
    assert world.notes.requests[0].ending is Ending.FAILED
    with pytest.raises(Draining):  # who comes later, too
        await world.run(world.request())


async def test_who_waits_is_told_that_the_gateway_stops(world: World) -> None:
    held = [slot for name in world.policy.backends for slot in await fill(world, name)]

    told = await told_after(world, world.request(), world.pipeline.end)

    assert (type(told), told.code) == (Draining, "draining")
    with anyio.fail_after(10), pytest.raises(Draining):  # who comes later does not even wait
        await world.run(world.request())
    for slot in held:
        await world.ledger.release(slot)


async def test_who_waits_after_a_failure_is_told_that_the_gateway_stops(world: World) -> None:
    held = [slot for name in ("light-1", "push") for slot in await fill(world, name)]
    world.answers(light_0=Script(opening=UpstreamUnreachable("It cannot be reached.")))

    told = await told_after(world, world.request(), world.pipeline.end)

    assert (type(told), told.code) == (Draining, "draining")
    for slot in held:
        await world.ledger.release(slot)


@pytest.mark.parametrize("rounds", range(4))
async def test_who_has_just_got_a_place_is_told_that_the_gateway_stops(world: World, rounds: int) -> None:
    """Between its turn in the queue and its attempt, a request is neither waiting nor running."""
    held = [slot for name in world.policy.backends for slot in await fill(world, name)]
    for _ in range(2):
        world.answers(light_0=Script([anyio.Event()]), light_1=Script([anyio.Event()]))
    told: list[GatewayError] = []

    async def ask(number: int) -> None:
        with pytest.raises(Draining) as caught:
            await world.run(world.request(), arrival=Arrival(f"req-{number}", 1_000_000.0, 10.0))
        told.append(caught.value)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            for number in range(2):
                tasks.start_soon(ask, number)
            await anyio.wait_all_tasks_blocked()
            for slot in held:
                await world.ledger.release(slot)
            while world.ledger.load("light-0").seqs < 1:
                await anyio.lowlevel.checkpoint()
            for _ in range(rounds):
                await anyio.lowlevel.checkpoint()
            world.pipeline.end()
    assert [error.code for error in told] == ["draining"] * 2


async def test_a_job_is_left_to_its_worker_at_the_end_of_the_gateway(world: World) -> None:
    gate = anyio.Event()
    world.answers(light_0=Script([ROLE + HELLO, gate, STOP, DONE]))
    caller = Caller()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(is_job=True), caller)
        await anyio.wait_all_tasks_blocked()
        world.pipeline.end()
        await anyio.wait_all_tasks_blocked()
        gate.set()

    assert caller.body == public(ROLE + HELLO + STOP) + DONE


async def test_a_job_that_its_worker_takes_back_at_the_end_of_the_gateway_has_not_failed(
    world: World,
) -> None:
    world.answers(light_0=Script([anyio.Event()]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(is_job=True))
        await anyio.wait_all_tasks_blocked()
        world.pipeline.end()
        tasks.cancel_scope.cancel()

    (record,) = world.notes.requests
    assert (record.ending, record.error_code) == (Ending.LEFT, "")


@pytest.mark.parametrize(
    ("fails_at", "ending", "status"),
    [("estimate", Ending.FAILED, 500), ("send", Ending.BROKEN, 200)],
)
async def test_a_fault_of_the_gateway_itself_is_recorded_as_one(
    world: World, fails_at: str, ending: Ending, status: int
) -> None:
    caller = Caller()
    world.answers(light_0=GOOD)

    def fail() -> None:
        raise ZeroDivisionError

    async def fail_to_send(_: bytes) -> None:
        fail()

    if fails_at == "estimate":
        world.estimates.meanwhile = fail
    else:
        caller.before_send = fail_to_send

    with pytest.raises(ZeroDivisionError):
        await world.run(world.request(), caller)

    (record,) = world.notes.requests
    assert (record.ending, record.status, record.error_code) == (ending, status, "internal_error")


async def test_a_stream_that_the_end_of_the_gateway_cuts_ends_with_an_error(world: World) -> None:
    world.answers(light_0=Script([ROLE + HELLO, anyio.Event()]))
    caller = Caller()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(), caller)
        await anyio.wait_all_tasks_blocked()
        world.pipeline.end()

    assert caller.body.startswith(public(ROLE + HELLO))
    assert b'"code": "stream_broken"' in caller.body
    assert b"shutting down" in caller.body
    assert world.fleet.reports == [("light-0", Outcome.CANCELLED)]
    (record,) = world.notes.requests
    assert (record.ending, record.error_code) == (Ending.BROKEN, "stream_broken")


async def test_a_caller_that_leaves_at_the_error_of_a_broken_stream_did_not_break_it(world: World) -> None:
    scope = anyio.CancelScope()

    class Leaving(Caller):
        async def fail(self, error: GatewayError, code: str) -> None:
            await super().fail(error, code)
            scope.cancel()

    world.pipeline.cohort.size = 2  # so that requests wait for each other
    world.answers(light_0=Script([ROLE + HELLO, CRASH]))
    with scope:
        await world.run(world.request(), Leaving())

    (record,) = world.notes.requests
    assert (record.ending, record.error_code) == (Ending.BROKEN, "stream_broken")


async def test_a_caller_that_is_gone_at_the_error_of_a_broken_stream_was_not_told_of_it(world: World) -> None:
    class Gone(Caller):
        async def fail(self, error: GatewayError, code: str) -> None:
            raise OSError("the caller's socket is gone")

    world.answers(light_0=Script([ROLE + HELLO, CRASH]))
    with pytest.raises(OSError, match="gone"):
        await world.run(world.request(), Gone())

    (record,) = world.notes.requests
    assert (record.ending, record.error_code) == (Ending.LEFT, "")
    assert [one.outcome for one in record.attempts] == [Outcome.FAILED]


async def test_a_stream_of_which_more_arrives_as_the_gateway_ends_is_cut_all_the_same(world: World) -> None:
    arrival = anyio.Event()
    world.answers(light_0=Script([ROLE + HELLO, arrival, HELLO, anyio.Event()]))
    caller = Caller()

    with anyio.fail_after(3):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.run, world.request(), caller)
            await anyio.wait_all_tasks_blocked()
            arrival.set()
            world.pipeline.end()

    assert b"shutting down" in caller.body


@pytest.mark.parametrize("end", ["cut", "left"])
async def test_a_whole_answer_that_was_sent_is_complete_whatever_ends_as_its_connection_is_closed(
    world: World, end: str
) -> None:
    closing = anyio.Event()

    class Closing(ScriptedUpstream):
        @asynccontextmanager
        async def open(self, target: Target, timeouts: Timeouts) -> AsyncIterator[ScriptedResponse]:
            async with super().open(target, timeouts) as response:
                yield response
                closing.set()
                await anyio.sleep_forever()

    world.upstream = world.pipeline._upstream = Closing()
    world.answers(light_0=Script([WHOLE]))
    caller = Caller()

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.run, world.request(stream=False), caller)
            await closing.wait()
            if end == "cut":
                world.pipeline.end()
            else:
                tasks.cancel_scope.cancel()

    assert json.loads(caller.body)["model"] == "gemma-4"
    assert world.fleet.reports == [("light-0", Outcome.OK)]
    (record,) = world.notes.requests
    assert (record.ending, record.usage) == (Ending.COMPLETED, Usage(101, 2))


async def test_a_caller_that_does_not_read_is_not_told_that_the_gateway_stops(world: World) -> None:
    world.answers(light_0=Script([ROLE + HELLO, STOP + DONE]))

    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(CallerStalled):
                await world.run(world.request(), Caller(stalls=True))

        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        world.pipeline.end()

    (record,) = world.notes.requests
    assert (record.ending, record.error_code) == (Ending.BROKEN, "stream_broken")
    assert record.attempts[-1].detail == "the caller was not reading as this gateway shut down"


# ---------------------------------------------------------------- the caller leaves


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([anyio.Event], id="waiting-for-headers-or-first-token"),
        pytest.param([ROLE + HELLO, anyio.Event], id="mid-stream"),
    ],
)
async def test_a_caller_that_leaves_frees_its_slot(world: World, steps: list[object]) -> None:
    script = Script([step() if step is anyio.Event else step for step in steps])  # type: ignore[misc]
    world.answers(light_0=script)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request())
        await anyio.wait_all_tasks_blocked()
        assert world.ledger.load("light-0").seqs == 1
        tasks.cancel_scope.cancel()

    assert world.upstream.closed == ["light-0"]
    assert world.fleet.reports == [("light-0", Outcome.CANCELLED)]
    assert world.notes.requests[0].ending is Ending.LEFT


@pytest.mark.parametrize(
    ("steps", "held"),
    [
        pytest.param([], {}, id="before-the-first-token"),
        pytest.param([ROLE + HELLO], {"light-0": 0.5}, id="after-it"),
    ],
)
async def test_the_next_turn_of_a_caller_that_stops_an_answer_finds_the_backend_that_read_its_prompt(
    world: World, steps: list[Step], held: dict[str, float]
) -> None:
    world.answers(light_0=Script([*steps, anyio.Event()]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(prefixes=((1, 1.0),)))
        await anyio.wait_all_tasks_blocked()
        assert world.prefixes.held(((1, 0.5), (2, 1.0))) == held
        tasks.cancel_scope.cancel()

    assert world.prefixes.held(((1, 0.5), (2, 1.0))) == held


async def test_a_send_that_fails_frees_its_slot(world: World) -> None:
    world.answers(light_0=GOOD)

    with pytest.raises(OSError, match="socket is gone"):
        await world.run(world.request(), Caller(broken=True))

    assert world.upstream.closed == ["light-0"]


# ---------------------------------------------------------------- refusals


async def test_an_unknown_model_is_refused_before_anything_else(world: World) -> None:
    with pytest.raises(ModelNotFound, match="Known: gemma-4"):
        await world.run(replace(world.request(), model="gpt-5"))


async def test_a_request_that_no_class_takes_is_refused(world: World) -> None:
    (model,) = world.policy.models
    only_long = TrafficClass("long", ("push",), When(prompt_tokens=(Bound(Comparison.GE, 16_000),)))
    world.policy = replace(world.policy, models=(replace(model, classes=(only_long,)),))

    with pytest.raises(InvalidRequest, match="No class of model `gemma-4` takes this request") as caught:
        await world.run(world.request())

    assert caught.value.code == "no_class"
    assert world.upstream.targets == []


async def test_a_prompt_that_fits_nowhere_is_refused_in_words_that_sdks_recognise(world: World) -> None:
    world.estimates.tokens = 300_000

    with pytest.raises(ContextExceeded) as caught:
        await world.run(world.request(max_tokens=512))

    assert caught.value.message == (
        "This model's maximum context length is 262144 tokens, but the request needs 300528 "
        "(300016 input + 512 output). Input tokens exceed the configured limit [context_length_exceeded]."
    )
    assert dict(caught.value.headers)[b"x-gateway-class"] == b"long_document"
    assert world.upstream.targets == []


async def test_a_prompt_that_fits_nowhere_is_refused_as_such_where_nobody_may_wait(world: World) -> None:
    """Told that the queue is full, its caller would ask again for ever."""
    (model,) = world.policy.models
    nobody = TrafficClass("all", ("light", "push"), waiting=Waiting(waiting_max=0))
    world.policy = replace(world.policy, models=(replace(model, classes=(nobody,)),))
    world.estimates.tokens = 300_000

    with pytest.raises(ContextExceeded):
        await world.run(world.request())


async def test_whoever_names_a_time_limit_waits_no_longer(world: World) -> None:
    held = [slot for name in world.policy.backends for slot in await fill(world, name)]

    def pass_time() -> None:
        world.clock.time += 5.0
        world.pipeline.room.look()

    told = await told_after(world, world.request(headers={"x-gateway-timeout-s": "5"}), pass_time)

    assert (type(told), told.code) == (AtCapacity, "deadline")
    for slot in held:
        await world.ledger.release(slot)


async def test_a_prompt_that_fits_nowhere_is_told_the_longest_window(world: World) -> None:
    (model,) = world.policy.models
    everywhere = replace(model, classes=(TrafficClass("all", ("light", "push")),))
    world.policy = replace(world.policy, models=(everywhere,))
    world.estimates.tokens = 300_000

    with pytest.raises(ContextExceeded, match="maximum context length is 262144 tokens"):
        await world.run(world.request())


async def test_who_sets_no_limit_gets_what_the_window_leaves(world: World) -> None:
    """The reserve that is planned for them is no reason to refuse them."""
    world.estimates.tokens = 262_000  # 262,016 at most, and 1,024 of output do not fit
    world.answers(push=GOOD)

    caller = await world.run(world.request())

    assert caller.headers["x-gateway-backend"] == "push"
    world.estimates.tokens = 262_128  # 262,144 at most: nothing is left
    with pytest.raises(ContextExceeded):
        await world.run(world.request())


@pytest.mark.parametrize("tokens", [32_500, 262_000])  # a window leaves 252, or 128
async def test_who_sets_no_limit_goes_where_there_is_room_for_an_answer(world: World, tokens: int) -> None:
    world.estimates.tokens = tokens
    world.policy = replace(
        world.policy,
        models=tuple(
            replace(one, classes=(TrafficClass("all", ("light", "push")),)) for one in world.policy.models
        ),
    )
    world.answers(push=GOOD)

    caller = await world.run(world.request())

    assert caller.headers["x-gateway-backend"] == "push"


async def test_an_output_that_fits_nowhere_is_not_blamed_on_the_prompt(world: World) -> None:
    """Clients that take it for too long a conversation cut that down, and are refused again."""
    with pytest.raises(InvalidRequest) as caught:
        await world.run(world.request(max_tokens=262_144))

    assert (caught.value.code, caught.value.param) == ("invalid_request", "max_tokens")
    assert "context" not in caught.value.message
    assert world.upstream.targets == []


async def fill(world: World, name: str, seqs: int = 2) -> list[Slot]:
    capacity = world.policy.backends[name].capacity
    claim = admission.claim(capacity, Demand(seqs=1, prompt_tokens=10, total_tokens=20))
    slots = [await world.ledger.acquire(name, claim, admission.limits(capacity)) for _ in range(seqs)]
    return [slot for slot in slots if isinstance(slot, Slot)]


async def test_a_backend_whose_machine_serves_another_model_is_passed_over(world: World) -> None:
    world.objections = {"light-0": (Exclusion.SWAPPED_OUT, "its box serves another model")}
    world.answers(light_1=GOOD)

    caller = await world.run(world.request())

    assert caller.headers["x-gateway-backend"] == "light-1"


async def test_a_full_pool_spills_to_the_next(world: World) -> None:
    held = [*await fill(world, "light-0"), *await fill(world, "light-1")]
    world.answers(push=GOOD)

    caller = await world.run(world.request())

    assert caller.headers["x-gateway-pool"] == "push"
    assert world.notes.requests[0].is_spill
    for slot in held:
        await world.ledger.release(slot)


async def refused_in_the_end(world: World) -> GatewayError:
    """Run a request that has to wait, let its patience run out, and return what it was told."""

    def lose_patience() -> None:
        world.clock.time += 2.0
        world.pipeline.room.look()

    return await told_after(world, world.request(), lose_patience)


async def test_who_waits_for_an_engine_that_comes_up_with_a_smaller_window_is_told_what_to_change(
    world: World,
) -> None:
    """As when its box brings it in: before that, only its configured window is known."""
    world.objections = dict.fromkeys(POLICY.backends, (Exclusion.SWAPPED_OUT, "its model is out"))

    def come_up() -> None:
        world.objections = {}
        for name, status in world.fleet.known.items():
            world.fleet.known[name] = replace(status, context_tokens=16)
        world.pipeline.room.look()

    error = await told_after(world, world.request(), come_up)

    assert error.status == 400
    assert "this model holds 16 tokens" in error.message
    assert world.notes.requests[0].ending is Ending.REJECTED


async def test_a_full_fleet_is_429_when_its_patience_has_run_out(world: World) -> None:
    held = [slot for name in world.policy.backends for slot in await fill(world, name)]

    error = await refused_in_the_end(world)

    assert (error.status, error.code) == (429, "waited_too_long")
    assert "position 1" in error.message
    assert error.retry_after_s is not None
    assert world.notes.requests[0].ending is Ending.SHED
    for slot in held:
        await world.ledger.release(slot)


@pytest.mark.parametrize("is_answered", [True, False], ids=["answered", "failed"])
async def test_how_fast_slots_become_free_is_learned_from_what_was_answered(
    world: World, is_answered: bool
) -> None:
    world.policy = replace(POLICY, retry=RetryPolicy(attempts_max=1))
    first, second = anyio.Event(), anyio.Event()
    end = [HELLO, STOP, DONE] if is_answered else [UpstreamFailed("x")]
    world.answers(light_0=Script([ROLE, first, *end]))
    world.answers(light_0=Script([ROLE, second, *end]))

    async with anyio.create_task_group() as tasks:
        for number, gate in ((1, first), (2, second)):
            arrival = Arrival(f"req-{number}", 1_000_000.0, 10.0)
            tasks.start_soon(partial(world.run_to_any_end, world.request(), arrival=arrival))
            await anyio.wait_all_tasks_blocked()
            rates = world.pipeline.room.line.drains_per_s(world.clock.now())
            is_known = rates["gemma-4", "short_chat"] is not None
            assert is_known is (is_answered and gate is second)
            world.clock.time += 2.0
            gate.set()
            await anyio.wait_all_tasks_blocked()


@pytest.mark.parametrize("is_reloaded", [False, True], ids=["one-policy", "reloaded"])
async def test_who_has_waited_before_it_failed_waits_no_longer_than_its_class_allows(
    world: World, is_reloaded: bool
) -> None:
    """Another policy lets it wait for a turn more, but only until it gets a slot."""
    world.policy = patient(POLICY, 30.0)
    gate = anyio.Event()
    world.answers(light_0=Script([gate, UpstreamFailed("x")]))
    held = [slot for name in world.policy.backends for slot in await fill(world, name)]
    told: list[GatewayError] = []

    async def ask() -> None:
        with pytest.raises(AtCapacity) as caught:
            await world.run(world.request())
        told.append(caught.value)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            if is_reloaded:
                world.policy = replace(world.policy)
                world.pipeline.policy_changed()
                await anyio.wait_all_tasks_blocked()
            world.clock.time += 29.5
            await world.ledger.release(held.pop(0))
            await anyio.wait_all_tasks_blocked()
            assert asked(world) == ["light-0"]
            held += await fill(world, "light-0", 1)
            gate.set()
            await anyio.wait_all_tasks_blocked()
            assert not told
            world.clock.time += 0.75
            world.pipeline.room.look()
            await anyio.wait_all_tasks_blocked()
            assert [error.code for error in told] == ["waited_too_long"]

    for slot in held:
        await world.ledger.release(slot)


async def test_a_place_that_comes_free_is_taken_at_once(world: World) -> None:
    held = [slot for name in world.policy.backends for slot in await fill(world, name)]
    world.answers(light_1=GOOD)
    caller = Caller()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(), caller)
        await anyio.wait_all_tasks_blocked()
        assert caller.status == 0
        freed = next(slot for slot in held if slot.backend == "light-1")
        world.clock.time += 0.7
        await world.ledger.release(freed)
        world.pipeline.room.look()

    assert caller.headers["x-gateway-backend"] == "light-1"
    assert caller.headers["x-gateway-queue-ms"] == "700"
    for slot in held:
        await world.ledger.release(slot)


async def test_a_caller_that_leaves_while_it_waits_is_gone_at_once(world: World) -> None:
    held = [slot for name in world.policy.backends for slot in await fill(world, name)]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request())
        await anyio.wait_all_tasks_blocked()
        assert len(world.pipeline.room.line) == 1
        tasks.cancel_scope.cancel()

    assert len(world.pipeline.room.line) == 0
    assert world.notes.requests[0].ending is Ending.LEFT
    for slot in held:
        await world.ledger.release(slot)


async def test_a_request_that_ends_lets_the_next_one_start(world: World) -> None:
    held = [*await fill(world, "light-1"), *await fill(world, "push"), *await fill(world, "light-0", seqs=1)]
    gate = anyio.Event()
    world.answers(light_0=Script([ROLE + HELLO, gate, STOP + DONE]))
    world.answers(light_0=GOOD)
    second = Caller()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request())
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(partial(world.run, world.request(), second, arrival=Arrival("req-2", 0.0, 10.0)))
        await anyio.wait_all_tasks_blocked()
        assert second.status == 0
        gate.set()

    assert second.status == 200
    for slot in held:
        await world.ledger.release(slot)


@pytest.mark.parametrize("header", ["", "soon", "-1", "nan", "inf"])
async def test_a_deadline_that_is_none_is_ignored(world: World, header: str) -> None:
    world.answers(light_0=GOOD)

    caller = await world.run(world.request(headers={"x-gateway-timeout-s": header}))

    assert caller.status == 200


async def test_backends_that_do_not_know_a_model_are_asked_what_they_serve(world: World) -> None:
    """Their server may have loaded another one. Having failed everywhere, it counts against none of them."""
    world.answers(light_0=Script(status=404), light_1=Script(status=404), push=Script(status=404))

    await world.run_to_any_end(world.request())

    tried = [target.backend.id for target in world.upstream.targets]
    assert world.fleet.looks == tried
    assert {outcome for _, outcome in world.fleet.reports} == {Outcome.REJECTED}


async def test_who_finds_only_ejected_backends_is_tried_there(world: World) -> None:
    out = BackendStatus(state=State.EJECTED, served_models=("served",), ejected_until=90.0)
    world.fleet.known = dict.fromkeys(world.policy.backends, out)
    world.answers(light_0=Script(status=500), light_1=GOOD)

    caller = await world.run(world.request())

    assert (caller.status, caller.headers["x-gateway-backend"]) == (200, "light-1")
    assert world.fleet.reports == [("light-0", Outcome.FAILED), ("light-1", Outcome.OK)]


@pytest.mark.parametrize(
    ("state", "fault", "outcome"),
    [
        (State.EJECTED, None, Outcome.REJECTED),
        (State.EJECTED, ProbeFault.STATUS, Outcome.FAILED),
        (State.UP, ProbeFault.STATUS, Outcome.REJECTED),
    ],
    ids=["well", "unwell", "up"],
)
async def test_what_all_ejected_backends_fail_counts_where_probes_fail_too(
    world: World, state: State, fault: ProbeFault | None, outcome: Outcome
) -> None:
    """Otherwise none of them would ever rest, and no caller would be told when to ask again."""
    out = BackendStatus(state=state, served_models=("served",), probe_fault=fault)
    world.fleet.known = dict.fromkeys(world.policy.backends, out)
    world.answers(light_0=Script(status=500), light_1=Script(status=500), push=Script(status=500))

    await world.run_to_any_end(world.request())

    assert {reported for _, reported in world.fleet.reports} == {outcome}


async def test_a_dead_fleet_is_503_with_retry_after(world: World) -> None:
    world.fleet.known = {name: BackendStatus(state=State.DOWN) for name in world.policy.backends}

    with pytest.raises(NoBackend) as caught:
        await world.run(world.request())

    assert caught.value.status == 503
    assert caught.value.retry_after_s is not None


@pytest.mark.parametrize(
    ("fields", "code"),
    [({"images": 1}, "unsupported_modality"), ({"seqs": 3, "choices": 3}, "too_many_choices")],
)
async def test_what_the_fleet_cannot_do_is_a_400(world: World, fields: dict[str, Any], code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await world.run(world.request(**fields))

    assert (caught.value.status, caught.value.code) == (400, code)


async def test_images_go_where_they_are_taken(world: World) -> None:
    push = replace(world.policy.backends["push"], modalities=Modalities(images_max=None))
    world.policy = replace(world.policy, backends={**world.policy.backends, "push": push})
    world.answers(push=GOOD)

    caller = await world.run(world.request(images=1))

    assert caller.headers["x-gateway-backend"] == "push"


async def test_a_request_keeps_the_policy_it_started_with(world: World) -> None:
    gate = anyio.Event()
    world.answers(light_0=Script([gate, UpstreamFailed("x")]), light_1=GOOD)
    caller = Caller()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(), caller)
        await anyio.wait_all_tasks_blocked()
        world.policy = Policy(models=(), pools={}, backends=dict[str, Backend]())
        gate.set()
        await anyio.wait_all_tasks_blocked()

    assert caller.headers["x-gateway-backend"] == "light-1"


async def test_a_backend_that_has_failed_a_request_is_not_asked_again_under_another_policy(
    world: World,
) -> None:
    gate = anyio.Event()
    world.answers(light_0=Script([gate, UpstreamFailed("x")]), light_1=GOOD)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request())
        await anyio.wait_all_tasks_blocked()
        world.policy = replace(POLICY)
        world.pipeline.policy_changed()
        gate.set()

    assert asked(world) == ["light-0", "light-1"]


async def test_where_a_job_would_go_is_decided_under_the_policy_that_came_meanwhile(world: World) -> None:
    (model,) = POLICY.models
    newer = replace(POLICY, models=(replace(model, classes=(TrafficClass("chat", ("push",)),)),))

    def reloaded() -> None:
        world.policy = newer
        world.pipeline.policy_changed()

    world.estimates.meanwhile = reloaded

    decision = await world.pipeline.decision_for(Incoming(world.request()))

    assert (decision.traffic_class, decision.pools) == ("chat", ("push",))


async def test_where_a_request_goes_is_decided_under_the_policy_that_came_meanwhile(world: World) -> None:
    """Its pools have the names of those before, but other backends."""
    world.answers(light_0=GOOD, new=GOOD)
    await world.run(world.request())
    (model,) = POLICY.models
    newer = replace(
        POLICY,
        models=(replace(model, classes=(TrafficClass("chat", ("light", "push")),)),),
        pools={**POLICY.pools, "light": Pool("light", ("new",))},
        backends={**POLICY.backends, "new": replace(POLICY.backends["light-0"], id="new")},
    )
    world.fleet.known["new"] = world.fleet.known["light-0"]

    def reloaded() -> None:
        world.policy = newer

    world.estimates.meanwhile = reloaded
    caller = await world.run(world.request())

    assert (caller.headers["x-gateway-class"], caller.headers["x-gateway-backend"]) == ("chat", "new")


@pytest.mark.parametrize("is_known", [True, False], ids=["its-model-is-known", "its-model-is-gone"])
async def test_whose_backend_has_got_another_model_since_it_got_the_slot_goes_to_the_next(
    is_known: bool,
) -> None:
    """Under a policy that would reject it, it keeps its own, whose ranking has that backend first."""
    other = replace(POLICY.backends["light-0"], url="http://elsewhere", model="other")
    newer = replace(
        POLICY,
        models=POLICY.models if is_known else (),
        pools={**POLICY.pools, "light": Pool("light", ("light-1",)), "others": Pool("others", ("light-0",))},
        backends={**POLICY.backends, "light-0": other},
    )

    class Reloading(MemoryLedger):
        def acquire_at_once(self, backend_id: str, claim: Load, limits: Load) -> Slot | None:
            assert world.policy is POLICY or backend_id != "light-0", "it goes round in circles"
            if world.policy is POLICY:
                world.policy = newer
                world.pipeline.policy_changed()
            return super().acquire_at_once(backend_id, claim, limits)

    world = World(Reloading())
    world.answers(light_1=GOOD)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.pipeline.room.run)
        caller = await world.run(world.request())
        tasks.cancel_scope.cancel()

    assert caller.headers["x-gateway-backend"] == "light-1"
    assert asked(world) == ["light-1"]
    assert all(load == Load() for load in world.ledger.loads().values())


async def test_who_waits_is_told_when_all_its_backends_have_been_removed(world: World) -> None:
    """The new policy would reject it, so it keeps the one under which it was accepted."""
    held = [slot for name in world.policy.backends for slot in await fill(world, name)]
    before = world.policy

    def removed() -> None:
        world.policy = Policy(models=(), pools={}, backends=dict[str, Backend]())
        world.pipeline.policy_changed()

    with anyio.fail_after(5):
        told = await told_after(world, world.request(), removed)

    assert type(told) is NoBackend
    world.policy = before
    for slot in held:
        await world.ledger.release(slot)


@pytest.mark.parametrize(
    ("max_tokens", "status"), [pytest.param(None, 200, id="none"), pytest.param(20_000, 503, id="its-own")]
)
async def test_who_waits_for_a_larger_backend_that_fails_gets_one_where_it_fits_without_its_reserve(
    world: World, max_tokens: int | None, status: int
) -> None:
    chat = TrafficClass("short_chat", ("light", "push"), output_reserve_tokens=20_000)
    world.policy = replace(POLICY, models=(replace(POLICY.models[0], classes=(chat,)),))
    world.pipeline.policy_changed()
    world.estimates.tokens = 15_000
    world.answers(light_0=GOOD)
    held = await fill(world, "push")
    caller = Caller()
    refused: list[int] = []

    async def ask() -> None:
        try:
            await world.run(world.request(max_tokens=max_tokens), caller)
        except NoBackend as error:
            refused.append(error.status)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            assert (caller.status, refused) == (0, [])
            world.fleet.known["push"] = BackendStatus(state=State.EJECTED)
            world.pipeline.room.look()

    assert [caller.status or None, *refused] == ([200] if status == 200 else [None, 503])
    (noted,) = world.notes.requests
    assert noted.decision is not None
    assert noted.decision.demand.total_tokens == (32_768 if status == 200 else 35_016)
    for slot in held:
        await world.ledger.release(slot)
    assert all(load == Load() for load in world.ledger.loads().values())


async def test_backends_that_left_are_not_looked_at_for_ever(world: World) -> None:
    before = world.policy
    for number in range(5):
        gone = replace(POLICY.backends["light-0"], id=f"gone-{number}")
        world.policy = replace(before, backends={**before.backends, gone.id: gone})
        world.pipeline.policy_changed()
    del gone
    world.policy = before
    world.pipeline.policy_changed()
    gc.collect()

    kept = [one.id for one in gc.get_objects() if isinstance(one, Backend) and one.id.startswith("gone-")]
    assert kept == []


async def test_a_decision_sees_what_others_take_of_a_backend(world: World) -> None:
    world.counts.kv_taken["light-0"] = 5
    assert world.pipeline.view.for_operators(world.policy, {})["light-0"].kv_taken == 5
    world.counts.kv_taken.clear()
    world.counts.seqs_taken["light-0"] = 7
    assert world.pipeline.view.for_operators(world.policy, {})["light-0"].seqs_taken == 7
    world.counts.seqs_taken.clear()
    world.pipeline.room.line.note_long_waiting({"light-0": 2})
    assert world.pipeline.view.for_operators(world.policy, {})["light-0"].long_waiting == 2


async def test_a_conversation_returns_to_its_replica(world: World) -> None:
    world.answers(light_0=GOOD, light_1=GOOD)
    (held,) = await fill(world, "light-0", seqs=1)
    await world.run(world.request(prefixes=((1, 1.0),)))
    await world.ledger.release(held)
    world.answers(light_1=GOOD)

    caller = await world.run(world.request(prefixes=((1, 0.9), (2, 1.0))))

    assert caller.headers["x-gateway-backend"] == "light-1"


@pytest.mark.parametrize("caches", [True, False])
async def test_an_engine_that_caches_no_prefixes_has_none_from_the_first_answer_on(
    world: World, caches: bool
) -> None:
    """Not only once its metrics have been read again: an agent's next turn may come before."""
    status, engine = world.fleet.known["light-0"], EngineSample(at=0.0, caches_prefixes=caches)
    world.fleet.known["light-0"] = replace(status, engine=engine)
    world.answers(light_0=GOOD)

    await world.run(world.request(prefixes=((1, 1.0),)))

    assert ("light-0" in world.prefixes.held(((1, 1.0),))) is caches


async def test_an_error_before_a_decision_carries_the_request_id(world: World) -> None:
    with pytest.raises(GatewayError) as caught:
        await world.run(replace(world.request(), model="nope"))

    assert dict(caught.value.headers) == {b"x-request-id": b"req-1"}
