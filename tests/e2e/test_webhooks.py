"""Webhooks from what ended to whoever is told: a real Valkey, real receivers, failures and deaths between."""

import asyncio
import os
import secrets
import signal
import sys
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from anyio.abc import SocketStream
from openai import OpenAI
from redis.asyncio import Redis
from redis.exceptions import RedisError
from support import clients
from support.raw_server import RawServer, answer_of, raw_server
from support.redis_server import RedisServer, own_server
from support.site import simulated, site
from support.webhook_store import Announcing

from gateway.clock import SystemClock
from gateway.core.webhooks import (
    WebhookAttempt,
    WebhookEndpoint,
    WebhookEvent,
    WebhookOutcome,
    read_secret,
)
from gateway.upstream import webhook_calls
from gateway.upstream.webhook_calls import WebhookCaller
from gateway.upstream.webhooks import ATTEMPTS_MAX, EVENTS_AT_ONCE, Webhooks

SECRETS = ["whsec_" + b64encode(fill * 24).decode() for fill in (b"a", b"b")]
TAG = "{gw:jobs}:webhooks"


@dataclass
class Receiver:
    """An endpoint that answers with what a test says, in order; the last answer from then on."""

    statuses: Sequence[str] = ("200 OK",)
    server: RawServer = field(default_factory=RawServer)

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def ids(self) -> list[str]:
        return [head["webhook-id"] for head in self.heads]

    @property
    def heads(self) -> list[dict[str, str]]:
        lines = [head.decode().split("\r\n")[1:] for head, _ in self.server.requests]
        return [
            {name.lower(): value for name, value in (one.split(": ", 1) for one in fields)}
            for fields in lines
        ]

    def unwrapped(self, number: int, secret: str = SECRETS[0]) -> Any:
        client = OpenAI(api_key="unused", webhook_secret=secret)
        return client.webhooks.unwrap(self.server.requests[number][1], self.heads[number])


@asynccontextmanager
async def receiver(*statuses: str) -> AsyncIterator[Receiver]:
    found = Receiver(statuses or ("200 OK",))

    async def answer(stream: SocketStream, number: int) -> None:
        status = found.statuses[min(number, len(found.statuses) - 1)]
        if status == "never":
            await stream.receive()
        else:
            await stream.send(answer_of(b"", status, "location: http://127.0.0.1:1/\r\n"))

    async with raw_server(answer) as server:
        found.server = server
        yield found


def endpoint(name: str, url: str, written: Sequence[str] = SECRETS[:1], **more: Any) -> WebhookEndpoint:
    return WebhookEndpoint(name, url, tuple(map(read_secret, written)), allow_private=True, **more)


@dataclass
class Process:
    """A gateway process's webhooks, running.

    Attributes:
        attempts: Every one it has made.
        pending: What waits, as last told.
        scope: What it runs in.
    """

    store: Announcing
    scope: anyio.CancelScope
    attempts: list[WebhookAttempt] = field(default_factory=list)
    pending: Mapping[str, int] = field(default_factory=dict)

    def outcomes(self) -> list[WebhookOutcome]:
        return [attempt.outcome for attempt in self.attempts]


