"""Simulated servers for the tests of this folder: a small window, text only, fast."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest
from support import clients

from gateway.core.backends import Modalities
from gateway.core.profile import Profile
from gateway.profiles import load
from gateway.simulator import Simulator, SimulatorOptions, simulator

Raw = Callable[[Simulator, bytes], Awaitable[bytes]]


@pytest.fixture(scope="session")
def profile() -> Profile:
    light = load("h100-tp1-light")
    return replace(
        light,
        served_model="gemma-4-31b-it",
        capacity=replace(light.capacity, context_tokens=4096),
        modalities=Modalities(images_max=0, audios_max=0),
    )


@pytest.fixture
def options(profile: Profile) -> SimulatorOptions:
    return SimulatorOptions(profile=profile, speed=100)


@pytest.fixture
async def server(options: SimulatorOptions) -> AsyncIterator[Simulator]:
    async with simulator(options) as running:
        yield running


@pytest.fixture
async def client(server: Simulator) -> AsyncIterator[httpx.AsyncClient]:
    async with clients.http(base_url=server.url, timeout=10) as http:
        yield http


@pytest.fixture
def raw() -> Raw:
    """Return what a server answers to bytes on a fresh connection, up to its end."""

    async def exchange(server: Simulator, request: bytes) -> bytes:
        host, _, port = server.url.removeprefix("http://").rpartition(":")
        received = b""
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(request)
            try:
                while True:
                    received += await stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return received

    return exchange


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Return a wait for a condition that this event loop will bring about; it fails after 5 s."""

    async def wait(condition: Callable[[], bool]) -> None:
        with anyio.fail_after(5):
            while not condition():
                await anyio.lowlevel.checkpoint()

    return wait


def _chat(text: object = "Name a river.", **members: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **members}


def _events(body: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.fixture
def chat() -> Callable[..., dict[str, Any]]:
    """Return the body of a chat request with the given text and members."""
    return _chat


@pytest.fixture
def events() -> Callable[[str], list[Any]]:
    """Return the events of a stream's body, decoded; the last one is the string "[DONE]"."""
    return _events
