"""Files and batches, through the unmodified SDK, a real store and simulated backends."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from e2e.test_background import jobs_site
from support.redis_server import RedisServer, own_server
from support.site import Site

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SHORT = {"model": "gemma-4", "max_completion_tokens": 8}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "store"
    folder.mkdir()
    with own_server("valkey-9", folder, keeps=True) as server:
        yield server


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


async def lines_of(client: openai.AsyncOpenAI, id: str | None) -> list[dict[str, Any]]:
    if id is None:
        return []
    return [json.loads(line) for line in (await client.files.content(id)).text.splitlines()]


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
