"""A gateway before an engine in this process that answers at once, and its caller: shared by benchmarks."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"
_LENGTH = re.compile(rb"content-length: (\d+)")


class Engine:
    """Answers whatever is asked, chats only while `is_open`. What takes spans is answered, too."""

    def __init__(self, window_tokens: int) -> None:
        """Answer at once; `window_tokens` is what it says that it holds."""
        self.is_open = asyncio.Event()
        self.is_open.set()
        message = {"role": "assistant", "content": "It scatters."}
        answer = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "gemma-4",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 60, "completion_tokens": 4, "total_tokens": 64},
        }
        models = {
            "object": "list",
            "data": [{"id": "gemma-4", "object": "model", "max_model_len": window_tokens}],
        }
        self._answer = json.dumps(answer).encode()
        self._others = {b"/v1/models": json.dumps(models).encode(), b"/metrics": SAMPLE}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        with suppress(asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                path = head.split(b" ", 2)[1]
                length = _LENGTH.search(head.lower())
                left = int(length[1]) if length else 0
                while left:
                    data = await reader.read(left)
                    if not data:
                        return
                    left -= len(data)
                body = self._others.get(path, b"{}")
                if path in (b"/v1/chat/completions", b"/v1/completions"):
                    await self.is_open.wait()
                    body = self._answer
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()


@dataclass(frozen=True)
class Process:
    """A gateway that runs.

    Attributes:
        process: The process.
        port, admin_port: Where it listens; 0 for nowhere.
    """

    process: subprocess.Popen[str]
    port: int
    admin_port: int

    def end(self) -> None:
        """Stop it, and wait until it has."""
        self.process.terminate()
        self.process.wait()


def start(path: Path, document: Mapping[str, Any], program: Sequence[str] = ("gateway",)) -> Process:
    """Run a gateway with a configuration, which is written to `path`; `program`: its module, and arguments.

    Raises:
        SystemExit: it does not start.
    """
    path.write_text(yaml.safe_dump(dict(document)))
    process = subprocess.Popen(
        [sys.executable, "-m", *program, "serve", "-c", str(path), "--log-level", "warning"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stderr is not None
    admin = "" if document.get("admin") == "off" else r".*operators: http://[\d.]+:(\d+)"
    said = ""
    for line in process.stderr:
        said += line
        if found := re.search(r"serves http://[\d.]+:(\d+)" + admin, said, re.DOTALL):
            return Process(process, int(found[1]), int(found[2]) if admin else 0)
    raise SystemExit(f"the gateway did not start:\n{said}")


class Caller:
    """One connection to a gateway."""

    def __init__(self, port: int) -> None:
        """Connect to `port` with the first request."""
        self._port = port
        self._ends: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: bytes) -> None:
        """Send a chat, and take its answer.

        Raises:
            SystemExit: it is none.
        """
        if self._ends is None:
            self._ends = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._ends
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body)
        )
        writer.write(body)
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head.lower())
        answer = await reader.readexactly(int(length[1])) if length else b""
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"the gateway answered {head.splitlines()[0].decode()}: {answer[:300]!r}")

    def leave(self) -> None:
        """Close the connection."""
        if self._ends is not None:
            self._ends[1].close()
