"""How long one request keeps the event loop, by the kind of its body: in that time every stream stands still.

    python benchmarks/stalls.py                     with a small vocabulary made here
    python benchmarks/stalls.py --vocab FILE        with your own: a rank file or a tokenizer.json

A gateway runs in this process, before an engine in another that answers at once. A task takes a turn in
every round of the event loop, and notes the CPU that the loop's thread has used since its last: the longest
is what is told, the best of the rounds, since neighbours only add. Work in other threads holds the loop up
for as long as it keeps the interpreter, at most `sys.getswitchinterval()` at a time in Python, and until it
returns in C: that is in `between turns`, with what the machine added.

Each request has a text of its own, so that nothing is remembered of the ones before.
"""

import argparse
import asyncio
import base64
import http.client
import itertools
import json
import os
import platform
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anyio
import yaml

if not __package__:  # python benchmarks/stalls.py
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.before_engine import Engine
from benchmarks.overhead.vocabulary import prose
from gateway import memory, settings
from gateway.app import Gateway

WINDOW_TOKENS = 16_000_000
CHATS, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/completions"
PROSE = prose()


@dataclass(frozen=True)
class Kind:
    """A kind of body: its name, where it is sent, and what makes one of it that begins with a given text."""

    name: str
    path: str
    make: Callable[[str], Mapping[str, Any]]


def _chat(content: object, **members: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **members}


def _turns(mark: str, count: int, chars: int) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    starts = (index * 97 % (len(PROSE) - chars) for index in range(count))
    return [
        {"role": roles[index % 2], "content": f"{mark}{index} {PROSE[start : start + chars]}"}
        for index, start in enumerate(starts)
    ]


def _texts(mark: str, count: int) -> list[dict[str, str]]:
    return [{"type": "text", "text": f"{mark}{index} the river runs"} for index in range(count)]


def _images(mark: str, count: int, size: int) -> dict[str, Any]:
    pictures = (base64.b64encode(os.urandom(size)).decode() for _ in range(count))
    urls = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{one}"}} for one in pictures]
    return _chat([{"type": "text", "text": mark}, *urls])


def _tools(count: int) -> list[dict[str, Any]]:
    fields = {f"field_{number}": {"type": "string", "description": PROSE[:80]} for number in range(6)}
    schema = {"type": "object", "properties": fields, "required": ["field_1"]}
    return [
        {
            "type": "function",
            "function": {"name": f"tool_{number}", "description": PROSE[:300], "parameters": schema},
        }
        for number in range(count)
    ]


def _members(count: int) -> dict[str, int]:
    return {str(number): number for number in range(count)}


def _calls(mark: str, count: int) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": mark}]
    for number in range(count):
        function = {"name": "look", "arguments": f'{{"at": "{mark}{number}"}}'}
        call = {"id": f"call-{number}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call-{number}", "content": "found"})
    return {"messages": messages}


def _instructed(text: str) -> dict[str, Any]:
    return {"instructions": text, "input": "Name a river."}


def _result(text: str) -> dict[str, Any]:
    called = _calls("", 1)["messages"]
    return {"messages": [*called[:-1], {**called[-1], "content": text}]}


KINDS = (
    Kind("a short chat", CHATS, lambda mark: _chat(mark + "Name a river.")),
    Kind("one text of 1 MB", CHATS, lambda mark: _chat(mark + (PROSE * 9)[:1_000_000])),
    Kind("one text of 4 MB", CHATS, lambda mark: _chat(mark + (PROSE * 36)[:4_000_000])),
    Kind("66 texts of 60 KB", CHATS, lambda mark: {"messages": _turns(mark, 66, 60_000)}),
    Kind("4,000 messages", CHATS, lambda mark: {"messages": _turns(mark, 4_000, 230)}),
    Kind("16,000 parts", CHATS, lambda mark: {"messages": _chat(_texts(mark, 4_000))["messages"] * 4}),
    Kind("1,000 tools", CHATS, lambda mark: _chat(mark, tools=_tools(1_000))),
    Kind("2,000 tool calls", CHATS, lambda mark: _calls(mark, 2_000)),
    Kind("an image of 20 MB", CHATS, lambda mark: _images(mark, 1, 15_000_000)),
    Kind("30 images of 600 KB", CHATS, lambda mark: _images(mark, 30, 450_000)),
    Kind("99,000 empty objects", CHATS, lambda mark: _chat(mark, metadata=[{}] * 99_000)),
    Kind("99,000 members", CHATS, lambda mark: _chat(mark, chat_template_kwargs=_members(99_000))),
    Kind("a member of 8 MB", CHATS, lambda mark: _chat(mark, user=(PROSE * 75)[:7_900_000])),
    Kind("a tool's result of 8 MB", CHATS, lambda mark: _result(mark + (PROSE * 75)[:7_900_000])),
    Kind("9,000 halves of characters", CHATS, lambda mark: _chat(mark + "\ud83d" * 9_000)),
    Kind("a response, 1 MB", RESPONSES, lambda mark: {"input": mark + (PROSE * 9)[:1_000_000]}),
    Kind("a response, 4,000 items", RESPONSES, lambda mark: {"input": _turns(mark, 4_000, 230)}),
    Kind("instructions of 8 MB", RESPONSES, lambda mark: _instructed(mark + (PROSE * 75)[:7_900_000])),
    Kind("1,000,000 token ids", COMPLETIONS, lambda mark: {"prompt": list(range(1_000_000))}),
)


