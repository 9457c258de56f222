"""A whole gateway in this event loop, in front of simulated backends, over real sockets."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import anyio
import httpx
import yaml
from openai import AsyncOpenAI

from gateway import profiles, settings
from gateway.app import Gateway
from gateway.core.health import State
from gateway.core.load import Load
from gateway.ports import JobStore
from gateway.simulator import FaultOrder, Simulator, SimulatorOptions, simulator
from support import clients
from support.processes import LOOK_S
from support.redis_server import RedisServer

SPEED = 50.0
FLEET = {
    "light-0": "h100-tp1-light",
    "light-1": "h100-tp1-light",
    "push": "h100-tp2-push",
    "spark": "spark-nvfp4",
    "tpu": "tpu-v6e4-moe",
}
POLICY: Mapping[str, Any] = {
    "listen": "127.0.0.1:0",
    "admin": "127.0.0.1:0",
    "tokenizer": "approximate",
    "pools": {"light": ["light-0", "light-1"], "push": ["push"], "reasoning": ["tpu", "spark"]},
    "models": {
        "gemma-4": {
            "aliases": ["google/gemma-4-31B-it"],
            "classes": [
                {"class": "reasoning", "when": {"reasoning": True}, "pools": ["reasoning"]},
                {"class": "long_document", "when": {"prompt_tokens": ">= 16000"}, "pools": ["push"]},
                {"class": "short_chat", "pools": ["light", "push"]},
            ],
        }
    },
    "health": {"interval_s": 0.2},
    "timeouts": {"connect_s": 20},  # an engine of this very event loop is slow when the machine is
}


@dataclass
class Site:
    """A running gateway and its fleet.

    Attributes:
        gateway: The gateway itself, for looking inside.
        url, admin_url: Its base URLs.
        backends: The simulated servers by id.
        closing: Where clients are closed with it.
    """

    gateway: Gateway
    url: str
    admin_url: str
    backends: Mapping[str, Simulator]
    closing: AsyncExitStack

    @property
    def jobs(self) -> JobStore:
        """Where its jobs are kept."""
        assert self.gateway.jobs is not None
        return self.gateway.jobs.store

    def openai(self, **options: Any) -> AsyncOpenAI:
        """Return an unmodified SDK client that does not retry, so that a test sees each answer."""
        defaults = {"base_url": f"{self.url}/v1", "api_key": "unused", "max_retries": 0, "timeout": 60}
        client = clients.sdk(**{**defaults, **options})
        self.closing.push_async_callback(client.close)
        return client

    def http(self) -> httpx.AsyncClient:
        """Return a plain HTTP client for the gateway's URL."""
        return clients.http(base_url=self.url, timeout=60)

    async def eventually(self, condition: Callable[[], bool], within_s: float = 20.0) -> None:
        """Return once `condition()` holds."""
        with anyio.fail_after(within_s):
            while not condition():  # noqa: ASYNC110 - it is of many parts, none of which says when it changes
                await anyio.sleep(LOOK_S)

    def idle(self) -> bool:
        """Return whether nothing is in flight anywhere."""
        loads = self.gateway.ledger.loads().values()
        return all(load == Load() for load in loads) and not self.gateway.applications.serving.in_flight


@asynccontextmanager
async def site(
    folder: Path,
    *,
    fleet: Mapping[str, SimulatorOptions] | None = None,
    backend: Mapping[str, Any] | None = None,
    takes_chats: bool = True,
    **sections: Any,
) -> AsyncIterator[Site]:
    """Run the fleet and the gateway in front of it; `sections` replace those of `POLICY`.

    `backend` is configured for every one of the fleet. Without `takes_chats`, chats are ASGI requests.
    """
    fleet = simulated(FLEET) if fleet is None else fleet
    async with AsyncExitStack() as stack:
        backends = {
            name: await stack.enter_async_context(simulator(options)) for name, options in fleet.items()
        }
        document = {
            **POLICY,
            "backends": {
                name: {"url": server.url, "profile": fleet[name].profile.name, **(backend or {})}
                for name, server in backends.items()
            },
            **sections,
        }
        path = folder / "gateway.yaml"
        path.write_text(yaml.safe_dump(document))
        gateway = Gateway(settings.load(path), {})
        if not takes_chats:
            gateway.chats = None
        running = await stack.enter_async_context(gateway.running())
        await gateway.fleet.wait_for(
            lambda known: all(status.state is State.UP and status.served_models for status in known.values())
        )
        assert running.admin_url is not None
        closing = await stack.enter_async_context(AsyncExitStack())
        yield Site(gateway, running.url, running.admin_url, backends, closing)


@asynccontextmanager
async def jobs_site(
    folder: Path,
    store: RedisServer,
    *,
    fleet: Mapping[str, SimulatorOptions] | None = None,
    speed: float = 20.0,
    fault: FaultOrder | None = None,
    **sections: Any,
) -> AsyncIterator[Site]:
    """Run a gateway with jobs, two backends alike and one class, for callers with the keys "a" and "b"."""
    sections = {
        "pools": {"light": ["light-0", "light-1"]},
        "models": {"gemma-4": {"classes": [{"class": "short_chat", "pools": ["light"]}]}},
        "store": {"url": store.url},
        "jobs": {},
        "keys": {name: {"sha256": sha256(name.encode()).hexdigest()} for name in ("a", "b")},
        **sections,
    }
    if fleet is None:
        fleet = simulated(
            {name: "h100-tp1-light" for name in ("light-0", "light-1")}, speed=speed, fault=fault
        )
    async with site(folder, fleet=fleet, **sections) as running:
        yield running


def simulated(names: Mapping[str, str], **options: Any) -> dict[str, SimulatorOptions]:
    """Return options for simulated servers: backend id to profile name."""
    return {
        name: SimulatorOptions(profile=profiles.load(profile), **{"speed": SPEED, **options})
        for name, profile in names.items()
    }
