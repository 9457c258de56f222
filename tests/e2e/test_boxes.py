"""Two models, one memory, and a gateway that changes them: real sockets, real commands, a real store."""

import re
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx
import openai
import pytest
import yaml
from support import clients
from support.redis_server import own_server

from gateway import settings
from gateway.app import Gateway
from gateway.core import box
from gateway.core.box import State
from gateway.core.health import State as Health
from gateway.core.load import Load
from gateway.simulator import Boot, Box, BoxOptions, Fault, FaultOrder, simulated_box, spark_pair

SPEED = 300.0
WAITING = {"max_wait_s": 900, "ttft_target_s": 30}
SOON = {"jobs": 2, "max_wait_s": 1.0}
CHAT = {"messages": [{"role": "user", "content": "Tell me something."}], "max_tokens": 20}


@dataclass
class Boxed:
    """A gateway in front of a simulated box."""

    gateway: Gateway
    url: str
    admin_url: str
    machine: Box

    def box(self) -> Any:
        return self.gateway.boxes.snapshots()["spark"].box

    async def until(self, condition: Callable[[], bool], within_s: float = 40.0) -> None:
        with anyio.fail_after(within_s):
            while not condition():  # noqa: ASYNC110 - as in support/site.py
                await anyio.sleep(0.02)

    async def resident(self, name: str) -> None:
        await self.until(lambda: (self.box().state, self.box().backend) == (State.RESIDENT, name))

    async def ask(self, model: str, **body: Any) -> httpx.Response:
        async with clients.http(base_url=self.url, timeout=120) as client:
            return await client.post("/v1/chat/completions", json={"model": model, **CHAT, **body})

    def is_unharmed(self) -> bool:
        """Whether no two models ever met in the memory, and nobody was cut off."""
        return not self.machine.violations and not self.machine.cut


def by_request(machine: Box) -> Mapping[str, Any]:
    def call(name: str, what: str) -> Mapping[str, Any]:
        return {"method": "POST", "url": f"{machine.url}/models/{name}/{what}"}

    return {
        name: {"http": {"start": call(name, "start"), "stop": call(name, "stop?wait=true")}}
        for name in machine.models
    }


def by_command(machine: Box) -> Mapping[str, Any]:
    switch = [sys.executable, "-m", "gateway", "box-switch", "--control", machine.url]
    return {
        name: {"exec": {"start": [*switch, "start", name], "stop": [*switch, "--wait", "stop", name]}}
        for name in machine.models
    }


def by_sleep(machine: Box) -> Mapping[str, Any]:
    return {name: {"sleep": {}} for name in machine.models}


@asynccontextmanager
async def gateway_at(
    machine: Box,
    folder: Path,
    members: Mapping[str, Any],
    *,
    backend: Mapping[str, Any] | None = None,
    box: Mapping[str, Any] | None = None,
    **sections: Any,
) -> AsyncIterator[Boxed]:
    await anyio.Path(folder).mkdir(exist_ok=True)
    path = folder / "gateway.yaml"
    document = {
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "tokenizer": "approximate",
        "backends": {
            name: {"url": model.url, "profile": "spark-nvfp4", **(backend or {})}
            for name, model in machine.models.items()
        },
        "pools": {name: [name] for name in machine.models},
        "boxes": {
            "spark": {
                "default": "gemma",
                "residency_s": 0.1,
                "backends": {name: {**way, **SOON} for name, way in members.items()},
                **(box or {}),
            }
        },
        "models": {
            name: {"classes": [{"class": "work", "pools": [name], "waiting": WAITING}]}
            for name in machine.models
        },
        "health": {"interval_s": 0.1},
        **sections,
    }
    path.write_text(yaml.safe_dump(document))
    gateway = Gateway(settings.load(path), {})
    async with gateway.running() as running:
        assert running.admin_url is not None
        site = Boxed(gateway, running.url, running.admin_url, machine)
        yield site
        await gateway.applications.serving.drain()
        # That another gateway holds nothing any more is known a second later.
        await site.until(lambda: all(load == Load() for load in gateway.ledger.loads().values()))


