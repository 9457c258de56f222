"""What callers see, through the unmodified Node SDK: a gateway with jobs, a real store, simulated backends.

The checks are in the .mjs files beside this one: a file is a group, an exported function a check. Each is a
test here. A group runs in one process, when its first test asks for it.
"""

import json
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import pytest
from anyio.abc import SocketStream
from support.node_sdk import SDKS, NodeSdk, groups
from support.raw_server import answer_of, raw_server
from support.redis_server import own_server
from support.site import simulated, site

CHECKS = [(group, check) for group, checks in groups().items() for check in checks]
SECRET = "whsec_" + b64encode(b"a" * 24).decode()
LIGHT = {"light-0": "h100-tp1-light", "light-1": "h100-tp1-light"}


@dataclass
class Bench:
    """A running site, and what the checks against it have said so far."""

    node: NodeSdk
    facts: Mapping[str, Any]
    said: dict[tuple[str, str], Mapping[str, str | None]] = field(default_factory=dict)
    failed: set[tuple[str, str]] = field(default_factory=set)

    async def outcome(self, sdk: str, group: str, check: str) -> str | None:
        """Return what a check threw, or None. A group that failed is run once more if asked again."""
        if (sdk, group) not in self.said:
            try:
                self.said[sdk, group] = await self.node.run(sdk, group, self.facts)
            except AssertionError as failure:
                self.said[sdk, group] = dict.fromkeys(groups()[group], str(failure))
        thrown = self.said[sdk, group][check]
        if thrown is not None and (sdk, group) not in self.failed:
            self.failed.add((sdk, group))
            del self.said[sdk, group]
        return thrown


@pytest.fixture(scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    folder = tmp_path_factory.mktemp("node")
    node = NodeSdk.found(folder)
    (folder / "ops.secret").write_text(SECRET)
    async with AsyncExitStack() as stack:
        store = stack.enter_context(own_server("valkey-9", tmp_path_factory.mktemp("store"), keeps=True))
        url = await stack.enter_async_context(receiver())
        patient = {"class": "chat", "pools": ["slow"], "waiting": {"keep_alive_after_s": 0.1}}
        running = await stack.enter_async_context(
            site(
                folder,
                fleet=simulated(LIGHT)
                | simulated({"slow": "h100-tp1-light"}, speed=2.0, prefix_caching=False),
                pools={"light": list(LIGHT), "slow": ["slow"]},
                models={
                    "gemma-4": {
                        "aliases": ["google/gemma-4-31B-it"],
                        "classes": [{"class": "short_chat", "pools": ["light"]}],
                    },
                    "patient": {"classes": [patient]},
                    "queued": {"classes": [{"class": "queued", "pools": ["light"], "queue": {}}]},
                },
                keys={name: {"sha256": sha256(name.encode()).hexdigest()} for name in ("a", "b")},
                store={"url": store.url},
                jobs={"attempts_max": 8},  # what is made to break off may do so again before all have begun
                webhooks={"ops": {"url": url, "secret_file": "ops.secret", "allow_private": True}},
            )
        )
        facts = {
            "url": running.url,
            "backends": [running.backends[name].url for name in LIGHT],
            "webhooks": url,
            "webhook_secret": SECRET,
        }
        yield Bench(node, facts)
        await running.eventually(running.idle)


@asynccontextmanager
async def receiver() -> AsyncIterator[str]:
    """Run an endpoint for webhooks, and yield its URL: what it was sent it says to whoever GETs it."""

    async def answer(stream: SocketStream, number: int) -> None:
        told = b""
        if server.requests[number][0].startswith(b"GET"):
            told = json.dumps([_sent(*request) for request in server.requests]).encode()
        await stream.send(answer_of(told))

    async with raw_server(answer) as server:
        yield server.url


def _sent(head: bytes, body: bytes) -> Mapping[str, Any]:
    lines = [line.split(": ", 1) for line in head.decode().split("\r\n")[1:]]
    return {"headers": {name.lower(): value for name, value in lines}, "body": body.decode()}


@pytest.mark.parametrize("sdk", SDKS)
@pytest.mark.parametrize(("group", "check"), CHECKS, ids=[f"{group}-{check}" for group, check in CHECKS])
async def test_node_sdk(bench: Bench, sdk: str, group: str, check: str) -> None:
    thrown = await bench.outcome(sdk, group, check)
    if thrown is not None:
        pytest.fail(thrown, pytrace=False)


async def test_a_check_that_throws_is_told_of(bench: Bench) -> None:
    """Else all of the above would mean nothing."""
    lines = [
        "export async function one() { throw new Error('so be it'); }",
        "export async function other() {}",
    ]
    (bench.node.folder / "thrown.mjs").write_text("\n".join(lines))
    said = await bench.node.run(SDKS[0], "thrown", bench.facts)

    assert "so be it" in (said["one"] or "")
    assert said["other"] is None
