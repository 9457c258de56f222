"""A long conversation returns to the backend that has it in its prefix cache, and waits for it."""

from pathlib import Path
from typing import Any

import anyio
from support import clients
from support.site import Site, simulated, site

DOCUMENT = "The river runs past the old mill. " * 3_000
REPLICAS = ("push-0", "push-1")
LASTING: Any = {"max_tokens": 50_000, "stream": True, "extra_body": {"ignore_eos": True}}
CLASS = {"class": "chat", "pools": ["push"], "waiting": {"max_wait_s": 60}}


async def chat(gateway: Site, *said: str, **fields: Any) -> tuple[str, Any]:
    """Return the backend that answered, and the answer; of `said`, every other is the model's."""
    messages: Any = [
        {"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(said)
    ]
    fields = {"max_tokens": 5, **fields}
    asked = gateway.openai().chat.completions.with_raw_response
    response = await asked.create(model="gemma-4", messages=messages, **fields)
    return response.headers["x-gateway-backend"], response.parse()


async def test_the_next_turn_waits_for_the_backend_that_has_read_the_rest(tmp_path: Path) -> None:
    knee = {"limits": {"knee_seqs": 1}}
    fleet = simulated(dict.fromkeys(REPLICAS, "h100-tp2-push"), speed=20.0)
    pools, models = {"push": list(REPLICAS)}, {"gemma-4": {"classes": [CLASS]}}
    async with site(tmp_path, fleet=fleet, backend=knee, pools=pools, models=models) as gateway:
        first, answer = await chat(gateway, DOCUMENT)
        text = answer.choices[0].message.content
        other, stream = await chat(gateway, "Go on for ever.", **LASTING)
        assert (first, other) == ("push-0", "push-0")

        turn = [DOCUMENT, text, "And then?"]
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": said} for role, said in zip(roles, turn, strict=True)]
        async with clients.http(base_url=gateway.admin_url) as http:
            question = {"request": {"model": "gemma-4", "messages": messages}}
            told = (await http.post("/admin/explain", json=question)).json()
        served: list[str] = []

        async def next_turn() -> None:
            served.append((await chat(gateway, DOCUMENT, text, "And then?"))[0])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(next_turn)
            line = gateway.gateway.pipeline.room.line
            await gateway.eventually(lambda: [one.stays_for for one in line.waiters(0.0)] == ["push-0"])
            elsewhere, _ = await chat(gateway, "Why is the sky blue?")  # is not kept from the other one
            await stream.close()

    assert (served, elsewhere) == (["push-0"], "push-1")
    assert told["decision"]["candidates"][0]["backend"] == "push-1"
    assert told["outlook"]["expected_wait_s"] is None
    assert told["notes"][0].startswith("push-0 has its conversation: it waits for that one for up to ")
    assert gateway.backends["push-0"].host.engine.found_tokens > 20_000
    assert gateway.backends["push-1"].host.engine.queried_tokens < 100


async def test_a_conversation_does_not_return_to_a_backend_that_has_slept(tmp_path: Path) -> None:
    fleet = simulated(dict.fromkeys(REPLICAS, "h100-tp2-push"), speed=20.0)
    options: Any = {
        "backend": {"limits": {"knee_seqs": 1}},
        "pools": {"push": list(REPLICAS)},
        "models": {"gemma-4": {"classes": [CLASS]}},
        "health": {"interval_s": 0.1},
    }
    async with site(tmp_path, fleet=fleet, **options) as gateway:
        busy, stream = await chat(gateway, "Go on for ever.", **LASTING)
        first, answer = await chat(gateway, DOCUMENT)
        assert (busy, first) == ("push-0", "push-1")
        await stream.close()
        await gateway.eventually(gateway.idle)

        sleeper, statuses = gateway.backends[first], gateway.gateway.fleet.statuses
        sleeper.doze(level=1)
        await gateway.eventually(lambda: statuses()[first].is_asleep)
        await sleeper.wake_up()
        await gateway.eventually(lambda: not statuses()[first].is_asleep)
        next_one, _ = await chat(gateway, DOCUMENT, answer.choices[0].message.content, "And then?")

    assert next_one == "push-0"
