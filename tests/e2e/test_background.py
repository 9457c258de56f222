"""Responses in the background, through the unmodified SDK, a real store and simulated backends."""

import json
import re
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest
from redis.asyncio import Redis
from support import clients
from support.processes import config, running
from support.redis_server import RedisServer
from support.site import Site, jobs_site, simulated, site

from gateway import app
from gateway.core.health import transitions
from gateway.core.jobs import JobStatus
from gateway.downstream import job_waits
from gateway.simulator.options import Fault, FaultOrder

MESSAGES: Any = [{"role": "user", "content": "Why is the sky blue?"}]
ASK: dict[str, Any] = {"model": "gemma-4", "input": "Why is the sky blue?"}


@pytest.fixture
async def gateway(tmp_path: Path, store: RedisServer) -> AsyncIterator[Site]:
    async with jobs_site(tmp_path, store) as running:
        yield running
        await running.eventually(running.idle)


async def ended(client: openai.AsyncOpenAI, id: str) -> Any:
    """Return a response once it is over."""
    with anyio.fail_after(60):
        while True:
            response = await client.responses.retrieve(id)
            if response.status not in ("queued", "in_progress"):
                return response
            await anyio.sleep(0.05)


async def test_a_job_is_handed_over_and_fetched(gateway: Site) -> None:
    client = gateway.openai(api_key="a")

    job = await client.responses.create(**ASK, background=True, max_output_tokens=40, metadata={"n": "1"})
    assert job.status in {"queued", "in_progress"}
    assert job.id.startswith("resp_")
    done = await ended(client, job.id)

    assert done.status in {"completed", "incomplete"}
    assert done.background is True
    assert done.metadata == {"n": "1"}
    assert done.output_text
    assert done.usage.output_tokens > 0
    assert (await client.responses.retrieve(job.id)).model_dump() == done.model_dump()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_handover_is_named_in_the_headers_of_its_answer(gateway: Site, stream: bool) -> None:
    client = gateway.openai(api_key="a")

    async with client.responses.with_streaming_response.create(
        **ASK, background=True, stream=stream, max_output_tokens=5, extra_body={"priority": 3}
    ) as raw:
        headers = raw.headers
        id = (await client.responses.retrieve(headers["x-gateway-job"])).id

    assert headers["x-request-id"].startswith("req-")
    assert (headers["x-gateway-class"], headers["x-gateway-job"]) == ("short_chat", id)
    assert headers["x-gateway-dropped"] == "priority"


async def test_a_job_goes_on_elsewhere_when_its_vllm_stops_silently(
    tmp_path: Path, store: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transitions, "GONE_S", 0.3)
    monkeypatch.setattr(app, "GONE_S", 0.3)
    ask: Any = {"model": "gemma-4", "input": "Count from 1 to 60."}

    async with jobs_site(tmp_path, store, speed=4.0, health={"interval_s": 0.1}) as running:
        client, backends = running.openai(api_key="a"), running.backends
        job = await client.responses.create(**ask, background=True, max_output_tokens=2_000)
        await running.eventually(lambda: any(one.generated_tokens > 40 for one in backends.values()))
        gone = next(one for one in backends.values() if one.generated_tokens > 40)
        assert gone.load == 1
        gone.order(FaultOrder(Fault.SILENT_STOP, for_s=0.0))
        done = await ended(client, job.id)
        await running.eventually(running.idle)

    assert done.status == "completed"
    assert [int(word) for word in re.findall(r"\d+", done.output_text)] == list(range(1, 61))
    assert sum(one.generated_tokens > 0 for one in backends.values()) == 1  # the other one booted again


