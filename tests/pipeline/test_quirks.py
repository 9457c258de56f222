"""Requests to backends with quirks, through the pipeline, with scripted backends."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anyio
import pytest
from support.world import (
    CRASH,
    DONE,
    HELLO,
    ROLE,
    STOP,
    USAGE,
    WHOLE,
    Caller,
    Script,
    Step,
    World,
    event,
)

from gateway.core.backends import Timeouts
from gateway.core.errors import AnswerUnfit, UpstreamFailed, UpstreamTimeout, UpstreamUnreachable
from gateway.core.health import BackendStatus, Outcome, State
from gateway.core.load import Load
from gateway.core.usage import Ending, Usage


@pytest.fixture(autouse=True)
def _nothing_leaks(world: World) -> Iterator[None]:
    yield
    for name in world.policy.backends:
        assert world.ledger.load(name) == Load(), name


def give(world: World, *quirks: str, timeouts: Timeouts | None = None) -> None:
    """Let every backend have these quirks, and every pool these timeouts."""
    backends = {name: replace(one, quirks=quirks) for name, one in world.policy.backends.items()}
    pools = {
        name: replace(pool, timeouts=timeouts or pool.timeouts) for name, pool in world.policy.pools.items()
    }
    world.policy = replace(world.policy, backends=backends, pools=pools)


def sent(world: World, number: int = 0) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(world.upstream.targets[number].body)
    return body


# ---------------------------------------------------------------- an answer assembled from a stream


async def test_a_stream_becomes_the_one_answer_that_was_asked_for(world: World) -> None:
    give(world, "tool_markup_leaks")
    world.answers(light_0=Script([ROLE + HELLO, STOP, USAGE, DONE]))

    caller = await world.run(world.request(stream=False, tools=1))

    answer = json.loads(caller.body)
    assert (caller.status, caller.headers["content-type"]) == (200, "application/json")
    assert int(caller.headers["content-length"]) == len(caller.body)
    assert answer["model"] == "gemma-4"
    assert answer["choices"][0]["message"]["content"] == "hello"
    assert sent(world) == {"model": "served", "stream": True, "stream_options": {"include_usage": True}}
    record = world.notes.requests[0]
    assert (record.ending, record.usage) == (Ending.COMPLETED, Usage(101, 2))
    assert world.notes.attempts[0].outcome is Outcome.OK


@pytest.mark.parametrize("end", [STOP + USAGE, STOP + USAGE.rstrip()])
async def test_a_stream_may_end_without_saying_so_once_its_answer_is_whole(world: World, end: bytes) -> None:
    give(world, "tool_markup_leaks")
    world.answers(light_0=Script([ROLE + HELLO, end]))

    caller = await world.run(world.request(stream=False, tools=1))

    assert json.loads(caller.body)["choices"][0]["message"]["content"] == "hello"
    record = world.notes.requests[0]
    assert (record.ending, record.usage) == (Ending.COMPLETED, Usage(101, 2))


async def test_one_that_breaks_off_is_asked_for_elsewhere_though_it_had_begun(world: World) -> None:
    give(world, "tool_markup_leaks")
    world.answers(light_0=Script([ROLE + HELLO]), light_1=Script([ROLE + HELLO, STOP, DONE]))

    caller = await world.run(world.request(stream=False, tools=1))

    assert json.loads(caller.body)["choices"][0]["finish_reason"] == "stop"
    assert [attempt.outcome for attempt in world.notes.attempts] == [Outcome.FAILED, Outcome.OK]


@pytest.mark.parametrize(
    ("last", "bytes_max"), [(CRASH, 1_000), (HELLO, len(ROLE + HELLO))], ids=["error", "too-long"]
)
async def test_one_that_cannot_become_an_answer_is_not_read_any_further(
    world: World, monkeypatch: pytest.MonkeyPatch, last: bytes, bytes_max: int
) -> None:
    monkeypatch.setattr("gateway.pipeline.attempt.ANSWER_BYTES_MAX", bytes_max)
    give(world, "tool_markup_leaks")
    world.answers(light_0=Script([ROLE + HELLO, last, anyio.Event()]))
    world.answers(light_1=Script([ROLE, STOP, DONE]))

    with anyio.fail_after(3):
        await world.run(world.request(stream=False, tools=1))

    assert [attempt.outcome for attempt in world.notes.attempts] == [Outcome.FAILED, Outcome.OK]


@pytest.mark.parametrize(
    ("idle_s", "total_s", "said"), [(0.05, 10, "send anything for"), (5, 0.05, "finish within")]
)
async def test_one_that_falls_silent_is_given_up_after_the_idle_time_or_all_its_time(
    world: World, idle_s: float, total_s: float, said: str
) -> None:
    give(world, "tool_markup_leaks", timeouts=Timeouts(first_byte_s=5, idle_s=idle_s, total_s=total_s))
    silent = Script([ROLE + HELLO, anyio.Event(), STOP])
    world.answers(light_0=silent, light_1=silent, push=silent)

    with anyio.fail_after(3), pytest.raises(UpstreamTimeout, match=said):
        await world.run(world.request(stream=False, tools=1))


async def test_a_caller_that_leaves_ends_the_stream_at_once(world: World) -> None:
    give(world, "tool_markup_leaks")
    world.answers(light_0=Script([ROLE + HELLO, anyio.Event(), STOP]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(stream=False, tools=1))
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()

    assert world.upstream.closed == ["light-0"]
    assert world.notes.requests[0].ending is Ending.LEFT


async def test_a_body_that_stays_open_after_its_end_costs_the_caller_nothing(world: World) -> None:
    give(world, "tool_markup_leaks")
    world.answers(light_0=Script([ROLE + HELLO + STOP + DONE, anyio.Event()]))
    caller = Caller()

    with anyio.fail_after(5):
        await world.run(world.request(stream=False, tools=1), caller)

    assert json.loads(caller.body)["choices"][0]["message"]["content"] == "hello"
    assert world.notes.requests[0].ending is Ending.COMPLETED


async def test_requests_that_a_quirk_does_not_touch_are_relayed_as_ever(world: World) -> None:
    give(world, "tool_markup_leaks")
    world.answers(light_0=Script([WHOLE]))

    caller = await world.run(world.request(stream=False))

    assert caller.body == WHOLE.replace(b'"served"', b'"gemma-4"').replace(b'"model": ', b'"model":')
    assert sent(world) == {"model": "served"}


# ---------------------------------------------------------------- an answer that is not what was asked for


def called(arguments: str) -> bytes:
    call = {"index": 0, "id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return event(delta={"tool_calls": [call]})


def whole(arguments: str) -> Script:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    choice = {"index": 0, "message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}
    usage = {"prompt_tokens": 101, "completion_tokens": 2}
    return Script([json.dumps({"model": "served", "choices": [choice], "usage": usage}).encode()])


CALLED = event(delta={}, finish_reason="tool_calls")


async def test_a_stream_whose_call_is_no_json_ends_with_an_error(world: World) -> None:
    give(world, "streamed_tool_json_invalid")
    world.answers(light_0=Script([ROLE + called('{"a": "<|'), CALLED, DONE]))

    caller = await world.run(world.request(tools=1))

    *_, last, done = caller.body.split(b"\n\n")[:-1]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "stream_broken"
    assert b"not a JSON object" in last
    assert done == b"data: [DONE]"
    assert b'"tool_calls"}' not in caller.body
    assert world.notes.attempts[0].outcome is Outcome.UNFIT
    assert world.fleet.reports == [("light-0", Outcome.UNFIT)]


async def test_a_whole_answer_whose_call_is_no_json_is_asked_for_elsewhere(world: World) -> None:
    give(world, "streamed_tool_json_invalid")
    world.answers(light_0=whole("{"), light_1=whole("{}"))

    caller = await world.run(world.request(stream=False, tools=1))

    assert json.loads(caller.body)["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == "{}"
    assert [attempt.outcome for attempt in world.notes.attempts] == [Outcome.UNFIT, Outcome.OK]


async def test_where_there_is_nobody_else_the_same_backend_is_asked_once_more(world: World) -> None:
    give(world, "streamed_tool_json_invalid")
    for name in ("light-1", "push"):
        world.fleet.known[name] = BackendStatus(state=State.DOWN, reason="gone")
    world.answers(light_0=whole("{"))
    world.answers(light_0=whole("{}"))

    caller = await world.run(world.request(stream=False, tools=1))

    assert caller.status == 200
    assert [attempt.backend for attempt in world.notes.attempts] == ["light-0", "light-0"]


async def test_a_backend_that_failed_otherwise_is_not_asked_again(world: World) -> None:
    give(world, "streamed_tool_json_invalid")
    world.fleet.known["push"] = BackendStatus(state=State.DOWN, reason="gone")
    world.answers(light_0=Script(opening=UpstreamUnreachable("no connection")), light_1=whole("{"))
    world.answers(light_1=whole("{}"))

    await world.run(world.request(stream=False, tools=1))

    assert [attempt.backend for attempt in world.notes.attempts] == ["light-0", "light-1", "light-1"]


async def test_and_then_no_more(world: World) -> None:
    give(world, "streamed_tool_json_invalid")
    for name in ("light-1", "push"):
        world.fleet.known[name] = BackendStatus(state=State.DOWN, reason="gone")
    world.answers(light_0=whole("{"))
    world.answers(light_0=whole("{"))

    with pytest.raises(AnswerUnfit) as caught:
        await world.run(world.request(stream=False, tools=1))

    assert (caught.value.status, caught.value.code) == (502, "tool_arguments_invalid")
    assert world.notes.requests[0].usage is None
    assert len(world.notes.attempts) == 2


PROSE = Script([ROLE + HELLO, STOP, DONE])
FORCED = {"tool_choice": "required"}


async def test_a_forced_call_that_is_not_made_is_asked_for_elsewhere_unseen(world: World) -> None:
    give(world, "tool_choice_not_enforced")
    good = [ROLE + HELLO, called("{}"), CALLED, DONE]
    world.answers(light_0=PROSE, light_1=Script(good))

    caller = await world.run(world.request(tools=1), members=FORCED)

    assert caller.parts == [
        part.replace(b'"served"', b'"gemma-4"') for part in (good[0] + good[1], *good[2:])
    ]
    assert caller.headers["x-gateway-backend"] == "light-1"
    assert [attempt.outcome for attempt in world.notes.attempts] == [Outcome.UNFIT, Outcome.OK]
    assert world.notes.requests[0].ending is Ending.COMPLETED


async def test_a_forced_call_that_nobody_makes_is_an_error_with_a_status(world: World) -> None:
    give(world, "tool_choice_not_enforced")
    world.answers(light_0=PROSE, light_1=PROSE, push=PROSE)
    caller = Caller()

    with pytest.raises(AnswerUnfit) as caught:
        await world.run(world.request(tools=1), caller, members=FORCED)

    assert (caught.value.code, caller.status, len(world.notes.attempts)) == ("tool_call_missing", 0, 3)


@pytest.mark.parametrize(
    "then", [[], [UpstreamFailed("broke")], [anyio.Event()]], ids=["ends", "broke", "open"]
)
async def test_a_stream_that_is_held_to_its_end_moves_on(world: World, then: list[Step]) -> None:
    """The call is that of a choice that was not asked for."""
    give(world, "tool_choice_not_enforced")
    good = ROLE + called("{}") + CALLED + DONE
    world.answers(light_0=Script([good.replace(b'"index":0,"finish', b'"index":5,"finish'), *then]))
    world.answers(light_1=Script([good]))

    caller = await world.run(world.request(tools=1), members=FORCED)

    assert (caller.status, caller.body) == (200, good.replace(b'"served"', b'"gemma-4"'))
    assert [attempt.outcome for attempt in world.notes.attempts] == [Outcome.FAILED, Outcome.OK]


async def test_the_reads_of_a_held_stream_are_steps_of_the_engine(world: World) -> None:
    give(world, "tool_choice_not_enforced")
    world.answers(light_0=Script([ROLE, HELLO, HELLO, HELLO, called("{}"), CALLED + DONE]))

    await world.run(world.request(tools=1), members=FORCED)

    assert world.pipeline.watch._watched["light-0"].meter.chunks == 4


async def test_a_held_stream_that_falls_silent_moves_on(world: World) -> None:
    give(world, "tool_choice_not_enforced", timeouts=Timeouts(first_byte_s=60, idle_s=0.05, total_s=60))
    world.answers(
        light_0=Script([ROLE + HELLO, anyio.Event()]), light_1=Script([ROLE + called("{}") + CALLED + DONE])
    )

    with anyio.fail_after(10):
        caller = await world.run(world.request(tools=1), members=FORCED)

    assert caller.headers["x-gateway-backend"] == "light-1"
    assert world.notes.attempts[0].outcome is Outcome.TIMEOUT
