"""Requests that start, stop and ask models, before servers that answer whatever a test says."""

import gc
import json
import logging
import ssl
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from anyio.abc import SocketStream
from support.certificates import self_signed
from support.raw_server import RawServer, raw_server, tls_server

from gateway.core.backends import Backend, Capacity, KneeStep
from gateway.core.canary import Canary
from gateway.upstream import switches
from gateway.upstream.commands import Command
from gateway.upstream.faults import Failed
from gateway.upstream.switches import BoxSwitch, ByCommand, ByRequest, BySleep, Call, Member, note_launch

NOWHERE = "http://127.0.0.1:1"
CANARY = Canary("What is 17 + 25?", "42", timeout_s=5)


def answer(status: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def says(content: str) -> bytes:
    return answer("200 OK", json.dumps({"choices": [{"message": {"content": content}}]}).encode())


def answering(*answers: bytes | None):  # type: ignore[no-untyped-def]
    """Return what answers each request with the next of these; None: not at all."""

    async def reply(stream: SocketStream, number: int) -> None:
        said = answers[min(number, len(answers) - 1)]
        if said is not None:
            await stream.send(said)

    return raw_server(reply)


def asked(server: RawServer) -> Sequence[str]:
    return [head.decode().split(" HTTP")[0] for head, _ in server.requests]


def member(way: ByCommand | ByRequest | BySleep, url: str = NOWHERE, model: str | None = "qwen") -> Member:
    backend = Backend("qwen", url, Capacity(65_536, (KneeStep(None, 4),)), model=model)
    return Member(backend, way, CANARY, secret="key-of-the-server")


def by_request(url: str, **options: float) -> ByRequest:
    call = Call("POST", f"{url}/models/qwen?wait=true", {"state": "running"})
    return ByRequest(call, Call("DELETE", f"{url}/models/qwen"), "token", **options)


def switch(one: Member) -> BoxSwitch:
    return BoxSwitch({"qwen": one})


async def test_a_start_is_one_request_with_its_token_and_the_number_of_the_ownership() -> None:
    async with answering(answer("202 Accepted")) as server:
        assert await switch(member(by_request(server.url))).start("qwen", 7) == ""
        ((head, body),) = server.requests
    assert head.startswith(b"POST /models/qwen?wait=true HTTP/1.1")
    assert b"x-gateway-fence: 7" in head
    assert b"authorization: Bearer token" in head
    assert b"key-of-the-server" not in head
    assert json.loads(body) == {"state": "running"}


@pytest.mark.parametrize(("body", "sent"), [({}, b"{}"), (None, b"")])
async def test_an_empty_body_is_one(body: object, sent: bytes) -> None:
    async with answering(answer("200 OK")) as server:
        way = ByRequest(Call("PUT", f"{server.url}/a", body), Call("PUT", f"{server.url}/b"))
        assert await switch(member(way)).start("qwen", 1) == ""
        ((head, received),) = server.requests
    assert received == sent
    assert b"authorization" not in head
    assert (b"content-type" in head) is bool(sent)


@pytest.mark.parametrize(
    ("answers", "failure"),
    [
        pytest.param([answer("500 Oh")], "HTTP 500", id="refused"),
        pytest.param([answer("302 Found", b"", "location: http://127.0.0.1:1/")], "HTTP 302", id="redirect"),
        pytest.param([b"garbage\r\n\r\n"], "no answer (RemoteProtocolError)", id="no-http"),
        pytest.param([None], "no answer in 0.2 s", id="silent"),
        pytest.param([answer("200 OK", b"x" * 1_000_001)], "more than 1000000 bytes", id="endless"),
    ],
)
async def test_a_request_that_does_not_succeed_says_why(answers: list[bytes | None], failure: str) -> None:
    async with answering(*answers) as server:
        limit_s = 0.2 if answers == [None] else 10
        assert await switch(member(by_request(server.url, timeout_s=limit_s))).start("qwen", 1) == failure


async def test_an_agent_that_is_not_there_is_a_failure_without_its_address() -> None:
    assert await switch(member(by_request(NOWHERE))).start("qwen", 1) == "no answer (ConnectError)"


async def test_a_stop_is_over_when_the_server_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "LOOK_S", 0.0)
    async with answering(answer("200 OK"), answer("200 OK"), answer("503 Gone")) as server:
        assert await switch(member(by_request(server.url), server.url)).stop("qwen", 1) == ""
        assert asked(server) == ["DELETE /models/qwen", "GET /health", "GET /health"]


