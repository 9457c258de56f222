"""Probing fake engines over real sockets."""

import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.certificates import self_signed

from gateway.core.backends import Backend, Capacity, KneeStep
from gateway.core.facts import Attempts
from gateway.core.health import (
    BackendStatus,
    EngineSample,
    HealthRules,
    Outcome,
    PeerAttempts,
    PeerVerdict,
    State,
    Verdict,
)
from gateway.ports import Clock, Fleet
from gateway.upstream import backend_clients, probes
from gateway.upstream.probes import Prober, spread

QUICK = HealthRules(
    interval_s=0.02, probe_timeout_s=5.0, scrape_timeout_s=5.0, models_every_s=0.2, penalty_s=0.0, hang_s=0.1
)
PATIENCE_S = 20.0  # a bound for a broken test, not a time anything is expected to take

Engine = Any  # the class lives in conftest.py, which cannot be imported
Engines = Callable[..., AbstractAsyncContextManager[Engine]]
Statuses = Mapping[str, BackendStatus]


def backend(name: str, url: str, model: str | None = "gemma") -> Backend:
    return Backend(
        id=name,
        url=url,
        model=model,
        capacity=Capacity(context_tokens=32768, knee=(KneeStep(None, 8),)),
        boot_budget_s=60.0,
    )


@asynccontextmanager
async def probing(prober: Prober) -> AsyncIterator[Prober]:
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(prober.run)
            yield prober
            tasks.cancel_scope.cancel()


def watch(clock: Clock, engine: Engine, rules: HealthRules = QUICK, **options: Any) -> Prober:
    return Prober(
        {"a": backend("a", engine.url)},
        rules,
        clock,
        secrets=options.pop("secrets", {}),
        tls=options.pop("tls", {}),
        **options,
    )


def is_(state: State) -> Callable[[Statuses], bool]:
    return lambda statuses: statuses["a"].state is state


async def test_first_contact_learns_what_the_backend_is(clock: Clock, fake_engine: Engines) -> None:
    async with fake_engine() as engine:
        engine.running, engine.waiting, engine.kv_usage = 4, 2, 0.842
        async with probing(watch(clock, engine)) as fleet:
            await fleet.wait_for(lambda seen: seen["a"].version != "" and seen["a"].engine is not None)
            status = fleet.statuses()["a"]
    assert (status.state, status.served_models, status.context_tokens) == (State.UP, ("gemma",), 32768)
    assert status.version == "0.32.0"
    assert status.engine is not None
    assert (status.engine.running, status.engine.waiting, status.engine.kv_usage) == (4, 2, 0.842)
    assert status.engine.started_at == 1e9


@pytest.mark.parametrize("host", ["xn--", "a\x7f", "\u2603", "a..b", "a" * 300])
async def test_a_host_that_can_have_no_address(clock: Clock, host: str) -> None:
    fleet = Prober({"a": backend("a", f"http://{host}:8000")}, QUICK, clock, secrets={}, tls={})

    async with probing(fleet):
        await fleet.wait_for(lambda seen: seen["a"].last_error != "")

    assert fleet.statuses()["a"].state is State.BOOTING


async def test_it_is_a_fleet_that_knows_nothing_before_it_runs(clock: Clock, fake_engine: Engines) -> None:
    async with fake_engine() as engine:
        fleet: Fleet = watch(clock, engine)
        assert fleet.statuses()["a"].state is State.UNKNOWN
        fleet.report("a", Outcome.OK, "", inf)
        assert fleet.statuses()["a"].state is State.UP


async def test_one_that_is_killed_boots_and_comes_back_on_probation(
    clock: Clock, fake_engine: Engines
) -> None:
    rules = replace(QUICK, models_every_s=1_000.0)  # it is why its models are read again
    async with fake_engine() as engine, probing(watch(clock, engine, rules)) as fleet:
        await fleet.wait_for(lambda seen: seen["a"].engine is not None and seen["a"].served_models != ())
        await engine.stop()
        await fleet.wait_for(is_(State.BOOTING))
        assert fleet.statuses()["a"].reason == "connection refused; it has 60 s to boot"

        engine.started_at += 40
        engine.models = ("gemma", "adapter")
        await engine.start()
        await fleet.wait_for(lambda seen: seen["a"].restarts == 1 and len(seen["a"].served_models) == 2)
        assert fleet.statuses()["a"].state is State.PROBATION
        for _ in range(3):
            fleet.report("a", Outcome.OK, "", inf)
        assert fleet.statuses()["a"].state is State.UP