@dataclass
class World:
    """A store of the test's own, and the processes on it."""

    url: str
    redis: Redis
    server: RedisServer

    @asynccontextmanager
    async def process(
        self, *endpoints: WebhookEndpoint, poll_s: float = 0.02, **options: Any
    ) -> AsyncIterator[Process]:
        async with anyio.create_task_group() as tasks:
            running = Process(Announcing(self.url, command_s=10.0, **options), tasks.cancel_scope)
            webhooks = Webhooks(
                endpoints,
                Announcing(self.url, command_s=10.0, **options),
                WebhookCaller(SystemClock()),
                on_attempt=running.attempts.append,
                on_pending=lambda pending: setattr(running, "pending", pending),
                poll_s=poll_s,
            )
            tasks.start_soon(webhooks.run)
            await self.until(lambda: running.pending != {} or not endpoints)
            yield running
            tasks.cancel_scope.cancel()
        await running.store.aclose()

    async def until(self, condition: Callable[[], bool]) -> None:
        with anyio.fail_after(30):
            while not condition():
                with suppress(RedisError):
                    await self.redis.ping()
                await anyio.sleep(0.01)  # between two looks: a busy loop would slow what it waits for

    async def asked(self) -> int:
        """Return how often any process has asked for a script, in vain or not."""
        asked = (await self.redis.info("commandstats"))["cmdstat_evalsha"]
        return int(asked["calls"]) + int(asked["rejected_calls"])

    async def refuse_scripts(self) -> None:
        await self.redis.acl_setuser("default", enabled=True, commands=["-evalsha"])

    async def take_scripts(self) -> None:
        await self.redis.acl_setuser("default", enabled=True, commands=["+evalsha"])

    async def waiting(self, name: str) -> dict[str, float]:
        """Return the deliveries that wait for an endpoint, with the seconds they still have to."""
        seconds, microseconds = await self.redis.time()
        now = seconds + microseconds / 1e6
        found = await self.redis.zrange(f"{TAG}:due:{name}", 0, -1, withscores=True)
        pairs = cast("list[tuple[bytes, float]]", found)
        return {id_.decode(): at_ms / 1000 - now for id_, at_ms in pairs}

    async def pass_time(self, name: str) -> None:
        """Let everything that waits for an endpoint be due, once it waits for its next attempt."""
        seconds, _ = await self.redis.time()
        for id_ in await self.waiting(name):
            await self.redis.zadd(f"{TAG}:due:{name}", {id_: seconds * 1000}, xx=True)

    async def failed(self, name: str, times: int) -> None:
        """Return once the store knows of so many failures of every delivery of an endpoint."""
        with anyio.fail_after(30):
            while True:
                keys = [f"{TAG}:delivery:{name}:{id_}" for id_ in await self.waiting(name)]
                failures = [int(await self.redis.hget(key, "failures") or 0) for key in keys]
                if failures and all(count == times for count in failures):
                    return
                await anyio.sleep(0.01)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    with own_server("valkey-9", tmp_path) as server:
        redis = Redis.from_url(server.url)
        yield World(server.url, redis, server)
        await redis.aclose()


async def test_it_is_tried_until_it_succeeds_under_one_id(world: World) -> None:
    async with receiver("500 Oh", "307 There", "200 OK") as ops:
        async with world.process(endpoint("ops", ops.url)) as process:
            await process.store.announce("response.completed", "resp_1", None)
            for failures, least, most in ((1, 4, 6), (2, 260, 340)):
                await world.failed("ops", failures)
                (wait,) = (await world.waiting("ops")).values()
                assert least < wait < most
                await world.pass_time("ops")
            await world.until(lambda: process.pending == {"ops": 0})
    assert process.outcomes() == [WebhookOutcome.FAILED, WebhookOutcome.FAILED, WebhookOutcome.DELIVERED]
    assert len(set(ops.ids)) == 1
    assert [ops.unwrapped(number).data.id for number in range(3)] == ["resp_1"] * 3
    assert await world.redis.keys(f"{TAG}:d*") == []


async def test_after_the_last_attempt_it_is_given_up(world: World) -> None:
    async with receiver("500 Oh") as ops:
        async with world.process(endpoint("ops", ops.url)) as process:
            await process.store.announce("response.failed", "resp_1", None)
            for failures in range(1, 10):
                await world.failed("ops", failures)
                await world.pass_time("ops")
            await world.until(lambda: process.pending == {"ops": 0})
    assert process.outcomes() == [WebhookOutcome.FAILED] * 9 + [WebhookOutcome.GIVEN_UP]
    assert await world.redis.keys(f"{TAG}:d*") == []


async def test_each_hears_what_it_asked_for(world: World) -> None:
    async with receiver() as ops, receiver() as team:
        only = endpoint("team", team.url, events=("response.failed",), keys=frozenset({"nightly"}))
        async with world.process(endpoint("ops", ops.url), only) as process:
            for type_, key in (
                ("response.completed", "nightly"),
                ("response.failed", "nightly"),
                ("response.failed", None),
                ("response.failed", "reports"),
            ):
                await process.store.announce(type_, f"resp_{type_}_{key}", key)
            await world.until(lambda: len(process.attempts) == 5)
    assert len(ops.ids) == 4
    assert team.unwrapped(0).data.id == "resp_response.failed_nightly"
    assert len(team.ids) == 1


async def test_while_a_secret_is_replaced_either_verifies(world: World) -> None:
    async with receiver() as ops:
        async with world.process(endpoint("ops", ops.url, SECRETS)) as process:
            await process.store.announce("response.completed", "resp_1", None)
            await world.until(lambda: process.outcomes() == [WebhookOutcome.DELIVERED])
    for secret in SECRETS:
        assert ops.unwrapped(0, secret).type == "response.completed"


