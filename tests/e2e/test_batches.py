"""Files and batches, through the unmodified SDK, a real store and simulated backends."""

import json
import re
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from redis.asyncio import Redis
from support import clients
from support.processes import Process, config, running, until
from support.redis_server import RedisServer
from support.site import Site, jobs_site

from gateway.core.batches import FILE_BYTES_MAX
from gateway.core.errors import RequestTimeout
from gateway.downstream.files import UPLOADS_MAX, UPLOADS_OVERHEAD
from gateway.downstream.multipart import parts_of

CHAT: Any = "/v1/chat/completions"
RESPONSES: Any = "/v1/responses"
SHORT = {"model": "gemma-4", "max_completion_tokens": 8}


@pytest.fixture
async def slow(tmp_path: Path, store: RedisServer) -> AsyncIterator[Site]:
    """A gateway whose backends are no faster than engines are: many long answers at once are work."""
    async with jobs_site(tmp_path, store, speed=1.0) as running:
        yield running
        await running.eventually(running.idle)


@pytest.fixture
async def gateway(tmp_path: Path, store: RedisServer) -> AsyncIterator[Site]:
    async with jobs_site(tmp_path, store) as running:
        yield running
        await running.eventually(running.idle)


def chat(custom_id: str, text: str = "Why is the sky blue?", **members: Any) -> dict[str, Any]:
    body = {**SHORT, "messages": [{"role": "user", "content": text}], **members}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def jsonl(*lines: object) -> bytes:
    return b"".join(
        (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines
    )


async def batch_of(client: openai.AsyncOpenAI, content: bytes, endpoint: Any = CHAT, **options: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options
    )


async def ended(client: openai.AsyncOpenAI, id: str, within_s: float = 60) -> Any:
    """Return a batch once it is over."""
    with anyio.fail_after(within_s):
        while True:
            batch = await client.batches.retrieve(id)
            if batch.status in ("failed", "completed", "expired", "cancelled"):
                return batch
            await anyio.sleep(0.05)


async def completed(client: openai.AsyncOpenAI, id: str, least: int) -> None:
    """Return once so many requests of a batch have their answers."""
    with anyio.fail_after(90):
        while True:
            counts = (await client.batches.retrieve(id)).request_counts
            if counts is not None and counts.completed >= least:
                return
            await anyio.sleep(0.05)


async def lines_of(client: openai.AsyncOpenAI, id: str | None) -> list[dict[str, Any]]:
    if id is None:
        return []
    return [json.loads(line) for line in (await client.files.content(id)).text.splitlines()]


async def refusals(client: openai.AsyncOpenAI, batch: Any) -> dict[str, tuple[int, str, str]]:
    """Return the status, code and param of each request that was refused, by `custom_id`."""
    said = {}
    for line in await lines_of(client, batch.error_file_id):
        error = line["response"]["body"]["error"]
        said[line["custom_id"]] = (line["response"]["status_code"], error["code"], error["param"])
    return said


async def test_a_batch_of_chats_is_worked_off(gateway: Site) -> None:
    client = gateway.openai(api_key="a")
    lines = [chat(f"r{number}") for number in range(40)]

    made = await batch_of(client, jsonl(*lines), metadata={"job": "nightly"})
    assert made.status == "validating"
    done = await ended(client, made.id)

    assert done.status == "completed"
    assert done.metadata == {"job": "nightly"}
    assert done.request_counts.to_dict() == {"total": 40, "completed": 40, "failed": 0}
    assert done.error_file_id is None
    assert done.in_progress_at and done.finalizing_at and done.completed_at
    answers = await lines_of(client, done.output_file_id)
    assert sorted(line["custom_id"] for line in answers) == sorted(line["custom_id"] for line in lines)
    for line in answers:
        assert line["error"] is None
        assert line["response"]["status_code"] == 200
        body = openai.types.chat.ChatCompletion.model_validate(line["response"]["body"])
        assert (body.object, body.model) == ("chat.completion", "gemma-4")
        assert body.choices[0].message.content
        assert body.choices[0].finish_reason == "length"
        assert body.usage is not None and body.usage.completion_tokens == 8
    output = await client.files.retrieve(done.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{done.id}_output.jsonl")


async def test_a_batch_of_responses_is_worked_off(gateway: Site) -> None:
    client = gateway.openai(api_key="a")
    lines = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": RESPONSES,
            "body": {"model": "gemma-4", "input": "Why?", "max_output_tokens": 8, "metadata": {"n": "1"}},
        }
        for number in range(5)
    ]
    done = await ended(client, (await batch_of(client, jsonl(*lines), RESPONSES)).id)
    assert done.status == "completed"
    answers = await lines_of(client, done.output_file_id)
    assert {line["custom_id"] for line in answers} == {f"r{number}" for number in range(5)}
    for line in answers:
        response = openai.types.responses.Response.model_validate(line["response"]["body"])
        assert response.output_text
        assert response.metadata == {"n": "1"}
        assert response.status == "incomplete"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response.id)


