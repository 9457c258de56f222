"""A box: models that share one memory. Over real sockets."""

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest
from support import clients
from support.processes import is_refused

from gateway.core.profile import Profile
from gateway.simulator import (
    Boot,
    Box,
    BoxOptions,
    Fault,
    FaultOrder,
    SimulatorOptions,
    State,
    simulated_box,
    spark_pair,
)

Chat = Callable[..., dict[str, Any]]
Events = Callable[[str], list[Any]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
URL = "/v1/chat/completions"
BOOT_S = 30.0
SPEED = 200.0


def pair(profile: Profile, **options: Any) -> dict[str, SimulatorOptions]:
    common = SimulatorOptions(profile, **{"speed": SPEED, "boot_s": BOOT_S, **options})
    return {"gemma": common, "qwen": replace(common, served_model="qwen")}


@pytest.fixture
async def box(profile: Profile) -> AsyncIterator[Box]:
    async with simulated_box(BoxOptions(pair(profile))) as running:
        yield running


@pytest.fixture
async def control(box: Box) -> AsyncIterator[httpx.AsyncClient]:
    async with clients.http(base_url=box.url, timeout=10) as client:
        yield client


async def ask(box: Box, name: str, body: dict[str, Any]) -> httpx.Response:
    async with clients.http(timeout=20) as client:
        return await client.post(box.models[name].url + URL, json=body)


async def order(control: httpx.AsyncClient, what: str, name: str, *, wait: bool = True) -> httpx.Response:
    return await control.post(f"/models/{name}/{what}", params={"wait": str(wait).lower()})


async def states(control: httpx.AsyncClient) -> dict[str, str]:
    models = (await control.get("/models")).json()["models"]
    return {model["name"]: model["state"] for model in models}


# ------------------------------------------------------------------ one at a time


async def test_nothing_runs_until_it_is_started(box: Box, control: httpx.AsyncClient) -> None:
    assert await states(control) == {"gemma": "stopped", "qwen": "stopped"}
    assert [await is_refused(model.url) for model in box.models.values()] == [True, True]


async def test_a_model_boots_in_its_time_and_refuses_until_then(
    box: Box, control: httpx.AsyncClient, chat: Chat
) -> None:
    before = anyio.current_time()
    taken = await order(control, "start", "gemma", wait=False)
    assert (taken.status_code, taken.json()["state"]) == (202, "booting")
    assert await is_refused(box.models["gemma"].url)
    done = await order(control, "start", "gemma")

    assert (done.status_code, done.json()["state"]) == (200, "running")
    assert anyio.current_time() - before >= 0.9 * BOOT_S / SPEED
    assert (await ask(box, "gemma", chat(max_tokens=5))).json()["usage"]["completion_tokens"] == 5
    assert done.json()["starts"] == 1


async def test_a_swap_one_after_the_other(box: Box, control: httpx.AsyncClient, chat: Chat) -> None:
    for what, name in [
        ("start", "gemma"),
        ("stop", "gemma"),
        ("start", "qwen"),
        ("stop", "qwen"),
        ("start", "gemma"),
    ]:
        assert (await order(control, what, name)).status_code == 200
    counted = (await control.get("/box")).json()

    assert await states(control) == {"gemma": "running", "qwen": "stopped"}
    assert (await ask(box, "gemma", chat(max_tokens=5))).status_code == 200
    assert await is_refused(box.models["qwen"].url)
    assert (counted["violations"], counted["cut_requests"]) == (0, 0)
    assert [(swap["left"], swap["came"]) for swap in counted["swaps"]] == [
        ("gemma", "qwen"),
        ("qwen", "gemma"),
    ]
    assert all(swap["took_s"] >= BOOT_S for swap in counted["swaps"])
    stays = counted["residencies"]
    assert [stay["model"] for stay in stays] == ["gemma", "qwen", "gemma"]
    assert all(before["until_s"] <= after["from_s"] for before, after in itertools.pairwise(stays))
    assert stays[-1]["until_s"] is None
    assert box.models["qwen"].resident_s == pytest.approx(stays[1]["engine_s"])


async def test_the_restarted_model_is_a_new_process(box: Box, control: httpx.AsyncClient, chat: Chat) -> None:
    await order(control, "start", "gemma")
    await ask(box, "gemma", chat(max_tokens=5))
    first = box.models["gemma"].server
    await order(control, "stop", "gemma")
    await order(control, "start", "gemma")
    second = box.models["gemma"].server

    assert first is not None
    assert second is not None
    assert second.host.tally.started_wall_s > first.host.tally.started_wall_s
    assert second.generated_tokens == 0


@pytest.mark.parametrize("wait", [True, False])
async def test_orders_that_change_nothing_are_fine(control: httpx.AsyncClient, wait: bool) -> None:
    assert (await order(control, "stop", "gemma", wait=wait)).status_code == 200
    await order(control, "start", "gemma")
    again = await order(control, "start", "gemma", wait=wait)

    assert (again.status_code, again.json()["state"], again.json()["starts"]) == (200, "running", 1)


async def test_a_boot_can_be_stopped(box: Box, control: httpx.AsyncClient) -> None:
    await order(control, "start", "gemma", wait=False)
    assert (await order(control, "stop", "gemma")).json()["state"] == "stopped"
    assert (await order(control, "start", "qwen")).json()["state"] == "running"
    assert box.violations == 0
    assert await is_refused(box.models["gemma"].url)


# ------------------------------------------------------------------ one memory


async def test_a_second_model_kills_both(
    box: Box, control: httpx.AsyncClient, chat: Chat, until: Until
) -> None:
    await order(control, "start", "gemma")
    broken: list[httpx.HTTPError] = []

    async def asking() -> None:
        try:
            await ask(box, "gemma", chat(max_tokens=4_000, ignore_eos=True))
        except httpx.HTTPError as error:
            broken.append(error)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(asking)
        await until(lambda: box.models["gemma"].server.generated_tokens > 5)  # type: ignore[union-attr]
        refused = await order(control, "start", "qwen")

    assert (refused.status_code, refused.json()["state"]) == (500, "failed")
    assert refused.json()["reason"] == "out of memory: qwen needed it while gemma held it"
    assert len(broken) == 1
    assert await states(control) == {"gemma": "failed", "qwen": "failed"}
    assert [await is_refused(model.url) for model in box.models.values()] == [True, True]
    counted = (await control.get("/box")).json()
    assert (counted["violations"], counted["cut_requests"]) == (1, 1)
    assert [(seen["model"], seen["held_by"], seen["by"]) for seen in counted["violation_log"]] == [
        ("qwen", ["gemma"], "start")
    ]
    assert [model.kills for model in box.models.values()] == [1, 1]


@pytest.mark.parametrize("state", [State.BOOTING, State.STOPPING])
async def test_a_model_holds_the_memory_while_it_comes_and_goes(
    profile: Profile, until: Until, state: State
) -> None:
    async with simulated_box(BoxOptions(pair(profile), stop_s=10_000)) as box:
        box.start("gemma")
        if state is State.STOPPING:
            await box.models["gemma"].settled()
            box.stop("gemma")
        assert box.models["gemma"].state is state
        box.start("qwen")

        assert [model.state for model in box.models.values()] == [State.FAILED, State.FAILED]
        assert box.violations == 1


async def test_after_a_kill_a_model_can_be_started_again(
    box: Box, control: httpx.AsyncClient, chat: Chat
) -> None:
    await order(control, "start", "gemma")
    await order(control, "start", "qwen")
    again = await order(control, "start", "qwen")

    assert (again.status_code, again.json()["starts"], again.json()["kills"]) == (200, 2, 1)
    assert (await ask(box, "qwen", chat(max_tokens=5))).status_code == 200
    assert (await control.get("/box")).json()["violations"] == 1


async def test_a_model_started_in_the_moment_of_its_death_lives(
    profile: Profile, chat: Chat, until: Until
) -> None:
    async with simulated_box(BoxOptions(pair(profile, boot_s=0), resident="gemma")) as box:
        gemma = box.models["gemma"]
        first = gemma.server
        assert first is not None

        async def asking() -> None:
            with pytest.raises(httpx.HTTPError):
                await ask(box, "gemma", chat(max_tokens=4_000, ignore_eos=True))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(asking)
            await until(lambda: first.generated_tokens > 5)
            box.start("qwen")
            box.start("gemma")
            assert await gemma.settled() is State.RUNNING
        assert (await ask(box, "gemma", chat(max_tokens=5))).status_code == 200

        assert gemma.server is not None
        assert gemma.server.generated_tokens == 5
        assert gemma.cut == 1


async def test_a_stop_at_any_moment_of_a_boot_stops_it(profile: Profile) -> None:
    async with simulated_box(BoxOptions(pair(profile, boot_s=0), stop_s=0)) as box:
        for turns in range(20):
            box.start("gemma")
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            box.stop("gemma")
            assert await box.models["gemma"].settled() is State.STOPPED
            assert await is_refused(box.models["gemma"].url)
    assert box.models["gemma"].server is None


async def test_a_stopping_model_cannot_be_started(profile: Profile) -> None:
    async with simulated_box(BoxOptions(pair(profile), resident="gemma", stop_s=10_000)) as box:
        async with clients.http(base_url=box.url) as control:
            assert (await order(control, "stop", "gemma", wait=False)).json()["state"] == "stopping"
            refused = await order(control, "start", "gemma")

    assert (refused.status_code, refused.json()) == (409, {"detail": "gemma is being stopped"})


async def test_three_models_share_it_too(profile: Profile) -> None:
    models = {**pair(profile), "third": SimulatorOptions(profile, speed=SPEED, boot_s=BOOT_S)}
    async with simulated_box(BoxOptions(models, resident="third")) as box:
        box.stop("third")
        assert await box.models["third"].settled() is State.STOPPED
        box.start("gemma")
        assert await box.models["gemma"].settled() is State.RUNNING
        box.start("third")

        assert [model.state for model in box.models.values()] == [State.FAILED, State.STOPPED, State.FAILED]


# ------------------------------------------------------------------ what is cut off


async def test_a_stop_cuts_off_what_runs_and_counts_it(
    box: Box, control: httpx.AsyncClient, chat: Chat, events: Events, until: Until
) -> None:
    await order(control, "start", "gemma")
    server = box.models["gemma"].server
    assert server is not None
    streams: list[httpx.Response] = []

    async def asking() -> None:
        streams.append(await ask(box, "gemma", chat(stream=True, max_tokens=4_000, ignore_eos=True)))

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(asking)
        await until(lambda: server.host.engine.running == 3 and server.generated_tokens > 9)
        stopped = await order(control, "stop", "gemma")

    assert stopped.json()["cut_requests"] == 3
    for stream in streams:
        found = events(stream.text)
        assert (found[-2]["choices"][0]["finish_reason"], found[-1]) == ("abort", "[DONE]")
    await order(control, "start", "gemma")
    await ask(box, "gemma", chat(max_tokens=5))
    await order(control, "stop", "gemma")
    assert box.cut == 3


async def test_a_killed_model_is_gone_at_once_and_its_memory_free(
    box: Box, control: httpx.AsyncClient, chat: Chat, until: Until
) -> None:
    await order(control, "start", "gemma")

    async def asking() -> None:
        with pytest.raises(httpx.HTTPError):
            await ask(box, "gemma", chat(max_tokens=4_000, ignore_eos=True))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(asking)
        await until(lambda: box.models["gemma"].server.generated_tokens > 5)  # type: ignore[union-attr]
        killed = await order(control, "kill", "gemma")

    assert (killed.status_code, killed.json()["state"], killed.json()["cut_requests"]) == (200, "failed", 1)
    assert await is_refused(box.models["gemma"].url)
    assert (await order(control, "start", "qwen")).json()["state"] == "running"
    counted = (await control.get("/box")).json()
    assert (counted["violations"], counted["cut_requests"]) == (0, 1)


async def test_killing_what_is_stopped_changes_nothing(control: httpx.AsyncClient) -> None:
    killed = (await order(control, "kill", "gemma")).json()

    assert (killed["state"], killed["kills"]) == ("stopped", 0)


# ------------------------------------------------------------------ boots that go wrong


async def test_boots_end_as_planned_and_then_well(profile: Profile) -> None:
    options = BoxOptions(pair(profile), boots={"gemma": [Boot.FAIL, Boot.FAIL]})
    async with simulated_box(options) as box, clients.http(base_url=box.url) as control:
        before = anyio.current_time()
        failed = await order(control, "start", "gemma")
        assert anyio.current_time() - before >= 0.9 * BOOT_S / SPEED
        assert (failed.status_code, failed.json()["reason"]) == (500, "the boot failed")
        assert await is_refused(box.models["gemma"].url)
        again = [(await order(control, "start", "gemma")).json()["state"] for _ in range(2)]
        described = (await control.get("/models/gemma")).json()

    assert again == ["failed", "running"]
    assert (described["starts"], described["failed_boots"], described["kills"]) == (3, 2, 0)
    assert box.violations == 0


async def test_a_failed_boot_leaves_the_memory_free(profile: Profile) -> None:
    async with simulated_box(BoxOptions(pair(profile), boots={"gemma": [Boot.FAIL]})) as box:
        box.start("gemma")
        assert await box.models["gemma"].settled() is State.FAILED
        box.start("qwen")

        assert await box.models["qwen"].settled() is State.RUNNING


async def test_chance_decides_by_the_seed(profile: Profile) -> None:
    async def ends(seed: int) -> list[State]:
        models = {"gemma": SimulatorOptions(profile, boot_s=0)}
        async with simulated_box(BoxOptions(models, fail_chance=0.5, seed=seed, stop_s=0)) as box:
            found = []
            for _ in range(12):
                box.start("gemma")
                found.append(await box.models["gemma"].settled())
                box.stop("gemma")
                await box.models["gemma"].settled()
            return found

    first = await ends(1)
    assert set(first) == {State.FAILED, State.RUNNING}
    assert await ends(1) == first
    assert await ends(2) != first


@pytest.mark.parametrize(
    ("end", "text"),
    [("channel_markers", "<|channel>thought\n<channel|>OK"), ("empty_answer", ""), ("wrong_text", "!")],
)
async def test_a_boot_can_come_up_talking_nonsense(
    box: Box, control: httpx.AsyncClient, chat: Chat, end: str, text: str
) -> None:
    planned = await control.post("/models/gemma/boots", content=f'{{"boots": ["{end}"]}}')
    assert planned.json()["next_boots"] == [end]
    canary = chat('Reply with the word "OK".')
    said = []
    for _ in range(2):
        assert (await order(control, "start", "gemma")).json()["state"] == "running"
        said.append((await ask(box, "gemma", canary)).json()["choices"][0]["message"]["content"])
        await order(control, "stop", "gemma")

    assert said == [text, "OK"]


async def test_a_plan_that_makes_no_sense_is_refused(control: httpx.AsyncClient) -> None:
    for body in ({"boots": ["explode"]}, {"boots": "fail"}, {}):
        answer = await control.post("/models/gemma/boots", json=body)
        assert (answer.status_code, "channel_markers" in answer.text) == (400, True)


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/models/qwem/start"), ("GET", "/models/start"), ("GET", "/nothing"), ("POST", "/box")],
)
async def test_what_there_is_not_is_404(control: httpx.AsyncClient, method: str, path: str) -> None:
    assert (await control.request(method, path)).status_code == 404


