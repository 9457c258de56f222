"""A whole gateway with either way of taking chats: the same answers, and the same figures."""

import re
from pathlib import Path
from typing import Any

import openai
import pytest
from support import clients
from support.loops import on_both_loops
from support.site import Site, simulated, site

HELLO: Any = [{"role": "user", "content": "Why is the sky blue?"}]
COUNTED = re.compile(
    r"^(gateway_(?!build|config|loop|process)\w+_(?:total|count)(?:\{.*\})?) (\d+)", re.MULTILINE
)

anyio_backend = on_both_loops


async def used(running: Site) -> tuple[list[Any], dict[str, str]]:
    """Use a gateway as an SDK does, and return what was said, and what was counted."""
    client = running.openai()
    said: list[Any] = []
    options: Any = {"model": "gemma-4", "messages": HELLO, "seed": 1, "max_tokens": 20}
    whole = await client.chat.completions.with_raw_response.create(**options)
    said.append((whole.status_code, sorted(whole.headers), whole.parse().choices[0].message.content))
    stream = await client.chat.completions.create(**options, stream=True)
    # Joined: an engine that is late puts several tokens into one event.
    said.append("".join([part.choices[0].delta.content or "" async for part in stream if part.choices]))
    wrongs: list[dict[str, Any]] = [{"model": "other"}, {"messages": []}, {"max_tokens": -1}, {"n": 99}]
    for wrong in wrongs:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(**{**options, **wrong})
        said.append((caught.value.status_code, caught.value.code, sorted(caught.value.response.headers)))
    await running.eventually(running.idle)
    async with clients.http() as operator:
        page = (await operator.get(f"{running.admin_url}/metrics")).text
    return said, dict(COUNTED.findall(page))


async def test_both_ways_say_and_count_the_same(tmp_path: Path) -> None:
    seen = []
    for takes_chats in (True, False):
        fleet = simulated({"light-0": "h100-tp1-light"})
        pools = {"light": ["light-0"]}
        models = {"gemma-4": {"classes": [{"class": "chat", "pools": ["light"]}]}}
        async with site(
            tmp_path, fleet=fleet, takes_chats=takes_chats, pools=pools, models=models
        ) as running:
            seen.append(await used(running))

    (said, counted), (said_so, counted_so) = seen
    assert said == said_so
    requests = {name: value for name, value in counted.items() if "requests" in name or "attempts" in name}
    assert len(requests) >= 4
    assert requests == {name: counted_so.get(name) for name in requests}