# ------------------------------------------------------------------ what goes wrong


async def test_a_bad_file_runs_nothing_and_says_what_is_wrong_where(gateway: Site) -> None:
    client = gateway.openai(api_key="a")
    bad = {**chat("c"), "method": "GET"}
    made = await batch_of(client, jsonl(chat("a"), b"{", chat("a"), bad))

    done = await ended(client, made.id)

    assert done.status == "failed"
    assert [(error.line, error.code, error.param) for error in done.errors.data] == [
        (2, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "invalid_method", "method"),
    ]
    assert (done.output_file_id, done.error_file_id) == (None, None)
    assert gateway.idle()


async def test_what_the_gateway_refuses_stands_in_the_error_file(gateway: Site) -> None:
    client = gateway.openai(api_key="a")
    lines = [
        chat("good"),
        chat("unknown", model="gpt-9"),
        chat("long", text="word " * 400_000),
        chat("typed", temperature=1.0, max_completion_tokens="many"),
        chat("scored", prompt_logprobs=1),
    ]
    done = await ended(client, (await batch_of(client, jsonl(*lines))).id)

    assert done.status == "completed"
    assert done.request_counts.to_dict() == {"total": 5, "completed": 1, "failed": 4}
    assert await refusals(client, done) == {
        "unknown": (404, "model_not_found", "model"),
        "long": (400, "context_length_exceeded", "messages"),
        "typed": (400, "invalid_request", "max_completion_tokens"),
        "scored": (400, "unsupported_parameter", "prompt_logprobs"),
    }
    assert [line["custom_id"] for line in await lines_of(client, done.output_file_id)] == ["good"]


async def test_what_is_refused_of_a_response_has_the_name_that_it_was_sent_under(gateway: Site) -> None:
    client = gateway.openai(api_key="a")
    bodies: dict[str, dict[str, Any]] = {
        "renamed": {"input": "Why?", "max_tokens": 5},
        "long": {"input": "word " * 400_000},
    }
    lines = [
        {"custom_id": name, "method": "POST", "url": RESPONSES, "body": {"model": "gemma-4", **body}}
        for name, body in bodies.items()
    ]
    done = await ended(client, (await batch_of(client, jsonl(*lines), RESPONSES)).id)

    assert await refusals(client, done) == {
        "renamed": (400, "unsupported_parameter", "max_tokens"),
        "long": (400, "context_length_exceeded", "input"),
    }


