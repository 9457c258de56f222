"""Traces and metrics as a real receiver, a process of its own, gets them."""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest
from anyio.abc import SocketStream
from support.otlp_receiver import Receiver, Span, receiver
from support.raw_server import raw_server
from support.redis_server import RedisServer, binary, own_server
from support.site import Site, simulated, site

SECRET = "a sentence that nobody else may read"
ASK: dict[str, Any] = {
    "model": "gemma-4",
    "messages": [{"role": "user", "content": SECRET}],
    "max_tokens": 20,
}
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
FOLLOWED = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1"}
DEAD = "http://127.0.0.1:9"  # discard: nothing listens there


@pytest.fixture
async def otlp() -> AsyncIterator[Receiver]:
    async with receiver() as running:
        yield running


@asynccontextmanager
async def traced(folder: Path, url: str, *, waiting: Any = None, **traces: Any) -> AsyncIterator[Site]:
    """Run a site whose spans go to `url`; they are there when it has ended."""
    classes = [{"class": "short_chat", "pools": ["light"], "waiting": waiting or {"ttft_target_s": 60}}]
    async with site(
        folder,
        fleet=simulated({"light-0": "h100-tp1-light"}),
        pools={"light": ["light-0"]},
        models={"gemma-4": {"classes": classes}},
        telemetry={"otlp": {"endpoint": url}, "traces": {"share": 0, **traces}},
    ) as running:
        yield running


def one(spans: Sequence[Span], name: str) -> Span:
    (found,) = (span for span in spans if span.name == name)
    return found


async def test_a_request_is_a_trace(tmp_path: Path, otlp: Receiver) -> None:
    async with traced(tmp_path, otlp.url) as gateway:
        stream = await gateway.openai().chat.completions.create(**ASK, stream=True, extra_headers=FOLLOWED)
        async for _ in stream:
            pass
    spans = await otlp.spans()

    assert {span.trace_id for span in spans} == {TRACE}
    server = one(spans, "POST /v1/chat/completions")
    assert (server.kind, server.parent_id, server.status) == ("SPAN_KIND_SERVER", CALLER, "")
    attempt = one(spans, "chat gemma-4")
    assert (attempt.kind, attempt.parent_id) == ("SPAN_KIND_CLIENT", server.span_id)
    parts = [one(spans, name) for name in ("gateway.estimate", "gateway.admission", "chat gemma-4")]
    assert {part.parent_id for part in parts} == {server.span_id}
    first, decode = one(spans, "gateway.first_token"), one(spans, "gateway.decode")
    connect = one(spans, "gateway.connect")  # the first one: no connection was kept
    assert {connect.parent_id, first.parent_id, decode.parent_id} == {attempt.span_id}
    assert connect.started_ns == attempt.started_ns
    assert connect.ended_ns == first.started_ns
    order = [server.started_ns, *(part.started_ns for part in parts), first.ended_ns, decode.ended_ns]
    assert order == sorted(order)
    assert first.ended_ns == decode.started_ns
    assert decode.ended_ns <= attempt.ended_ns <= server.ended_ns
    assert len({span.span_id for span in spans}) == len(spans) == 7

    facts = server.attributes
    assert facts["http.route"] == "/v1/chat/completions"
    assert facts["http.response.status_code"] == 200
    assert (facts["gateway.class"], facts["gateway.backend"]) == ("short_chat", "light-0")
    assert facts["gateway.class_reason"] == "takes everything else"
    estimate, used = facts["gateway.estimated_input_tokens"], facts["gen_ai.usage.input_tokens"]
    assert facts["gateway.estimate_error_tokens"] == used - estimate
    assert facts["gateway.candidates"] == [
        f"light-0: score {float(facts['gateway.candidates'][0].split()[-1]):.2f}"
    ]
    assert facts["gateway.knee_seqs"] == 64
    assert facts["gateway.spill"] is False
    assert facts["gateway.queue_s"] >= 0
    assert attempt.attributes["gen_ai.provider.name"] == "vllm"
    assert attempt.attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert attempt.attributes["server.port"] == httpx.URL(gateway.backends["light-0"].url).port


async def test_the_route_says_what_backends_are_asked_for(tmp_path: Path, otlp: Receiver) -> None:
    async with traced(tmp_path, otlp.url, share=1) as gateway:
        await gateway.openai().chat.completions.create(**ASK)
        await gateway.openai().completions.create(model="gemma-4", prompt=SECRET, max_tokens=5)
    spans = await otlp.spans()

    for operation, route in (("chat", "/v1/chat/completions"), ("text_completion", "/v1/completions")):
        server, attempt = one(spans, f"POST {route}"), one(spans, f"{operation} gemma-4")
        assert attempt.parent_id == server.span_id
        for span in (server, attempt):
            assert span.attributes["gen_ai.operation.name"] == operation
        # Neither was streamed: when the first token came is not known.
        assert "gen_ai.response.time_to_first_chunk" not in attempt.attributes


