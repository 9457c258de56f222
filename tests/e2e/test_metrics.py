"""The metrics of a gateway: no label is a caller's choice, every query finds its own, faults raise alerts."""

import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import anyio
import httpx
import yaml
from anyio.abc import SocketStream
from prometheus_client.parser import text_string_to_metric_families
from support.prometheus import Prometheus, program, prometheus
from support.raw_server import answer_of, raw_server
from support.redis_server import RedisServer, own_server
from support.site import Site, simulated, site

from gateway.core.box import State as BoxState
from gateway.core.box_swaps import SwapCause
from gateway.core.decision import Exclusion
from gateway.core.health import Outcome, State
from gateway.core.jobs import AttemptOutcome, Beginning, JobOutcome, JobStatus
from gateway.core.knee_estimate import Confidence
from gateway.core.swap_policy import Cause
from gateway.core.usage import Ending
from gateway.core.webhooks import WebhookOutcome
from gateway.simulator import Fault, FaultOrder
from gateway.store.fallback import Mode
from gateway.telemetry.metrics import Timeliness
from gateway.telemetry.tracing import KeepReason

ROOT = Path(__file__).parents[2]
KEY = "sk-evil-but-known"
EVIL = 'evil"\n{}\\ü' + "x" * 300
CHAT: dict[str, Any] = {
    "model": "gemma-4",
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    "max_tokens": 8,
}


@asynccontextmanager
async def busy_site(folder: Path, **sections: Any) -> AsyncIterator[Site]:
    """Run a gateway with everything that has metrics, boxes and webhooks aside."""
    store = folder / "store"
    store.mkdir()
    fleet = simulated({"light-0": "h100-tp1-light", "push": "h100-tp2-push"})
    classes = [
        {"class": "long_document", "when": {"prompt_tokens": ">= 16000"}, "pools": ["push"]},
        {"class": "short_chat", "pools": ["light", "push"]},
    ]
    with own_server("valkey-9", store, keeps=True) as server:
        async with site(
            folder,
            fleet=fleet,
            pools={"light": ["light-0"], "push": ["push"]},
            models={"gemma-4": {"classes": classes}},
            store={"url": server.url},
            jobs={},
            **sections,
        ) as running:
            yield running


async def ask(
    client: httpx.AsyncClient, path: str, body: Mapping[str, Any], **headers: str
) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await client.post(path, content=json.dumps(body), headers=named)


# ------------------------------------------------------------------ labels


def sources(running: Site) -> dict[str, frozenset[str]]:
    """Return where the values of every label come from: what each may be at this site."""
    policy, document = running.gateway.policy, running.gateway.settings.document
    lanes = {f"{model.id}/{one.name}" for model in policy.models for one in model.classes}
    steps = {step.prompt_tokens_max for one in policy.backends.values() for step in one.capacity.knee}
    page = (ROOT / "docs" / "errors.md").read_text()
    codes = {code for line in page.splitlines() for code in re.findall(r"^\| [^|]*\| [^|]*\| `(\w+)`", line)}
    return {
        "backend": frozenset(policy.backends) | {""},
        "beginning": frozenset(Beginning),
        "box": frozenset(document.boxes),
        "cause": frozenset(SwapCause) | frozenset(Cause),
        "code": frozenset(codes) | {""},
        "confidence": frozenset(Confidence),
        "endpoint": frozenset(document.webhooks),
        "ending": frozenset(Ending),
        "lane": frozenset(lanes),
        "listener": frozenset({"applications", "operators"}),
        "mode": frozenset(Mode),
        "model": frozenset(model.id for model in policy.models),
        "outcome": frozenset(
            {*Outcome, *AttemptOutcome, *JobOutcome, *WebhookOutcome}
            | {"applied", "refused", "written", "dropped", "failed"}
        ),
        "pool": frozenset(policy.pools) | {""},
        "prompt_tokens_max": frozenset(str(step) for step in steps) | {"+Inf"},
        "reason": frozenset(Exclusion) | frozenset(KeepReason),
        "state": frozenset(State) | frozenset(BoxState),
        "status": frozenset(JobStatus),
        "timeliness": frozenset(Timeliness),
        "traffic_class": frozenset(one.name for model in policy.models for one in model.classes) | {""},
        "version": frozenset({policy.version}),
    }


