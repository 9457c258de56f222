"""Engines that hold fewer requests than their knee, and refuse the rest."""

from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from support.site import simulated, site

HOLDS = 3
MODELS = {
    "gemma-4": {"classes": [{"class": "chat", "pools": ["light"], "waiting": {"max_wait_s": 60}}]},
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

        async def ask(number: int) -> None:
            messages: Any = [{"role": "user", "content": f"Count up to {number}, slowly."}]
            client = gateway.openai()
            try:
                answer: Any = await client.chat.completions.create(
                    model="gemma-4", messages=messages, max_tokens=200, stream=stream
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
