"""What callers ask for while somebody measures."""

import base64
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.overhead import vocabulary

RATE_HZ = 40
"""Chunks a second of one stream."""
CHUNKS = 200
LARGE_BYTES = 1_000_000
OPEN_LOOP_HZ = 100
ROUNDS, RESULT_CHARS, TOOLS = 60, 5_000, 40
"""Of an agent: its calls, what each brought, and its tools."""

_QUESTION = "Explain in two sentences why memory bandwidth limits how fast tokens are generated."


def _orders(chunks: int, every_us: int, after_us: int) -> str:
    """Return what tells the engine how to answer; engine.c reads it."""
    return f"[engine chunks={chunks:04d} every_us={every_us} after_us={after_us}]"


def _user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


def _chat(orders: str, *messages: object, streamed: bool, tools: Sequence[object] = ()) -> bytes:
    body = {
        "model": "gemma-4",
        **({"stream": True} if streamed else {}),
        "messages": [
            {"role": "system", "content": f"You are a helpful assistant. {orders}"},
            *messages,
        ],
        **({"tools": tools} if tools else {}),
        "max_tokens": CHUNKS,
        "temperature": 0.7,
    }
    return json.dumps(body, separators=(",", ":")).encode()


def short() -> bytes:
    """Return a short request that is answered at once, in one piece."""
    return _chat(_orders(1, 0, 0), _user(_QUESTION), streamed=False)


def large() -> bytes:
    """Return a request of 1 MB: a document, whose number every caller changes, and a question about it."""
    prose = vocabulary.prose()
    document = (prose * (LARGE_BYTES // len(prose) + 1))[:LARGE_BYTES]
    return _chat(_orders(1, 0, 0), _user(f"Document serial=00000000.\n{document}"), streamed=False)


def image() -> bytes:
    """Return a question, whose number every caller changes, about an image of 1 MB in base64."""
    data = base64.b64encode(random.Random(1).randbytes(LARGE_BYTES * 3 // 4)).decode()
    parts = [
        {"type": "text", "text": "What is in picture serial=00000000?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
    ]
    return _chat(_orders(1, 0, 0), _user(parts), streamed=False)


def agent() -> bytes:
    """Return an agent's request after 60 calls of its tools: only the end of it is new, by its number."""
    prose = vocabulary.prose()
    texts = (prose[at : at + RESULT_CHARS] for at in range(0, len(prose), RESULT_CHARS))
    messages: list[dict[str, object]] = [_user("Find out why the build fails.")]
    for number, text in zip(range(ROUNDS), texts, strict=False):
        arguments = json.dumps({"path": f"src/module_{number}.py", "first_line": number})
        call = {"id": f"call_{number}", "type": "function"}
        call_function = {"name": "read_file", "arguments": arguments}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call | {"function": call_function}]},
            {"role": "tool", "tool_call_id": f"call_{number}", "content": text},
        ]
    messages.append(_user("Now try attempt serial=00000000."))
    parameters = {
        "type": "object",
        "properties": {"path": {"type": "string"}, "first_line": {"type": "integer"}},
    }
    tools = [
        {
            "type": "function",
            "function": {
                "name": "read_file" if number == 0 else f"tool_{number}",
                "description": prose[number * 400 : number * 400 + 400],
                "parameters": parameters,
            },
        }
        for number in range(TOOLS)
    ]
    return _chat(_orders(1, 0, 0), *messages, streamed=False, tools=tools)


def renumbered(body: str, number: int) -> str:
    """Return a body with another serial number, as load.c gives it one."""
    return re.sub(r"serial=\d{8}", f"serial={number:08d}", body, count=1)


def streamed(every_us: int = 1_000_000 // RATE_HZ, after_us: int = 0) -> bytes:
    """Return a short request that is answered as a stream."""
    return _chat(_orders(CHUNKS, every_us, after_us), _user(_QUESTION), streamed=True)


@dataclass(frozen=True)
class Load:
    """What load.c is told.

    Attributes:
        body: Of every request.
        connections: At most.
        rate_hz: Requests a second; 0: each connection asks again at once.
        ramp_s: Over which the first requests of all connections are spread.
        warm_s: Before what is measured.
        stretch: What is measured, in units of `--seconds`.
    """

    body: bytes
    connections: int
    rate_hz: float = 0
    ramp_s: float = 0
    warm_s: float = 0.7
    stretch: float = 1


@dataclass(frozen=True)
class Scenario:
    """A load whose cost is measured, and one that may come on top of it.

    Attributes:
        load: What is measured.
        disturbance: Where set, the load is measured twice, alone and while this one runs.
        direct: Whether it says something of the engine and the callers themselves.
        clocked: Whether the gateway's token counts are timed meanwhile, and everybody's work at rest before.
    """

    load: Load
    disturbance: Load | None = None
    direct: bool = False
    clocked: bool = False


def _streams(count: int) -> Load:
    return Load(streamed(), count, ramp_s=1.0, warm_s=1.8, stretch=1.5)


def scenarios() -> Mapping[str, Scenario]:
    """Return all of them by name, in the order in which they are run."""
    return {
        "short": Scenario(Load(short(), 32), direct=True),
        "latency": Scenario(Load(short(), 64, rate_hz=OPEN_LOOP_HZ, stretch=1.5), direct=True),
        "each": Scenario(Load(streamed(20_000, 10_000), 1)),
        "streams-256": Scenario(_streams(256)),
        "streams-512": Scenario(_streams(512)),
        "streams-1024": Scenario(_streams(1024), direct=True),
        "large": Scenario(Load(large(), 4), clocked=True),
        "agent": Scenario(Load(agent(), 4), clocked=True),
        "image": Scenario(Load(image(), 4), clocked=True),
        "gap": Scenario(
            Load(streamed(), 16, ramp_s=0.4, warm_s=0.8, stretch=1.5), Load(large(), 1, warm_s=0, stretch=1.5)
        ),
    }


def worker_scenarios() -> Mapping[str, Scenario]:
    """Return those for several processes: at a pace that one of them could hold, so that no core is full."""
    return {
        "paced": Scenario(Load(short(), 64, rate_hz=400, stretch=1.5)),
        "streams-256": Scenario(_streams(256)),
    }