# ------------------------------------------------------------------ the other process


def elsewhere(told: Connection) -> None:
    """Run an engine, tell its port, and send what comes: a port, a path, a body. None ends it."""

    async def main() -> None:
        server = await asyncio.start_server(Engine(WINDOW_TOKENS).serve, "127.0.0.1", 0, limit=1 << 20)
        told.send(server.sockets[0].getsockname()[1])
        while (work := await asyncio.to_thread(told.recv)) is not None:
            told.send(await asyncio.to_thread(_sent, *work))

    asyncio.run(main())


def _sent(port: int, path: str, body: bytes) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", path, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


# ------------------------------------------------------------------ this one


class Turns:
    """The longest times between two turns of a task, seconds: of CPU of this thread, and of the clock."""

    def __init__(self) -> None:
        """Have seen nothing."""
        self.cpu_s = self.wall_s = 0.0

    async def run(self) -> None:
        """Take turns until cancelled."""
        cpu, wall = time.thread_time(), time.perf_counter()
        while True:
            await asyncio.sleep(0)
            cpu_now, wall_now = time.thread_time(), time.perf_counter()
            self.cpu_s = max(self.cpu_s, cpu_now - cpu)
            self.wall_s = max(self.wall_s, wall_now - wall)
            cpu, wall = cpu_now, wall_now

    def taken(self) -> tuple[float, float]:
        """Return both, and begin anew."""
        found = self.cpu_s, self.wall_s
        self.cpu_s = self.wall_s = 0.0
        return found


def document(engine: int, vocab: Path) -> dict[str, Any]:
    """Return a configuration under which nothing is too long."""
    limits = {"knee_seqs": 999, "context_tokens": WINDOW_TOKENS, "kv_blocks": None}
    return {
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "tokenizer": {"vocab": str(vocab)},
        "backends": {
            "one": {
                "url": f"http://127.0.0.1:{engine}",
                "profile": "h100-tp1-light",
                "limits": limits,
                "quirks": {"remove": ["tool_markup_leaks"]},  # for which tools are asked for as a stream
            }
        },
        "pools": {"all": {"backends": ["one"], "gates": {"long_prefills": None, "prefill_s": None}}},
        "models": {"gemma-4": {"classes": [{"class": "all", "pools": ["all"]}]}},
    }


async def measure(gateway: Gateway, other: Connection, rounds: int) -> None:
    """Send a body of each kind in turns, and print what that did."""
    found: dict[str, list[tuple[float, float]]] = {kind.name: [] for kind in KINDS}
    sizes, marks = {}, map("{}. ".format, itertools.count(1))
    turns = Turns()
    async with gateway.running() as running, anyio.create_task_group() as tasks:
        memory.keep_freed(os.environ)
        memory.settle()
        tasks.start_soon(turns.run)
        port = int(running.url.rpartition(":")[2])
        await asyncio.sleep(2)  # until its backends are known
        for _ in range(rounds):
            for kind in KINDS:
                fields = {"model": "gemma-4", "max_tokens": 4, **kind.make(next(marks))}
                if kind.path == RESPONSES:
                    fields["max_output_tokens"] = fields.pop("max_tokens")
                body = json.dumps(fields).encode()
                sizes[kind.name] = len(body)
                await asyncio.sleep(0.01)  # the body was made in a turn, too
                turns.taken()
                await asyncio.to_thread(other.send, (port, kind.path, body))
                status = await asyncio.to_thread(other.recv)
                found[kind.name].append(turns.taken())
                if status != 200:
                    raise SystemExit(f"{kind.name}: the gateway answered {status}")
        tasks.cancel_scope.cancel()
    print("\n| body | bytes | CPU in one turn, ms | between turns, ms |")
    print("| --- | ---: | ---: | ---: |")
    for name, times in found.items():
        cpu_s, wall_s = (min(column) for column in zip(*times, strict=True))
        print(f"| {name} | {sizes[name]:,} | {1000 * cpu_s:.1f} | {1000 * wall_s:.1f} |")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=Path, help="a rank file or a tokenizer.json")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, ", end="")
    print(" ".join(platform.libc_ver()), f"load {os.getloadavg()[0]:.1f}")
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=elsewhere, args=(there,), daemon=True)
    process.start()
    with tempfile.TemporaryDirectory() as folder:
        vocab = options.vocab
        if vocab is None:
            made = runpy.run_path(str(Path(__file__).parents[1] / "tests" / "support" / "vocabulary.py"))
            vocab = Path(folder) / "tokenizer.json"
            vocab.write_text(json.dumps(made["gemma_like"]()))
        file = Path(folder) / "gateway.yaml"
        file.write_text(yaml.safe_dump(document(here.recv(), vocab.resolve())))
        gateway = Gateway(settings.load(file), os.environ)
        anyio.run(measure, gateway, here, options.rounds, backend_options={"use_uvloop": True})
    here.send(None)
    process.join()


if __name__ == "__main__":
    main()