async def test_no_text_is_sent(tmp_path: Path, otlp: Receiver) -> None:
    async with traced(tmp_path, otlp.url, share=1) as gateway:
        answer = await gateway.openai().chat.completions.create(**ASK)
        with pytest.raises(openai.BadRequestError):
            await gateway.openai().chat.completions.create(**{**ASK, "temperature": SECRET})
    sent = repr(await otlp.spans())
    assert "POST /v1/chat/completions" in sent
    assert SECRET not in sent
    assert str(answer.choices[0].message.content) not in sent


async def test_only_what_is_worth_it_is_kept(tmp_path: Path, otlp: Receiver) -> None:
    async with traced(tmp_path, otlp.url, follow_callers=False) as gateway:
        client = gateway.openai()
        await client.chat.completions.create(**ASK, extra_headers=FOLLOWED)
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(**{**ASK, "model": "unknown"})
        await gateway.backends["light-0"].stop()
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(**ASK)
        async with gateway.http() as http:
            page = (await http.get(f"{gateway.admin_url}/metrics")).text
    spans = await otlp.spans()
    refused, server = (span for span in spans if span.name == "POST /v1/chat/completions")  # of the three
    assert refused.attributes["error.type"] == "model_not_found"
    assert refused.status == ""  # it was the caller's mistake
    assert server.status == "STATUS_CODE_ERROR"
    assert server.attributes["error.type"]
    assert server.attributes["http.response.status_code"] >= 500
    assert 'gateway_traces_total{reason="failed"} 2.0' in page


async def test_a_slow_first_token_is_kept(tmp_path: Path, otlp: Receiver) -> None:
    slow = {"ttft_target_s": 0.001}
    async with traced(tmp_path, otlp.url, waiting=slow) as gateway:
        client = gateway.openai()
        await client.chat.completions.create(**ASK)  # in one piece: nobody waits for its first token
        async for _ in await client.chat.completions.create(**ASK, stream=True):
            pass
    spans = await otlp.spans()
    assert one(spans, "POST /v1/chat/completions").attributes["gateway.stream"] is True


async def test_the_names_of_the_older_conventions(tmp_path: Path, otlp: Receiver) -> None:
    async with traced(tmp_path, otlp.url, share=1, genai_conventions=1.41) as gateway:
        await gateway.openai().chat.completions.create(**ASK)
    facts = one(await otlp.spans(), "chat gemma-4").attributes
    assert facts["gen_ai.system"] == "vllm"
    assert "gen_ai.provider.name" not in facts


async def test_a_receiver_that_is_away_holds_nobody_up(tmp_path: Path) -> None:
    async with traced(tmp_path, DEAD, share=1) as gateway:
        answer = await gateway.openai().chat.completions.create(**ASK)
    assert answer.choices[0].message.content


MODELS = b'{"object":"list","data":[{"id":"gemma-4","object":"model","max_model_len":32768}]}'
ANSWER = (
    b'{"id":"1","object":"chat.completion","created":1,"model":"gemma-4","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"Hi."},"finish_reason":"stop"}]}'
)


@asynccontextmanager
async def before_a_raw_backend(folder: Path, **sections: Any) -> AsyncIterator[tuple[Site, list[bytes]]]:
    """Run a gateway before a server whose requests are seen as they arrive: their heads, in lower case."""
    seen: list[bytes] = []

    async def answer(stream: SocketStream, number: int) -> None:
        head = server.requests[number][0]
        body = MODELS if head.startswith(b"GET /v1/models") else ANSWER
        if head.startswith(b"POST"):
            seen.append(head.lower())
        await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    async with raw_server(answer) as server:
        async with site(
            folder,
            fleet={},
            backends={"light-0": {"url": server.url, "profile": "h100-tp1-light"}},
            pools={"light": ["light-0"]},
            models={"gemma-4": {"classes": [{"class": "short_chat", "pools": ["light"]}]}},
            **sections,
        ) as gateway:
            yield gateway, seen


async def test_a_backend_continues_the_trace(tmp_path: Path, otlp: Receiver) -> None:
    telemetry = {"otlp": {"endpoint": otlp.url}, "traces": {"share": 0}}
    async with before_a_raw_backend(tmp_path, telemetry=telemetry) as (gateway, seen):
        await gateway.openai().chat.completions.create(**ASK, extra_headers=FOLLOWED)
        await gateway.openai().chat.completions.create(**ASK)
    attempt = one(await otlp.spans(), "chat gemma-4")
    assert attempt.trace_id == TRACE
    assert f"traceparent: 00-{TRACE}-{attempt.span_id}-01\r\n".encode() in seen[0] + b"\r\n"
    assert b"\r\ntracestate: vendor=1" in seen[0]
    assert re.search(rb"\r\ntraceparent: 00-[0-9a-f]{32}-[0-9a-f]{16}-00", seen[1])  # not chosen