async def test_lines_that_one_process_cannot_run_are_run_by_another(
    tmp_path: Path, store: RedisServer
) -> None:
    """Two gateways serve different models, and one serves longer prompts: whoever reads the file, all run."""
    names, fleet = ("small", "large"), {}
    for name, tokens in zip(names, (2_000, 100_000), strict=True):
        (tmp_path / name).mkdir()
        one = {"classes": [{"class": "short_chat", "pools": ["light"]}]}
        backend = {"limits": {"context_tokens": tokens}}
        fleet[name] = jobs_site(
            tmp_path / name, store, backend=backend, models={"gemma-4": one, f"only-{name}": one}
        )
    async with AsyncExitStack() as stack:
        sites = [await stack.enter_async_context(fleet[name]) for name in names]
        async with Redis.from_url(store.url, decode_responses=True) as redis:

            async def are_known() -> bool:
                return await redis.zcard("{gw:jobs}:serving:gemma-4") == len(sites)

            await until(are_known)
        client = sites[0].openai(api_key="a")
        files = [
            jsonl(
                chat(f"{n}-both"),
                chat(f"{n}-small", model="only-small"),
                chat(f"{n}-large", model="only-large"),
                chat(f"{n}-long", text="word " * 10_000),
                chat(f"{n}-none", model="gpt-9"),
            )
            for n in range(8)
        ]
        made = [await batch_of(client, file) for file in files]
        for one in made:
            done = await ended(client, one.id)
            answers = await lines_of(client, done.output_file_id)
            assert sorted(line["custom_id"][2:] for line in answers) == ["both", "large", "long", "small"]
            (refused,) = await lines_of(client, done.error_file_id)
            assert refused["response"]["body"]["error"]["code"] == "model_not_found"