async def test_a_restart_between_two_probes_is_noticed(clock: Clock, fake_engine: Engines) -> None:
    rules = replace(QUICK, models_every_s=1_000.0)  # it is why its models are read again
    async with fake_engine() as engine, probing(watch(clock, engine, rules)) as fleet:
        await fleet.wait_for(lambda seen: seen["a"].engine is not None and seen["a"].served_models != ())
        engine.started_at += 40
        engine.context_tokens = 4096
        await fleet.wait_for(lambda seen: seen["a"].context_tokens == 4096)
        assert (fleet.statuses()["a"].restarts, fleet.statuses()["a"].state) == (1, State.PROBATION)


async def test_figures_of_engines_that_answer_by_turns_are_those_of_none(
    clock: Clock, fake_engine: Engines
) -> None:
    told: list[tuple[bool, bool]] = []
    samples, stale = list[EngineSample](), list[str]()
    async with fake_engine() as engine:
        prober = watch(
            clock,
            engine,
            on_change=lambda _, old, new: told.append((old.shared_at is None, new.shared_at is None)),
            on_sample=lambda _, one: samples.append(one),
            on_stale=stale.append,
        )
        async with probing(prober) as fleet:
            await fleet.wait_for(lambda seen: seen["a"].engine is not None)
            for turn in (40, -40):
                await engine.until_asked("/metrics", engine.asked["/metrics"] + 2)
                engine.started_at += turn
            await fleet.wait_for(lambda seen: seen["a"].shared_at is not None)
            assert told[-1] == (True, False)
            samples.clear()
            stale.clear()
            await engine.until_asked("/metrics", engine.asked["/metrics"] + 2)
            assert (samples, stale[:1]) == ([], ["a"])


async def test_a_hang_is_noticed_although_health_says_200(clock: Clock, fake_engine: Engines) -> None:
    async with fake_engine() as engine, probing(watch(clock, engine)) as fleet:
        engine.running, engine.generation_tokens = 3, 700
        await fleet.wait_for(is_(State.HUNG))
        assert "3 running" in fleet.statuses()["a"].reason
        asked = engine.asked["/health"]
        await engine.until_asked("/health", asked + 2)
        assert fleet.statuses()["a"].state is State.HUNG
        engine.generation_tokens += 1
        await fleet.wait_for(is_(State.PROBATION))


async def test_failed_requests_eject_and_a_good_probe_gives_another_chance(
    clock: Clock, fake_engine: Engines
) -> None:
    seen: list[tuple[State, State]] = []
    async with fake_engine() as engine:
        prober = watch(clock, engine, on_change=lambda _, old, new: seen.append((old.state, new.state)))
        async with probing(prober) as fleet:
            await fleet.wait_for(is_(State.UP))
            for _ in range(3):
                fleet.report("a", Outcome.FAILED, "HTTP 500", inf)
            await fleet.wait_for(is_(State.PROBATION))
    assert seen[:3] == [
        (State.UNKNOWN, State.UP),
        (State.UP, State.EJECTED),
        (State.EJECTED, State.PROBATION),
    ]


async def test_what_it_serves_is_told_when_it_is_known(clock: Clock, fake_engine: Engines) -> None:
    told: list[tuple[str, ...]] = []
    async with fake_engine() as engine:
        engine.gates["/v1/models"] = anyio.Event()
        prober = watch(clock, engine, on_change=lambda _, old, new: told.append(new.served_models))
        async with probing(prober) as fleet:
            await fleet.wait_for(is_(State.UP))
            assert set(told) == {()}
            engine.gates["/v1/models"].set()
            await fleet.wait_for(lambda statuses: bool(statuses["a"].served_models))
    assert told[-1] != ()


async def test_a_slow_metrics_page_delays_no_verdict_and_is_not_asked_for_twice(
    clock: Clock, fake_engine: Engines
) -> None:
    async with fake_engine() as engine:
        engine.gates["/metrics"] = anyio.Event()
        async with probing(watch(clock, engine)) as fleet:
            await engine.until_asked("/health", 20)
            assert (engine.asked["/metrics"], engine.busiest["/health"]) == (1, 1)
            assert fleet.statuses()["a"].state is State.UP
            await engine.stop()
            await fleet.wait_for(is_(State.BOOTING))


async def test_a_proxy_that_limits_requests_takes_no_engine_out_of_service(
    clock: Clock, fake_engine: Engines
) -> None:
    async with fake_engine() as engine, probing(watch(clock, engine)) as fleet:
        await fleet.wait_for(is_(State.UP))
        engine.replies["/health"] = (429, b"<html>Too Many Requests</html>")
        await engine.until_asked("/health", engine.asked["/health"] + 10)
        status = fleet.statuses()["a"]
        assert (status.state, status.last_error) == (State.UP, "probe: /health: HTTP 429")


