"""Two gateways in front of one fleet, sharing its limits through a real Valkey."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.site import Site, simulated, site

from gateway.core.load import Load
from gateway.simulator import simulator
from gateway.store.embedded import temporary_folder, valkey_in

HELLO: Any = [{"role": "user", "content": "Go on for ever."}]
KNEE = 3


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Site, Site]]:
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(valkey_in(stack.enter_context(temporary_folder())))
        # As fast as the real one: what is to hold a place must not have ended before it is looked at.
        fleet = simulated({"light-0": "h100-tp1-light"}, speed=1.0)
        backend = await stack.enter_async_context(simulator(fleet["light-0"]))
        sites = []
        for name in ("one", "other"):
            folder = tmp_path / name
            folder.mkdir()
            sections: dict[str, Any] = {
                "store": store.url,
                "pools": {"light": ["light-0"]},
                "backends": {
                    "light-0": {
                        "url": backend.url,
                        "profile": "h100-tp1-light",
                        "limits": {"knee_seqs": KNEE},
                    }
                },
                "models": {
                    "gemma-4": {
                        "classes": [
                            {"class": "short_chat", "pools": ["light"], "waiting": {"max_wait_s": 30}}
                        ]
                    }
                },
            }
            running = site(folder, fleet={}, **sections)
            sites.append(await stack.enter_async_context(running))
        yield sites[0], sites[1]


async def test_two_gateways_stay_below_one_knee_and_wake_each_other(pair: tuple[Site, Site]) -> None:
    one, other = pair
    stream = {"model": "gemma-4", "messages": HELLO, "max_tokens": 20_000, "stream": True}
    fields: Any = {**stream, "extra_body": {"ignore_eos": True}}
    held = [await one.openai().chat.completions.create(**fields) for _ in range(KNEE)]
    for answer in held:
        await anext(aiter(answer))
    late: list[Any] = []

    async def ask() -> None:
        late.append(await other.openai().chat.completions.create(**fields))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await other.eventually(lambda: len(other.gateway.pipeline.room.line) == 1)
        assert not late
        await held[0].close()  # a place comes free on the other gateway

    await anext(aiter(late[0]))
    assert other.gateway.ledger.load("light-0").seqs == KNEE
    for answer in [*held[1:], *late]:
        await answer.close()
    await one.eventually(lambda: one.gateway.ledger.load("light-0") == Load())
    await other.eventually(lambda: other.gateway.ledger.load("light-0") == Load())
