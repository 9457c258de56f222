"""Two gateways in front of one fleet, with a real Valkey between them, behave as one."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
import openai
import pytest
from openai import AsyncOpenAI
from support import clients
from support.redis_server import RedisServer, own_server
from support.site import Site, simulated, site

from gateway.core.health import State
from gateway.core.load import Load
from gateway.core.policy import TemplateCosts
from gateway.core.request import Prompt, Turn
from gateway.simulator import Fault, FaultOrder, Simulator, simulator
from gateway.store.fallback import FallbackLedger, Mode

HELLO: Any = [{"role": "user", "content": "Go on for ever."}]
PROSE = "Größere Straßenbrücken überspannen den Fluß. " * 60
DOCUMENT: Any = [{"role": "user", "content": "The river runs past the old mill. " * 3_000}]
LASTING: Any = {"max_tokens": 20_000, "stream": True, "extra_body": {"ignore_eos": True}}
SPEED = 10.0


@dataclass
class Pair:
    """Two gateways, the simulated servers behind both, and the server between them."""

    one: Site
    other: Site
    backends: Mapping[str, Simulator]
    valkey: RedisServer

    async def acquainted(self) -> None:
        """Wait until each has heard of the other."""
        await self.one.eventually(lambda: name(self.other) in heard_by(self.one))
        await self.other.eventually(lambda: name(self.one) in heard_by(self.other))


def ledger(site: Site) -> FallbackLedger:
    assert isinstance(site.gateway.ledger, FallbackLedger)
    return site.gateway.ledger


def name(site: Site) -> str:
    return ledger(site).owner


def heard_by(site: Site) -> Any:
    return site.gateway.peers.view()


def state(site: Site, backend: str) -> State:
    return site.gateway.fleet.statuses()[backend].state


@pytest.fixture
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with own_server("valkey-9", tmp_path_factory.mktemp("s")) as server:
        yield server


@pytest.fixture
def two_gateways(tmp_path: Path, valkey: RedisServer) -> Callable[..., Any]:
    """Return a function that runs two gateways in front of one fleet while its block runs."""

    @asynccontextmanager
    async def running(
        backends: dict[str, dict[str, Any]], classes: list[dict[str, Any]], **sections: Any
    ) -> AsyncIterator[Pair]:
        async with AsyncExitStack() as stack:
            options = simulated({name: told["profile"] for name, told in backends.items()}, speed=SPEED)
            fleet = {name: await stack.enter_async_context(simulator(one)) for name, one in options.items()}
            document = {
                "store": valkey.url,
                "pools": {name: [name] for name in backends},
                "backends": {name: {"url": fleet[name].url, **told} for name, told in backends.items()},
                "models": {"gemma-4": {"classes": classes}},
                **sections,
            }
            sites = []
            for folder in (tmp_path / "one", tmp_path / "other"):
                folder.mkdir()
                sites.append(await stack.enter_async_context(site(folder, fleet={}, **document)))
            pair = Pair(sites[0], sites[1], fleet, valkey)
            await pair.acquainted()
            yield pair

    return running


LIGHT = {"light-0": {"profile": "h100-tp1-light"}}
CHAT = [{"class": "short_chat", "pools": ["light-0"], "waiting": {"max_wait_s": 60}}]


async def failing(client: AsyncOpenAI, times: int) -> None:
    for _ in range(times):  # each another request: one that is sent again counts once
        with pytest.raises(openai.APIStatusError):
            await client.chat.completions.create(
                model="gemma-4", messages=[{"role": "user", "content": f"Hello, {uuid4()}."}], max_tokens=5
            )


async def test_a_backend_that_fails_through_one_gateway_is_ejected_at_the_other(two_gateways: Any) -> None:
    async with two_gateways(LIGHT, CHAT) as pair:
        pair.backends["light-0"].order(FaultOrder(Fault.ERROR, count=3))
        await failing(pair.one.openai(), 3)
        assert state(pair.one, "light-0") is State.EJECTED

        await pair.other.eventually(lambda: state(pair.other, "light-0") is State.EJECTED)

        status = pair.other.gateway.fleet.statuses()["light-0"]
        assert status.reason.startswith(f"seen by {name(pair.one)}: 3 failures")
        assert (status.served, status.failed) == (0, 0)
        async with clients.http(base_url=pair.other.admin_url) as operator:
            view = (await operator.get("/admin/replicas")).json()
            page = (await operator.get("/metrics")).text
        assert (view["mode"], view["replicas"], view["owner"]) == ("shared", 2, name(pair.other))
        assert view["others"][name(pair.one)]["verdicts"]["light-0"].startswith("3 failures")
        assert 'gateway_store_mode{mode="shared"} 1.0' in page
        assert "gateway_replicas 2.0" in page
        # Both let it back in, and neither takes the other's old word for a new one.
        for here in (pair.one, pair.other):
            await here.eventually(lambda here=here: state(here, "light-0") is State.PROBATION)
            await here.openai().chat.completions.create(model="gemma-4", messages=HELLO, max_tokens=5)
        for here in (pair.one, pair.other):
            assert here.gateway.fleet.statuses()["light-0"].ejections == 1


async def test_failures_through_two_gateways_add_up(two_gateways: Any) -> None:
    async with two_gateways(LIGHT, CHAT) as pair:
        pair.backends["light-0"].order(FaultOrder(Fault.ERROR, count=3))
        await failing(pair.one.openai(), 2)
        await pair.other.eventually(
            lambda: len(pair.other.gateway.fleet.statuses()["light-0"].recent_failures) == 2
        )
        await failing(pair.other.openai(), 1)

        for here in (pair.one, pair.other):
            await here.eventually(lambda here=here: state(here, "light-0") is State.EJECTED)


async def test_what_one_gateway_learned_of_counting_the_other_uses(two_gateways: Any) -> None:
    prompt = Prompt(turns=(Turn("user", (PROSE,)),))

    def count(site: Site) -> int:
        return site.gateway.estimator.estimate_now(prompt, TemplateCosts(), 100_000).tokens

    async with two_gateways(LIGHT, CHAT) as pair:
        before = count(pair.other)
        for _ in range(10):
            await pair.one.openai().chat.completions.create(
                model="gemma-4", messages=[{"role": "user", "content": PROSE}], max_tokens=1
            )
        learned = count(pair.one)
        assert learned != before

        await pair.other.eventually(lambda: count(pair.other) == learned)
        assert not pair.other.gateway.estimator.learned().ratios


async def test_a_key_that_floods_one_gateway_is_behind_at_the_other(two_gateways: Any) -> None:
    keys = {name: {"sha256": sha256(name.encode()).hexdigest()} for name in ("flood", "quiet")}
    backends = {"light-0": {"profile": "h100-tp1-light", "limits": {"knee_seqs": 1}}}
    async with two_gateways(backends, CHAT, keys=keys) as pair:
        flooding = pair.one.openai(api_key="flood")
        for _ in range(5):
            await flooding.chat.completions.create(model="gemma-4", messages=HELLO, max_tokens=50)
        running = await flooding.chat.completions.create(model="gemma-4", messages=HELLO, **LASTING)
        await anext(aiter(running))
        total = sum(pair.one.gateway.peers.facts().started.values())
        await pair.other.eventually(lambda: heard_by(pair.other)[name(pair.one)]["tokens_started"] == total)
        order: list[str] = []

        async def ask(key: str) -> None:
            await pair.other.openai(api_key=key).chat.completions.create(
                model="gemma-4", messages=HELLO, max_tokens=5
            )
            order.append(key)

        room = pair.other.gateway.pipeline.room
        async with anyio.create_task_group() as tasks:
            for number, key in enumerate(("flood", "quiet"), start=1):
                tasks.start_soon(ask, key)
                await pair.other.eventually(lambda number=number: len(room.line) == number)
            await running.close()
        assert order == ["quiet", "flood"]


async def test_a_document_that_waits_at_one_gateway_keeps_the_other_from_spilling(two_gateways: Any) -> None:
    backends = {
        "light-0": {"profile": "h100-tp1-light", "limits": {"knee_seqs": 1}},
        "push-0": {"profile": "h100-tp2-push"},
    }
    pools = {"light-0": ["light-0"], "push-0": {"backends": ["push-0"], "gates": {"long_seqs": 1}}}
    patience = {"waiting": {"max_wait_s": 60}}
    classes = [
        {
            "class": "long_document",
            "when": {"prompt_tokens": ">= 16000"},
            "pools": ["push-0"],
            "waiting": {"max_wait_s": 600},
        },
        {"class": "short_chat", "pools": ["light-0", "push-0"], **patience},
    ]
    async with two_gateways(backends, classes, pools=pools) as pair:
        one, other = pair.one.openai(), pair.other.openai()
        read = await one.chat.completions.create(model="gemma-4", messages=DOCUMENT, **LASTING)
        await anext(aiter(read))
        chatting = await other.chat.completions.create(model="gemma-4", messages=HELLO, **LASTING)
        await anext(aiter(chatting))

        async def ask(client: AsyncOpenAI, messages: Any, answered: list[str]) -> None:
            raw = await client.chat.completions.with_raw_response.create(
                model="gemma-4", messages=messages, max_tokens=5
            )
            answered.append(raw.headers["x-gateway-backend"])

        documents: list[str] = []
        chats: list[str] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, one, DOCUMENT, documents)
            await pair.other.eventually(
                lambda: pair.other.gateway.pipeline.room.line.long_waiting() == {"push-0": 1}
            )
            tasks.start_soon(ask, other, HELLO, chats)
            await pair.other.eventually(lambda: len(pair.other.gateway.pipeline.room.line) == 1)
            assert not chats
            await read.close()  # the document that waits at the one gateway starts, and ends
            await pair.other.eventually(lambda: bool(chats))

        assert (documents, chats) == (["push-0"], ["push-0"])
        await chatting.close()


async def test_without_valkey_each_goes_on_with_what_it_knows(two_gateways: Any) -> None:
    async with two_gateways(LIGHT, CHAT) as pair:
        pair.valkey.kill()
        for here in (pair.one, pair.other):
            await here.eventually(lambda here=here: ledger(here).mode is Mode.ALONE)
        pair.backends["light-0"].order(FaultOrder(Fault.ERROR, count=3))
        await failing(pair.one.openai(), 3)
        await pair.other.openai().chat.completions.create(model="gemma-4", messages=HELLO, max_tokens=5)
        assert state(pair.one, "light-0") is State.EJECTED
        assert state(pair.other, "light-0") is State.UP

        pair.valkey.start()
        for here in (pair.one, pair.other):
            await here.eventually(lambda here=here: ledger(here).mode is Mode.SHARED)
        await pair.one.eventually(lambda: state(pair.one, "light-0") is State.PROBATION)
        pair.backends["light-0"].order(FaultOrder(Fault.ERROR, count=1))
        await failing(pair.one.openai(), 1)
        await pair.other.eventually(lambda: state(pair.other, "light-0") is State.EJECTED)


async def test_a_gateway_that_is_gone_stops_counting(
    two_gateways: Any, tmp_path: Path, valkey: RedisServer
) -> None:
    async with two_gateways(LIGHT, CHAT) as pair:
        folder = tmp_path / "third"
        folder.mkdir()
        backends = {"light-0": {"url": pair.backends["light-0"].url, **LIGHT["light-0"]}}
        sections: Any = {
            "store": valkey.url,
            "pools": {"light-0": ["light-0"]},
            "backends": backends,
            "models": {"gemma-4": {"classes": CHAT}},
        }
        async with site(folder, fleet={}, **sections) as third:
            await pair.one.eventually(lambda: name(third) in heard_by(pair.one))

        await pair.one.eventually(lambda: name(third) not in heard_by(pair.one), within_s=40)

        assert name(pair.other) in heard_by(pair.one)


async def test_a_conversation_returns_to_its_backend_through_another_gateway(two_gateways: Any) -> None:
    replicas = {f"push-{number}": {"profile": "h100-tp2-push"} for number in range(2)}
    classes = [{"class": "chat", "pools": ["push"], "waiting": {"max_wait_s": 60}}]
    async with two_gateways(replicas, classes, pools={"push": list(replicas)}) as pair:
        busy = Load(seqs=20, share=500_000)
        slot = await pair.one.gateway.ledger.acquire("push-0", busy, Load(99, 10**6, 10**6, 99, 99, 10**6))
        said = await pair.one.openai().chat.completions.create(
            model="gemma-4", messages=DOCUMENT, max_tokens=5
        )
        await pair.one.gateway.ledger.release(slot)
        await pair.other.eventually(lambda: heard_by(pair.other)[name(pair.one)]["conversations"] == 1)
        answer = {"role": "assistant", "content": said.choices[0].message.content}
        more = [*DOCUMENT, answer, {"role": "user", "content": "And then?"}]
        asked = pair.other.openai().chat.completions.with_raw_response
        response = await asked.create(model="gemma-4", messages=more, max_tokens=5)

        assert response.headers["x-gateway-backend"] == "push-1"
        assert pair.backends["push-1"].host.engine.found_tokens > 10_000