async def test_what_other_gateways_say_of_a_backend_counts_here(clock: Clock, fake_engine: Engines) -> None:
    reasons: list[str] = []
    async with fake_engine() as engine:
        prober = watch(clock, engine, on_change=lambda _, old, new: reasons.append(new.reason))
        async with probing(prober) as fleet:
            await fleet.wait_for(is_(State.UP))
            told = PeerVerdict("other", Verdict(1, State.EJECTED, "3 requests failed", 0.05))
            fleet.hear("a", told)
            fleet.hear("of another fleet", told)

            assert fleet.statuses()["a"].state is State.EJECTED
            assert reasons[-1] == "seen by other: 3 requests failed"
            assert fleet.verdicts() == {}
            await fleet.wait_for(is_(State.PROBATION))


def test_what_ones_own_requests_showed_is_there_to_be_told(clock: Clock) -> None:
    subject = backend("a", "http://127.0.0.1:1")
    prober = Prober({"a": subject}, HealthRules(failures_max=2), clock, secrets={}, tls={})
    prober.report("a", Outcome.FAILED, "status 500", inf)
    assert prober.verdicts() == {}
    prober.report("a", Outcome.FAILED, "status 500", inf)

    verdict = prober.verdicts()["a"]

    assert (verdict.number, verdict.state, verdict.ejections) == (1, State.EJECTED, 1)
    assert 0 < verdict.left_s <= 5.0


def test_failures_that_successes_elsewhere_do_not_forgive_are_forgiven_by_one_of_ones_own(
    clock: Clock,
) -> None:
    subject = backend("a", "http://127.0.0.1:1")
    prober = Prober({"a": subject}, HealthRules(failures_max=2), clock, secrets={}, tls={})
    prober.report("a", Outcome.OK, "", inf)
    for _ in range(3):
        prober.report("a", Outcome.FAILED, "status 500", inf)
        prober.hear("a", PeerAttempts(served=1, failed=0))
        prober.report("a", Outcome.OK, "", inf)

    assert prober.statuses()["a"].state is State.UP


async def test_a_slow_backend_delays_no_other(clock: Clock, fake_engine: Engines) -> None:
    async with fake_engine() as slow, fake_engine() as quick:
        slow.gates["/health"] = anyio.Event()
        prober = Prober(
            {"slow": backend("slow", slow.url), "quick": backend("quick", quick.url)},
            QUICK,
            clock,
            secrets={},
            tls={},
        )
        async with probing(prober) as fleet:
            await quick.until_asked("/health", 20)
            assert slow.asked["/health"] == 1
            states = {name: status.state for name, status in fleet.statuses().items()}
            assert states == {"slow": State.UNKNOWN, "quick": State.UP}


async def test_no_answer_in_time_is_a_failed_probe(clock: Clock, fake_engine: Engines) -> None:
    rules = HealthRules(interval_s=0.02, probe_timeout_s=0.05, penalty_s=60.0)
    async with fake_engine() as engine, probing(watch(clock, engine, rules)) as fleet:
        await fleet.wait_for(is_(State.UP))
        engine.gates["/health"] = anyio.Event()
        await fleet.wait_for(is_(State.EJECTED))
        assert fleet.statuses()["a"].last_error == "probe: no answer in 0.05 s"


@pytest.mark.parametrize("is_stream", [True, False])
async def test_no_answer_in_time_does_not_count_while_requests_are_answered(
    is_stream: bool, clock: Clock, fake_engine: Engines
) -> None:
    rules = HealthRules(interval_s=0.02, probe_timeout_s=0.2, penalty_s=60.0)
    silences_s = iter([0.19] * 8 if is_stream else [])
    async with fake_engine() as engine:
        prober = watch(clock, engine, rules, silence_s=lambda _: next(silences_s, 0.4))
        async with probing(prober) as fleet:
            await fleet.wait_for(is_(State.UP))
            await engine.until_asked("/metrics", 1)
            engine.gates["/health"] = anyio.Event()
            asked = engine.asked["/health"]
            for done in range(8):
                await engine.until_asked("/health", asked + done + 1)
                assert fleet.statuses()["a"].state is State.UP
                if not is_stream:
                    fleet.report("a", Outcome.OK, "", inf)
            await fleet.wait_for(is_(State.EJECTED))
        assert fleet.statuses()["a"].reason.startswith("3 probes failed in a row: no answer in 0.2 s")


