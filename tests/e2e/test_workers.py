"""`serve --workers 2` as real processes: what they share, and what happens when one of all these ends."""

import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest
import yaml
from support import clients
from support.processes import Process, descendants, parent_of, running, until, wait_gone

WORKERS = 2
KNEE = 2
LEASE_S = 15.0
LASTING = 900  # tokens, some six seconds: longer than a busy machine takes to signal
CHAT: Any = [{"role": "user", "content": "Tell me of the river."}]


@dataclass
class Gateway:
    """A gateway with two workers in front of one simulated server.

    Attributes:
        process: The parent.
        config: Its configuration file.
        backend: Base URL of the simulated server.
        url: Base URL for applications.
        admin: Base URL for operators of each worker.
    """

    process: Process
    config: Path
    backend: str
    url: str = ""
    admin: tuple[str, ...] = ()

    async def serving(self) -> None:
        """Return once every worker serves and knows its backend."""
        announced = await self.process.wait_for(r"serves (http://\S+)/v1 with 2 workers\n")
        self.url = announced[1]
        for number in range(WORKERS):
            await self.process.wait_for(rf"operators: \S+ \(worker {number}\)")
        self.admin = tuple(re.findall(r"operators: (http://[^/\s]+)/admin/backends \(", self.process.output))
        for number in range(WORKERS):
            await self.knows_its_backend(number)

    async def knows_its_backend(self, number: int) -> None:
        """Return once a worker has seen that the backend is up."""
        async with clients.http() as client:

            async def is_up() -> bool:
                backends = (await client.get(f"{self.admin[number]}/admin/backends")).json()
                return bool(backends["light-0"]["state"] == "up")

            await until(is_up)

    def pid(self, number: int) -> int:
        """Return the process that is this worker now."""
        return int(re.findall(rf"worker {number} \(pid (\d+)\) accepts", self.process.output)[-1])

    def valkey(self) -> int:
        """Return the process of the embedded store."""
        (watcher,) = [
            pid for pid in descendants(self.process.process.pid) if b"embedded_watch" in command(pid)
        ]
        (server,) = descendants(watcher)
        return server

    @asynccontextmanager
    async def client_of(self, number: int) -> AsyncIterator[openai.AsyncOpenAI]:
        """Yield an SDK client whose one connection this worker has accepted."""
        async with AsyncExitStack() as stack:
            with anyio.fail_after(30):
                while True:
                    client = await stack.enter_async_context(self.client())
                    short = await client.chat.completions.with_raw_response.create(
                        model="gemma-4", messages=CHAT, max_tokens=1
                    )
                    if short.headers["x-request-id"] in await self.requests(number):
                        break
            yield client

    def client(self) -> openai.AsyncOpenAI:
        """Return an SDK client; asked one thing after the other, it keeps one connection.

        By itself it closes one after 5 s, and a busy machine takes as long to find eight: the next one may
        be accepted by another worker.
        """
        limits = type(openai.DEFAULT_CONNECTION_LIMITS)(keepalive_expiry=60)
        return clients.sdk(limits, base_url=f"{self.url}/v1", api_key="x", max_retries=0, timeout=120)

    async def name(self, number: int) -> str:
        """Return what the store calls a worker."""
        async with clients.http() as http:
            return str((await http.get(f"{self.admin[number]}/admin/replicas")).json()["owner"])

    async def version(self, number: int) -> str:
        """Return which configuration a worker has in force."""
        async with clients.http() as http:
            return (await http.get(f"{self.admin[number]}/admin/config")).headers["etag"]

    async def requests(self, number: int) -> dict[str, Any]:
        """Return the requests that a worker remembers, by id."""
        async with clients.http() as http:
            records = (await http.get(f"{self.admin[number]}/admin/requests")).json()
        return {record["id"]: record for record in records}


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def configured(folder: Path, backend: str, **sections: Any) -> Path:
    """Write a configuration with one backend that takes two requests at a time."""
    document = {
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "tokenizer": "approximate",
        "backends": {"light-0": {"url": backend, "profile": "h100-tp1-light", "limits": {"knee_seqs": KNEE}}},
        "pools": {"light": ["light-0"]},
        "models": {
            "gemma-4": {
                "classes": [{"class": "short_chat", "pools": ["light"], "waiting": {"max_wait_s": 60}}]
            }
        },
        "health": {"interval_s": 0.2},
        **sections,
    }
    path = folder / "gateway.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def serve(config: Path) -> tuple[str, ...]:
    return ("serve", "--config", str(config), "--workers", str(WORKERS))