async def test_a_request_to_make_a_batch_must_be_in_order(gateway: Site) -> None:
    client = gateway.openai(api_key="a")
    file = await client.files.create(file=("in.jsonl", jsonl(chat("a"))), purpose="batch")
    right: dict[str, Any] = {
        "input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", "metadata": {},
    }  # fmt: skip
    for wrong, param in (
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": 5}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 5}},
            "output_expires_after.seconds",
        ),
        ({"output_expires_after": {"anchor": "now", "seconds": 5000}}, "output_expires_after.anchor"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.batches.create(**{**right, **wrong})
        assert caught.value.param == param
    with pytest.raises(openai.NotFoundError) as missing:
        await client.batches.create(**{**right, "input_file_id": "file-0"})
    assert (missing.value.code, missing.value.param) == ("file_not_found", "input_file_id")


async def test_a_request_to_make_a_batch_is_as_large_as_its_metadata_may_be(gateway: Site) -> None:
    file = await gateway.openai(api_key="a").files.create(
        file=("in.jsonl", jsonl(chat("a"))), purpose="batch"
    )
    face = "\N{GRINNING FACE}"  # escaped, the longest that a character can be
    most = {f"{number:x}" + face * 63: face * 512 for number in range(16)}
    right = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", "metadata": most}
    crowd = {**right, "crowd": [[]] * 50_000}  # is decoded with the rest, though nobody looks at it
    async with gateway.http() as client:
        for asked, status in ((right, 200), (crowd, 413)):
            headers = {"authorization": "Bearer a", "content-type": "application/json"}
            answer = await client.post("/v1/batches", content=json.dumps(asked), headers=headers)
            assert answer.status_code == status
            assert status != 200 or answer.json()["metadata"] == most


async def test_who_asks_twice_with_one_idempotency_key_gets_one_batch(gateway: Site) -> None:
    client, other = gateway.openai(api_key="a"), gateway.openai(api_key="b")
    file = await client.files.create(file=("in.jsonl", jsonl(chat("a"))), purpose="batch")
    right: dict[str, Any] = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    once = {"Idempotency-Key": "nightly-2026-11-22"}

    first = await client.batches.create(**right, extra_headers=once)
    again = await client.batches.create(**right, extra_headers=once)
    assert again.id == first.id
    with pytest.raises(openai.UnprocessableEntityError) as reused:
        await client.batches.create(**right, metadata={"a": "b"}, extra_headers=once)
    assert reused.value.code == "idempotency_key_reused"
    with pytest.raises(openai.BadRequestError) as none:
        await client.batches.create(**right, extra_headers={"Idempotency-Key": "two words"})
    assert none.value.code == "invalid_idempotency_key"
    theirs = await other.files.create(file=("in.jsonl", jsonl(chat("b"))), purpose="batch")
    of_other = await other.batches.create(**{**right, "input_file_id": theirs.id}, extra_headers=once)
    assert of_other.id != first.id
    assert [batch.id async for batch in client.batches.list()].count(first.id) == 1


async def test_a_cancelled_batch_keeps_what_it_has(slow: Site) -> None:
    client = slow.openai(api_key="a")
    long: dict[str, Any] = {"max_completion_tokens": 20_000, "ignore_eos": True}
    lines = [chat(f"q{number}") for number in range(3)] + [chat(f"s{n}", **long) for n in range(300)]
    made = await batch_of(client, jsonl(*lines))
    await completed(client, made.id, 3)

    asked = await client.batches.cancel(made.id)
    done = await ended(client, made.id)
    again = await client.batches.cancel(made.id)

    assert asked.status == "cancelling"
    assert (done.status, again.status) == ("cancelled", "cancelled")
    answers = await lines_of(client, done.output_file_id)
    failures = await lines_of(client, done.error_file_id)
    assert {line["custom_id"] for line in answers} == {"q0", "q1", "q2"}
    assert sorted(line["custom_id"] for line in failures) == sorted(f"s{n}" for n in range(300))
    assert {line["error"]["code"] for line in failures} == {"batch_cancelled"}
    assert done.request_counts.to_dict() == {"total": 303, "completed": 3, "failed": 300}


async def test_a_batch_whose_time_is_over_says_so_for_every_line(slow: Site, store: RedisServer) -> None:
    client = slow.openai(api_key="a")
    long: dict[str, Any] = {"max_completion_tokens": 20_000, "ignore_eos": True}
    lines = [chat("quick")] + [chat(f"s{n}", **long) for n in range(50)]
    made = await batch_of(client, jsonl(*lines))
    await completed(client, made.id, 1)

    async with Redis.from_url(store.url) as redis:
        await redis.hset(f"{{gw:jobs}}:batch:{made.id}", "expires", 1)
    done = await ended(client, made.id)

    assert done.status == "expired" and done.expired_at
    failures = await lines_of(client, done.error_file_id)
    assert sorted(line["custom_id"] for line in failures) == sorted(f"s{n}" for n in range(50))
    assert {line["error"]["code"] for line in failures} == {"batch_expired"}
    assert [line["custom_id"] for line in await lines_of(client, done.output_file_id)] == ["quick"]


# ------------------------------------------------------------------ files


async def test_compressed_bodies_are_refused_as_such(gateway: Site) -> None:
    headers = {"Authorization": "Bearer a", "Content-Encoding": "gzip"}
    async with gateway.http() as client:
        answers = [
            await client.post(path, headers=headers, content=b"\x1f\x8b")
            for path in ("/v1/files", "/v1/batches", "/v1/responses")
        ]
    assert [answer.status_code for answer in answers] == [415] * 3
    assert {answer.json()["error"]["code"] for answer in answers} == {"unsupported_content_encoding"}


async def test_files_are_listed_read_and_deleted(gateway: Site) -> None:
    client = gateway.openai(api_key="a")
    made = [
        await client.files.create(file=(f"{n}.jsonl", b"x" * n), purpose="batch") for n in (0, 5, 2_500_000)
    ]
    assert [(file.bytes, file.filename, file.status) for file in made] == [
        (0, "0.jsonl", "processed"), (5, "5.jsonl", "processed"), (2_500_000, "2500000.jsonl", "processed"),
    ]  # fmt: skip
    assert made[0].expires_at == made[0].created_at + 30 * 86_400
    assert await client.files.retrieve(made[1].id) == made[1]
    assert (await client.files.content(made[2].id)).content == b"x" * 2_500_000

    listed = [file.id async for file in client.files.list(limit=2)]
    oldest = [file.id async for file in client.files.list(limit=1, order="asc", purpose="batch")]
    assert listed == [file.id for file in reversed(made)]
    assert oldest == [file.id for file in made]
    assert [file.id async for file in client.files.list(purpose="batch_output")] == []

    assert (await client.files.delete(made[1].id)).deleted
    with pytest.raises(openai.NotFoundError) as caught:
        await client.files.retrieve(made[1].id)
    assert caught.value.code == "file_not_found"


async def test_a_caller_says_how_long_a_file_is_kept(gateway: Site) -> None:
    client = gateway.openai(api_key="a")
    file = await client.files.create(
        file=("in.jsonl", jsonl(chat("a"))),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert file.expires_at == file.created_at + 3600
    made = await client.batches.create(
        input_file_id=file.id,
        endpoint=CHAT,
        completion_window="24h",
        output_expires_after={"anchor": "created_at", "seconds": 7200},
    )
    done = await ended(client, made.id)
    output = await client.files.retrieve(done.output_file_id)
    assert output.expires_at == output.created_at + 7200


async def test_batches_are_listed_page_by_page_newest_first(gateway: Site) -> None:
    client = gateway.openai(api_key="a")
    made = [(await batch_of(client, jsonl(chat("a")))).id for _ in range(5)]
    assert [batch.id async for batch in client.batches.list(limit=2)] == made[::-1]
    first = await client.batches.list(limit=2)
    assert (first.has_more, len(first.data)) == (True, 2)
    with pytest.raises(openai.BadRequestError):
        await client.batches.list(after="batch_0")
    for id in made:
        await ended(client, id)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
@pytest.mark.parametrize("limit", ["0", "10001", "x", "9" * 5000])
async def test_a_page_that_cannot_be_is_refused(gateway: Site, path: str, limit: str) -> None:
    async with gateway.http() as client:
        page = await client.get(f"{path}?limit={limit}", headers={"authorization": "Bearer a"})

    assert page.status_code == 400
    assert page.json()["error"]["param"] == "limit"


async def test_what_is_another_keys_is_not_there(gateway: Site) -> None:
    mine, theirs = gateway.openai(api_key="a"), gateway.openai(api_key="b")
    made = await batch_of(mine, jsonl(chat("a")))
    done = await ended(mine, made.id)

    for file in (made.input_file_id, done.output_file_id):
        for ask in (theirs.files.retrieve, theirs.files.content, theirs.files.delete):
            with pytest.raises(openai.NotFoundError) as caught:
                await ask(file)
            assert caught.value.code == "file_not_found"
    for ask_batch in (theirs.batches.retrieve, theirs.batches.cancel):
        with pytest.raises(openai.NotFoundError) as caught:
            await ask_batch(made.id)
        assert caught.value.code == "batch_not_found"
    with pytest.raises(openai.NotFoundError):
        await theirs.batches.create(input_file_id=made.input_file_id, endpoint=CHAT, completion_window="24h")
    assert [file.id async for file in theirs.files.list()] == []
    assert [batch.id async for batch in theirs.batches.list()] == []
    with pytest.raises(openai.AuthenticationError):
        await gateway.openai(api_key="c").files.list()


async def test_a_file_that_a_batch_reads_stays(gateway: Site) -> None:
    client = gateway.openai(api_key="a")
    made = await batch_of(client, jsonl(chat("a", max_completion_tokens=20_000, ignore_eos=True)))
    with pytest.raises(openai.BadRequestError) as caught:
        await client.files.delete(made.input_file_id)
    assert caught.value.code == "file_in_use"
    await client.batches.cancel(made.id)
    await ended(client, made.id)
    assert (await client.files.delete(made.input_file_id)).deleted


async def test_a_keys_files_are_bounded_together(tmp_path: Path, store: RedisServer) -> None:
    jobs = {"batches": {"file_bytes_max_per_key": 3_000_000}}
    async with jobs_site(tmp_path, store, jobs=jobs) as gateway:
        client, other = gateway.openai(api_key="a", max_retries=2), gateway.openai(api_key="b")
        first = await client.files.create(file=("1.jsonl", b"x" * 2_000_000), purpose="batch")
        with pytest.raises(openai.RateLimitError) as caught:
            await client.files.create(file=("2.jsonl", b"x" * 30_000_000), purpose="batch")
        assert caught.value.code == "too_many_file_bytes"
        assert caught.value.response.headers["x-should-retry"] == "false"
        await other.files.create(file=("2.jsonl", b"x" * 2_000_000), purpose="batch")
        await client.files.delete(first.id)
        await client.files.create(file=("2.jsonl", b"x" * 2_500_000), purpose="batch")


async def test_a_form_that_is_none_leaves_nothing(gateway: Site, store: RedisServer) -> None:
    headers = {"authorization": "Bearer a"}
    form = {"content-type": "multipart/form-data; boundary=x", **headers}
    whole = b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n' + b"y" * 2_000_000
    forms: list[tuple[dict[str, Any], str]] = [
        ({"content": b"{}", "headers": headers}, "invalid_multipart"),
        ({"content": b"--x\r\nbroken", "headers": form}, "invalid_multipart"),
        ({"content": whole, "headers": form}, "invalid_multipart"),
        ({"content": whole + b"\r\n--x--\r\n", "headers": form}, "invalid_request"),
        ({"files": {"file": b"y"}, "data": {"purpose": "vision"}, "headers": headers}, "invalid_request"),
        ({"files": {"x": b"y"}, "data": {"purpose": "batch"}, "headers": headers}, "invalid_request"),
    ]
    async with gateway.http() as client:
        for sent, code in forms:
            answer = await client.post("/v1/files", **sent)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
            assert answer.headers["x-request-id"]
    async with Redis.from_url(store.url) as redis:
        assert [name async for name in redis.scan_iter(match="*file*")] == []
        assert [name async for name in redis.scan_iter(match="*piece*")] == []


# ------------------------------------------------------------------ whatever dies


@asynccontextmanager
async def serving(file: Path) -> AsyncIterator[tuple[Process, openai.AsyncOpenAI]]:
    """Run a gateway as a process of its own, with a client of it."""
    async with running("serve", "--config", str(file)) as process:
        url = (await process.wait_for(r"serves (http://\S+)/v1"))[1]
        async with clients.sdk(base_url=f"{url}/v1", api_key="x") as client:
            yield process, client


@asynccontextmanager
async def file_of_site(folder: Path, store: RedisServer, speed: str) -> AsyncIterator[Path]:
    """Run a backend, and yield the configuration of gateways in front of it that share a store."""
    async with running("simulate", "--profile", "h100-tp1-light", "--port", "0", "--speed", speed) as engine:
        backend = (await engine.wait_for(r"(http://127\.0\.0\.1:\d+)"))[1]
        rest = f"""
models: {{gemma-4: {{classes: [{{class: short_chat, pools: [light]}}]}}}}
store: {{url: "{store.url}"}}
jobs: {{batches: {{queued_max_per_key: 40}}}}
health: {{interval_s: 0.2}}
"""
        yield config(folder, {"light-0": (backend, "h100-tp1-light")}, {"light": ["light-0"]}, rest)


async def test_whoever_works_at_a_batch_may_be_killed(tmp_path: Path, store: RedisServer) -> None:
    """Of two gateways both are killed, one after the other: so one that works at it was."""
    lines = [chat(f"r{number}", max_completion_tokens=20) for number in range(400)]

    async with file_of_site(tmp_path, store, speed="30") as file, AsyncExitStack() as stack:
        first, client = await stack.enter_async_context(serving(file))
        second, other = await stack.enter_async_context(serving(file))
        made = await batch_of(client, jsonl(*lines))
        await completed(other, made.id, 60)
        first.process.kill()
        await first.process.wait()
        third, last = await stack.enter_async_context(serving(file))
        await completed(last, made.id, 200)
        second.process.kill()
        await second.process.wait()
        done = await ended(last, made.id, within_s=120)
        answers = await lines_of(last, done.output_file_id)
        failures = await lines_of(last, done.error_file_id)
        status = await third.end(signal.SIGTERM)

    assert done.status == "completed"
    assert failures == []
    assert sorted(line["custom_id"] for line in answers) == sorted(line["custom_id"] for line in lines)
    assert done.request_counts.to_dict() == {"total": 400, "completed": 400, "failed": 0}
    assert status == 0
    async with Redis.from_url(store.url, decode_responses=True) as redis:
        left = {name.split(":")[2] async for name in redis.scan_iter(match="{gw:jobs}:*")}
    assert left & {"job", "chunks", "lines", "done", "quota"} == set()


async def test_an_upload_that_is_too_large_is_refused_before_it_comes(gateway: Site) -> None:
    head = b"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer a\r\ncontent-length: %d\r\n\r\n"
    most = FILE_BYTES_MAX + UPLOADS_OVERHEAD
    for size, status in ((most, b"400"), (most + 1, b"413")):  # 400: it is no form
        with anyio.fail_after(20):
            async with await anyio.connect_tcp("127.0.0.1", int(gateway.url.rpartition(":")[2])) as caller:
                await caller.send(head % size)
                answer = await caller.receive()
        assert answer.startswith(b"HTTP/1.1 " + status)


async def test_nobody_waits_for_the_slow_uploads_of_another_key(gateway: Site) -> None:
    begun = (
        b"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer a\r\ncontent-length: 1000000\r\n"
        b"content-type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
    )
    async with AsyncExitStack() as slow:
        for _ in range(UPLOADS_MAX):
            port = int(gateway.url.rpartition(":")[2])
            stream = await slow.enter_async_context(await anyio.connect_tcp("127.0.0.1", port))
            await stream.send(begun)
        async with gateway.http() as client:  # by now, what came before has been looked at
            assert (await client.get("/livez")).status_code == 200
        with anyio.fail_after(20):
            made = await gateway.openai(api_key="b").files.create(file=("b", b"{}"), purpose="batch")

    assert made.bytes == 2


async def test_an_upload_of_a_byte_now_and_then_is_given_up() -> None:
    head = b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
    pieces = iter([head, *[b"y"] * 1_000])

    async def receive() -> Any:  # a caller that sends long before a piece is overdue
        await anyio.sleep(0.01)
        return {"type": "http.request", "body": next(pieces), "more_body": True}

    with anyio.fail_after(20), pytest.raises(RequestTimeout):
        async for _ in parts_of("multipart/form-data; boundary=x", receive, 0.2, 100_000):
            pass


async def test_an_upload_is_never_in_memory_as_a_whole(tmp_path: Path, store: RedisServer) -> None:
    size = 100_000_000

    def peak_bytes(process: Process) -> int:
        status = Path(f"/proc/{process.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]

    async with file_of_site(tmp_path, store, speed="30") as file, serving(file) as (process, client):
        await client.files.create(file=("warm.jsonl", b"x" * 3_000_000), purpose="batch")
        before = peak_bytes(process)
        made = await client.files.create(file=("big.jsonl", b"y" * size), purpose="batch")
        async with client.files.with_streaming_response.content(made.id) as answer:
            sizes = [len(piece) async for piece in answer.iter_bytes()]
        grown = peak_bytes(process) - before

    assert made.bytes == sum(sizes) == size
    assert grown < size / 5