async def test_a_stop_that_stopped_nothing_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "GONE_S", 0.3)
    async with answering(answer("200 OK")) as server:
        stop = ByCommand(Command(["true"]), Command(["true"]))
        assert (
            await switch(member(stop, server.url)).stop("qwen", 1) == "it still answers 0.3 s after its stop"
        )


async def test_the_number_of_the_ownership_stands_where_a_command_wants_it(tmp_path: Path) -> None:
    said = tmp_path / "said"
    told = 'echo "$1 $GATEWAY_FENCE $GATEWAY_BACKEND" > "$2"'
    start = Command(["sh", "-c", told, "sh", "--fence={fence}", str(said)])
    assert await switch(member(ByCommand(start, Command(["true"])))).start("qwen", 9) == ""
    assert said.read_text() == "--fence=9 9 qwen\n"


async def test_sleep_frees_and_waking_up_reads_discarded_weights_anew() -> None:
    async with answering(answer("200 OK")) as server:
        subject = switch(member(BySleep(level=2), server.url))
        assert await subject.start("qwen", 1) == ""
        assert asked(server) == [
            "POST /wake_up?tags=weights",
            "POST /collective_rpc",
            "POST /wake_up?tags=kv_cache",
        ]
        assert json.loads(server.requests[1][1]) == {"method": "reload_weights"}
    async with answering(answer("200 OK"), answer("500 Oh")) as server:
        subject = switch(member(BySleep(level=2), server.url))
        assert await subject.start("qwen", 1) == "/collective_rpc: HTTP 500"
    async with answering(answer("200 OK"), answer("200 OK", b'{"is_sleeping": true}')) as server:
        assert await switch(member(BySleep(), server.url)).stop("qwen", 1) == ""
        assert asked(server) == ["POST /sleep?level=1", "GET /is_sleeping"]


@pytest.mark.parametrize("level", [1, 2])
async def test_a_server_that_is_not_there_is_not_woken_but_waited_for(level: int) -> None:
    assert await switch(member(BySleep(level=level))).start("qwen", 1) == ""
    async with answering(answer("404 Not Found")) as server:
        woken = await switch(member(BySleep(level=level), server.url)).start("qwen", 1)
    assert woken.endswith(": HTTP 404")


async def test_a_server_that_is_not_there_needs_no_sleep_and_one_that_refuses_has_failed() -> None:
    assert await switch(member(BySleep())).stop("qwen", 1) == ""
    async with answering(answer("404 Not Found"), answer("200 OK")) as server:
        assert await switch(member(BySleep(), server.url)).stop("qwen", 1) == "/sleep: HTTP 404"


@pytest.mark.parametrize("answered", [None, answer("504 Gateway Timeout")], ids=["late", "cut-off"])
async def test_a_server_that_sleeps_is_stopped_though_its_answer_did_not_come(answered: bytes | None) -> None:
    async def reply(stream: SocketStream, number: int) -> None:
        del number
        head, _ = server.requests[-1]
        sent = answer("200 OK", b'{"is_sleeping": true}') if b"/is_sleeping" in head else answered
        if sent is not None:
            await stream.send(sent)

    async with raw_server(reply) as server:
        assert await switch(member(BySleep(timeout_s=0.1), server.url)).stop("qwen", 1) == ""