async def test_without_a_receiver_the_caller_s_trace_travels_on(tmp_path: Path) -> None:
    async with before_a_raw_backend(tmp_path) as (gateway, seen):
        await gateway.openai().chat.completions.create(**ASK, extra_headers=FOLLOWED)
        (record,) = gateway.gateway.journal.recent()
    assert f"\r\ntraceparent: {FOLLOWED['traceparent']}".encode() in seen[0]
    assert record.trace is not None
    assert f"{record.trace.own.trace_id:032x}" == TRACE


async def test_metrics_are_pushed_as_they_are_shown(tmp_path: Path, otlp: Receiver) -> None:
    push = {"otlp": {"endpoint": otlp.url}, "metrics": {"interval_s": 0.05}}
    async with site(
        tmp_path,
        fleet=simulated({"light-0": "h100-tp1-light"}),
        pools={"light": ["light-0"]},
        models={"gemma-4": {"classes": [{"class": "short_chat", "pools": ["light"]}]}},
        telemetry=push,
    ) as gateway:
        await gateway.openai().chat.completions.create(**ASK)
        found: dict[str, Any] = {}
        while not found.get("gateway_requests_total"):
            found = await otlp.metrics()
        async with gateway.http() as http:
            page = (await http.get(f"{gateway.admin_url}/metrics")).text
    (point,) = found["gateway_requests_total"]["sum"]["dataPoints"]
    assert point["asDouble"] == 1
    (ttft,) = found["gateway_request_duration_seconds"]["histogram"]["dataPoints"]
    assert sum(map(int, ttft["bucketCounts"])) == int(ttft["count"]) == 1
    assert len(ttft["bucketCounts"]) == len(ttft["explicitBounds"]) + 1
    assert ttft["sum"] > 0
    (error,) = found["gateway_estimate_error_ratio"]["histogram"]["dataPoints"]
    assert int(error["count"]) == 1
    assert "sum" not in error  # it may go down: no receiver could use it, and 0 would be wrong
    assert found["gateway_request_duration_seconds"]["unit"] == "s"
    shown = set(re.findall(r"^# TYPE (\w+) ", page, re.M))
    assert set(found) <= shown


@pytest.mark.parametrize(("share", "kept"), [(0, {}), (1, {"chosen": 2})], ids=["none", "all"])
async def test_a_job_is_not_slow_for_a_first_token_that_nobody_waits_for(
    tmp_path: Path, share: int, kept: dict[str, int]
) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    classes = [{"class": "short_chat", "pools": ["light"], "waiting": {"ttft_target_s": 0.001}}]
    with own_server("valkey-9", folder, keeps=True) as store:
        async with site(
            tmp_path,
            fleet=simulated({"light-0": "h100-tp1-light"}),
            pools={"light": ["light-0"]},
            models={"gemma-4": {"classes": classes}},
            telemetry={"otlp": {"endpoint": DEAD}, "traces": {"share": share}},
            store={"url": store.url},
            jobs={},
        ) as gateway:
            client = gateway.openai()
            job = await client.responses.create(model="gemma-4", input=SECRET, background=True)
            with anyio.fail_after(60):
                while job.status in ("queued", "in_progress"):
                    job = await client.responses.retrieve(job.id)
            async with gateway.http() as http:
                page = (await http.get(f"{gateway.admin_url}/metrics")).text
    counted = {
        why: int(float(count)) for why, count in re.findall(r'traces_total{reason="(\w+)"} (\S+)', page)
    }
    assert counted == kept


async def test_a_job_is_a_trace_of_its_own_linked_to_who_handed_it_over(
    tmp_path: Path, otlp: Receiver
) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    store = RedisServer(binary("valkey-9"), folder)
    store.start()
    try:
        async with site(
            tmp_path,
            fleet=simulated({"light-0": "h100-tp1-light"}),
            pools={"light": ["light-0"]},
            models={"gemma-4": {"classes": [{"class": "short_chat", "pools": ["light"]}]}},
            telemetry={"otlp": {"endpoint": otlp.url}, "traces": {"share": 1}},
            store={"url": store.url},
            jobs={},
        ) as gateway:
            client = gateway.openai()
            job = await client.responses.create(
                model="gemma-4", input=SECRET, background=True, extra_headers=FOLLOWED
            )
            with anyio.fail_after(60):
                while job.status in ("queued", "in_progress"):
                    job = await client.responses.retrieve(job.id)
    finally:
        store.kill()
    spans = await otlp.spans()
    handed_over = one(spans, "POST /v1/responses")
    assert (handed_over.trace_id, handed_over.parent_id) == (TRACE, CALLER)
    assert handed_over.attributes["gateway.ending"] == "handed_over"
    assert handed_over.attributes["gateway.class"] == "short_chat"
    run = one(spans, "gateway.job")
    assert run.trace_id != TRACE
    assert run.links == [(TRACE, handed_over.span_id)]
    assert run.attributes["gateway.backend"] == "light-0"
    assert one(spans, "chat gemma-4").parent_id == run.span_id
    assert SECRET not in repr(spans)
