"""Another configuration while the gateway runs, over real sockets: nothing that runs notices."""

import errno
import os
import resource
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import httpx
import openai
import pytest
import yaml
from anyio.abc import TaskGroup
from support import clients
from support.processes import config, running, wait_asleep
from support.redis_server import RedisServer
from support.site import Site, simulated, site

from gateway import reload
from gateway.clock import SystemClock
from gateway.core.health import State
from gateway.core.policy import Policy
from gateway.core.reloads import Reload
from gateway.reload import Reloader
from gateway.settings import Settings, load, version_of
from gateway.simulator import Fault, FaultOrder

FLEET = {"light-0": "h100-tp1-light", "light-1": "h100-tp1-light", "light-2": "h100-tp1-light"}
PATIENT = {"max_wait_s": 100, "ttft_target_s": 100}  # so that none of these is refused for load
CLASSES = [{"class": "short_chat", "pools": ["light"], "waiting": PATIENT}]
ONE_POOL: dict[str, Any] = {
    "pools": {"light": ["light-0"]},
    "models": {"gemma-4": {"classes": CLASSES}},
}
ASK: dict[str, Any] = {"model": "gemma-4", "messages": [{"role": "user", "content": "Tell me a story."}]}
LONG = ASK | {"extra_body": {"ignore_eos": True}}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(
        tmp_path,
        fleet=simulated(FLEET, speed=4.0),
        pools={"light": ["light-0", "light-1", "light-2"]},
        models={"gemma-4": {"classes": CLASSES}},
        reload={"watch": False},
    ) as running_site:
        yield running_site
        await running_site.eventually(running_site.idle)


def written(gateway: Site) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(gateway.gateway.settings.path.read_text())
    return found