@asynccontextmanager
async def boxed(folder: Path, **options: Any) -> AsyncIterator[Boxed]:
    async with (
        simulated_box(BoxOptions(spark_pair(speed=SPEED), resident="gemma", **options)) as machine,
        gateway_at(machine, folder, by_request(machine)) as site,
    ):
        await site.resident("gemma")
        yield site


async def test_an_empty_box_boots_its_default_and_then_whatever_is_wanted(tmp_path: Path) -> None:
    async with (
        simulated_box(BoxOptions(spark_pair(speed=SPEED))) as machine,
        gateway_at(machine, tmp_path, by_request(machine)) as site,
    ):
        # It waits for the boot, like everybody who wants a model that is out.
        answer = await site.ask("gemma")
        assert (answer.status_code, answer.headers["x-gateway-backend"]) == (200, "gemma")

        answers: list[httpx.Response] = []

        async def ask(model: str) -> None:
            answers.append(await site.ask(model))

        async with anyio.create_task_group() as tasks:
            for model in ("qwen", "gemma", "qwen", "gemma", "qwen"):
                tasks.start_soon(ask, model)
        assert [answer.status_code for answer in answers] == [200] * 5, [answer.text for answer in answers]
        assert {answer.headers["x-gateway-backend"] for answer in answers} == {"gemma", "qwen"}
        assert site.is_unharmed()


async def test_nobody_is_cut_off_by_a_swap(tmp_path: Path) -> None:
    async with boxed(tmp_path) as site:
        ended: list[tuple[str, httpx.Response]] = []

        async def ask(model: str, **body: Any) -> None:
            ended.append((model, await site.ask(model, **body)))

        async with anyio.create_task_group() as tasks:
            # 600 tokens take 0.3 s here, and the swap is wanted at once.
            tasks.start_soon(lambda: ask("gemma", max_tokens=600, min_tokens=600))
            await site.until(lambda: site.gateway.ledger.load("gemma").seqs == 1)
            tasks.start_soon(ask, "qwen")
            tasks.start_soon(ask, "qwen")
        assert [name for name, _ in ended] == ["gemma", "qwen", "qwen"]
        assert ended[0][1].json()["usage"]["completion_tokens"] == 600
        assert site.box().backend == "qwen"
        async with clients.http(base_url=site.admin_url) as admin:
            page = (await admin.get("/metrics")).text
        assert re.search(r'gateway_box_swaps_total\{backend="qwen",box="spark",cause="(jobs|age)"\} 1', page)
        assert 'gateway_box_boot_seconds{backend="qwen",box="spark"}' in page
        assert site.is_unharmed()