async def test_one_that_is_gone_gets_no_more_until_a_restart_and_loses_nothing(world: World) -> None:
    async with receiver("410 Gone", "200 OK") as ops, receiver() as lab:
        both = (endpoint("ops", ops.url), endpoint("lab", lab.url))
        async with world.process(*both) as process:
            await process.store.announce("response.completed", "resp_1", None)
            await world.until(lambda: WebhookOutcome.GONE in process.outcomes())
            for number in (2, 3):
                await process.store.announce("response.completed", f"resp_{number}", None)
            await world.pass_time("ops")
            await world.until(lambda: process.pending == {"ops": 3, "lab": 0})
            assert (len(ops.ids), len(lab.ids)) == (1, 3)
        await world.pass_time("ops")
        async with world.process(*both) as process:
            await world.until(lambda: process.pending == {"ops": 0, "lab": 0})
    assert set(ops.ids) == set(lab.ids)


async def test_a_slow_one_holds_up_nobody_else(world: World) -> None:
    async with receiver("never") as slow, receiver() as ops:
        async with world.process(endpoint("slow", slow.url), endpoint("ops", ops.url)) as process:
            for number in range(3 * ATTEMPTS_MAX):
                await process.store.announce("response.completed", f"resp_{number}", None)
            await world.until(lambda: len(process.attempts) == 3 * ATTEMPTS_MAX)
            await world.until(lambda: len(slow.ids) == ATTEMPTS_MAX)
    assert {attempt.delivery.endpoint for attempt in process.attempts} == {"ops"}
    assert len(slow.ids) == ATTEMPTS_MAX


async def test_what_is_too_much_for_one_is_told_of_as_dropped(world: World) -> None:
    async with receiver("never") as ops:
        async with world.process(endpoint("ops", ops.url), pending_max=1) as process:
            await process.store.announce("response.completed", "resp_1", None)
            await world.until(lambda: len(ops.ids) == 1)
            await process.store.announce("response.failed", "resp_2", None)
            await world.until(lambda: process.attempts != [])
            assert process.pending == {"ops": 1}
    (dropped,) = process.attempts
    assert (dropped.outcome, dropped.retry_s) == (WebhookOutcome.DROPPED, None)
    assert (dropped.delivery.endpoint, dropped.delivery.subject) == ("ops", "resp_2")
    assert dropped.detail == "too many deliveries are already waiting for it"


async def test_two_processes_deliver_each_once(world: World) -> None:
    async with receiver() as ops:
        to = endpoint("ops", ops.url)
        async with world.process(to) as one, world.process(to) as other:
            announced = 0
            while announced < 60 or not (one.attempts and other.attempts):
                await one.store.announce("response.completed", f"resp_{announced}", None)
                announced += 1
            await world.until(lambda: len(one.attempts) + len(other.attempts) == announced)
            await world.until(lambda: one.pending == other.pending == {"ops": 0})
    assert len(ops.ids) == len(set(ops.ids)) == announced


async def test_each_process_has_its_own_endpoints_and_none_misses_an_event(world: World) -> None:
    """Two files differ: whoever hands an event on does so for all."""
    async with receiver() as ops, receiver() as lab:
        to_ops = endpoint("ops", ops.url)
        to_lab = endpoint("lab", lab.url, events=("response.failed",), keys=frozenset({"alice"}))
        async with world.process(to_ops) as one, world.process(to_lab) as other:
            for number in range(20):
                await one.store.announce("response.completed", f"resp_{number}", "alice")
                await one.store.announce("response.failed", f"resp_bad{number}", "alice")
                await one.store.announce("response.failed", f"resp_bobs{number}", "bob")
            await world.until(lambda: (len(one.attempts), len(other.attempts)) == (60, 20))
            await world.until(lambda: (one.pending, other.pending) == ({"ops": 0}, {"lab": 0}))
    assert len(set(ops.ids)) == 60
    assert len(set(lab.ids)) == 20


async def comes_to_rest(count: Callable[[], Awaitable[int]]) -> None:
    """Return once a number stays what it is."""
    with anyio.fail_after(10):
        before, now = -1, await count()
        while before != now:
            await anyio.sleep(0.1)
            before, now = now, await count()


