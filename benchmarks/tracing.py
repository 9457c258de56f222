"""What tracing costs a request: CPU of the gateway's process with it and without, in one run.

    python benchmarks/tracing.py [--requests 3000] [--rounds 5]

One gateway per way of tracing runs before the same engine, a server in this process that answers at once.
Requests go to them in turns, so that what the machine does meanwhile is shared fairly; the CPU is what each
gateway's process has used, and the best of the rounds counts: neighbours only ever add. Spans are taken by a
receiver in this process, so that they are really encoded and sent.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

WAYS: Mapping[str, float | None] = {"off": None, "1 %": 0.01, "100 %": 1.0}
"""Share of requests that is kept, by the name of a way; None: no tracing at all."""

CONNECTIONS = 8
BODY = json.dumps(
    {"model": "gemma-4", "messages": [{"role": "user", "content": "Why is the sky blue? " * 10}]}
).encode()
ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "gemma-4",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "It scatters."}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 60, "completion_tokens": 4, "total_tokens": 64},
    }
).encode()
MODELS = b'{"object":"list","data":[{"id":"gemma-4","object":"model","max_model_len":32768}]}'
SAMPLE = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"


@dataclass
class Gateway:
    """A gateway that runs, and what its process has used per request, round by round."""

    process: subprocess.Popen[str]
    port: int
    cpu_us: list[float]

    def used_s(self) -> float:
        """Return the CPU seconds its process has used so far, in user and system."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Be an engine, and a receiver of spans: answer whatever is asked at once."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            if length:
                await reader.readexactly(int(length[1]))
            body = b"{}"
            for path, answer in ((b"/v1/models", MODELS), (b"/metrics", SAMPLE), (b"/chat/", ANSWER)):
                body = answer if path in head.split(b"\r\n", 1)[0] else body
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
        writer.close()


def start(folder: Path, name: str, engine: str, share: float | None) -> Gateway:
    """Run a gateway that traces so."""
    document = {
        "listen": "127.0.0.1:0",
        "admin": "off",
        "tokenizer": "approximate",
        "backends": {"light": {"url": engine, "profile": "h100-tp1-light"}},
        "pools": {
            "light": {"backends": ["light"], "gates": {"prefill_s": 3600}}
        },  # this engine reads at once
        "models": {
            "gemma-4": {"classes": [{"class": "chat", "pools": ["light"], "waiting": {"max_wait_s": 60}}]}
        },
    }
    if share is not None:
        document["telemetry"] = {"otlp": {"endpoint": engine}, "traces": {"share": share}}
    path = folder / f"{name.split()[0]}.yaml"
    path.write_text(yaml.safe_dump(document))
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway", "serve", "-c", str(path), "--log-level", "warning"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if match := re.search(r"serves http://127\.0\.0\.1:(\d+)", line):
            return Gateway(process, int(match[1]), [])
    raise SystemExit(f"the gateway that traces {name} did not start")


async def ask(port: int, count: int) -> None:
    """Send that many requests, one after the other on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
    )
    for _ in range(count):
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"a gateway answered {head.splitlines()[0].decode()}")
        length = re.search(rb"content-length: (\d+)", head.lower())
        assert length is not None
        await reader.readexactly(int(length[1]))
    writer.close()


async def measure(requests: int, rounds: int) -> Mapping[str, Gateway]:
    """Return the gateways with what they used."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 24)
    engine = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        gateways = {
            name: await asyncio.to_thread(start, Path(folder), name, engine, share)
            for name, share in WAYS.items()
        }
        try:
            for gateway in gateways.values():
                await asyncio.gather(*(ask(gateway.port, 50) for _ in range(CONNECTIONS)))  # to warm up
            for _ in range(rounds):
                for gateway in gateways.values():
                    before = gateway.used_s()
                    each = requests // CONNECTIONS
                    await asyncio.gather(*(ask(gateway.port, each) for _ in range(CONNECTIONS)))
                    gateway.cpu_us.append((gateway.used_s() - before) / (each * CONNECTIONS) * 1e6)
        finally:
            for gateway in gateways.values():
                gateway.process.terminate()
                gateway.process.wait()
    server.close()
    return gateways


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=3000, help="per gateway and round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    gateways = asyncio.run(measure(options.requests, options.rounds))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{options.requests} requests, {options.rounds} rounds, CPU of the gateway's process\n")
    print("| kept | us per request, best | rounds | against none |")
    print("|---|---|---|---|")
    none = min(gateways["off"].cpu_us)
    for name, gateway in gateways.items():
        best = min(gateway.cpu_us)
        shown = " ".join(f"{one:.0f}" for one in gateway.cpu_us)
        print(f"| {name} | {best:.0f} | {shown} | {best / none - 1:+.1%} |")


if __name__ == "__main__":
    main()