async def test_operators_see_what_decides_and_what_comes_next(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        machine = await stack.enter_async_context(
            simulated_box(BoxOptions(spark_pair(speed=SPEED), resident="gemma"))
        )
        ways = by_request(machine)
        box = {"backends": {name: {**way, "jobs": 2, "max_wait_s": 60} for name, way in ways.items()}}
        site = await stack.enter_async_context(gateway_at(machine, tmp_path, ways, box=box))
        admin = await stack.enter_async_context(clients.http(base_url=site.admin_url))
        await site.resident("gemma")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(site.ask, "qwen")
            await site.until(lambda: bool(site.gateway.boxes.snapshots()["spark"].plan.target))
            spark = (await admin.get("/admin/boxes")).json()["spark"]
            page = (await admin.get("/metrics")).text
            backends = (await admin.get("/admin/backends")).json()
            tasks.cancel_scope.cancel()
        assert (spark["state"], spark["backend"]) == ("resident", "gemma")
        assert (spark["next"]["cause"], spark["next"]["backend"]) == ("age", "qwen")
        assert 0 < spark["next"]["in_s"] <= 60
        assert spark["waiting"]["qwen"]["requests"] == 1
        assert spark["switched_by_this_gateway"]
        assert 'gateway_box_state{box="spark",state="resident"} 1.0' in page
        assert 'gateway_box_waiting{backend="qwen",box="spark"} 1.0' in page
        assert 'gateway_box_swap_planned{backend="qwen",box="spark",cause="age"} 1.0' in page
        assert 'gateway_class_served{model="qwen",traffic_class="work"} 1.0' in page
        # Its port is closed on purpose: that is neither booting nor a fault.
        assert (backends["qwen"]["state"], backends["qwen"]["last_error"]) == ("out", "")


async def test_a_model_that_answers_nonsense_never_gets_a_request(tmp_path: Path) -> None:
    async with boxed(tmp_path, boots={"qwen": [Boot.WRONG_TEXT]}) as site:
        async with anyio.create_task_group() as tasks:
            answers: list[httpx.Response] = []

            async def ask() -> None:
                answers.append(await site.ask("qwen"))

            tasks.start_soon(ask)
            tasks.start_soon(ask)
        assert [answer.status_code for answer in answers] == [503, 503]
        assert "canary failed: expected '42', it said" in site.box().quarantine["qwen"].reason
        # It is not tried again, and the other one serves.
        await site.resident("gemma")
        assert (await site.ask("qwen")).status_code == 503
        assert (await site.ask("gemma")).status_code == 200
        status = site.gateway.fleet.statuses()["qwen"]
        assert (status.state.value, status.reason[:29]) == ("out", "in quarantine: canary failed:")
        async with clients.http() as http:
            page = (await http.get(f"{site.admin_url}/metrics")).text
        served = re.findall(r'gateway_class_served\{model="(\w+)",traffic_class="work"\} (\S+)', page)
        assert served == [("gemma", "1.0"), ("qwen", "0.0")]
        assert site.is_unharmed()


async def test_a_box_on_which_nothing_answers_correctly_is_not_ready(tmp_path: Path) -> None:
    """Its last model is left running, and answers every probe."""
    boots = {name: [Boot.WRONG_TEXT] for name in ("gemma", "qwen")}
    options = BoxOptions(spark_pair(speed=SPEED), boots=boots)
    async with (
        simulated_box(options) as machine,
        gateway_at(machine, tmp_path, by_request(machine)) as site,
        clients.http() as http,
    ):
        await site.until(lambda: site.box().state is State.FAILED)
        statuses = site.gateway.fleet.statuses
        await site.until(lambda: any(status.state is Health.UP for status in statuses().values()))
        ready = await http.get(f"{site.url}/readyz")
        backends = (await http.get(f"{site.admin_url}/admin/backends")).json().values()
        page = (await http.get(f"{site.admin_url}/metrics")).text

    assert (ready.status_code, ready.json()["checks"]["a_backend_is_up"]) == (503, False)
    (kept_out,) = [backend["kept_out"] for backend in backends if backend["state"] == "up"]
    assert kept_out.startswith("unhealthy: in quarantine: canary failed:")
    assert re.findall(r"gateway_backend_usable\{.*\} (\S+)", page) == ["0.0", "0.0"]


async def test_a_boot_that_never_answers_is_quarantine_and_the_other_one_serves(tmp_path: Path) -> None:
    options = BoxOptions(spark_pair(speed=SPEED), resident="gemma", boots={"qwen": [Boot.FAIL]})
    async with (
        simulated_box(options) as machine,
        gateway_at(machine, tmp_path, by_request(machine), box={"boot_budget_s": 3}) as site,
    ):
        await site.resident("gemma")
        assert (await site.ask("qwen")).status_code == 503
        assert site.box().quarantine["qwen"].reason == "not ready 3 s after its start: connection refused"
        await site.resident("gemma")
        assert site.is_unharmed()


async def test_a_wrong_engine_version_is_quarantine(tmp_path: Path) -> None:
    async with (
        simulated_box(BoxOptions(spark_pair(speed=SPEED), resident="gemma")) as machine,
        gateway_at(machine, tmp_path, by_request(machine), backend={"versions": "> 99"}) as site,
    ):
        await site.until(lambda: site.box().state is State.FAILED)
        assert "not > 99" in site.box().quarantine["gemma"].reason
        assert set(site.box().quarantine) == {"gemma", "qwen"}
        assert (await site.ask("gemma")).status_code == 503


async def test_a_renewed_key_is_used_for_the_next_swap(tmp_path: Path) -> None:
    models = spark_pair(speed=SPEED)
    keyed = {name: replace(model, api_key=f"key of {name}") for name, model in models.items()}
    key = tmp_path / "key"
    key.write_text("key of gemma")
    async with (
        simulated_box(BoxOptions(keyed, resident="gemma")) as machine,
        gateway_at(machine, tmp_path, by_request(machine), backend={"api_key_file": str(key)}) as site,
    ):
        await site.resident("gemma")
        key.write_text("key of qwen")
        assert not (await site.gateway.reloader.reread()).error

        assert (await site.ask("qwen")).status_code == 200
        assert not site.box().quarantine
        assert site.is_unharmed()


async def test_a_second_crash_is_quarantine(tmp_path: Path) -> None:
    async with boxed(tmp_path) as site:

        def crash() -> None:
            gemma = site.machine.models["gemma"].server
            assert gemma is not None
            gemma.order(FaultOrder(Fault.RESTART))

        crash()
        await site.until(lambda: bool(site.box().restarts))
        await site.resident("gemma")
        assert (await site.ask("gemma")).status_code == 200
        crash()
        await site.resident("qwen")
        assert "2 times within a day" in site.box().quarantine["gemma"].reason
        assert (await site.ask("qwen")).status_code == 200


@pytest.mark.parametrize("way", [by_command, by_sleep], ids=["commands", "sleep"])
async def test_the_other_ways_to_switch(tmp_path: Path, way: Callable[[Box], Mapping[str, Any]]) -> None:
    is_asleep = way is by_sleep
    pair = spark_pair(speed=SPEED, **({"sleep_mode": True} if is_asleep else {}))
    async with (
        simulated_box(BoxOptions(pair, resident="gemma")) as machine,
        gateway_at(machine, tmp_path, way(machine), box={"launch_record": "launches.json"}) as site,
    ):
        await site.resident("gemma")
        assert (await site.ask("qwen")).status_code == 200
        assert (await site.ask("gemma")).status_code == 200
        assert site.is_unharmed()
    assert (tmp_path / "launches.json").exists()


async def test_a_server_with_sleep_mode_that_died_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be woken, and its supervisor needs as long as a boot to have it up again."""
    monkeypatch.setattr(box, "COMMAND_PAUSES_S", (0.01, 0.01))
    async with (
        simulated_box(BoxOptions(spark_pair(speed=SPEED, sleep_mode=True), resident="gemma")) as machine,
        gateway_at(machine, tmp_path, by_sleep(machine)) as site,
    ):
        await site.resident("gemma")
        gemma = machine.models["gemma"].server
        assert gemma is not None
        gemma.order(FaultOrder(Fault.CRASH, for_s=1.5 * SPEED))
        await site.until(lambda: bool(site.box().restarts))
        await site.until(lambda: site.box().is_started)
        await site.resident("gemma")

        assert not site.box().quarantine
        assert (await site.ask("gemma")).status_code == 200
        assert site.is_unharmed()


async def test_a_gateway_that_starts_without_its_store_uses_what_is_in_and_switches_nothing(
    tmp_path: Path,
) -> None:
    async with (
        simulated_box(BoxOptions(spark_pair(speed=SPEED), resident="gemma")) as machine,
        gateway_at(machine, tmp_path, by_request(machine), store=f"unix://{tmp_path}/nobody") as site,
    ):
        await site.resident("gemma")
        assert (await site.ask("gemma")).status_code == 200
        assert not site.gateway.boxes.snapshots()["spark"].is_owner


async def test_of_two_gateways_one_switches_and_both_serve(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        store = stack.enter_context(own_server("valkey-9", tmp_path))
        machine = await stack.enter_async_context(
            simulated_box(BoxOptions(spark_pair(speed=SPEED), resident="gemma"))
        )
        sites = [
            await stack.enter_async_context(
                gateway_at(machine, tmp_path / name, by_request(machine), store=store.url)
            )
            for name in ("one", "two")
        ]
        for site in sites:
            await site.resident("gemma")
        owners = [site.gateway.boxes.snapshots()["spark"].is_owner for site in sites]
        assert sorted(owners) == [False, True]
        other = sites[owners.index(False)]

        # What waits at the one that does not switch counts too.
        assert (await other.ask("qwen")).status_code == 200
        for site in sites:
            await site.resident("qwen")
        for site in sites:
            assert (await site.ask("gemma")).status_code == 200
        assert sites[0].is_unharmed()
        assert len(machine.swaps) == 2


async def test_another_gateway_ends_the_swap_that_one_has_begun(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        store = stack.enter_context(own_server("valkey-9", tmp_path))
        machine = await stack.enter_async_context(
            simulated_box(BoxOptions(spark_pair(speed=SPEED / 3), resident="gemma"))
        )

        stop = anyio.Event()

        async def run_first(task_status: anyio.abc.TaskStatus[Boxed]) -> None:
            async with gateway_at(machine, tmp_path / "one", by_request(machine), store=store.url) as one:
                await one.resident("gemma")
                task_status.started(one)
                await stop.wait()

        tasks = await stack.enter_async_context(anyio.create_task_group())
        one = await tasks.start(run_first)
        two = await stack.enter_async_context(
            gateway_at(machine, tmp_path / "two", by_request(machine), store=store.url)
        )
        await two.resident("gemma")
        answers: list[httpx.Response] = []

        async def ask() -> None:
            answers.append(await two.ask("qwen"))

        async with anyio.create_task_group() as asking:
            asking.start_soon(ask)
            await one.until(lambda: one.box().state is State.BOOTING)
            stop.set()
        assert [answer.status_code for answer in answers] == [200]
        assert two.gateway.boxes.snapshots()["spark"].is_owner
        assert two.is_unharmed()
        assert len(machine.swaps) == 1


async def test_a_model_started_by_hand_in_mid_swap_gets_no_other_beside_it(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        store = stack.enter_context(own_server("valkey-9", tmp_path))
        machine = await stack.enter_async_context(
            simulated_box(BoxOptions(spark_pair(speed=SPEED / 3), resident="gemma"))
        )
        async with (
            gateway_at(machine, tmp_path / "one", by_request(machine), store=store.url) as one,
            anyio.create_task_group() as asking,
        ):
            await one.resident("gemma")
            asking.start_soon(one.ask, "qwen")
            await one.until(lambda: one.box().state is State.BOOTING and one.box().is_started)
            asking.cancel_scope.cancel()
        for order, name in ((machine.stop, "qwen"), (machine.start, "gemma")):
            order(name)
            await machine.models[name].settled()
        two = await stack.enter_async_context(
            gateway_at(machine, tmp_path / "two", by_request(machine), store=store.url)
        )
        await two.resident("gemma")
        assert (await two.ask("gemma")).status_code == 200
        assert two.is_unharmed()


async def test_a_box_serves_on_without_its_store_and_swaps_when_it_is_back(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        store = stack.enter_context(own_server("valkey-9", tmp_path))
        machine = await stack.enter_async_context(
            simulated_box(BoxOptions(spark_pair(speed=SPEED), resident="gemma"))
        )
        site = await stack.enter_async_context(
            gateway_at(machine, tmp_path / "one", by_request(machine), store=store.url)
        )
        await site.resident("gemma")
        store.kill()
        assert (await site.ask("gemma")).status_code == 200
        async with anyio.create_task_group() as tasks:
            answers: list[httpx.Response] = []

            async def ask() -> None:
                answers.append(await site.ask("qwen"))

            tasks.start_soon(ask)
            await site.until(
                lambda: (
                    site.gateway.boxes.snapshots()["spark"].waits_for == "the store, which does not answer"
                )
            )
            assert (await site.ask("gemma")).status_code == 200
            store.start()
        assert [answer.status_code for answer in answers] == [200]
        assert site.is_unharmed()


async def ended(client: openai.AsyncOpenAI, id: str) -> str | None:
    with anyio.fail_after(60):
        while True:
            job = await client.with_options(max_retries=5).responses.retrieve(id)
            if job.status not in ("queued", "in_progress"):
                return job.status
            await anyio.sleep(0.05)


async def test_jobs_that_wait_in_the_store_are_one_batch_and_one_swap(tmp_path: Path) -> None:
    """Two gateways, each with two of twelve jobs in its line, and a caller who wants the other model."""
    async with AsyncExitStack() as stack:
        store = stack.enter_context(own_server("valkey-9", tmp_path))
        machine = await stack.enter_async_context(
            simulated_box(BoxOptions(spark_pair(speed=SPEED / 3), resident="gemma"))
        )
        ways = by_request(machine)
        box = {
            "residency_s": 0.5,
            "backends": {
                "gemma": {**ways["gemma"], "jobs": 1, "max_wait_s": 0.1},
                "qwen": {**ways["qwen"], "jobs": 12, "max_wait_s": 900},
            },
        }
        sites = [
            await stack.enter_async_context(
                gateway_at(machine, tmp_path / name, ways, box=box, store=store.url, jobs={})
            )
            for name in ("one", "two")
        ]
        one = sites[0]
        for site in sites:
            await site.resident("gemma")
        client = await stack.enter_async_context(
            clients.sdk(base_url=f"{one.url}/v1", api_key="-", max_retries=0)
        )
        admin = await stack.enter_async_context(clients.http(base_url=one.admin_url))

        async def hand_over() -> str:
            job = await client.responses.create(
                model="qwen",
                input="Think it over.",
                background=True,
                max_output_tokens=1_200,
                extra_body={"ignore_eos": True},
            )
            return job.id

        ids = [await hand_over() for _ in range(11)]
        for site in sites:  # eleven in all, wherever one looks
            await site.until(
                lambda site=site: (
                    (  # type: ignore[misc]
                        site.gateway.boxes.snapshots()["spark"].wants["qwen"].count,
                        site.gateway.boxes.snapshots()["spark"].stored["qwen"].count,
                    )
                    == (4, 7)
                )
            )
        spark = (await admin.get("/admin/boxes")).json()["spark"]
        assert (spark["waiting"]["qwen"]["requests"], spark["waiting"]["qwen"]["stored_jobs"]) == (4, 7)
        assert (spark["state"], spark["next"]["cause"]) == ("resident", "age")
        assert 'gateway_box_stored_jobs{backend="qwen",box="spark"} 7.0' in (await admin.get("/metrics")).text
        last = await client.responses.retrieve(ids[-1])
        assert 306 < (last.model_extra or {})["queue"]["expected_start_s"] <= 900 + 306
        ids.append(await hand_over())
        await one.resident("qwen")

        async with anyio.create_task_group() as tasks:
            chats: list[httpx.Response] = []

            async def chat() -> None:
                chats.append(await one.ask("gemma"))

            tasks.start_soon(chat)
            for id in ids:
                assert await ended(client, id) == "incomplete"  # it is as long as it may be
            assert len(machine.swaps) == 1
            assert not chats
        assert [answer.status_code for answer in chats] == [200]
        assert [(swap.left, swap.came) for swap in machine.swaps] == [("gemma", "qwen"), ("qwen", "gemma")]
        stays = [stay.engine_s / (SPEED / 3) for stay in machine.residencies if stay.engine_s is not None]
        assert min(stays) >= 0.5
        assert one.is_unharmed()


async def test_a_model_of_a_box_is_drained_without_a_restart(tmp_path: Path) -> None:
    async with boxed(tmp_path) as site:
        document = yaml.safe_load((tmp_path / "gateway.yaml").read_text())

        async def drain(*, is_on: bool) -> None:
            document["backends"]["gemma"]["drain"] = is_on
            found = await site.gateway.reloader.put(yaml.safe_dump(document).encode())
            assert (found.error, found.changes.at_start) == ("", ())

        await drain(is_on=True)
        assert (await site.ask("gemma")).status_code == 503
        assert (await site.ask("qwen")).status_code == 200
        await drain(is_on=False)
        assert (await site.ask("gemma")).status_code == 200
        assert site.is_unharmed()