@pytest.mark.parametrize(
    ("reply", "detail"),
    [
        ((503, b""), "/health: HTTP 503"),
        ((302, b""), "/health: HTTP 302"),
        ((500, b""), "/health: HTTP 500"),
        ((200, b"x" * 4_000_001), "more than 4000000 bytes"),
    ],
    ids=["dead-engine", "login-page", "broken", "endless"],
)
async def test_an_answer_that_is_no_health(
    reply: tuple[int, bytes], detail: str, clock: Clock, fake_engine: Engines
) -> None:
    async with fake_engine() as engine:
        engine.replies["/health"] = reply
        async with probing(watch(clock, engine)) as fleet:
            await fleet.wait_for(is_(State.BOOTING))
            assert fleet.statuses()["a"].last_error == f"probe: {detail}"


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_a_server_without_health_is_well_while_it_lists_its_models(
    status: int, clock: Clock, fake_engine: Engines
) -> None:
    async with fake_engine() as engine:
        engine.api_key, engine.replies["/health"] = "k", (status, b"404 page not found")
        async with probing(watch(clock, engine, secrets={"a": "k"})) as fleet:
            await fleet.wait_for(is_(State.UP))
            engine.replies["/v1/models"] = (503, b"")
            await fleet.wait_for(is_(State.EJECTED))
            del engine.replies["/v1/models"]
            await fleet.wait_for(is_(State.PROBATION))


@pytest.mark.parametrize(
    ("reply", "detail"),
    [
        ((404, b""), "HTTP 404 (is its URL that of an engine?)"),
        ((401, b""), "HTTP 401 (it wants an API key: `api_key_env`)"),
        ((200, b"<html>"), "no list of models"),
        ((200, b"{}"), "no list of models"),
    ],
    ids=["nothing-there", "a-key-is-missing", "a-web-page", "another-api"],
)
async def test_a_server_with_neither_health_nor_models_is_no_backend(
    reply: tuple[int, bytes], detail: str, clock: Clock, fake_engine: Engines
) -> None:
    async with fake_engine() as engine:
        engine.replies.update({"/health": (404, b""), "/v1/models": reply})
        async with probing(watch(clock, engine)) as fleet:
            await fleet.wait_for(is_(State.BOOTING))
            assert fleet.statuses()["a"].last_error == f"probe: /health: HTTP 404, /v1/models: {detail}"