async def test_a_server_that_does_not_answer_may_hold_the_memory_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(switches, "IS_IN_S", 0.1)
    async with answering(None) as server:
        stopped = await switch(member(BySleep(timeout_s=0.1), server.url)).stop("qwen", 1)
    assert stopped == "/sleep: no answer in 0.1 s"


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(answer("200 OK", b'{"is_sleeping": false}'), id="awake"),
        pytest.param(answer("200 OK", b'{"is_sleeping": "yes"}'), id="unclear"),
        pytest.param(answer("500 Oh"), id="broken"),
        pytest.param(answer("404 Not Found"), id="cannot-say"),
        pytest.param(None, id="silent"),
    ],
)
async def test_a_server_that_does_not_say_that_it_sleeps_may_hold_the_memory_still(
    said: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switches, "GONE_S", 0.2)
    monkeypatch.setattr(switches, "IS_IN_S", 0.1)

    async def reply(stream: SocketStream, number: int) -> None:
        del number
        head, _ = server.requests[-1]
        if (sent := said if b"/is_sleeping" in head else answer("200 OK")) is not None:
            await stream.send(sent)

    async with raw_server(reply) as server:
        stopped = await switch(member(BySleep(), server.url)).stop("qwen", 1)
    assert stopped == "/is_sleeping: it does not say that it sleeps, 0.2 s after it was told to"


async def test_a_server_that_ends_instead_of_sleeping_holds_no_memory() -> None:
    async def reply(stream: SocketStream, number: int) -> None:
        await stream.send(answer("200 OK", b"", "connection: close"))
        if number == 0:  # it was told to sleep
            await server.refuse()

    async with raw_server(reply) as server:
        assert await switch(member(BySleep(), server.url)).stop("qwen", 1) == ""
        assert asked(server) == ["POST /sleep?level=1"]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        pytest.param(answer("200 OK", b'{"is_sleeping": false}'), True, id="awake"),
        pytest.param(answer("200 OK", b'{"is_sleeping": true}'), False, id="asleep"),
        pytest.param(answer("200 OK", b"[]"), False, id="says-nothing"),
        pytest.param(answer("200 OK", b"{}"), False, id="says-nothing-of-it"),
        pytest.param(answer("200 OK", b"<html>"), False, id="no-json"),
        pytest.param(answer("200 OK", b"[" * 100_000), False, id="nested-without-end"),
        pytest.param(answer("404 Not Found"), False, id="cannot-sleep"),
    ],
)
async def test_who_sleeps_is_not_in(said: bytes, expected: bool) -> None:
    async with answering(said) as server:
        assert await switch(member(BySleep(), server.url)).is_resident("qwen") is expected


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        pytest.param([answer("200 OK")], True, id="well"),
        pytest.param([answer("503 Loading")], False, id="not-well"),
        pytest.param(
            [answer("404 Not Found"), answer("200 OK", b'{"data":[{"id":"qwen"}]}')], True, id="lists"
        ),
        pytest.param([answer("404 Not Found"), answer("200 OK", b'{"data":[]}')], False, id="has-none"),
        pytest.param([answer("404 Not Found"), answer("503 Loading")], False, id="cannot-list"),
        pytest.param([answer("404 Not Found"), answer("200 OK", b"<html>")], False, id="no-json"),
    ],
)
async def test_who_is_well_or_has_no_health_but_a_model_is_in(answers: list[bytes], expected: bool) -> None:
    async with answering(*answers) as server:
        assert await switch(member(by_request(NOWHERE), server.url)).is_resident("qwen") is expected
        assert asked(server) == ["GET /health", "GET /v1/models"][: len(answers)]


async def test_the_canary_is_asked_with_the_servers_own_key_and_its_answer_judged() -> None:
    way = ByCommand(Command(["true"]), Command(["true"]))
    async with answering(says("It is 42.")) as server:
        assert await switch(member(way, server.url)).ask("qwen") == ""
        ((head, body),) = server.requests
    assert b"authorization: Bearer key-of-the-server" in head
    assert b"content-type: application/json" in head
    assert b"accept-encoding: identity" in head
    assert json.loads(body)["model"] == "qwen"
    async with answering(says("<|channel>thought\n<channel|>42")) as server:
        assert "<|channel" in await switch(member(way, server.url)).ask("qwen")
    async with answering(answer("500 Oh")) as server:
        assert await switch(member(way, server.url)).ask("qwen") == "HTTP 500"