def without(document: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return a configuration without these backends."""
    left = {name: one for name, one in document["backends"].items() if name not in names}
    return {**document, "backends": left, "pools": {"light": list(left)}}


async def put(gateway: Site, document: object, match: str = "*") -> httpx.Response:
    async with clients.http(base_url=gateway.admin_url) as client:
        source = document if isinstance(document, str) else yaml.safe_dump(document)
        return await client.put("/admin/config", content=source, headers={"if-match": match})


async def test_streams_run_on_while_everything_changes(gateway: Site) -> None:
    """60 streams, 12 configurations, backends that leave and join, and files that cannot be used."""
    client = gateway.openai(timeout=120)
    before = written(gateway)
    for one in before["backends"].values():
        one["limits"] = {"knee_seqs": 4}
    assert (await put(gateway, before)).status_code == 200
    ended: list[str] = []
    began = anyio.Event()

    async def stream(number: int) -> None:
        text, finish = "", None
        parts = await client.chat.completions.create(**ASK, stream=True, max_tokens=40, seed=number)
        async for part in parts:
            began.set()
            text += part.choices[0].delta.content or ""
            finish = part.choices[0].finish_reason or finish
        assert text
        ended.append(finish or "cut")

    async with anyio.create_task_group() as tasks:
        for number in range(60):  # 12 places: the others wait, and are decided anew
            tasks.start_soon(stream, number)
        await began.wait()
        for round_ in range(12):  # every combination of what leaves, `attempts_max` and the mistake
            gone = () if round_ % 4 == 3 else (f"light-{round_ % 3}",)
            document = without(before, *gone) | {"routing": {"attempts_max": 2 + round_ % 3}}
            answer = await put(gateway, document)
            assert answer.status_code == 200, answer.text
            assert set(gateway.gateway.fleet.statuses()) == set(document["backends"])
            tasks.start_soon(stream, round_)  # one that comes under this configuration
            bad = await put(
                gateway, "pools: [" if round_ % 2 else {**document, "pools": {"light": ["nobody"]}}
            )
            assert bad.status_code == 400
            assert gateway.gateway.policy.version == answer.json()["version"]
    assert set(ended) <= {"stop", "length"}
    assert len(ended) == 72
    assert not gateway.gateway.upstream._retired  # every connection to what is gone was closed


async def test_no_policy_is_worked_out_on_the_event_loop(
    gateway: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    own = Settings.policy

    def noted(settings: Settings) -> Policy:
        threads.append(threading.get_ident())
        return own(settings)

    monkeypatch.setattr(Settings, "policy", noted)
    document = {**written(gateway), "routing": {"attempts_max": 2}}
    assert (await put(gateway, document)).status_code == 200
    question = {"request": ASK, "config": yaml.safe_dump(document)}
    async with clients.http(base_url=gateway.admin_url) as client:
        assert (await client.post("/admin/explain", json=question)).status_code == 200

    assert len(threads) >= 3
    assert threading.get_ident() not in threads


async def test_nothing_is_asked_of_the_store_about_a_backend_that_left(
    tmp_path: Path, store: RedisServer
) -> None:
    async with site(
        tmp_path,
        fleet=simulated(FLEET),
        pools={"light": list(FLEET)},
        models={"gemma-4": {"classes": CLASSES}},
        store={"url": store.url},
        jobs={},
        reload={"watch": False},
    ) as gateway:
        ledger = gateway.gateway.ledger
        await gateway.openai().chat.completions.create(**ASK)
        await gateway.eventually(lambda: set(ledger.loads()) == set(FLEET))

        assert (await put(gateway, without(written(gateway), "light-1"))).status_code == 200
        await gateway.eventually(lambda: set(ledger.loads()) == {"light-0", "light-2"})


async def test_a_backend_that_joins_serves_and_one_that_leaves_is_left_alone(gateway: Site) -> None:
    before = written(gateway)
    assert (await put(gateway, without(before, "light-1", "light-2"))).status_code == 200
    joined = await put(gateway, without(before, "light-0", "light-2"))
    assert joined.json()["changes"] == [
        "backend light-0 is gone",
        f"backend light-1 is new (h100-tp1-light, {gateway.backends['light-1'].url})",
        "pool light loses light-0",
        "pool light gains light-1",
    ]
    await gateway.gateway.fleet.wait_for(lambda known: known["light-1"].state is State.UP)
    raw = await gateway.openai().chat.completions.with_raw_response.create(**ASK, max_tokens=5)
    assert raw.headers["x-gateway-backend"] == "light-1"


async def test_what_is_known_of_a_server_says_nothing_of_the_one_in_its_place(gateway: Site) -> None:
    drifts, measured = gateway.gateway.drift.drifts, gateway.gateway.pipeline.watch.snapshots

    async def seen() -> float:
        async with clients.http(base_url=gateway.admin_url) as client:
            found = (await client.post("/admin/explain", json={"request": ASK})).json()
        (candidate,) = found["decision"]["candidates"]
        return float(candidate["scores"]["prefix_affinity"])

    counted = gateway.gateway.counts.drifts
    await gateway.eventually(lambda: set(counted()) == set(FLEET))
    alone = without(written(gateway), "light-1", "light-2")
    await put(gateway, alone)
    assert set(counted()) == {"light-0"}
    await gateway.openai().chat.completions.create(**ASK, max_tokens=2)
    await put(gateway, alone | {"routing": {"attempts_max": 2}})
    assert set(drifts()) == set(measured()) == {"light-0"}
    assert await seen() == 1.0

    (settings,) = alone["backends"].values()
    other = settings | {"url": gateway.backends["light-1"].url}
    answer = await put(gateway, alone | {"backends": {"light-0": other}})

    assert answer.status_code == 200, answer.text
    assert not drifts()
    assert not measured()
    await gateway.gateway.fleet.wait_for(lambda known: bool(known["light-0"].served_models))
    assert await seen() == 0.0


async def test_whoever_waits_is_decided_anew(gateway: Site) -> None:
    """All places are taken, and the only backend left goes away: the one that joins serves those who wait."""
    before = written(gateway)
    before["backends"]["light-0"]["limits"] = {"knee_seqs": 1}
    await put(gateway, without(before, "light-1", "light-2"))
    client = gateway.openai(timeout=60)
    backends: list[str] = []

    async def ask() -> None:
        raw = await client.chat.completions.with_raw_response.create(**ASK, max_tokens=200)
        backends.append(raw.headers["x-gateway-backend"])

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(ask)
        await gateway.eventually(lambda: len(gateway.gateway.pipeline.room.line) == 2)
        await put(gateway, without(before, "light-0", "light-2"))
    assert sorted(backends) == ["light-0", "light-1", "light-1"]


async def test_whoever_waits_under_a_former_configuration_is_served_where_a_backend_is_now(
    gateway: Site,
) -> None:
    """Requests whose alias is gone wait on, and nothing is held against the server at the new URL."""
    before = without(written(gateway), "light-1", "light-2")
    before["backends"]["light-0"]["limits"] = {"knee_seqs": 1}
    before["models"]["gemma-4"]["aliases"] = ["gemma"]
    assert (await put(gateway, before)).status_code == 200
    client = gateway.openai(timeout=60, max_retries=0)
    backends: list[str] = []

    async def ask(model: str) -> None:
        raw = await client.chat.completions.with_raw_response.create(**ASK | {"model": model}, max_tokens=5)
        backends.append(raw.headers["x-gateway-backend"])

    gateway.backends["light-0"].order(FaultOrder(Fault.HANG))  # holds its place meanwhile
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, "gemma-4")
        await gateway.eventually(lambda: gateway.gateway.ledger.load("light-0").seqs == 1)
        for _ in range(3):
            tasks.start_soon(ask, "gemma")
        await gateway.eventually(lambda: len(gateway.gateway.pipeline.room.line) == 3)
        moved = before["backends"]["light-0"] | {"url": gateway.backends["light-1"].url}
        models = {"gemma-4": {"classes": before["models"]["gemma-4"]["classes"]}}
        answer = await put(gateway, before | {"backends": {"light-0": moved}, "models": models})
        assert answer.status_code == 200, answer.text
        gateway.backends["light-0"].order(None)
    assert backends == ["light-0"] * 4
    status = gateway.gateway.fleet.statuses()["light-0"]
    assert (status.state, status.last_error) == (State.UP, "")


@pytest.fixture
async def repurposed(tmp_path: Path) -> AsyncIterator[tuple[Site, str]]:
    """A gateway with one place at light-0 and light-1 drained, and the URL of a server of another model."""
    other = {"other": replace(simulated({"other": "h100-tp1-light"})["other"], served_model="other")}
    async with site(
        tmp_path,
        fleet={**simulated({name: FLEET[name] for name in ("light-0", "light-1")}, speed=4.0), **other},
        pools={"light": ["light-0", "light-1"]},
        models={"gemma-4": {"classes": CLASSES}},
        reload={"watch": False},
    ) as gateway:
        before = written(gateway)
        url = before["backends"].pop("other")["url"]
        before["backends"]["light-0"]["limits"] = {"knee_seqs": 1}
        before["backends"]["light-1"]["drain"] = True
        assert (await put(gateway, before)).status_code == 200
        yield gateway, url
        await gateway.eventually(gateway.idle)


async def one_runs_and_three_wait(
    gateway: Site, ask: Callable[[int], Coroutine[Any, Any, None]], tasks: TaskGroup
) -> None:
    """Ask four times, with so many tokens each, where there is one place."""
    tasks.start_soon(ask, 2_000)
    await gateway.eventually(lambda: gateway.gateway.ledger.load("light-0").seqs == 1)
    for _ in range(3):
        tasks.start_soon(ask, 20)
    await gateway.eventually(lambda: len(gateway.gateway.pipeline.room.line) == 3)


async def test_whoever_waits_is_not_sent_to_a_backend_that_has_got_another_model(
    repurposed: tuple[Site, str],
) -> None:
    """It has room at once, and those who wait have not been decided anew yet."""
    gateway, url = repurposed
    client, before = gateway.openai(), written(gateway)
    backends: list[str] = []

    async def ask(max_tokens: int) -> None:
        raw = await client.chat.completions.with_raw_response.create(**LONG, max_tokens=max_tokens)
        backends.append(raw.headers["x-gateway-backend"])

    async with anyio.create_task_group() as tasks:
        await one_runs_and_three_wait(gateway, ask, tasks)
        moved = {"url": url, "profile": "h100-tp1-light", "model": "other"}
        document = before | {
            "backends": {"light-0": before["backends"]["light-0"], "light-1": moved},
            "pools": {"light": ["light-0"], "others": ["light-1"]},
            "models": before["models"] | {"other": {"classes": [{"class": "chat", "pools": ["others"]}]}},
        }
        answer = await put(gateway, document)
        assert answer.status_code == 200, answer.text
    assert backends == ["light-0"] * 4


async def test_whoever_waits_for_a_model_that_is_gone_gets_no_other_one(repurposed: tuple[Site, str]) -> None:
    gateway, url = repurposed
    client, before = gateway.openai(), written(gateway)
    ended: list[str | None] = []

    async def ask(max_tokens: int) -> None:
        try:
            answer = await client.chat.completions.create(**LONG, max_tokens=max_tokens)
        except openai.APIStatusError as error:
            ended.append(error.code)
        else:
            ended.append(answer.choices[0].finish_reason)

    async with anyio.create_task_group() as tasks:
        await one_runs_and_three_wait(gateway, ask, tasks)
        moved = {"url": url, "profile": "h100-tp1-light", "model": "other"}
        document = before | {
            "backends": {"light-0": moved},
            "pools": {"light": ["light-0"]},
            "models": {"other": {"classes": CLASSES}},
        }
        answer = await put(gateway, document)
        assert answer.status_code == 200, answer.text
    assert sorted(map(str, ended)) == ["length", "no_backend", "no_backend", "no_backend"]
    status = gateway.gateway.fleet.statuses()["light-0"]
    assert (status.served, status.last_error) == (0, "")


async def test_whoever_waits_for_a_model_is_served_by_no_other_in_its_place(tmp_path: Path) -> None:
    """The model is gone, and its backend serves another one now, elsewhere."""
    fleet = simulated({"light-0": "h100-tp1-light"}, speed=4.0)
    fleet |= simulated({"light-1": "h100-tp1-light"}, speed=4.0, served_model="other")
    async with site(
        tmp_path,
        fleet=fleet,
        pools={"light": [*fleet]},
        models={"gemma-4": {"classes": CLASSES}},
        reload={"watch": False},
    ) as gateway:
        before = without(written(gateway), "light-1")
        before["backends"]["light-0"]["limits"] = {"knee_seqs": 1}
        assert (await put(gateway, before)).status_code == 200
        client = gateway.openai(timeout=60, max_retries=0)
        errors: list[object] = []

        async def ask() -> None:
            try:
                await client.chat.completions.create(**ASK, max_tokens=5)
            except openai.InternalServerError as error:
                errors.append((error.status_code, error.code))

        gateway.backends["light-0"].order(FaultOrder(Fault.HANG))  # holds its place meanwhile
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await gateway.eventually(lambda: gateway.gateway.ledger.load("light-0").seqs == 1)
            for _ in range(3):
                tasks.start_soon(ask)
            await gateway.eventually(lambda: len(gateway.gateway.pipeline.room.line) == 3)
            moved = before["backends"]["light-0"] | {"url": gateway.backends["light-1"].url}
            others = {"other": before["models"]["gemma-4"]}
            answer = await put(gateway, before | {"backends": {"light-0": moved}, "models": others})
            assert answer.status_code == 200, answer.text
            gateway.backends["light-0"].order(None)

        assert errors == [(503, "no_backend")] * 3
        status = gateway.gateway.fleet.statuses()["light-0"]
        assert (status.state, status.last_error) == (State.UP, "")


async def test_keys_change_at_once(gateway: Site) -> None:
    of_a = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"  # of "a"
    await put(gateway, written(gateway) | {"keys": {"a": {"sha256": of_a}}})
    with pytest.raises(openai.AuthenticationError):
        await gateway.openai(api_key="b").chat.completions.create(**ASK, max_tokens=5)
    await gateway.openai(api_key="a").chat.completions.create(**ASK, max_tokens=5)
    assert gateway.gateway.peers._keys == {"a"}  # of those, it believes what other gateways say


async def test_origins_change_at_once_and_never_for_operators(gateway: Site) -> None:
    page = {"origin": "https://app.example.com"}
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    document, name = written(gateway), "access-control-allow-origin"
    admin = clients.http(base_url=gateway.admin_url)
    async with gateway.http() as client, admin:
        for origins, allowed in (([page["origin"]], page["origin"]), ("*", "*"), ([], None)):
            answer = await put(gateway, document | {"allowed_origins": origins})
            assert [one.split()[0] for one in answer.json()["changes"]] == ["allowed_origins"]

            for stream in (False, True):
                body = {**ASK, "max_tokens": 5, "stream": stream}
                chat = await client.post("/v1/chat/completions", json=body, headers=page)
                assert (chat.status_code, chat.headers.get(name)) == (200, allowed)
            asked = await client.options("/v1/chat/completions", headers=page | asks)
            assert (asked.status_code, asked.headers.get(name)) == (204 if allowed else 405, allowed)
            for path in ("/admin/backends", "/metrics"):
                assert name not in (await admin.get(path, headers=page)).headers
                assert name not in (await admin.options(path, headers=page | asks)).headers


async def test_what_cannot_change_is_named_and_stays(gateway: Site) -> None:
    document = written(gateway)
    answer = await put(gateway, {**document, "listen": "127.0.0.1:1", "requests": {"max_body_bytes": 9}})
    assert answer.json()["needs_restart"] == ["listen", "requests"]
    assert answer.json()["changes"] == []
    await gateway.openai().chat.completions.create(**ASK, max_tokens=5)
    again = await put(gateway, {**document, "listen": "127.0.0.1:1", "requests": {"max_body_bytes": 9}})
    assert again.json()["needs_restart"] == ["listen", "requests"]  # until it is restarted
    assert await waits_for_a_restart(gateway) == (["listen", "requests"], 1.0)
    await put(gateway, document)
    assert await waits_for_a_restart(gateway) == ([], 0.0)


async def waits_for_a_restart(gateway: Site) -> tuple[list[str], float | None]:
    async with clients.http(base_url=gateway.admin_url) as client:
        listed = (await client.get("/admin/config/versions")).json()
    assert listed[0]["in_force"]
    gauge = gateway.gateway.metrics.registry.get_sample_value("gateway_config_restart_needed")
    return listed[0]["needs_restart"], gauge


async def test_a_check_refuses_what_could_not_be_applied_now(gateway: Site) -> None:
    document = written(gateway)
    document["backends"]["light-1"]["api_key_env"] = "NOT_THERE"

    async with clients.http(base_url=gateway.admin_url) as client:
        answer = await client.post("/admin/config/check", content=yaml.safe_dump(document))

    assert answer.status_code == 400
    assert "NOT_THERE is not set" in answer.json()["error"]["message"]


async def test_what_the_next_start_would_lack_is_a_warning_now(gateway: Site) -> None:
    document = written(gateway) | {"tokenizer": {"vocab": "none.tiktoken"}}

    answer = await put(gateway, document)

    assert answer.json()["needs_restart"] == ["tokenizer"]
    assert any("there is no file" in warning for warning in answer.json()["warnings"])


async def test_what_only_a_start_reads_may_go_while_the_gateway_runs(tmp_path: Path) -> None:
    secret, logs = tmp_path / "secret", tmp_path / "logs"
    secret.write_text("whsec_" + "a" * 32)
    logs.mkdir()
    named = {"secret_file": str(secret), "url": "https://example.com/"}
    read: dict[str, Any] = {
        "webhooks": {"ops": named},
        "jobs": {},
        "decisions": {"file": str(logs / "decisions")},
    }
    fleet = simulated({"light-0": "h100-tp1-light"})
    async with site(tmp_path, fleet=fleet, reload={"watch": False}, **ONE_POOL, **read) as gateway:
        document = written(gateway) | {"allowed_origins": ["https://a.example"]}
        secret.unlink()
        (logs / "decisions").unlink()
        logs.rmdir()

        kept = await put(gateway, document)
        assert kept.json()["changes"] == ["allowed_origins [] -> [https://a.example]"]
        assert len(kept.json()["warnings"]) == 2  # the next start lacks them

        gone = await put(gateway, {name: one for name, one in document.items() if name not in read})
        assert gone.json()["needs_restart"] == ["jobs", "webhooks", "decisions"]
        assert gone.json()["warnings"] == []


async def test_a_configuration_is_replaced_only_by_who_has_seen_it(gateway: Site) -> None:
    document = written(gateway)
    async with clients.http(base_url=gateway.admin_url) as client:
        shown = await client.get("/admin/config")
        assert yaml.safe_load(shown.text) == document
        first = shown.headers["etag"]
        source = yaml.safe_dump(without(document, "light-2"))
        refused = await client.put("/admin/config", content=source)
        assert (refused.status_code, refused.json()["error"]["code"]) == (428, "if_match_required")
        done = await client.put("/admin/config", content=source, headers={"if-match": first})
        assert done.headers["etag"] != first
        late = await client.put("/admin/config", content=source, headers={"if-match": first})
        assert (late.status_code, late.json()["error"]["code"]) == (412, "configuration_changed")
        assert written(gateway) == yaml.safe_load(source)  # for the next start

        tried = await client.post("/admin/config/check", content=yaml.safe_dump(document))
        assert tried.json()["changes"][0].startswith("backend light-2 is new")
        assert "light-2" not in gateway.gateway.policy.backends
        faulty = await client.post("/admin/config/check", content=b"listen: [\n")
        assert (faulty.status_code, faulty.json()["error"]["code"]) == (400, "invalid_configuration")
        assert ":2:1: " in faulty.json()["error"]["message"]

        back = await client.post(
            f"/admin/config/rollback?version={first.strip(chr(34))}", headers={"if-match": "*"}
        )
        assert back.headers["etag"] == first
        assert "light-2" in gateway.gateway.policy.backends
        listed = (await client.get("/admin/config/versions")).json()
        assert [one["by"] for one in listed] == ["rollback", "put", "start"]
        unknown = await client.post("/admin/config/rollback?version=none", headers={"if-match": "*"})
        assert unknown.json()["error"]["code"] == "version_not_found"


async def test_a_version_needs_no_quotes_to_be_the_one_that_is_replaced(gateway: Site) -> None:
    # `/admin/config/versions` and the log name versions without quotes, and a shell takes quotes away.
    async with clients.http(base_url=gateway.admin_url) as client:
        first = (await client.get("/admin/config/versions")).json()[0]["version"]
        assert f'"{first}"' == (await client.get("/admin/config")).headers["etag"]
        source = yaml.safe_dump(without(written(gateway), "light-2"))
        for other in (first[:-1], f"{first}0", f"x{first}", f'"{first}'):
            late = await client.put("/admin/config", content=source, headers={"if-match": other})
            assert late.status_code == 412, other
        done = await client.put("/admin/config", content=source, headers={"if-match": f"0123, {first}"})
        assert done.status_code == 200, done.text


async def test_of_two_who_replace_the_same_configuration_at_once_one_is_told(gateway: Site) -> None:
    version, document = gateway.gateway.policy.version, written(gateway)
    answers: list[httpx.Response] = []

    async def replaced(name: str) -> None:
        answers.append(await put(gateway, without(document, name), match=f'"{version}"'))

    async with anyio.create_task_group() as tasks:
        for name in ("light-1", "light-2"):
            tasks.start_soon(replaced, name)

    assert [answer.status_code for answer in answers].count(200) == 1
    assert [answer.json()["error"]["code"] for answer in answers if answer.status_code != 200] == [
        "configuration_changed"
    ]


async def test_what_another_process_has_just_written_is_not_overwritten_unseen(gateway: Site) -> None:
    version, document = gateway.gateway.policy.version, written(gateway)
    file, others = gateway.gateway.settings.path, yaml.safe_dump(without(document, "light-1"))
    file.write_text(others)  # and is not yet in force here

    late = await put(gateway, without(document, "light-2"), match=f'"{version}"')

    assert (late.status_code, late.json()["error"]["code"]) == (412, "configuration_changed")
    assert file.read_text() == others
    assert not [*file.parent.glob(f".{file.name}.*")]
    knowing = await put(gateway, document, match=f'"{version_of(others.encode())}", "{version}"')
    assert knowing.status_code == 200


async def test_a_file_that_was_refused_is_replaced_by_who_has_seen_what_is_in_force(gateway: Site) -> None:
    version, document = gateway.gateway.policy.version, written(gateway)
    gateway.gateway.settings.path.write_text("listen: [\n")
    await gateway.gateway.reloader.reread()

    corrected = await put(gateway, without(document, "light-2"), match=f'"{version}"')

    assert corrected.status_code == 200
    assert written(gateway) == without(document, "light-2")


async def test_a_file_that_cannot_be_used_changes_nothing_and_says_why(gateway: Site) -> None:
    version = gateway.gateway.policy.version
    answer = await put(gateway, written(gateway) | {"pools": {"light": ["light-9"]}})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "invalid_configuration"
    assert "light-9" in error["message"]
    assert gateway.gateway.policy.version == version
    async with gateway.http() as client:
        page = (await client.get(f"{gateway.admin_url}/metrics")).text
    assert 'gateway_config_reloads_total{outcome="refused"} 1.0' in page
    assert "gateway_config_last_reload_successful 0.0" in page
    assert f'gateway_config_info{{version="{version}"}} 1.0' in page


@pytest.mark.parametrize("way", ["file", "emptied", "gone", "put"])
async def test_what_is_in_force_and_in_the_file_is_no_failure_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    """Who puts the file back as it was has done what the alert asks for, and nothing else will change."""
    async with site(tmp_path, fleet=simulated({"light-0": "h100-tp1-light"}), **ONE_POOL) as running_site:
        path, registry = running_site.gateway.settings.path, running_site.gateway.metrics.registry
        good = path.read_bytes()
        caplog.set_level("INFO", logger="gateway.config")

        def is_successful(wanted: float) -> bool:
            return registry.get_sample_value("gateway_config_last_reload_successful") == wanted

        if way == "put":
            await put(running_site, "pools: [")
        elif way == "gone":
            path.unlink()
            await running_site.gateway.reloader.reread()
        else:
            path.write_text("" if way == "emptied" else "pools: [")
            await running_site.eventually(lambda: is_successful(0))
        path.write_bytes(good)
        await running_site.eventually(lambda: is_successful(1))

        (version,) = running_site.gateway.reloader.versions
    assert f"configuration {version.id} is in force (file)" in caplog.messages


@pytest.mark.parametrize(
    ("instead", "reason"),
    [
        pytest.param(None, "No such file or directory", id="nothing"),
        pytest.param(os.mkdir, "Is a directory", id="folder"),
        pytest.param(os.mkfifo, "it is not a regular file", id="pipe"),
    ],
)
async def test_a_watched_file_that_stays_away_is_told_of_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    instead: Callable[[Path], None] | None,
    reason: str,
) -> None:
    monkeypatch.setattr(reload, "LOOK_S", 0.02)
    async with site(tmp_path, fleet=simulated({"light-0": "h100-tp1-light"}), **ONE_POOL) as running_site:
        path = running_site.gateway.settings.path
        away = path.rename(path.with_suffix(".away"))
        if instead is not None:
            instead(path)
        caplog.set_level("INFO", logger="gateway.config")
        await running_site.eventually(lambda: "cannot be read" in caplog.text)
        assert f"{path}: cannot be read: {reason}" in caplog.text
        if instead is not None:
            path.rename(path.with_suffix(".gone"))
        away.rename(path)
        await running_site.eventually(lambda: "is in force (file)" in caplog.text)
    assert caplog.text.count("cannot be read") == 1


def unserved(folder: Path) -> Path:
    """Write a file with a backend that nobody serves."""
    return config(
        folder,
        {"light-0": ("http://127.0.0.1:9", "h100-tp1-light")},
        {"light": ["light-0"]},
        yaml.safe_dump({"models": {"gemma-4": {"classes": CLASSES}}}),
    )


class Growing(type(Path())):  # type: ignore[misc]
    """A file that is written anew whenever it is opened, with what is left of `contents`."""

    contents: list[str]

    def __fspath__(self) -> str:
        if self.contents:
            Path(str(self)).write_text(self.contents.pop(0))
        return str(self)


async def test_a_watched_file_that_is_still_being_written_is_not_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "LOOK_S", 0.0)
    path = unserved(tmp_path)
    started, growing, applied = load(path, {}), Growing(path), anyio.Event()
    half = path.read_text() + "routing: {attempts_max: 4}\n"
    growing.contents = [half, half + "allowed_origins: [https://a.example]\n"]

    async def put_in_force() -> None:
        applied.set()

    reloader = Reloader(
        replace(started, path=growing), {}, lambda _: put_in_force, dict, SystemClock(), lambda found: None
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reloader.watch)
        with anyio.fail_after(20):
            await applied.wait()
        tasks.cancel_scope.cancel()

    assert reloader.versions[0].source.decode() == half + "allowed_origins: [https://a.example]\n"


class LookedAt(type(Path())):  # type: ignore[misc]
    """A file that counts how often it is opened."""

    looks = 0

    def __fspath__(self) -> str:
        self.looks += 1
        return str(self)

    async def again(self) -> None:
        """Return once it has been looked at so often that every change has shown its effect."""
        enough = self.looks + 2 * reload.UNREADABLE_LOOKS
        with anyio.fail_after(20):
            while self.looks < enough:
                await anyio.lowlevel.checkpoint()


def reloading(path: Path) -> tuple[Reloader, LookedAt, list[str]]:
    """Return a reloader of a file, the file as it sees it, and what it says of each reload, in time."""
    looked_at, results = LookedAt(path), list[str]()

    async def put_in_force() -> None:
        pass

    def note(found: Reload) -> None:
        results.append(found.error.partition(": ")[2] or "applied")

    started = replace(load(path, {}), path=looked_at)
    return Reloader(started, {}, lambda _: put_in_force, dict, SystemClock(), note), looked_at, results


async def test_a_watched_file_is_not_refused_while_no_file_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "LOOK_S", 0.0)
    path = unserved(tmp_path)
    reloader, looked_at, results = reloading(path)
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reloader.watch)
        await looked_at.again()
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
        try:
            await looked_at.again()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
        await looked_at.again()
        assert results == []
        path.write_bytes(path.read_bytes() + b"routing: {attempts_max: 5}\n")
        await looked_at.again()
        assert results == ["applied"]
        tasks.cancel_scope.cancel()


async def test_each_state_of_a_watched_file_is_tried_and_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "LOOK_S", 0.0)
    path = unserved(tmp_path)
    reloader, looked_at, results = reloading(path)
    good, other = path.read_bytes(), path.with_suffix(".other")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reloader.watch)
        await looked_at.again()
        assert results == []
        for _ in range(2):
            path.rename(other)
            await looked_at.again()
            other.rename(path)
            await looked_at.again()
        assert results == ["cannot be read: No such file or directory", "applied"] * 2
        for _ in range(2):
            for contents in (good + b"pools: {light: [light-9]}", good):
                other.write_bytes(contents)
                other.rename(path)
                await looked_at.again()
        assert results[4] == results[6] != "applied"
        assert results[5:] == ["applied", results[4], "applied"]
        tasks.cancel_scope.cancel()


async def test_a_signal_that_comes_while_the_file_is_replaced_brings_nothing_former_back(
    tmp_path: Path,
) -> None:
    path = unserved(tmp_path)
    wanted, reloads = path.read_bytes() + b"routing: {attempts_max: 5}\n", list[str]()

    async def put_in_force() -> None:
        pass

    async def signalled() -> None:
        tasks.start_soon(reloader.reread)
        for _ in range(2000):  # time enough to read the file
            await anyio.lowlevel.checkpoint()

    def prepare(new: Settings) -> Callable[[], Awaitable[None]]:
        reloads.append(new.version)
        if len(reloads) == 1:
            anyio.from_thread.run(signalled)
        return put_in_force

    reloader = Reloader(load(path, {}), {}, prepare, dict, SystemClock(), lambda found: None)
    async with anyio.create_task_group() as tasks:
        await reloader.put(wanted)

    assert reloader.versions[0].source == path.read_bytes() == wanted
    assert len(reloads) == 2


async def test_a_change_that_is_replaced_while_it_waits_to_be_applied_is_not_brought_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "LOOK_S", 0.0)
    path = unserved(tmp_path)
    good = path.read_bytes()
    changed, wanted = good + b"routing: {attempts_max: 4}\n", good + b"routing: {attempts_max: 5}\n"
    looked_at = LookedAt(path)

    async def put_in_force() -> None:
        pass

    async def watched() -> None:
        path.write_bytes(changed)
        tasks.start_soon(reloader.watch)
        with anyio.fail_after(20):
            while not reloader._turn.statistics().tasks_waiting:
                await anyio.lowlevel.checkpoint()

    def prepare(new: Settings) -> Callable[[], Awaitable[None]]:
        if len(reloader.versions) == 1:
            anyio.from_thread.run(watched)
        return put_in_force

    started = replace(load(path, {}), path=looked_at)
    reloader = Reloader(started, {}, prepare, dict, SystemClock(), lambda found: None)
    async with anyio.create_task_group() as tasks:
        await reloader.put(wanted)
        await looked_at.again()
        tasks.cancel_scope.cancel()

    assert [one.source for one in reloader.versions] == [wanted, good]


async def test_a_reload_for_which_no_thread_is_left_ends_nothing(
    gateway: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none_left(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")  # as Python says it

    reloader, registry = gateway.gateway.reloader, gateway.gateway.metrics.registry
    with monkeypatch.context() as patch:
        patch.setattr(anyio.to_thread, "run_sync", none_left)
        found = await reloader.reread()
    assert found.error == f"{reloader.path}: cannot be read: can't start new thread"
    assert registry.get_sample_value("gateway_config_last_reload_successful") == 0

    assert (await reloader.reread()).error == ""
    assert registry.get_sample_value("gateway_config_last_reload_successful") == 1


@pytest.mark.parametrize(
    ("backend", "written_there", "says"),
    [
        ({"api_key_file": "secret"}, "two words\nand a line", "no header can carry"),
        ({"url": "https://127.0.0.1:9", "tls": {"ca_file": "secret"}}, "no PEM", "holds no certificates"),
    ],
)
async def test_what_turns_out_unusable_never_gets_into_the_file(
    gateway: Site, backend: Mapping[str, object], written_there: str, says: str
) -> None:
    """The file says all the same what is in force: the next start, and other processes, read it."""
    path = gateway.gateway.settings.path
    (path.parent / "secret").write_text(written_there)
    before = path.read_bytes()
    document = written(gateway)
    document["backends"]["light-1"] |= backend

    answer = await put(gateway, document)

    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert path.read_bytes() == before
    assert len(gateway.gateway.reloader.versions) == 1


async def test_a_file_that_is_replaced_keeps_its_link_and_its_rights(
    gateway: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gateway.gateway.settings.path
    real = path.rename(path.with_name("real.yaml"))
    path.symlink_to(real)
    real.chmod(0o640)
    document = without(written(gateway), "light-2")

    assert (await put(gateway, document)).status_code == 200
    with monkeypatch.context() as full:

        def fail(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(os, "fsync", fail)
        assert (await put(gateway, without(document, "light-1"))).status_code >= 400

    assert path.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert yaml.safe_load(real.read_text()) == document
    assert not list(path.parent.glob(".real.yaml.*"))


async def test_few_former_configurations_are_kept(gateway: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "VERSIONS_KEPT", 1)
    for name in ("light-1", "light-2"):
        assert (await put(gateway, without(written(gateway), name))).status_code == 200

    assert [one.by for one in gateway.gateway.reloader.versions] == ["put", "put"]


async def test_a_fault_of_the_gateway_s_own_refuses_a_file_and_ends_nothing(
    gateway: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise TypeError("a fault")

    path = gateway.gateway.settings.path
    before, document = path.read_bytes(), written(gateway)
    with monkeypatch.context() as faulty:
        faulty.setattr("gateway.parts.backend_keys", fail)
        answer = await put(gateway, {**document, "allowed_origins": ["https://new.example"]})
        assert path.read_bytes() == before
        path.write_text(yaml.safe_dump({**document, "allowed_origins": ["https://other.example"]}))
        found = await gateway.gateway.reloader.reread()

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_configuration")
    assert "the gateway failed on it (TypeError)" in found.error
    assert not (await gateway.gateway.reloader.reread()).error


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_signal_and_a_changed_file(tmp_path: Path, workers: int) -> None:
    rest = {"models": {"gemma-4": {"classes": CLASSES}}, "reload": {"watch": workers == 1}}
    path = config(
        tmp_path,
        {"light-0": ("http://127.0.0.1:9", "h100-tp1-light")},
        {"light": ["light-0"]},
        yaml.safe_dump(rest),
    )
    document = yaml.safe_load(path.read_text())
    async with running("serve", "-c", str(path), "--workers", str(workers)) as process:
        await process.wait_for("serves http")
        process.process.send_signal(signal.SIGHUP)  # nothing has changed, which is said, too
        await process.wait_for(r"(?s)" + r"(is in force \(signal\).*)" * workers)
        path.write_text(yaml.safe_dump(document | {"routing": {"attempts_max": 4}}))
        if workers > 1:  # nobody watches it
            process.process.send_signal(signal.SIGHUP)
        await process.wait_for(r"routing.attempts_max \d -> 4" + r"(?s:.*)-> 4" * (workers - 1))
        path.write_text("nothing: here")
        process.process.send_signal(signal.SIGHUP)
        await process.wait_for("the new configuration was refused")
        assert await process.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("arguments", [("serve",), ("worker",)], ids=" ".join)
async def test_a_stop_that_comes_before_the_file_is_read_ends_it_well(
    tmp_path: Path, arguments: Sequence[str]
) -> None:
    pipe = tmp_path / "slow.yaml"
    os.mkfifo(pipe)
    async with running(*arguments, "-c", str(pipe)) as process:
        # Opened once the other end is: the process has come to reading it.
        with await anyio.to_thread.run_sync(pipe.open, "w"):
            await wait_asleep(process.process.pid)
            assert await process.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("arguments", [("serve",), ("serve", "--workers", "2"), ("worker",)], ids=" ".join)
async def test_a_signal_that_comes_before_the_file_is_read_ends_nothing(
    tmp_path: Path, store: RedisServer, arguments: Sequence[str]
) -> None:
    rest = {"models": {"gemma-4": {"classes": CLASSES}}, "reload": {"watch": False}}
    rest |= {"store": store.url, "jobs": {}}
    backends = {"light-0": ("http://127.0.0.1:9", "h100-tp1-light")}
    text = config(tmp_path, backends, {"light": ["light-0"]}, yaml.safe_dump(rest)).read_text()
    pipe = tmp_path / "slow.yaml"
    os.mkfifo(pipe)
    async with running(*arguments, "-c", str(pipe)) as process:
        # Opened once the other end is: the process has come to reading it.
        with await anyio.to_thread.run_sync(pipe.open, "w") as writing:
            process.process.send_signal(signal.SIGHUP)
            writing.write(text)
        await process.wait_for("operators: ")
        assert await process.end(signal.SIGTERM) == 0