@pytest.fixture
async def gateway(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Gateway]:
    """A gateway with `sections` of its own; the server behind it is `speed` times as fast as a real one."""
    speed, sections = request.param
    simulate = ("simulate", "--profile", "h100-tp1-light", "--port", "0", "--speed", str(speed))
    async with running(*simulate) as simulator:
        backend = (await simulator.wait_for(r"(http://127\.0\.0\.1:\d+)"))[1]
        config = configured(tmp_path, backend, **sections)
        async with running(*serve(config), own_group=True) as process:
            gateway = Gateway(process, config, backend)
            await gateway.serving()
            yield gateway


FAST = pytest.param((20, {}), id="20x")
STORELESS = pytest.param((20, {"store": "redis://127.0.0.1:9"}), id="20x, its store was never there")
REAL = pytest.param((1, {}), id="1x")


async def stream(client: openai.AsyncOpenAI, tokens: int) -> AsyncIterator[Any]:
    """Ask for so many tokens, and return the chunks once the first is there."""
    answer = await client.chat.completions.create(
        model="gemma-4",
        messages=CHAT,
        max_tokens=tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    chunks = aiter(answer)
    await anext(chunks)
    return chunks


async def finish(chunks: AsyncIterator[Any]) -> str | None:
    """Return why a stream ended, once it has."""
    reason = None
    async for chunk in chunks:
        reason = chunk.choices[0].finish_reason
    return reason


@pytest.mark.parametrize("gateway", [FAST, STORELESS], indirect=True)
async def test_both_serve_and_share_one_limit(gateway: Gateway) -> None:
    peak = 0
    done = anyio.Event()

    async def watch() -> None:
        nonlocal peak
        async with clients.http() as http:
            while not done.is_set():
                text = (await http.get(f"{gateway.backend}/metrics")).text
                counts = re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", text, re.M)
                peak = max(peak, int(sum(map(float, counts))))

    async def call(client: openai.AsyncOpenAI) -> None:
        await client.chat.completions.create(
            model="gemma-4", messages=CHAT, max_tokens=1_500, extra_body={"ignore_eos": True}
        )

    async with AsyncExitStack() as stack:
        callers = [
            await stack.enter_async_context(gateway.client_of(number % WORKERS)) for number in range(8)
        ]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            async with anyio.create_task_group() as calls:
                for client in callers:
                    calls.start_soon(call, client)
            done.set()

    assert peak == KNEE
    for number in range(WORKERS):
        # Those that wait do so with their own worker, until a place comes free through either.
        records = (await gateway.requests(number)).values()
        assert any(one["admitted_at"] - one["estimated_at"] > 0.2 for one in records)
        assert re.search(rf'"worker": {number}, "event": "request"', gateway.process.output)
    assert gateway.process.output.count(" serves http") == 1


@pytest.mark.parametrize("gateway", [REAL], indirect=True)
async def test_both_know_conversations_by_the_same_keys(gateway: Gateway) -> None:
    async with clients.http() as operator:
        for url in gateway.admin:
            told: list[bool] = []

            async def has_heard(url: str = url, told: list[bool] = told) -> bool:
                others = (await operator.get(f"{url}/admin/replicas")).json()["others"]
                told[:] = [one["hashes_alike"] for one in others.values()]
                return bool(told)

            await until(has_heard)
            assert told == [True]


@pytest.mark.parametrize("gateway", [REAL], indirect=True)
async def test_a_worker_that_is_killed_is_replaced_and_gives_back_what_it_held(gateway: Gateway) -> None:
    waited: list[Any] = []

    async def ask(client: openai.AsyncOpenAI) -> None:
        waited.append(await client.chat.completions.create(model="gemma-4", messages=CHAT, max_tokens=1))

    async with gateway.client_of(0) as survivor, AsyncExitStack() as stack:
        killed = gateway.pid(1)
        name = await gateway.name(1)
        held = [
            await stream(await stack.enter_async_context(gateway.client_of(1)), 10_000) for _ in range(KNEE)
        ]
        gateway.config.write_text("not read again while the gateway runs")
        with anyio.fail_after(LEASE_S + 10):
            async with anyio.create_task_group() as tasks:
                os.kill(killed, signal.SIGKILL)
                tasks.start_soon(ask, survivor)
                await gateway.process.wait_for(r"worker 1 ended \(killed by SIGKILL\)")
                await gateway.process.wait_for(rf"the slots of {name}, which this process replaces, are free")
        assert waited[0].choices[0].finish_reason == "length"
        for chunks in held:
            with pytest.raises((openai.APIError, httpx.HTTPError)):
                await finish(chunks)

    await gateway.process.wait_for(r"(?s)worker 1 ended.*worker 1 \(pid \d+\) accepts")
    assert gateway.pid(1) != killed
    new = re.findall(
        r"worker 1 \(pid \d+\) accepts connections, operators: (http:[^\s\"]+)", gateway.process.output
    )
    gateway.admin = (gateway.admin[0], new[-1])
    await gateway.knows_its_backend(1)
    async with gateway.client_of(1):
        pass
    assert await gateway.process.end(signal.SIGTERM) == 0


async def test_a_worker_that_is_replaced_has_the_configuration_of_the_others(tmp_path: Path) -> None:
    keys = [tmp_path / name for name in ("first.key", "second.key")]
    for key in keys:
        key.write_text("x")
    async with AsyncExitStack() as stack:
        simulate = ("simulate", "--profile", "h100-tp1-light", "--port", "0", "--speed", "20")
        simulator = await stack.enter_async_context(running(*simulate))
        backend = (await simulator.wait_for(r"(http://127\.0\.0\.1:\d+)"))[1]
        config = configured(tmp_path, backend, keys={"app": {"file": "first.key"}})
        process = await stack.enter_async_context(running(*serve(config), own_group=True))
        gateway = Gateway(process, config, backend)
        await gateway.serving()

        # The second section needs a restart: of all, not of one.
        configured(tmp_path, backend, keys={"app": {"file": "second.key"}}, requests={"max_body_bytes": 100})
        await process.wait_for(rf"(?s)(is in force \(file\).*){{{WORKERS}}}")
        keys[0].unlink()
        killed = gateway.pid(1)
        os.kill(killed, signal.SIGKILL)
        started = await process.wait_for(
            r"(?s)worker 1 ended.*worker 1 \(pid \d+\) accepts connections, operators: (http:[^\s\"]+)",
            within_s=20,
        )

        gateway.admin = (gateway.admin[0], started[1])
        assert await gateway.version(0) == await gateway.version(1)
        async with clients.http() as http:
            checked = [
                (await http.post(f"{admin}/admin/config/check", content=config.read_bytes())).json()
                for admin in gateway.admin
            ]
        assert [one["needs_restart"] for one in checked] == [["requests"]] * WORKERS
        async with gateway.client_of(1) as client:
            chat: Any = [{"role": "user", "content": "word " * 100}]
            answer = await client.chat.completions.create(model="gemma-4", messages=chat, max_tokens=1)
            assert answer.choices[0].finish_reason == "length"
        assert await process.end(signal.SIGTERM) == 0


async def test_a_worker_that_starts_hears_a_signal_to_reload(tmp_path: Path) -> None:
    backend = "http://127.0.0.1:9"
    config = configured(tmp_path, backend, reload={"watch": False})
    async with running(*serve(config), own_group=True) as process:
        gateway = Gateway(process, config, backend)
        await process.wait_for(r"serves http")
        before = set(descendants(process.process.pid))
        os.kill(gateway.pid(1), signal.SIGKILL)
        with anyio.fail_after(20):
            while not set(descendants(process.process.pid)) - before:  # noqa: ASYNC110 - it sends no event
                await anyio.sleep(0.005)
        configured(tmp_path, backend, reload={"watch": False}, allowed_origins=["https://new.example"])
        process.process.send_signal(signal.SIGHUP)
        await process.wait_for(r"is in force \(signal\)", within_s=20)
        started = await process.wait_for(
            r"(?s)worker 1 ended.*worker 1 \(pid \d+\) accepts connections, operators: (http:[^\s\"]+)",
            within_s=20,
        )
        other = await process.wait_for(r"operators: (http://[^/\s]+)/admin/backends \(worker 0\)")
        gateway.admin = (other[1], started[1])
        with anyio.fail_after(20):  # it may have been started with the new one, and then says nothing of it
            while await gateway.version(0) != await gateway.version(1):  # noqa: ASYNC110 - nor sends an event
                await anyio.sleep(0.005)
        assert await process.end(signal.SIGTERM) == 0


async def test_what_a_command_of_a_box_starts_hears_a_signal_to_stop(tmp_path: Path) -> None:
    """A shell cannot trap a signal that is ignored when it starts, nor can what it starts."""
    asked = {"start": ["true"], "stop": ["kill -TERM $$"], "shell": True}
    ports = {"light-0": 9, "light-1": 10}  # where nothing listens: all are stopped first
    config = configured(
        tmp_path,
        "http://127.0.0.1:9",
        backends={
            name: {"url": f"http://127.0.0.1:{port}", "profile": "h100-tp1-light"}
            for name, port in ports.items()
        },
        boxes={"spark": {"default": "light-0", "backends": {name: {"exec": asked} for name in ports}}},
    )
    async with running(*serve(config)) as process:
        await process.wait_for("cannot stop light-1 .*: exit status -15")


async def test_a_configuration_in_a_pipe_does_not_stop_a_signal(tmp_path: Path) -> None:
    written = configured(tmp_path, "http://127.0.0.1:9").read_bytes()
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    async with running(*serve(pipe)) as process:
        await anyio.to_thread.run_sync(pipe.write_bytes, written)
        await process.wait_for(r"serves http")
        process.process.send_signal(signal.SIGHUP)
        await process.wait_for("it is not a regular file|cannot be read")
        assert await process.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("gateway", [FAST], indirect=True)
async def test_a_connection_that_waits_to_be_accepted_outlives_every_worker(gateway: Gateway) -> None:
    pids = [gateway.pid(number) for number in range(WORKERS)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    async with await anyio.connect_tcp("127.0.0.1", int(gateway.url.rpartition(":")[2])) as connection:
        await connection.send(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        with anyio.fail_after(30):
            assert (await connection.receive()).startswith(b"HTTP/1.1 200")


def to_the_parent(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


def to_the_group(pid: int) -> None:
    """As the terminal does upon Ctrl-C."""
    os.killpg(pid, signal.SIGINT)


def to_everyone(pid: int) -> None:
    """As `pkill gemma-gateway` does, or a service manager that stops all processes of a service."""
    workers = [one for one in descendants(pid) if b"gateway.worker" in command(one)]
    assert len(workers) == WORKERS
    for one in (pid, *workers):
        os.kill(one, signal.SIGTERM)


def listens(pid: int, url: str) -> bool:
    """Return whether a process has the listening socket of `url` open (Linux only)."""
    port = f":{httpx.URL(url).port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(port) and row[3] == "0A"}
    assert sockets
    return any(os.readlink(one) in sockets for one in Path(f"/proc/{pid}/fd").iterdir())


@pytest.mark.parametrize("gateway", [REAL], indirect=True)
@pytest.mark.parametrize("stop", [to_the_parent, to_the_group, to_everyone])
async def test_a_signal_drains_every_worker(gateway: Gateway, stop: Callable[[int], None]) -> None:
    pid = gateway.process.process.pid
    everything = descendants(pid)
    async with AsyncExitStack() as stack:
        # To find a client for each may take as long as a stream.
        callers = [await stack.enter_async_context(gateway.client_of(one)) for one in range(WORKERS)]
        streams = [await stream(client, LASTING) for client in callers]
        stop(pid)
        for number in range(WORKERS):
            await gateway.process.wait_for(rf'"worker": {number}, "event": "draining", "in_flight": 1')
        async with clients.http() as http:
            assert (await http.get(f"{gateway.url}/readyz")).status_code == 503
        # When the last worker lets go of the port, a connection is refused: nobody else keeps it waiting.
        assert not listens(pid, gateway.url)
        assert [await finish(chunks) for chunks in streams] == ["length", "length"]

    assert await gateway.process.end() == 0
    await wait_gone(*everything)


@pytest.mark.parametrize("gateway", [REAL], indirect=True)
async def test_a_second_signal_ends_every_worker_at_once(gateway: Gateway) -> None:
    async with gateway.client_of(0) as one, gateway.client_of(1) as other:
        streams = [await stream(client, 10_000) for client in (one, other)]
        gateway.process.process.send_signal(signal.SIGTERM)
        await gateway.process.wait_for("draining: 1")
        assert await gateway.process.end(signal.SIGTERM, within_s=15) == 0
        for chunks in streams:
            with pytest.raises((openai.APIError, httpx.HTTPError)):
                await finish(chunks)


@pytest.mark.parametrize("gateway", [REAL], indirect=True)
@pytest.mark.parametrize("is_told", [False, True], ids=["in-service", "while-it-drains"])
async def test_workers_drain_when_their_parent_is_killed_and_nothing_is_left(
    gateway: Gateway, is_told: bool
) -> None:
    everything = descendants(gateway.process.process.pid)
    assert len(everything) == WORKERS + 2  # the store, and what watches it
    async with gateway.client_of(0) as client:
        chunks = await stream(client, LASTING)
        if is_told:
            gateway.process.process.send_signal(signal.SIGTERM)
            await gateway.process.wait_for(r'"worker": 0, "event": "draining", "in_flight": 1')
        gateway.process.process.kill()
        await gateway.process.process.wait()
        assert await finish(chunks) == "length"

    await wait_gone(*everything)


@pytest.mark.parametrize("gateway", [FAST], indirect=True)
async def test_the_embedded_store_comes_back(gateway: Gateway) -> None:
    os.kill(gateway.valkey(), signal.SIGKILL)

    await gateway.process.wait_for("the embedded store ended .status 137.")
    await gateway.process.wait_for("the embedded store runs again")
    for number in range(WORKERS):
        await gateway.process.wait_for(f'"worker": {number}, "event": "store_back')
        async with gateway.client_of(number) as client:
            await client.chat.completions.create(model="gemma-4", messages=CHAT, max_tokens=1)
    assert parent_of(parent_of(gateway.valkey())) == gateway.process.process.pid


async def test_what_no_worker_can_use_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "empty.tiktoken").touch()
    config = configured(tmp_path, "http://127.0.0.1:9", tokenizer={"vocab": "empty.tiktoken"})
    async with running(*serve(config)) as process:
        assert await process.end() == 2
        await process.wait_for("<ended>")

    assert len(re.findall("error: .*empty.tiktoken", process.output)) == 1
    assert process.output.count("error: ") == 1
    assert "serves http" not in process.output


async def test_what_one_worker_cannot_use_ends_all(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken:  # where nobody else is likely to be, one port below
        port = taken.getsockname()[1]
        config = configured(tmp_path, "http://127.0.0.1:9", admin=f"127.0.0.2:{port - 1}")
        async with running(*serve(config)) as process:
            assert await process.end() == 1
            await process.wait_for("<ended>")

    assert process.output.count(f"error: cannot listen on 127.0.0.2:{port}") == 1
    assert process.output.count("error: ") == 1