async def test_a_response_whose_conversation_is_not_kept_cannot_be_continued(gateway: Site) -> None:
    client = gateway.openai(api_key="a")
    kept, unkept = [
        await ended(
            client,
            (await client.responses.create(**ASK, background=True, max_output_tokens=5, store=store)).id,
        )
        for store in (True, False)
    ]
    for use in (
        client.responses.create(**ASK, previous_response_id=unkept.id),
        client.responses.input_items.list(unkept.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await use
    message = kept.output[-1]
    again = await client.responses.create(
        model="gemma-4", input=[{"type": "item_reference", "id": message.id}, *MESSAGES], max_output_tokens=5
    )
    items = (await client.responses.input_items.list(again.id, order="asc")).data
    assert (len(items), items[0].id) == (2, message.id)


async def test_who_follows_a_job_and_what_is_new_are_seen_by_a_shutdown(gateway: Site) -> None:
    client, serving = gateway.openai(api_key="a"), gateway.gateway.applications.serving
    job = await client.responses.create(
        **ASK, background=True, max_output_tokens=20_000, extra_body={"ignore_eos": True}
    )
    await gateway.eventually(lambda: not serving.in_flight)
    stream = await client.responses.retrieve(job.id, stream=True)
    await anext(aiter(stream))
    assert serving.in_flight == 1
    serving.refuse()
    with pytest.raises(openai.InternalServerError) as caught:
        await client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
    assert caught.value.code == "draining"
    await client.responses.cancel(job.id)
    async for _ in stream:
        pass
    await gateway.eventually(lambda: not serving.in_flight)


async def test_a_stream_is_followed_left_and_taken_up_again(gateway: Site) -> None:
    client = gateway.openai(api_key="a")
    first = []
    stream = await client.responses.create(**ASK, background=True, stream=True, max_output_tokens=60)
    async for event in stream:
        first.append(event)
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    id = first[0].response.id

    rest = [
        event
        async for event in await client.responses.retrieve(
            id, stream=True, starting_after=first[-1].sequence_number
        )
    ]
    whole = [event async for event in await client.responses.retrieve(id, stream=True)]

    assert [event.type for event in first[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    assert [event.to_dict() for event in [*first, *rest]] == [event.to_dict() for event in whole]
    assert whole[-1].type in {"response.completed", "response.incomplete"}
    text = "".join(event.delta for event in whole if event.type == "response.output_text.delta")
    assert text == whole[-1].response.output_text


async def test_who_follows_an_answer_that_the_store_has_lost_is_told_so(
    gateway: Site, store: RedisServer
) -> None:
    client = gateway.openai(api_key="a")
    job = await client.responses.create(**ASK, background=True, max_output_tokens=40)
    await ended(client, job.id)
    async with Redis.from_url(store.url) as redis:
        assert await redis.delete(*await redis.keys(f"*:chunks:{job.id}")) == 1

    with anyio.fail_after(20), pytest.raises(openai.APIError) as caught:
        async for _ in await client.responses.retrieve(job.id, stream=True):
            pass

    assert caught.value.code == "response_not_found"


@pytest.mark.parametrize("again", [False, True], ids=["created", "retrieved"])
async def test_a_stream_outlasts_a_store_that_goes_away_for_a_while(
    gateway: Site,
    store: RedisServer,
    again: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_waits, "AGAIN_S", (0.05, 0.1))
    client = gateway.openai(api_key="a")
    stream: Any = await client.responses.create(
        **ASK, background=True, stream=True, max_output_tokens=1_500, extra_body={"ignore_eos": True}
    )
    if again:
        id = (await anext(stream)).response.id
        await stream.close()
        stream = await client.responses.retrieve(id, stream=True)
    seen = []
    async for event in stream:
        seen.append(event)
        if len(seen) == 5:
            store.stall()
            await gateway.eventually(lambda: "the job store is unavailable" in caplog.text)
            store.resume()

    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type == "response.incomplete"


async def test_a_stream_whose_store_stays_away_ends_with_an_error_and_is_taken_up_again(
    gateway: Site, store: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_waits, "AWAY_S", 0.0)
    monkeypatch.setattr(job_waits, "AGAIN_S", (0.05, 0.1))
    client = gateway.openai(api_key="a")
    seen: list[Any] = []
    stream: Any = await client.responses.create(
        **ASK, background=True, stream=True, max_output_tokens=1_500, extra_body={"ignore_eos": True}
    )
    with pytest.raises(openai.APIError) as caught:
        async for event in stream:
            seen.append(event)
            if len(seen) == 5:
                store.stall()
    store.resume()
    assert (caught.value.code, caught.value.type) == ("store_unavailable", "server_error")
    id = seen[0].response.id
    assert (await ended(client, id)).status == "incomplete"
    after = seen[-1].sequence_number
    rest = [event async for event in await client.responses.retrieve(id, stream=True, starting_after=after)]

    assert [event.sequence_number for event in (*seen, *rest)] == list(range(len(seen) + len(rest)))
    assert rest[-1].type == "response.incomplete"
    assert f"a follower of job {id} was cut off: The job store does not answer" in caplog.text
    assert "Exception in ASGI application" not in caplog.text


@pytest.mark.parametrize("is_again", [False, True], ids=["at-once", "taken-up-again"])
async def test_a_stream_that_nobody_reads_is_given_up(
    tmp_path: Path, store: RedisServer, monkeypatch: pytest.MonkeyPatch, is_again: bool
) -> None:
    monkeypatch.setattr("gateway.pipeline.caller.CALLER_STALL_S", 0.2)
    monkeypatch.setattr("gateway.tcp.KEEPALIVE", ((socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14),))
    long: dict[str, Any] = {"max_output_tokens": 20_000, "extra_body": {"ignore_eos": True}}
    asked = {**ASK, "background": True, "stream": True, "max_output_tokens": 20_000, "ignore_eos": True}
    async with jobs_site(tmp_path, store, speed=100.0) as gateway:
        serving = gateway.gateway.applications.serving
        line, body = "POST /v1/responses HTTP/1.1", json.dumps(asked).encode()
        if is_again:
            job = await gateway.openai(api_key="a").responses.create(**ASK, background=True, **long)
            line, body = f"GET /v1/responses/{job.id}?stream=true HTTP/1.1", b""
        fields = {"host": "gateway", "authorization": "Bearer a", "content-length": str(len(body))}
        lines = [line, *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
            reader.connect(("127.0.0.1", httpx.URL(gateway.url).port))
            reader.sendall("\r\n".join(lines).encode() + body)
            await gateway.eventually(lambda: serving.in_flight == 1)
            await gateway.eventually(lambda: serving.in_flight == 0)
        (job,) = await gateway.jobs.find()
        assert not job.status.is_final


async def test_jobs_use_all_slots_but_a_reserve_however_long_their_first_tokens_take(
    tmp_path: Path, store: RedisServer
) -> None:
    late = FaultOrder(Fault.SLOW_HEADERS, for_s=10_000.0)
    async with jobs_site(tmp_path, store, fault=late, backend={"limits": {"knee_seqs": 8}}) as gateway:
        client = gateway.openai(api_key="a")
        jobs = [await client.responses.create(**ASK, background=True) for _ in range(20)]
        ledger = gateway.gateway.ledger
        await gateway.eventually(lambda: {load.seqs for load in ledger.loads().values()} == {7})
        async with anyio.create_task_group() as tasks:
            chat = partial(client.chat.completions.create, model="gemma-4", messages=MESSAGES)
            tasks.start_soon(chat)
            tasks.start_soon(chat)
            await gateway.eventually(lambda: {load.seqs for load in ledger.loads().values()} == {8})
            tasks.cancel_scope.cancel()

        for job in jobs:
            await client.responses.cancel(job.id)
        await gateway.eventually(gateway.idle)


async def test_a_cancelled_job_stays_cancelled_and_frees_its_backend(gateway: Site) -> None:
    client = gateway.openai(api_key="a")
    job = await client.responses.create(
        **ASK, background=True, max_output_tokens=20_000, extra_body={"ignore_eos": True}
    )
    await gateway.eventually(lambda: any(load.seqs for load in gateway.gateway.ledger.loads().values()))

    cancelled = await client.responses.cancel(job.id)
    await gateway.eventually(gateway.idle)
    again = await client.responses.cancel(job.id)

    assert (cancelled.status, again.status) == ("cancelled", "cancelled")
    assert (await client.responses.retrieve(job.id)).status == "cancelled"


async def test_another_keys_job_is_not_there(gateway: Site) -> None:
    mine, theirs = gateway.openai(api_key="a"), gateway.openai(api_key="b")
    job = await mine.responses.create(**ASK, background=True, max_output_tokens=5)

    def streamed(id: str) -> Any:
        return theirs.responses.retrieve(id, stream=True)

    responses = theirs.responses
    for ask in (responses.retrieve, streamed, responses.cancel, responses.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            await ask(job.id)
        assert caught.value.code == "response_not_found"
    await ended(mine, job.id)
    await mine.responses.delete(job.id)
    with pytest.raises(openai.NotFoundError):
        await mine.responses.retrieve(job.id)


async def test_a_conversation_goes_on_from_a_job(gateway: Site) -> None:
    client = gateway.openai(api_key="a")
    job = await client.responses.create(**ASK, background=True, max_output_tokens=20)
    done = await ended(client, job.id)

    answer = await client.responses.create(
        model="gemma-4", input="And at night?", previous_response_id=job.id, max_output_tokens=5
    )

    assert answer.previous_response_id == job.id
    assert answer.usage is not None
    assert done.usage is not None
    assert answer.usage.input_tokens > done.usage.input_tokens + done.usage.output_tokens


async def test_the_same_idempotency_key_is_the_same_job(gateway: Site) -> None:
    client = gateway.openai(api_key="a")
    fields: Any = {"background": True, "max_output_tokens": 5, "extra_headers": {"Idempotency-Key": "k-1"}}

    one = await client.responses.create(**ASK, **fields)
    other = await client.responses.create(**ASK, **fields)

    assert one.id == other.id
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        await client.responses.create(model="gemma-4", input="Something else", **fields)
    assert caught.value.code == "idempotency_key_reused"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"model": "gpt-5"}, "model_not_found"),
        ({"input": "word " * 60_000}, "context_length_exceeded"),
        ({"extra_headers": {"x-gateway-priority": "urgent"}}, "invalid_request"),
        ({"extra_headers": {"x-gateway-expires-s": "soon"}}, "invalid_request"),
    ],
)
async def test_what_can_never_run_is_refused_when_it_is_handed_over(
    gateway: Site, fields: dict[str, Any], code: str
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await gateway.openai(api_key="a").responses.create(**{**ASK, **fields}, background=True)

    assert caught.value.code == code
    assert await gateway.jobs.find() == []


@pytest.mark.parametrize("after", ["soon", "1.5", "--1", "\u00b2", "9" * 5_000])
async def test_what_is_no_number_of_an_event_is_refused(gateway: Site, after: str) -> None:
    client = gateway.openai(api_key="a")
    job = await client.responses.create(**ASK, background=True, max_output_tokens=5)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.retrieve(job.id, stream=True, extra_query={"starting_after": after})

    assert (caught.value.code, caught.value.param) == ("invalid_request", "starting_after")
    await ended(client, job.id)


async def test_a_pending_job_says_where_it_stands(tmp_path: Path, store: RedisServer) -> None:
    async with jobs_site(tmp_path, store, speed=2.0, jobs={"running_max": 1}) as running:
        client = running.openai(api_key="a")
        fields: Any = {"background": True, "max_output_tokens": 3_000, "extra_body": {"ignore_eos": True}}
        first = await client.responses.create(**ASK, **fields)
        await running.eventually(lambda: running.gateway.worker.running == 1)  # type: ignore[union-attr]
        second = await client.responses.create(**ASK, **fields)
        async with clients.http(base_url=running.url) as http:
            answer = await http.get(f"/v1/responses/{second.id}", headers={"authorization": "Bearer a"})

        assert answer.json()["queue"]["position"] == 1
        assert answer.json()["status"] == "queued"
        assert 1 <= int(answer.headers["retry-after"]) <= 59
        for job in (first, second):
            await client.responses.cancel(job.id)
        await running.eventually(running.idle)


async def test_a_job_outlives_its_gateway(tmp_path: Path, store: RedisServer) -> None:
    """It is begun at one gateway, cut there with the text it has, and finished at another."""
    async with jobs_site(tmp_path, store, speed=5.0) as running:
        client = running.openai(api_key="a")
        job = await client.responses.create(
            **ASK, background=True, max_output_tokens=2_000, extra_body={"ignore_eos": True}
        )
        jobs = running.jobs
        with anyio.fail_after(30):
            while not await jobs.chunks(job.id):
                await jobs.changed(job.id, 0, 1.0, JobStatus.IN_PROGRESS)
    async with jobs_site(tmp_path, store, speed=50.0) as running:
        done = await ended(running.openai(api_key="a"), job.id)
        found = await running.jobs.get(job.id)

    assert done.status == "incomplete"
    assert found is not None
    assert (found.attempt, found.failures) == (2, 0)
    assert len(done.output) == 1
    assert done.output_text


async def test_a_backend_that_dies_costs_no_job(gateway: Site) -> None:
    client = gateway.openai(api_key="a")
    job = await client.responses.create(
        **ASK, background=True, max_output_tokens=1_500, extra_body={"ignore_eos": True}
    )
    loads = gateway.gateway.ledger.loads
    await gateway.eventually(lambda: any(load.seqs for load in loads().values()))
    name = next(name for name, load in loads().items() if load.seqs)
    async with clients.http() as http:
        await http.post(f"{gateway.backends[name].url}/simulator/fault", json={"fault": "crash"})

    assert (await ended(client, job.id)).status == "incomplete"


async def test_where_there_are_no_jobs_they_are_refused(tmp_path: Path) -> None:
    fleet = simulated({"light-0": "h100-tp1-light"})
    sections: Any = {
        "pools": {"light": ["light-0"]},
        "models": {"gemma-4": {"classes": [{"class": "short_chat", "pools": ["light"]}]}},
    }
    async with site(tmp_path, fleet=fleet, **sections) as running:
        with pytest.raises(openai.BadRequestError) as caught:
            await running.openai().responses.create(**ASK, background=True)

    assert caught.value.code == "background_not_supported"


async def test_without_a_store_jobs_are_kept_beside_the_gateway(tmp_path: Path) -> None:
    """A gateway of its own, killed in the middle of an answer, and started again."""
    async with running("simulate", "--profile", "h100-tp1-light", "--port", "0", "--speed", "5") as engine:
        backend = (await engine.wait_for(r"(http://127\.0\.0\.1:\d+)"))[1]
        rest = """
models: {gemma-4: {classes: [{class: short_chat, pools: [light]}]}}
jobs: {}
health: {interval_s: 0.2}
"""
        file = config(tmp_path, {"light-0": (backend, "h100-tp1-light")}, {"light": ["light-0"]}, rest)
        async with running("serve", "--config", str(file)) as gateway:
            url = (await gateway.wait_for(r"serves (http://\S+)/v1"))[1]
            async with clients.sdk(base_url=f"{url}/v1", api_key="x") as client:
                job = await client.responses.create(
                    **ASK, background=True, max_output_tokens=3_000, extra_body={"ignore_eos": True}
                )
                async for event in await client.responses.retrieve(job.id, stream=True):
                    if event.type == "response.output_text.delta":
                        break
            gateway.process.kill()
            await gateway.process.wait()
        async with running("serve", "--config", str(file)) as gateway:
            url = (await gateway.wait_for(r"serves (http://\S+)/v1"))[1]
            async with clients.sdk(base_url=f"{url}/v1", api_key="x") as client:
                done = await ended(client, job.id)

    assert done.status == "incomplete"
    assert done.output_text
