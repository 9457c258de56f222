"""The operator's side of jobs: gateways and workers as processes, a real store, the real command."""

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest
from support.processes import Process, config, running
from support.redis_server import RedisServer, binary

WITHIN_S = 60.0
REST = """
models: {{gemma-4: {{classes: [{{class: short_chat, pools: [light]}}]}}}}
health: {{interval_s: 0.2}}
jobs: {{work_in_serve: false, running_max: 1}}
shutdown: {{drain_s: {drain_s}}}
"""
ASK: dict[str, Any] = {"model": "gemma-4", "input": "Why is the sky blue?", "background": True}
LONG: dict[str, Any] = {**ASK, "max_output_tokens": 2_000, "extra_body": {"ignore_eos": True}}
ENDLESS: dict[str, Any] = {**ASK, "max_output_tokens": 20_000, "extra_body": {"ignore_eos": True}}
LANE = "gemma-4/short_chat"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "store"
    folder.mkdir()
    server = RedisServer(binary("valkey-9"), folder, keeps=True)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@dataclass
class World:
    """One simulated backend, and a configuration file for it.

    Attributes:
        file: The configuration file.
        stack: Where what was started ends.
    """

    file: Path
    stack: AsyncExitStack

    async def serve(self) -> "Serving":
        """Start a gateway that takes jobs in."""
        process = await self.stack.enter_async_context(running("serve", "--config", str(self.file)))
        url = (await process.wait_for(r"serves (http://\S+)/v1"))[1]
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        return Serving(process, await admin_of(process), await self.stack.enter_async_context(client))

    async def worker(self) -> "Working":
        """Start a worker."""
        process = await self.stack.enter_async_context(running("worker", "--config", str(self.file)))
        await process.wait_for("works jobs off")
        return Working(process, await admin_of(process))


@dataclass
class Working:
    """A worker, with its URL for operators."""

    process: Process
    admin: str

    async def get(self, path: str) -> httpx.Response:
        """Ask the admin port."""
        async with httpx.AsyncClient(base_url=self.admin, trust_env=False) as http:
            return await http.get(path)

    async def post(self, path: str) -> httpx.Response:
        """Order something of the admin port."""
        async with httpx.AsyncClient(base_url=self.admin, trust_env=False) as http:
            return await http.post(path)


@dataclass
class Serving(Working):
    """A gateway that takes jobs in."""

    openai: openai.AsyncOpenAI

    async def until(self, id: str, *statuses: str) -> Any:
        """Return a job once it has one of these statuses."""
        with anyio.fail_after(WITHIN_S):
            while True:
                job = await self.openai.responses.retrieve(id)
                if job.status in statuses:
                    return job
                await anyio.sleep(0.05)

    async def until_answered(self, id: str) -> None:
        """Return once a job's answer has begun."""
        with anyio.fail_after(WITHIN_S):
            async for event in await self.openai.responses.retrieve(id, stream=True):
                if event.type == "response.output_text.delta":
                    return


async def admin_of(process: Process) -> str:
    return (await process.wait_for(r"operators: (http://[^/\s]+)"))[1]


@asynccontextmanager
async def world(
    folder: Path, store: RedisServer | None, *, drain_s: int = 60, speed: int = 20
) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        arguments = ("simulate", "--profile", "h100-tp1-light", "--port", "0", "--speed", str(speed))
        engine = await stack.enter_async_context(running(*arguments))
        backend = (await engine.wait_for(r"(http://127\.0\.0\.1:\d+)"))[1]
        rest = REST.format(drain_s=drain_s)
        if store is not None:
            rest += f"store: {{url: '{store.url}'}}\n"
        backends = {"light-0": (backend, "h100-tp1-light")}
        yield World(config(folder, backends, {"light": ["light-0"]}, rest), stack)


# ------------------------------------------------------------------ workers of their own


@pytest.mark.parametrize("kept", ["in-a-store", "beside-the-gateway"])
async def test_a_gateway_takes_jobs_in_and_a_worker_works_them_off(
    tmp_path: Path, store: RedisServer, kept: str
) -> None:
    async with world(tmp_path, store if kept == "in-a-store" else None) as site:
        serving = await site.serve()
        job = await serving.openai.responses.create(**ASK, max_output_tokens=20)
        limits = (await serving.get("/admin/replicas")).json()
        assert (await serving.openai.responses.retrieve(job.id)).status == "queued"

        working = await site.worker()

        assert (await serving.until(job.id, "completed", "incomplete")).output_text
        assert limits["mode"] == "shared"
        assert (await working.get("/admin/replicas")).json()["mode"] == "shared"
        assert (await working.get("/readyz")).json()["ready"]
        for process in (working.process, serving.process):
            assert await process.end(signal.SIGTERM) == 0


async def test_a_worker_that_drains_finishes_what_it_answers(tmp_path: Path, store: RedisServer) -> None:
    async with world(tmp_path, store) as site:
        serving, working = await site.serve(), await site.worker()
        begun = await serving.openai.responses.create(**LONG)
        await serving.until_answered(begun.id)
        waits = await serving.openai.responses.create(**ASK, max_output_tokens=5)

        assert await working.process.end(signal.SIGTERM) == 0

        done = await serving.openai.responses.retrieve(begun.id)
        assert (done.status, done.usage.output_tokens if done.usage else 0) == ("incomplete", 2_000)
        assert (await serving.openai.responses.retrieve(waits.id)).status == "queued"
        await site.worker()
        await serving.until(waits.id, "completed", "incomplete")


@pytest.mark.parametrize("how", ["its-time-is-over", "a-second-signal"])
async def test_a_worker_that_must_end_gives_its_jobs_back(
    tmp_path: Path, store: RedisServer, how: str
) -> None:
    drain_s = 1 if how == "its-time-is-over" else 60
    async with world(tmp_path, store, drain_s=drain_s, speed=5) as site:
        serving, working = await site.serve(), await site.worker()
        job = await serving.openai.responses.create(**ENDLESS)
        await serving.until_answered(job.id)

        working.process.process.send_signal(signal.SIGTERM)
        await working.process.wait_for("draining: 1 jobs in flight")
        assert not (await working.get("/readyz")).json()["checks"]["not_draining"]
        assert await working.process.end(*[signal.SIGTERM] * (how == "a-second-signal")) == 0

        assert "ending with 1 jobs in flight" in working.process.output
        assert (await serving.openai.responses.retrieve(job.id)).status == "queued"
        await serving.openai.responses.cancel(job.id)


@pytest.mark.parametrize(
    ("rest", "arguments", "says"),
    [
        ("", (), "it has no `jobs`"),
        ("jobs: {}", (), "gateway.yaml:.*name a `store`, or write `work_in_serve: false`"),
        ("jobs: {work_in_serve: false}", ("--admin", "9091"), "--admin: write it as host:port"),
    ],
    ids=["no-jobs", "limits-of-its-own", "no-address"],
)
async def test_a_worker_that_could_not_work_says_why(
    tmp_path: Path, rest: str, arguments: tuple[str, ...], says: str
) -> None:
    models = "models: {gemma-4: {classes: [{class: short_chat, pools: [light]}]}}\n"
    backends = {"light-0": ("http://127.0.0.1:9", "h100-tp1-light")}
    file = config(tmp_path, backends, {"light": ["light-0"]}, models + rest)
    async with running("worker", "--config", str(file), *arguments) as process:
        await process.wait_for(f"error: .*{says}")
        assert await process.end() == 2
