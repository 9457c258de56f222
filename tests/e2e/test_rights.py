"""A user with the rights that docs/store.md names, and no others: all works, and nothing is refused."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import until
from support.redis_server import RedisServer, acl_orders, legs, limited, own_server
from support.site import Site, simulated, site

from gateway.store.boards import RedisBoard

ROOT = Path(__file__).parents[2]
BY_CLIENT = set(["client", "evalsha", "getrange", "info", "ping", "script|load", "subscribe", "unsubscribe"])
"""What is sent as it is: by the client, and beside scripts."""

CHAT: dict[str, Any] = {"model": "gemma-4", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
ASK: dict[str, Any] = {"model": "gemma-4", "input": "Hi", "max_output_tokens": 4}


def test_the_rights_are_those_that_scripts_use_and_no_others() -> None:
    used = set(BY_CLIENT)
    for script in (ROOT / "gateway" / "store").glob("*.lua"):
        used |= {name.lower() for name in re.findall(r"redis\.p?call\(\s*'([A-Z]+)'", script.read_text())}
    granted = [word[1:] for order in acl_orders() for word in order if word[0] == "+"]
    assert sorted(granted) == sorted(used)


@pytest.fixture(params=legs(own=True))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    """Every supported server in turn, as one of the test's own."""
    folder = tmp_path / "store"
    folder.mkdir()
    with own_server(request.param, folder, keeps=True) as server:
        yield server


async def test_nothing_that_a_gateway_does_is_refused(tmp_path: Path, server: RedisServer) -> None:
    models = {"gemma-4": {"classes": [{"class": "short_chat", "pools": ["light"]}]}}
    pools, fleet = {"light": ["light"]}, simulated({"light": "h100-tp1-light"})
    async with limited(server) as url:
        async with site(tmp_path, fleet=fleet, pools=pools, models=models, store=url, jobs={}) as gateway:
            await keyed_and_kept(gateway)
            await handed_over(gateway)
            await in_a_batch(gateway)
            await by_operators(gateway)
        board = RedisBoard(url, prefix="gw", owner="one")
        shown = await board.sync("spark", fence=0, state="", note="n")
        assert shown is not None and shown.fence
        await board.leave("spark")
        await board.aclose()


async def keyed_and_kept(gateway: Site) -> None:
    async with gateway.http() as http:
        answers = [
            (await http.post("/v1/chat/completions", json=CHAT, headers={"Idempotency-Key": "k"})).content
            for _ in range(2)
        ]
    assert answers[0] == answers[1]
    client = gateway.openai()
    first = await client.responses.create(**ASK)
    second = await client.responses.create(**ASK, previous_response_id=first.id)
    await client.responses.delete(second.id)


async def handed_over(gateway: Site) -> None:
    client = gateway.openai()
    job = await client.responses.create(**ASK, background=True, extra_headers={"Idempotency-Key": "j"})
    assert [event async for event in await client.responses.retrieve(job.id, stream=True)]
    await client.responses.delete(job.id)


async def in_a_batch(gateway: Site) -> None:
    client = gateway.openai()
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number, body in enumerate((CHAT, {**CHAT, "model": "none"}))
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    made = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )

    async def is_over() -> bool:
        return (await client.batches.retrieve(made.id)).status == "completed"

    await until(is_over)
    batch = await client.batches.retrieve(made.id)
    assert batch.output_file_id is not None and await client.files.content(batch.output_file_id)
    await client.batches.list()
    await client.files.list()
    await client.files.delete(file.id)


async def by_operators(gateway: Site) -> None:
    client = gateway.openai()
    async with gateway.http() as http:
        await http.post(f"{gateway.admin_url}/admin/jobs/drain")
        job = await client.responses.create(**ASK, background=True)
        for order in ("cancel", "retry"):
            assert (await http.post(f"{gateway.admin_url}/admin/jobs/{job.id}/{order}")).status_code == 200
        assert len((await http.get(f"{gateway.admin_url}/admin/jobs")).json()["jobs"]) == 1
        await http.post(f"{gateway.admin_url}/admin/jobs/undrain")
    assert [event async for event in await client.responses.retrieve(job.id, stream=True)]
