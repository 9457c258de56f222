"""The application in the demo, before a simulated server that ends its streams midway."""

from gateway.demo.caller import Caller
from gateway.demo.prompts import Ask, Kind
from gateway.demo.story import Stage, Story
from gateway.profiles import load
from gateway.simulator import Fault, FaultOrder, SimulatorOptions, simulator


async def test_the_tokens_of_a_running_stream_are_counted_however_many_an_event_brings() -> None:
    options = SimulatorOptions(
        load("h100-tp1-light"),
        speed=100,
        served_model="gemma-4",
        stream_interval=10,
        fault=FaultOrder(Fault.TRUNCATE, after_chunks=3),  # a role, the first tokens, ten more
    )
    async with simulator(options) as server:
        caller = Caller(server.url, Story(speed=100), lambda: 0.0, timeout_s=60.0)
        exchange = await caller.send(
            Ask(
                Kind.CHAT,
                {"messages": [{"role": "user", "content": "Hi."}], "extra_body": {"min_tokens": 99}},
            )
        )
        await caller.aclose()

    assert exchange.stage is Stage.FAILED
    assert exchange.output_tokens >= 1 + 10