def test_names_have_to_be_those_of_models(profile: Profile) -> None:
    with pytest.raises(ValueError, match="no model 'qwem'; there are gemma, qwen"):
        BoxOptions(pair(profile), resident="qwem")


# ------------------------------------------------------------------ faults do not reset what it counts


@pytest.mark.parametrize("fault", [Fault.CRASH, Fault.RESTART])
async def test_faults_reset_nothing(
    box: Box, control: httpx.AsyncClient, chat: Chat, until: Until, fault: Fault
) -> None:
    await order(control, "start", "gemma")
    server = box.models["gemma"].server
    assert server is not None

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, box, "gemma", chat(stream=True, max_tokens=4_000, ignore_eos=True))
        await until(lambda: server.generated_tokens > 5)
        server.order(FaultOrder(fault))
    await until(lambda: not server.booted.is_set())
    assert (await states(control))["gemma"] == "booting"
    await server.booted.wait()

    assert (await states(control))["gemma"] == "running"
    assert server.generated_tokens == 0
    assert box.cut == 1
    box.start("qwen")
    assert box.violations == 1


# ------------------------------------------------------------------ sleep


@pytest.fixture
async def sleepers(profile: Profile) -> AsyncIterator[Box]:
    models = pair(profile, sleep_mode=True)
    async with simulated_box(BoxOptions(models, resident="gemma")) as running:
        yield running


