"""Engines that hold fewer requests than their knee, and refuse the rest."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from anyio.abc import SocketStream
from support import clients
from support.raw_server import answer_of, raw_server
from support.site import simulated, site

from gateway.core.policy import RetryPolicy

HOLDS = 3
MODELS = {
    "gemma-4": {"classes": [{"class": "chat", "pools": ["light"], "waiting": {"max_wait_s": 60}}]},
}
ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "gemma",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
}


@pytest.mark.parametrize("names", [["light-0"], ["light-0", "light-1"]], ids=len)
@pytest.mark.parametrize("stream", [True, False])
async def test_who_comes_to_engines_that_are_full_below_their_knee_waits_for_them(
    tmp_path: Path, names: list[str], stream: bool
) -> None:
    engines = simulated(dict.fromkeys(names, "h100-tp1-light"), speed=20.0, max_num_queued_reqs=HOLDS)
    pools = {"light": names}
    outcomes = Counter[str]()
    async with site(tmp_path, fleet=engines, pools=pools, models=MODELS) as gateway:
        client = gateway.openai()

        async def ask(number: int) -> None:
            messages: Any = [{"role": "user", "content": f"Count up to {number}, slowly."}]
            try:
                answer: Any = await client.chat.completions.create(
                    model="gemma-4", messages=messages, max_tokens=60, stream=stream
                )
                if stream:
                    async for _ in answer:
                        pass
            except openai.APIStatusError as error:
                outcomes[str(error.code)] += 1
            else:
                outcomes["answered"] += 1

        async with anyio.create_task_group() as tasks:
            for number in range(10 * HOLDS):
                tasks.start_soon(ask, number)
        await gateway.eventually(gateway.idle)
        refused = sum(engine.host.tally.rejected for engine in gateway.backends.values())

    assert refused
    assert outcomes == {"answered": 10 * HOLDS}


async def test_what_an_engine_refuses_though_it_takes_others_neither_holds_them_up_nor_waits(
    tmp_path: Path,
) -> None:
    """As one that takes no streams, or only small requests: no wait helps."""
    ends, refusals, outcomes = anyio.Event(), 0, dict[str, str]()

    async def engine(stream: SocketStream, number: int) -> None:
        nonlocal refusals
        head, body = server.requests[number]
        if b"/v1/models" in head:
            await stream.send(answer_of(b'{"data": [{"id": "gemma"}]}'))
        elif b"POST" not in head:
            await stream.send(answer_of(b""))
        elif json.loads(body).get("stream"):
            refusals += 1
            await stream.send(answer_of(b'{"message": "busy"}', "503 Service Unavailable"))
        else:
            if b"long" in body:
                await ends.wait()
            await stream.send(answer_of(json.dumps(ANSWER).encode()))

    async with raw_server(engine) as server:
        backends = {"light-0": {"url": server.url, "profile": "h100-tp1-light"}}
        pools = {"light": ["light-0"]}
        async with site(tmp_path, fleet={}, backends=backends, pools=pools, models=MODELS) as gateway:

            async def ask(text: str, stream: bool = False) -> None:
                messages: Any = [{"role": "user", "content": text}]
                try:
                    await gateway.openai().chat.completions.create(
                        model="gemma-4", messages=messages, stream=stream
                    )
                except openai.APIStatusError as error:
                    outcomes[text] = str(error.code)
                else:
                    outcomes[text] = "answered"

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, "a long one")
                await gateway.eventually(lambda: gateway.gateway.ledger.load("light-0").seqs == 1)
                tasks.start_soon(ask, "a stream", True)
                await gateway.eventually(lambda: refusals == 1)
                while "a stream" not in outcomes:
                    await ask("another")
                assert outcomes == {"a stream": "upstream_busy", "another": "answered"}
                assert refusals > RetryPolicy().attempts_max
                ends.set()
    assert outcomes["a long one"] == "answered"


async def test_who_comes_together_to_an_engine_that_refuses_all_is_told_so_before_long(
    tmp_path: Path,
) -> None:
    """As one that is asleep. Most are refused while others have not been yet, and would wait for them."""
    engines = simulated({"light-0": "h100-tp1-light"}, max_num_queued_reqs=0)
    outcomes = Counter[str]()
    async with site(tmp_path, fleet=engines, pools={"light": ["light-0"]}, models=MODELS) as gateway:
        client = gateway.openai()

        async def ask(number: int) -> None:
            messages: Any = [{"role": "user", "content": f"Count up to {number}."}]
            with pytest.raises(openai.APIStatusError) as raised:
                await client.chat.completions.create(model="gemma-4", messages=messages)
            outcomes[str(raised.value.code)] += 1

        async def shown() -> Any:
            async with clients.http(base_url=gateway.admin_url) as operator:
                return (await operator.get("/admin/backends")).json()["light-0"]["refused_for_load"]

        assert await shown() is None
        with anyio.fail_after(10):  # one in a second would take 30
            async with anyio.create_task_group() as tasks:
                for number in range(30):
                    tasks.start_soon(ask, number)
        refused = await shown()

    assert outcomes == {"upstream_busy": 30}
    assert refused["in_flight"] == 0 and 0 <= refused["ago_s"] < 60