@pytest.mark.parametrize(
    ("garbage", "found"),
    [
        (b"220 mail.example ESMTP\r\n", "an answer that is not HTTP, or was cut"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", "an answer that is not HTTP, or was cut"),
        (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\n", "an answer that is compressed"),
        (b"", "the connection was closed without an answer"),
    ],
    ids=["another-protocol", "cut", "compressed", "nothing"],
)
async def test_garbage_is_a_failed_probe_and_probing_goes_on(
    garbage: bytes, found: str, clock: Clock, fake_engine: Engines
) -> None:
    async with fake_engine() as engine:
        engine.garbage = garbage
        async with probing(watch(clock, engine)) as fleet:
            await fleet.wait_for(lambda seen: seen["a"].probe_failures >= 3)
            assert fleet.statuses()["a"].last_error == f"probe: {found}"
            engine.garbage = None
            await fleet.wait_for(is_(State.UP))


async def test_metrics_that_are_missing_are_said_and_cost_nothing_else(
    clock: Clock, fake_engine: Engines
) -> None:
    async with fake_engine() as engine:
        engine.replies["/metrics"] = (404, b"")
        async with probing(watch(clock, engine)) as fleet:
            await fleet.wait_for(lambda seen: seen["a"].metrics_error == "HTTP 404")
            await fleet.wait_for(is_(State.UP))
            engine.replies["/metrics"] = (200, b"<html>")
            await fleet.wait_for(lambda seen: "none of vllm:num_requests_running" in seen["a"].metrics_error)
            del engine.replies["/metrics"]
            await fleet.wait_for(lambda seen: seen["a"].metrics_error == "")


@pytest.mark.parametrize(
    ("body", "served", "error"),
    [
        (b'{"data":[{"id":"qwen","max_model_len":8192}]}', ("qwen",), "serves qwen, not gemma"),
        (b'{"data":[]}', (), "serves nothing, not gemma"),
        (b'{"object":"list","data":null}', (), "serves nothing, not gemma"),
        (b"[1]", (), "cannot tell what it serves: /v1/models: no list of models"),
        (b"\xff", (), "cannot tell what it serves: /v1/models: no list of models"),
        (b"[" * 100_000, (), "cannot tell what it serves: /v1/models: no list of models"),
        (b'{"data":[7,{"id":7}]}', (), "serves nothing, not gemma"),
    ],
    ids=[
        "another-model",
        "no-model",
        "no-model-of-ollama",
        "no-object",
        "no-json",
        "nested-without-end",
        "odd-entries",
    ],
)
async def test_a_list_of_models_that_is_wrong_is_said(
    body: bytes, served: tuple[str, ...], error: str, clock: Clock, fake_engine: Engines
) -> None:
    async with fake_engine() as engine:
        engine.replies["/v1/models"] = (200, body)
        async with probing(watch(clock, engine)) as fleet:
            await fleet.wait_for(lambda seen: seen["a"].model_error == error)
            assert fleet.statuses()["a"].served_models == served
            del engine.replies["/v1/models"]
            await fleet.wait_for(lambda seen: seen["a"].model_error == "")
            assert fleet.statuses()["a"].served_models == ("gemma",)


@pytest.mark.parametrize(
    "models",
    [
        b'{"data":[{"id":"other","max_model_len":1},{"id":"gemma","max_model_len":2048}]}',
        b'{"models":[{"name":"gemma"}],"data":[{"id":"gemma","meta":{"n_ctx":2048,"n_ctx_train":4096}}]}',
        b'{"data":[{"id":"gemma","max_model_len":2048,"meta":{"n_ctx":4096}}]}',
    ],
    ids=["vllm", "llama-cpp", "both"],
)
async def test_the_window_of_the_wanted_model_is_taken(
    models: bytes, clock: Clock, fake_engine: Engines
) -> None:
    async with fake_engine() as engine:
        engine.replies["/v1/models"] = (200, models)
        engine.replies["/version"] = (404, b"")
        async with probing(watch(clock, engine)) as fleet:
            await fleet.wait_for(lambda seen: seen["a"].context_tokens == 2048)
            assert fleet.statuses()["a"].version == ""


@pytest.mark.parametrize("window", [b'"2048"', b"-1", b"[]"], ids=["text", "negative", "list"])
async def test_a_window_that_is_no_length_is_left_out(
    window: bytes, clock: Clock, fake_engine: Engines
) -> None:
    async with fake_engine() as engine:
        engine.replies["/v1/models"] = (200, b'{"data":[{"id":"gemma","max_model_len":%s}]}' % window)
        async with probing(watch(clock, engine)) as fleet:
            await fleet.wait_for(lambda seen: seen["a"].served_models == ("gemma",))
            assert fleet.statuses()["a"].context_tokens is None


async def test_each_backend_is_shown_its_own_key(clock: Clock, fake_engine: Engines) -> None:
    async with fake_engine() as engine:
        engine.api_key = "sk-secret"
        async with probing(watch(clock, engine, secrets={"a": "sk-secret"})) as fleet:
            await fleet.wait_for(lambda seen: seen["a"].served_models == ("gemma",))


@pytest.mark.parametrize(
    ("secrets", "hint"),
    [({"a": "sk-secret"}, "it refuses the backend's API key"), ({}, "it wants an API key: `api_key_env`")],
)
async def test_a_refused_key_ejects_and_says_so(
    clock: Clock, fake_engine: Engines, secrets: dict[str, str], hint: str
) -> None:
    rules = HealthRules(interval_s=0.02, models_every_s=0.2, penalty_s=60.0)
    async with fake_engine() as engine:
        engine.api_key = "sk-other"
        async with probing(watch(clock, engine, rules, secrets=secrets)) as fleet:
            await fleet.wait_for(is_(State.EJECTED))
            status = fleet.statuses()["a"]
    assert status.last_error == f"misconfigured: /v1/models: HTTP 401 ({hint})"


async def test_an_unusable_key_is_never_shown(clock: Clock, fake_engine: Engines) -> None:
    secrets = {"a": "sk-secret\nx: y"}
    async with fake_engine() as engine, probing(watch(clock, engine, secrets=secrets)) as fleet:
        await fleet.wait_for(lambda seen: seen["a"].last_error != "")
        status = fleet.statuses()["a"]
        assert not engine.asked
    assert "secret" not in repr(status)
    assert status.last_error == "probe: its API key cannot be sent: it holds a line break"


async def test_tls_to_a_server_without_it_is_a_failed_probe(clock: Clock, fake_engine: Engines) -> None:
    async with fake_engine() as engine:
        engine.garbage = b"220 mail.example ESMTP\r\n"
        prober = Prober(
            {"a": backend("a", engine.url.replace("http:", "https:"))},
            QUICK,
            clock,
            secrets={},
            tls={"a": ssl.create_default_context()},
        )
        async with probing(prober) as fleet:
            await fleet.wait_for(lambda seen: seen["a"].probe_failures >= 1)
            assert fleet.statuses()["a"].last_error == "probe: TLS: wrong version number"
            assert fleet.statuses()["a"].state is State.BOOTING


@pytest.mark.parametrize(
    ("name", "trusts", "found"),
    [
        ("localhost", True, ""),
        ("localhost", False, "self-signed certificate"),
        ("127.0.0.1", True, "IP address mismatch, certificate is not valid for '127.0.0.1'"),
    ],
)
async def test_a_probe_says_what_is_wrong_with_a_certificate(
    clock: Clock, fake_engine: Engines, tmp_path: Path, name: str, trusts: bool, found: str
) -> None:
    cert, key = self_signed(tmp_path, "localhost")
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(cert, key)
    asking = ssl.create_default_context(cafile=cert if trusts else None)
    async with fake_engine(tls=serving) as engine:
        subject = backend("a", f"https://{name}:{engine.port}")
        async with probing(Prober({"a": subject}, QUICK, clock, secrets={}, tls={"a": asking})) as fleet:
            await fleet.wait_for(lambda seen: seen["a"].state is not State.UNKNOWN)
            assert fleet.statuses()["a"].last_error == (found and f"probe: TLS: {found}")


async def test_a_probe_trusts_whom_the_system_trusts(
    clock: Clock, fake_engine: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = self_signed(tmp_path, "localhost")
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))  # where OpenSSL looks for the system's
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(cert, key)
    async with fake_engine(tls=serving) as engine:
        subject = backend("a", f"https://localhost:{engine.port}")
        async with probing(Prober({"a": subject}, QUICK, clock, secrets={}, tls={})) as fleet:
            await fleet.wait_for(lambda seen: seen["a"].state is not State.UNKNOWN)
            assert (fleet.statuses()["a"].state, fleet.statuses()["a"].last_error) == (State.UP, "")


async def test_a_probe_asks_plainly_and_says_who_asks(clock: Clock, fake_engine: Engines) -> None:
    async with fake_engine() as engine, probing(watch(clock, engine)) as fleet:
        await fleet.wait_for(lambda seen: seen["a"].engine is not None)
    head = engine.headers["/metrics"].lower()
    assert head.startswith(b"get /metrics http/1.1\r\n")
    assert b"accept-encoding: identity\r\n" in head
    assert b"user-agent: gemma-gateway/" in head
    assert b"authorization" not in head


async def test_only_figures_come_on_a_kept_connection(clock: Clock, fake_engine: Engines) -> None:
    async with fake_engine() as engine, probing(watch(clock, engine)):
        await engine.until_asked("/health", 4)
        await engine.until_asked("/metrics", 4)
        assert len(engine.used["/health"]) == engine.asked["/health"]
        assert len(engine.used["/metrics"]) == 1
        assert not engine.used["/metrics"] & engine.used["/health"]


async def test_a_kept_connection_that_the_engine_closed_costs_no_figures(
    clock: Clock, fake_engine: Engines
) -> None:
    samples: list[EngineSample] = []
    async with fake_engine() as engine:
        engine.closes = True
        prober = watch(clock, engine, on_sample=lambda _, sample: samples.append(sample))
        async with probing(prober) as fleet:
            await engine.until_asked("/metrics", 5)
            await engine.until_asked("/health", engine.asked["/health"] + 2)
            assert fleet.statuses()["a"].metrics_error == ""
        assert len(samples) >= 4


async def test_one_that_was_never_up_gets_its_boot_budget(clock: Clock, fake_engine: Engines) -> None:
    async with fake_engine() as engine:
        await engine.stop()
        async with probing(watch(clock, engine)) as fleet:
            await fleet.wait_for(is_(State.BOOTING))
            await engine.start()
            await fleet.wait_for(is_(State.UP))


async def test_a_probe_that_dies_takes_all_of_them_down(clock: Clock, fake_engine: Engines) -> None:
    def listener(name: str, old: BackendStatus, new: BackendStatus) -> None:
        raise AssertionError("a listener must not raise")

    async with fake_engine() as engine:
        with pytest.raises(ExceptionGroup) as caught, anyio.fail_after(PATIENCE_S):
            await watch(clock, engine, on_change=listener).run()
    assert caught.group_contains(AssertionError, match="must not raise")


async def test_one_that_leaves_while_a_probe_wakes_is_asked_no_more(
    clock: Clock, fake_engine: Engines
) -> None:
    """A task that is about to run when its backend leaves is not cancelled before it runs."""
    left: list[str] = []

    def listener(name: str, old: BackendStatus, new: BackendStatus) -> None:
        if new.was_up and not left:  # whoever reads its models has just been woken
            left.append(name)
            prober.update({}, QUICK, secrets={}, tls={})

    async with fake_engine() as engine:
        prober = watch(clock, engine, on_change=listener)
        async with probing(prober):
            await prober.wait_for(lambda seen: not seen)
            for _ in range(5):
                await anyio.wait_all_tasks_blocked()
        assert left == ["a"]
        assert not prober._looks


async def test_a_hang_may_take_longer_on_one_backend(clock: Clock, fake_engine: Engines) -> None:
    async with fake_engine() as engine, probing(watch(clock, engine, hang_s={"a": 3600.0})) as fleet:
        engine.running = 1
        await engine.until_asked("/metrics", 20)
        assert fleet.statuses()["a"].state is State.UP


def test_probes_are_spread_without_dice() -> None:
    factors = [spread(f"b{number} health", round_) for number in range(8) for round_ in range(8)]
    assert all(0.9 <= factor <= 1.1 for factor in factors)
    assert len(set(factors)) == len(factors)
    assert factors[0] == spread("b0 health", 0)


async def test_the_connection_for_figures_is_made_anew_now_and_then(
    clock: Clock, fake_engine: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_clients, "AGE_S", 0.0)
    async with fake_engine() as engine:
        async with probing(watch(clock, engine)):
            await engine.until_asked("/metrics", 3)
        assert len(engine.used["/metrics"]) == engine.asked["/metrics"]


async def test_a_version_that_cannot_be_told_now_stays_known(clock: Clock, fake_engine: Engines) -> None:
    async with fake_engine() as engine, probing(watch(clock, engine)) as fleet:
        await fleet.wait_for(lambda seen: seen["a"].version == "0.32.0")
        engine.replies["/version"] = (503, b"")
        await engine.until_asked("/version", engine.asked["/version"] + 3)
        assert fleet.statuses()["a"].version == "0.32.0"


async def test_an_engine_that_reports_nothing_any_more_is_said_to(
    clock: Clock, fake_engine: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "STALE_S", 0.1)
    stale: list[str] = []
    async with (
        fake_engine() as engine,
        probing(watch(clock, engine, on_stale=stale.append)) as fleet,
    ):
        await fleet.wait_for(lambda seen: seen["a"].engine is not None)
        stale.clear()
        engine.replies["/metrics"] = (500, b"")
        await fleet.wait_for(lambda _: bool(stale))
        assert fleet.statuses()["a"].state is State.UP
        assert set(stale) == {"a"}


async def test_another_url_or_backend_is_taken_at_any_time(clock: Clock, fake_engine: Engines) -> None:
    nothing: Mapping[str, Any] = {}
    prober = Prober({}, HealthRules(failures_max=1), clock, secrets=nothing, tls=nothing)
    for number in (1, 2):  # other gateways take a verdict once only: they are counted on
        subject = {"a": backend("a", f"http://127.0.0.1:{number}")}
        prober.update(subject, HealthRules(failures_max=1), secrets=nothing, tls=nothing)
        prober.report("a", Outcome.FAILED, "status 500", inf)
        assert prober.verdicts()["a"].number == number
    async with fake_engine() as engine:
        async with probing(watch(clock, engine)) as ended:
            await ended.wait_for(is_(State.UP))
        ended.update({"b": backend("b", engine.url)}, QUICK, secrets=nothing, tls=nothing)
        assert ended.statuses()["b"].state is State.UNKNOWN


async def test_a_backend_that_is_asked_in_another_way_is_asked_in_the_former_no_more(
    clock: Clock, fake_engine: Engines
) -> None:
    nothing: Mapping[str, Any] = {}
    async with fake_engine() as former, fake_engine() as engine, probing(watch(clock, former)) as fleet:
        await fleet.wait_for(is_(State.UP))
        fleet.update({"a": backend("a", engine.url)}, QUICK, secrets=nothing, tls=nothing)
        await engine.until_asked("/health", 3)
        asked = former.asked["/health"]
        await engine.until_asked("/health", engine.asked["/health"] + 5)
        assert former.asked["/health"] == asked
        fleet.update({"a": backend("a", engine.url)}, QUICK, secrets=nothing, tls={"a": False})
        assert fleet._watched["a"].verify is False


async def test_an_answer_that_is_out_does_not_hold_up_the_end(clock: Clock, fake_engine: Engines) -> None:
    async with fake_engine() as engine:
        engine.gates["/health"] = anyio.Event()
        begun = clock.now()
        async with probing(watch(clock, engine)):
            await engine.until_asked("/health", 1)
        assert clock.now() - begun < QUICK.probe_timeout_s


async def test_what_was_served_is_counted_once(clock: Clock, fake_engine: Engines) -> None:
    async with fake_engine() as engine, probing(watch(clock, engine)) as fleet:
        await fleet.wait_for(is_(State.UP))
        for _ in range(2):
            fleet.report("a", Outcome.OK, "", inf)
        assert fleet.attempts()["a"].served == 2
        await engine.until_asked("/health", engine.asked["/health"] + 3)
        assert fleet.attempts()["a"].served == 2


async def test_what_concerns_the_former_url_does_not_count_for_the_new_one(clock: Clock) -> None:
    nothing: Mapping[str, Any] = {}
    rules = HealthRules(failures_max=1)
    prober = Prober({"a": backend("a", "http://127.0.0.1:1")}, rules, clock, secrets=nothing, tls=nothing)
    told = PeerVerdict("other", Verdict(1, State.EJECTED, "3 requests failed", 30.0))
    prober.hear("a", told)
    assert prober.statuses()["a"].state is State.EJECTED
    started_at = clock.now()

    prober.update({"a": backend("a", "http://127.0.0.1:2")}, rules, secrets=nothing, tls=nothing)

    prober.hear("a", told)  # it is repeated for as long as it holds
    assert prober.statuses()["a"].state is State.UNKNOWN
    for outcome in (Outcome.FAILED, Outcome.OK):
        prober.report("a", outcome, "", started_at)
        assert prober.statuses()["a"].state is State.UNKNOWN
    prober.report("a", Outcome.OK, "", clock.now())
    assert prober.statuses()["a"].state is State.UP
    prober.report("a", Outcome.FAILED, "status 500", clock.now())
    assert prober.statuses()["a"].state is State.EJECTED
    for subject in ({}, {"a": backend("a", "http://127.0.0.1:3")}):
        prober.update(subject, rules, secrets=nothing, tls=nothing)
    prober.report("a", Outcome.OK, "", started_at)
    assert prober.statuses()["a"].state is State.UNKNOWN


async def test_what_succeeds_at_the_former_url_is_no_credit_to_the_server_at_the_new_one(
    clock: Clock,
) -> None:
    nothing: Mapping[str, Any] = {}
    rules = HealthRules(failures_max=2)
    prober = Prober({"a": backend("a", "http://127.0.0.1:1")}, rules, clock, secrets=nothing, tls=nothing)
    started_at = clock.now()
    for _ in range(3):
        prober.report("a", Outcome.OK, "", started_at)

    prober.update({"a": backend("a", "http://127.0.0.1:2")}, rules, secrets=nothing, tls=nothing)

    assert not prober.attempts()
    prober.report("a", Outcome.OK, "", clock.now())
    prober.report("a", Outcome.FAILED, "status 500", clock.now())
    for _ in range(3):
        prober.report("a", Outcome.OK, "", started_at)
    assert prober.attempts()["a"] == Attempts(served=1, failed=1)
    prober.report("a", Outcome.FAILED, "status 500", clock.now())
    assert prober.statuses()["a"].state is State.EJECTED


async def test_another_model_is_looked_for_at_once(clock: Clock, fake_engine: Engines) -> None:
    nothing: Mapping[str, Any] = {}
    rules = replace(QUICK, models_every_s=3600.0)
    async with fake_engine() as engine, probing(watch(clock, engine, rules)) as fleet:
        await fleet.wait_for(lambda statuses: bool(statuses["a"].served_models))
        fleet.update({"a": backend("a", engine.url, "other")}, rules, secrets=nothing, tls=nothing)
        await fleet.wait_for(lambda statuses: statuses["a"].model_error == "serves gemma, not other")
        fleet.update({"a": backend("a", engine.url)}, rules, secrets={"a": "key"}, tls=nothing)
        await fleet.wait_for(lambda statuses: statuses["a"].model_error == "")


async def test_one_that_may_serve_another_model_is_asked_at_once(clock: Clock, fake_engine: Engines) -> None:
    rules = replace(QUICK, models_every_s=3600.0)
    async with fake_engine() as engine:
        fleet = Prober({"a": backend("a", engine.url, model=None)}, rules, clock, secrets={}, tls={})
        async with probing(fleet):
            await fleet.wait_for(lambda statuses: statuses["a"].served_models == ("gemma",))
            engine.models = ("another",)
            fleet.look_again("a")
            await fleet.wait_for(lambda statuses: statuses["a"].served_models == ("another",))
            fleet.look_again("gone")


async def test_one_that_was_asked_just_now_is_asked_again_at_once_if_that_says_nothing_any_more(
    clock: Clock, fake_engine: Engines
) -> None:
    """So after a restart: a good probe has it asked, and then the sample that shows another start."""
    rules = replace(QUICK, models_every_s=3600.0, interval_s=3600.0)
    async with fake_engine() as engine, probing(watch(clock, engine, rules)) as fleet:
        await fleet.wait_for(lambda statuses: statuses["a"].served_models == ("gemma",))
        nothing: Mapping[str, Any] = {}
        fleet.update({"a": backend("a", engine.url, "other")}, rules, secrets=nothing, tls=nothing)
        await fleet.wait_for(lambda statuses: statuses["a"].model_error == "serves gemma, not other")


async def test_one_that_serves_the_wrong_model_is_asked_more_often(
    clock: Clock, fake_engine: Engines
) -> None:
    rules = replace(QUICK, models_every_s=1.25 * PATIENCE_S)
    async with fake_engine() as engine:
        engine.models = ("other",)
        async with probing(watch(clock, engine, rules)) as fleet:
            await fleet.wait_for(lambda statuses: statuses["a"].model_error != "")
            engine.models = ("gemma",)
            await fleet.wait_for(lambda statuses: statuses["a"].model_error == "")