async def test_models_can_take_turns_by_sleeping(sleepers: Box, chat: Chat) -> None:
    gemma, qwen = sleepers.models.values()
    assert (gemma.state, qwen.state) == (State.RUNNING, State.SLEEPING)
    async with clients.http() as client:
        assert (await client.post(f"{gemma.url}/sleep?level=1")).status_code == 200
        assert (gemma.state, qwen.state) == (State.SLEEPING, State.SLEEPING)
        before = anyio.current_time()
        assert (await client.post(f"{qwen.url}/wake_up")).status_code == 200
        assert anyio.current_time() - before >= qwen.options.wake_s / SPEED

    assert (gemma.state, qwen.state) == (State.SLEEPING, State.RUNNING)
    assert (await ask(sleepers, "qwen", chat(max_tokens=5))).status_code == 200
    assert [(swap.left, swap.came) for swap in sleepers.swaps] == [("gemma", "qwen")]
    assert (sleepers.violations, gemma.starts, qwen.starts) == (0, 0, 0)


async def test_waking_a_second_model_kills_both(sleepers: Box) -> None:
    gemma, qwen = sleepers.models.values()
    async with clients.http() as client:
        with pytest.raises(httpx.HTTPError):
            await client.post(f"{qwen.url}/wake_up")

    assert (gemma.state, qwen.state) == (State.FAILED, State.FAILED)
    assert [await is_refused(model.url) for model in sleepers.models.values()] == [True, True]
    assert [(seen.model, seen.held_by, seen.by) for seen in sleepers.violation_log] == [
        ("qwen", ("gemma",), "wake_up")
    ]


async def test_a_sleeping_model_can_be_stopped_and_booted_beside_another(sleepers: Box) -> None:
    gemma, qwen = sleepers.models.values()
    sleepers.stop("qwen")
    assert await qwen.settled() is State.STOPPED
    assert await is_refused(qwen.url)
    async with clients.http() as client:
        await client.post(f"{gemma.url}/sleep")
    sleepers.start("qwen")

    assert await qwen.settled() is State.RUNNING
    assert (gemma.state, sleepers.violations) == (State.SLEEPING, 0)


# ------------------------------------------------------------------ the pair as it ships


def test_the_pair_is_gemma_and_something_as_fast_as_qwen_is_said_to_be() -> None:
    pair = spark_pair(speed=50)

    assert {name: options.profile.name for name, options in pair.items()} == {
        "gemma": "spark-nvfp4",
        "qwen": "qwen",
    }
    assert pair["gemma"].profile.perf.lone_tokens_per_s() == pytest.approx(6.8, abs=0.1)
    assert pair["qwen"].profile.perf.lone_tokens_per_s() == pytest.approx(30)
    assert {(options.boot_s, options.speed) for options in pair.values()} == {(306, 50)}