async def test_whatever_has_ended_is_told_of_without_a_pause_and_then_the_store_is_left_alone(
    world: World,
) -> None:
    async with receiver() as ops:
        store = Announcing(world.url)
        await store.events(1)
        for number in range(2 * EVENTS_AT_ONCE):
            await store.announce("response.completed", f"resp_{number}", None)  # nobody hears of these
        for number in range(3 * ATTEMPTS_MAX):
            await store.announce("response.failed", f"resp_bad{number}", None)
        await store.aclose()
        to = endpoint("ops", ops.url, events=("response.failed",))
        async with world.process(to, poll_s=3600.0) as process:
            await world.until(lambda: len(process.attempts) == 3 * ATTEMPTS_MAX)
            await world.until(lambda: process.pending == {"ops": 0})
            await comes_to_rest(world.asked)


async def test_a_store_that_is_away_is_not_asked_all_the_time(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.refuse_scripts()
    async with world.process(poll_s=3600.0):
        await world.until(lambda: "the webhook store is unavailable" in caplog.text)
        await comes_to_rest(world.asked)


async def test_a_store_that_comes_back_is_used_again(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async with receiver() as ops:
        async with world.process(endpoint("ops", ops.url)) as process:
            world.server.kill()
            await world.until(lambda: "the webhook store is unavailable" in caplog.text)
            world.server.start()
            await world.until(lambda: "the webhook store is available again" in caplog.text)
            await process.store.announce("response.completed", "resp_1", None)
            await world.until(lambda: process.outcomes() == [WebhookOutcome.DELIVERED])
    assert len([record for record in caplog.records if "unavailable" in record.message]) == 1


DELIVERING = """
import asyncio, sys
from gateway.clock import SystemClock
from gateway.core.webhooks import WebhookEndpoint
from gateway.store.webhooks import RedisWebhooks
from gateway.upstream import webhook_calls
from gateway.upstream.webhook_calls import WebhookCaller
from gateway.upstream.webhooks import Webhooks
ends = [WebhookEndpoint("ops", sys.argv[2], (b"a" * 24,), allow_private=True)]
caller = WebhookCaller(SystemClock())
ignore = lambda _: None
asyncio.run(Webhooks(ends, RedisWebhooks(sys.argv[1]), caller, on_attempt=ignore, on_pending=ignore).run())
"""


async def test_killed_between_attempt_and_acknowledgement_it_is_delivered_again(world: World) -> None:
    async with receiver("never", "200 OK") as ops:
        store = Announcing(world.url)
        await store.events(1)
        await store.announce("response.completed", "resp_1", None)
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", DELIVERING, world.url, ops.url, cwd=Path(__file__).parents[2]
        )
        await world.until(lambda: len(ops.ids) == 1)
        os.kill(child.pid, signal.SIGKILL)
        await child.wait()
        (claimed_s,) = (await world.waiting("ops")).values()
        assert 30 < claimed_s <= 60  # nobody else has it before
        await world.pass_time("ops")
        async with world.process(endpoint("ops", ops.url)) as process:
            await world.until(lambda: process.pending == {"ops": 0})
        await store.aclose()
    assert process.outcomes() == [WebhookOutcome.DELIVERED]
    assert len(ops.ids) == 2
    assert len(set(ops.ids)) == 1
    assert ops.server.requests[0][1] == ops.server.requests[1][1]


async def test_an_end_in_the_middle_leaves_it_to_the_next(world: World) -> None:
    async with receiver("never", "200 OK") as ops:
        with anyio.fail_after(20):
            async with world.process(endpoint("ops", ops.url)) as process:
                await process.store.announce("response.completed", "resp_1", None)
                await world.until(lambda: len(ops.ids) == 1)
        assert process.attempts == []
        await world.pass_time("ops")
        async with world.process(endpoint("ops", ops.url)) as process:
            await world.until(lambda: process.pending == {"ops": 0})
    assert len(set(ops.ids)) == 1
    assert process.attempts[0].delivery.failures == 0


async def test_what_is_answered_just_after_the_end_is_not_delivered_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_calls, "HURRY_S", 20.0)
    may_answer = anyio.Event()

    async def answer(stream: SocketStream, _: int) -> None:
        await may_answer.wait()
        await stream.send(answer_of(b""))

    async with raw_server(answer) as server, world.process(endpoint("ops", server.url)) as process:
        for number in range(ATTEMPTS_MAX):
            await process.store.announce("response.completed", f"resp_{number}", None)
        await world.until(lambda: len(server.requests) == ATTEMPTS_MAX)
        process.scope.cancel()
        may_answer.set()
    assert process.outcomes() == [WebhookOutcome.DELIVERED] * ATTEMPTS_MAX
    assert await world.waiting("ops") == {}