def documented_labels() -> set[str]:
    page = (ROOT / "docs" / "metrics.md").read_text()
    return {
        label
        for words in re.findall(r"^\| `\w+` \| \w+ \|([\w, ]*)\|", page, re.M)
        for label in re.findall(r"\w+", words)
    }


def labels_of(page: str) -> Iterator[tuple[str, str, str]]:
    """Yield metric, label and value of every sample."""
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            for label, value in sample.labels.items():
                yield sample.name, label, value


async def hostile(client: httpx.AsyncClient) -> list[int]:
    """Send what a caller can choose, everywhere it can be chosen. Returns the statuses."""
    known = {"authorization": f"Bearer {KEY}"}
    calls = [
        ask(client, "/v1/chat/completions", CHAT | {"model": EVIL}, **known),
        ask(client, "/v1/chat/completions", CHAT | {"model": "evil-model"}, **known),
        ask(client, "/v1/completions", {"model": EVIL, "prompt": EVIL}, **known),
        ask(client, "/v1/responses", {"model": EVIL, "input": EVIL}, **known),
        ask(client, "/v1/responses", {"model": EVIL, "input": EVIL, "background": True}, **known),
        ask(client, "/v1/chat/completions", CHAT, authorization="Bearer sk-evil"),
        ask(
            client,
            "/v1/chat/completions",
            CHAT | {"user": EVIL, "metadata": {"evil": EVIL}, "service_tier": EVIL, "evil": EVIL},
            **known,
        ),
        ask(
            client,
            "/v1/chat/completions",
            CHAT | {"stream": True},
            user_agent="evil",
            idempotency_key="evil-1",
            x_request_id="evil",
            x_gateway_class="evil",
            x_gateway_backend="evil",
            prefer="evil",
            traceparent="00-evil-evil-evil",
            **known,
        ),
        ask(
            client,
            "/v1/responses",
            {"model": "gemma-4", "input": "hi", "metadata": {"evil": "evil"}},
            **known,
        ),
        ask(
            client,
            "/v1/responses",
            {"model": "gemma-4", "input": "hi", "background": True},
            idempotency_key="evil-2",
            **known,
        ),
        ask(client, "/v1/chat/completions", CHAT | {"tools": [{"type": "evil"}]}, **known),
        ask(client, "/v1/evil", {}, **known),
        client.get("/v1/responses/evil", headers=known),
        client.post("/v1/responses/evil/cancel", headers=known),
        client.get("/v1/models/evil", headers=known),
        client.request("PUT", "/v1/chat/completions", headers=known),
        client.post("/v1/chat/completions", content=b'{"model": evil', headers=known),
    ]
    return [(await call).status_code for call in calls]


async def test_no_label_is_what_a_caller_chose(tmp_path: Path) -> None:
    keys = {"team": {"sha256": sha256(KEY.encode()).hexdigest()}}
    async with busy_site(tmp_path, keys=keys) as running, running.http() as client:
        statuses = await hostile(client)
        assert {200, 400, 401, 404, 405} <= set(statuses)
        await running.eventually(running.idle)
        page = (await client.get(f"{running.admin_url}/metrics")).text
        allowed = sources(running)
    assert documented_labels() == set(allowed)
    found = list(labels_of(page))
    strange = {
        (name, label, value) for name, label, value in found if label != "le" and value not in allowed[label]
    }
    assert strange == set()
    assert "evil" not in page
    assert KEY not in page
    assert "team" not in page  # nor who it was: that is the log's
    # What was sent has been counted, under the names of the configuration.
    assert ("gateway_requests_total", "code", "model_not_found") in found
    assert ("gateway_requests_total", "traffic_class", "short_chat") in found


# ------------------------------------------------------------------ queries

RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "gemma-gateway.json").read_text())
ELSEWHERE = {
    "Ejections, hangs and restarts, last hour": "nothing has failed",
    "Where the knee seems to be": "takes minutes of traffic",
    "Drift of the estimate": "takes a number of answers",
    "Backends passed over, by reason": "nothing was full",
    "Late first tokens": "none did",
    "Refused, by code": "a counter's first sample has no rate",
    "Spills": "nothing was full",
    "State": "of a box",
    "Model being served": "of a box",
    "Waiting for a model": "of a box",
    "Oldest wait": "of a box",
    "Swaps per hour, by cause": "of a box",
    "Duration of swaps and boots": "of a box",
    "Webhooks": "none is configured",
    "Reloads, last hour": "there was none",
    "Traces kept": "none is sent",
    "Decision log": "none is written",
    "Sequences that no gateway counts": "takes a minute of samples",
}
"""What this traffic shows nothing of."""


def expressions() -> Iterator[tuple[str, str]]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"].replace("$__rate_interval", "1m")
    for note in DASHBOARD["annotations"]["list"]:
        yield note["name"], note["expr"]
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule.get("alert") or rule["record"], rule["expr"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def traffic(client: httpx.AsyncClient) -> None:
    """Have something of every kind served."""
    long = CHAT | {"messages": [{"role": "user", "content": "word " * 40_000}]}
    await ask(client, "/v1/responses", {"model": "gemma-4", "input": "hi", "background": True})
    for _ in range(3):
        for body in (CHAT, CHAT | {"stream": True}, long | {"stream": True}):
            assert (await ask(client, "/v1/chat/completions", body)).status_code == 200


async def seen(server: Prometheus, client: httpx.AsyncClient) -> None:
    """Return once Prometheus has seen a job's end twice, and has evaluated the rules since."""
    with anyio.fail_after(60):
        while not await server.query("count_over_time(gateway_jobs_ended_total[1m]) >= 2"):
            await ask(client, "/v1/chat/completions", CHAT | {"stream": True})
        while not await server.query("gateway:time_to_first_token_seconds:p95_5m"):
            await ask(client, "/v1/chat/completions", CHAT | {"stream": True})


async def test_every_query_is_answered_from_a_running_gateway(tmp_path: Path) -> None:
    program("prometheus")
    async with busy_site(tmp_path) as running, running.http() as client:
        await traffic(client)
        target = running.admin_url.removeprefix("http://")
        async with prometheus(tmp_path, target, free_port(), RULES) as server:
            await seen(server, client)
            found = [(name, await server.query(expression)) for name, expression in expressions()]
            groups = (await server.get("rules"))["groups"]
        await running.eventually(running.idle)
    rules = [rule for group in groups for rule in group["rules"]]
    assert [(rule["name"], rule["lastError"]) for rule in rules if rule.get("lastError")] == []
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []
    panels = {panel["title"] for panel in DASHBOARD["panels"]}
    empty = {name for name, result in found if not result and name in panels}
    assert empty <= set(ELSEWHERE)
    assert set(ELSEWHERE) <= panels
    recorded = {rule["name"] for rule in rules if rule["type"] == "recording"}
    silent = {name for name, result in found if not result and name in recorded}
    assert silent <= {
        "gateway:requests_shed:ratio5m",
        "gateway:requests_failed:ratio5m",
        "gateway:class_requests_failed:ratio5m",
        "gateway:first_tokens_late:ratio5m",
    }


# ------------------------------------------------------------------ alerts

ONE_EACH = {
    "GatewayClassNoBackend": {"model": "other", "traffic_class": "all"},
    "GatewayConfigReloadFailed": {},
    "GatewayJobsDrained": {},
    "GatewayJobsExpired": {"lane": "other/all"},
    "GatewayJobsPoisoned": {"lane": "gemma-4/short_chat"},
    "GatewayRequestsFail": {},
    "GatewayWebhooksFail": {},  # for both endpoints
    "GatewayWebhooksLost": {"endpoint": "gone"},
}
"""What each of the faults in the test raises, with what it has to name."""

OVER_WITH_ITS_CAUSE = {"GatewayClassNoBackend", "GatewayConfigReloadFailed", "GatewayJobsDrained"}
STORE = {"GatewayJobsStoreAway", "GatewayStoreAlone"}


def at_once(folder: Path) -> Path:
    """Write the rules down such that an alert fires when its condition holds, not some time later."""
    document = yaml.safe_load(RULES.read_text())
    for group in document["groups"]:
        for rule in group["rules"]:
            rule.pop("for", None)
    path = folder / "rules.yml"
    path.write_text(yaml.safe_dump(document))
    return path


async def firing(server: Prometheus) -> dict[str, list[Mapping[str, str]]]:
    """Return the labels of what fires, by alert."""
    found: dict[str, list[Mapping[str, str]]] = {}
    for alert in (await server.get("alerts"))["alerts"]:
        found.setdefault(alert["labels"]["alertname"], []).append(alert["labels"])
    return found


@asynccontextmanager
async def faulty_site(folder: Path, store: RedisServer) -> AsyncIterator[Site]:
    """Run a gateway with two models, a backend each, and two endpoints that take no webhook."""
    (folder / "secret").write_text("whsec_" + "x" * 32)

    async def gone(stream: SocketStream, number: int) -> None:
        await stream.send(answer_of(b"", "410 Gone"))

    async with raw_server(gone) as receiver:
        urls = {"gone": receiver.url, "silent": f"http://127.0.0.1:{free_port()}"}
        hook = {"secret_file": "secret", "allow_private": True, "events": ["response.failed"]}
        async with site(
            folder,
            fleet=simulated({"light-0": "h100-tp1-light", "light-1": "h100-tp1-light"}),
            pools={"light": ["light-0"], "other": ["light-1"]},
            models={
                "gemma-4": {"classes": [{"class": "short_chat", "pools": ["light"]}]},
                "other": {"classes": [{"class": "all", "pools": ["other"]}]},
            },
            store={"url": store.url},
            jobs={"attempts_max": 1},
            webhooks={name: {"url": url, **hook} for name, url in urls.items()},
        ) as running:
            yield running


async def test_faults_of_a_running_gateway_raise_their_alerts(tmp_path: Path) -> None:
    program("prometheus")
    folder = tmp_path / "store"
    folder.mkdir()
    with own_server("valkey-9", folder, keeps=True) as store:
        async with faulty_site(tmp_path, store) as running, running.http() as client:
            target = running.admin_url.removeprefix("http://")
            async with prometheus(tmp_path, target, free_port(), at_once(tmp_path)) as server:
                await raise_and_mend(running, client, server, store)


async def raise_and_mend(
    running: Site, client: httpx.AsyncClient, server: Prometheus, store: RedisServer
) -> None:
    """Have one thing after the other fail, and wait for its alert; mend it, and wait for the alert's end."""

    async def until(expected: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any]:
        with anyio.fail_after(60):
            while not expected(found := await firing(server)):
                await ask(client, "/v1/chat/completions", CHAT)
        return found

    with anyio.fail_after(60):
        while not await server.query("count_over_time(gateway_store_jobs_ended_total[1m]) > 2"):
            await ask(client, "/v1/chat/completions", CHAT)
    await until(lambda found: not {*ONE_EACH, *STORE} & {*found})

    path, job = running.gateway.settings.path, {"input": "hi", "background": True}
    good = path.read_bytes()
    path.write_text("pools: [")
    running.backends["light-0"].order(FaultOrder(Fault.ERROR))
    running.backends["light-1"].order(FaultOrder(Fault.REFUSE, for_s=1e6))
    await ask(client, "/v1/responses", job | {"model": "other"}, x_gateway_expires_s="1")
    await ask(client, "/v1/responses", job | {"model": "gemma-4"})
    await until(lambda found: "GatewayJobsPoisoned" in found)
    await client.post(f"{running.admin_url}/admin/jobs/drain")
    found = await until(lambda found: {*ONE_EACH} <= {*found})
    for alert, labels in ONE_EACH.items():
        assert all(labels.items() <= one.items() for one in found[alert]), found[alert]

    path.write_bytes(good)
    for backend in running.backends.values():
        backend.order(None)
    await client.post(f"{running.admin_url}/admin/jobs/undrain")
    await until(lambda found: not OVER_WITH_ITS_CAUSE & {*found})

    store.kill()
    await until(lambda found: {*found} >= STORE)
    store.start()
    await until(lambda found: not STORE & {*found})