async def test_a_server_that_refuses_the_canary_because_it_is_full_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that holds few requests, and had some when the gateway started: it answers as well as before."""
    monkeypatch.setattr(switches, "LOOK_S", 0.0)
    way = ByCommand(Command(["true"]), Command(["true"]))
    refusals = [answer(f"{status} Busy") for status in (503, 429, 408)]
    async with answering(*refusals, says("It is 42.")) as server:
        assert await switch(member(way, server.url)).ask("qwen") == ""
    async with answering(refusals[0], answer("500 Oh")) as server:
        assert await switch(member(way, server.url)).ask("qwen") == "HTTP 500"


async def test_a_server_that_goes_on_refusing_its_canary_fails_it_when_its_time_is_over() -> None:
    way = ByCommand(Command(["true"]), Command(["true"]))
    async with answering(answer("503 Busy")) as server:
        impatient = replace(member(way, server.url), canary=replace(CANARY, timeout_s=0.3))
        assert await switch(impatient).ask("qwen") in {"HTTP 503", "no answer in 0.3 s"}


def failures_held() -> int:
    return sum(isinstance(one, Failed) for one in gc.get_objects())


async def test_no_refusal_of_a_canary_is_held_in_memory(
    monkeypatch: pytest.MonkeyPatch, without_collector: None
) -> None:
    """Each has what was asked with it, key and all."""
    monkeypatch.setattr(switches, "LOOK_S", 0.0)
    way = ByCommand(Command(["true"]), Command(["true"]))
    before = failures_held()
    async with answering(answer("503 Busy"), says("It is 42.")) as server:
        assert await switch(member(way, server.url)).ask("qwen") == ""
    assert failures_held() == before


async def test_a_server_that_came_up_with_another_model_is_found_out() -> None:
    way = ByCommand(Command(["true"]), Command(["true"]))
    async with answering(answer("404 Not Found")) as server:
        subject = switch(member(way, server.url))
        assert await subject.ask("qwen") == "HTTP 404: it does not serve qwen"
    async with answering(answer("200 OK", b'{"data": [{"id": "qwen-3"}]}'), answer("404 No")) as server:
        subject = switch(member(way, server.url, model=None))
        assert await subject.ask("qwen") == "HTTP 404"


async def test_a_model_whose_name_is_not_configured_is_asked_for_it() -> None:
    way = ByCommand(Command(["true"]), Command(["true"]))
    models = answer("200 OK", b'{"data": [{"id": "qwen-3"}]}')
    async with answering(models, says("42")) as server:
        assert await switch(member(way, server.url, model=None)).ask("qwen") == ""
        assert json.loads(server.requests[1][1])["model"] == "qwen-3"
    for nothing in (b"[" * 100_000, b"[]", b"{}", b'{"data": []}'):
        async with answering(answer("200 OK", nothing)) as server:
            subject = switch(member(way, server.url, model=None))
            assert await subject.ask("qwen") == "/v1/models: no list of models"


def test_a_start_command_that_changes_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = tmp_path / "launches.json"
    first = replace(member(ByCommand(Command(["start", "qwen"]), Command(["stop"]))), launch_record=record)
    other = replace(first, way=ByCommand(Command(["start", "qwen", "--eager"]), Command(["stop"])))
    stopped_otherwise = replace(
        other, way=ByCommand(Command(["start", "qwen", "--eager"]), Command(["halt"]))
    )
    with caplog.at_level(logging.WARNING):
        note_launch(first)
        note_launch(first)
        assert caplog.messages == []
        note_launch(other)
        assert "qwen starts with different flags than last time" in caplog.messages[0]
        note_launch(stopped_otherwise)
        assert len(caplog.messages) == 1
    assert json.loads(record.read_text()) == {"qwen": other.launch_hash}


def test_all_of_how_a_model_is_started_counts_as_its_launch() -> None:
    stop = Call("POST", f"{NOWHERE}/stop")
    ways: list[ByCommand | ByRequest | BySleep] = [
        ByCommand(Command(["start"]), Command(["stop"])),
        ByCommand(Command(["start"], shell=True), Command(["stop"])),
        ByRequest(Call("POST", f"{NOWHERE}/start"), stop),
        ByRequest(Call("POST", f"{NOWHERE}/start", {"flags": "--eager"}), stop),
        BySleep(level=1),
        BySleep(level=2),
    ]
    assert len({member(way).launch_hash for way in ways}) == len(ways)


def test_the_order_of_what_is_sent_does_not_count_as_another_launch() -> None:
    stop = Call("POST", f"{NOWHERE}/stop")
    bodies = [{"a": 1, "b": 2}, {"b": 2, "a": 1}]
    ways = [ByRequest(Call("POST", f"{NOWHERE}/start", body), stop) for body in bodies]
    assert len({member(way).launch_hash for way in ways}) == 1


async def test_a_start_is_noted_beside_those_of_the_others(tmp_path: Path) -> None:
    record = tmp_path / "launches.json"
    record.write_text('{"gemma": "as before"}')
    one = replace(member(ByCommand(Command(["true"]), Command(["true"]))), launch_record=record)
    assert await switch(one).start("qwen", 1) == ""
    assert json.loads(record.read_text()) == {"gemma": "as before", "qwen": one.launch_hash}


async def test_a_server_is_asked_with_its_new_key() -> None:
    async with answering(answer("200 OK")) as server:
        box = switch(member(by_request(NOWHERE), server.url))
        box.update(secrets={"qwen": "another"}, tls={"qwen": True})
        assert await box.is_resident("qwen")
        ((head, _),) = server.requests
    assert b"authorization: Bearer another" in head


async def test_a_server_is_trusted_by_its_own_authority(
    fake_engine: Callable[..., AbstractAsyncContextManager[Any]], tmp_path: Path
) -> None:
    cert, key = self_signed(tmp_path, "localhost")
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(cert, key)
    asking = ssl.create_default_context(cafile=cert)
    async with fake_engine(tls=serving) as engine:
        one = member(by_request(NOWHERE), f"https://localhost:{engine.port}")
        box = switch(replace(one, verify=asking))
        assert await box.is_resident("qwen")
        box.update(secrets={}, tls={"qwen": ssl.create_default_context()})
        assert not await box.is_resident("qwen")
        assert await box.ask("qwen") == "no answer (TLS: self-signed certificate)"
        box.update(secrets={}, tls={"qwen": asking})
        assert await box.is_resident("qwen")


@pytest.mark.parametrize("scheme", ["https", "HTTPS"])
async def test_the_token_of_an_agent_goes_only_where_the_certificate_is_trusted(
    tmp_path: Path, scheme: str
) -> None:
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(*self_signed(tmp_path, "localhost"))
    async with tls_server(serving, answer("200 OK")) as (port, seen):
        subject = switch(member(by_request(f"{scheme}://localhost:{port}")))
        assert await subject.start("qwen", 1) == "no answer (TLS: self-signed certificate)"
    assert seen == []


@pytest.mark.parametrize("kept", ["no json", "[]", "[" * 100_000])
def test_a_record_that_cannot_be_kept_keeps_nobody_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: str
) -> None:
    record = tmp_path / "launches.json"
    record.write_text(kept)
    one = replace(member(BySleep()), launch_record=record)
    note_launch(one)
    assert json.loads(record.read_text()) == {"qwen": one.launch_hash}
    note_launch(replace(one, launch_record=tmp_path / "nowhere" / "launches.json"))
    assert "cannot be written (No such file or directory)" in caplog.messages[-1]