async def test_an_end_does_not_wait_for_all_that_is_to_be_told_of(world: World) -> None:
    scope = anyio.CancelScope()

    class Ending(Announcing):
        """The process is stopped while this turns the first event into deliveries."""

        async def create_deliveries(
            self, event: WebhookEvent, endpoints: Iterable[WebhookEndpoint]
        ) -> Sequence[WebhookEndpoint]:
            scope.cancel()
            return await super().create_deliveries(event, endpoints)

    store = Announcing(world.url, command_s=10.0)
    await store.events(1)
    for number in range(EVENTS_AT_ONCE):
        await store.announce("response.completed", f"resp_{number}", None)
    ending, caller = Ending(world.url, command_s=10.0), WebhookCaller(SystemClock())
    ops = endpoint("ops", "http://127.0.0.1:1/")
    with scope:
        await Webhooks([ops], ending, caller, on_attempt=ignore, on_pending=ignore).run()
    assert len(await store.events(EVENTS_AT_ONCE)) == EVENTS_AT_ONCE - 1
    await store.aclose()


def ignore(_: object) -> None:
    pass


async def test_a_result_that_the_store_does_not_take_is_written_later(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    may_answer = anyio.Event()

    async def answer(stream: SocketStream, _: int) -> None:
        await may_answer.wait()
        await stream.send(answer_of(b""))

    store = Announcing(world.url)
    await store.events(1)
    await store.announce("response.completed", "resp_1", None)
    await store.aclose()
    async with raw_server(answer) as server:
        # It looks once before the answer, so what the store refuses is the result.
        async with world.process(endpoint("ops", server.url), poll_s=3600.0):
            await world.until(lambda: len(server.requests) == 1)
            await world.refuse_scripts()
            may_answer.set()
            await world.until(lambda: "the webhook store is unavailable" in caplog.text)
            await world.take_scripts()
            with anyio.fail_after(30):
                while await world.waiting("ops"):  # noqa: ASYNC110 - it sends no event
                    await anyio.sleep(0.01)
    assert len(server.requests) == 1


async def test_a_gateway_with_webhooks_delivers_and_counts(world: World, tmp_path: Path) -> None:
    (tmp_path / "ops.secret").write_text("\n".join(SECRETS))
    async with AsyncExitStack() as stack:
        ops = await stack.enter_async_context(receiver("500 Oh", "200 OK"))
        token = secrets.token_hex(4)
        hook = {"url": f"{ops.url}/?{token}", "secret_file": "ops.secret", "allow_private": True}
        running = await stack.enter_async_context(
            site(
                tmp_path,
                fleet=simulated({"light-0": "h100-tp1-light"}),
                pools={"light": ["light-0"]},
                models={"gemma-4": {"classes": [{"class": "short_chat", "pools": ["light"]}]}},
                store=world.url,
                webhooks={"ops": hook},
            )
        )
        store = Announcing(world.url)
        stack.push_async_callback(store.aclose)
        client = await stack.enter_async_context(clients.http())
        await store.events(1)  # there may be endpoints before the gateway has said so
        await store.announce("response.completed", "resp_1", None)
        await world.failed("ops", 1)
        await world.pass_time("ops")

        pages = [""]
        with anyio.fail_after(20):
            while 'gateway_webhooks_pending{endpoint="ops"} 0.0' not in pages[-1]:
                pages.append((await client.get(f"{running.admin_url}/metrics")).text)
                await anyio.sleep(0.05)
        for outcome in ("failed", "delivered"):
            assert f'gateway_webhooks_total{{endpoint="ops",outcome="{outcome}"}} 1.0' in pages[-1]
        for outcome in ("given_up", "gone"):  # a series that appears with its first event shows no increase
            assert f'gateway_webhooks_total{{endpoint="ops",outcome="{outcome}"}} 0.0' in pages[-1]
    assert ops.unwrapped(1, SECRETS[1]).data.id == "resp_1"
