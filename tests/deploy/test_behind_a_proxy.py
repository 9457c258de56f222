"""Proxies as docs/behind-a-proxy.md configures them, in front of a gateway.

TEST_PROXIES names a folder that `.ci/proxies FOLDER` has filled. Without it, those on PATH are tested.
"""

import os
import re
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from anyio.abc import SocketStream
from support.front import KEY, Front, chat, front
from support.processes import reserved_port, until
from support.raw_server import STREAM_HEAD, chunk
from support.site import simulated, site
from support.world import HELLO, ROLE

from gateway.simulator import simulator

ENVIRON = "TEST_PROXIES"
PROXIES = os.environ.get(ENVIRON) or os.environ["PATH"]
PAGE = (Path(__file__).parents[2] / "docs" / "behind-a-proxy.md").read_text()
NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/a; proxy_temp_path {folder}/b; fastcgi_temp_path {folder}/c;
    uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
    {snippet}
}}
"""


def snippet(language: str, page: str = PAGE) -> str:
    """Return the first one of the page in that language."""
    found = re.search(rf"```{language}\n(.*?)```", page, re.DOTALL)
    assert found is not None
    return found[1]


def nginx(folder: Path, port: int) -> tuple[str, list[str]]:
    text = re.sub(r"^ *ssl_.*\n", "", snippet("nginx"), flags=re.MULTILINE)
    text = NGINX.format(folder=folder, snippet=text.replace("443 ssl", f"127.0.0.1:{port}"))
    return text, ["nginx", "-e", f"{folder}/error.log", "-c"]


def haproxy(_: Path, port: int) -> tuple[str, list[str]]:
    return re.sub(r"bind .*", f"bind 127.0.0.1:{port}", snippet("haproxy")), ["haproxy", "-db", "-f"]


def caddy(_: Path, port: int) -> tuple[str, list[str]]:
    text = snippet("caddyfile").replace("llm.example.com {", "http:// {\n    bind 127.0.0.1\n")
    options = f"{{\n    admin off\n    http_port {port}\n}}\n"
    return options + text, ["caddy", "run", "--adapter", "caddyfile", "--config"]


def before_engines(folder: Path, port: int, engines: Mapping[str, str]) -> str:
    """Return nginx's configuration with a path for each engine, by its name."""
    location = snippet("nginx", PAGE.partition("## Between the gateway and an engine")[2])
    assert location.count("location / {") == location.count("http://127.0.0.1:8000;") == 1
    locations = "".join(
        location.replace("/ {", f"/{name}/ {{").replace("http://127.0.0.1:8000;", f"{url}/;")
        for name, url in engines.items()
    )
    return NGINX.format(folder=folder, snippet=f"server {{ listen 127.0.0.1:{port};\n{locations} }}")


@pytest.fixture(params=[nginx, haproxy, caddy])
def proxy(request: pytest.FixtureRequest) -> Any:
    name = request.param.__name__
    if shutil.which(name, path=PROXIES) is None:
        pytest.skip(f"no {name}: `.ci/proxies FOLDER` fetches it, {ENVIRON}=FOLDER has the tests use it")
    return request.param


@asynccontextmanager
async def behind(proxy: Any, site: Front, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Call a gateway through a proxy while the block runs."""
    with reserved_port() as port:
        text, command = proxy(folder, port)
    text, count = re.subn(r"10\.0\.0\.1[12]:8080", f"127.0.0.1:{site.port}", text)
    assert count == 2
    config = folder / "proxy.conf"
    config.write_text(text)
    environ = {
        **os.environ,
        "PATH": PROXIES,
        "HOME": str(folder),
        "XDG_CONFIG_HOME": str(folder),
        "XDG_DATA_HOME": str(folder),
    }
    with (folder / "output").open("wb") as output:
        process = await anyio.open_process([*command, str(config)], stdout=output, stderr=output, env=environ)
    client = httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}",
        trust_env=False,
        headers={"authorization": f"Bearer {KEY}"},
        timeout=60,
    )

    async def is_up() -> bool:
        assert process.returncode is None, (folder / "output").read_text()
        try:
            return (await client.get("/livez")).status_code == 200
        except httpx.TransportError:
            return False

    async with client:
        try:
            await until(is_up)
            yield client
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def test_a_stream_comes_event_by_event_and_a_caller_that_leaves_ends_it(
    proxy: Any, tmp_path: Path
) -> None:
    seen = anyio.Event()

    async def wait_to_be_seen(stream: SocketStream, _: dict[str, Any]) -> None:
        await stream.send(STREAM_HEAD + chunk(ROLE + HELLO))
        await seen.wait()
        while (
            True
        ):  # until nobody reads: HAProxy notices that its caller has left when it passes something on
            await stream.send(chunk(HELLO))

    async with front("direct", wait_to_be_seen) as site, behind(proxy, site, tmp_path) as client:
        async with client.stream("POST", "/v1/chat/completions", content=chat(stream=True)) as answer:
            pieces = answer.aiter_raw()
            with anyio.fail_after(20):
                received = await anext(pieces)
                while b"hello" not in received:
                    received += await anext(pieces)
                seen.set()
                assert b"hello" in await anext(pieces)
        with anyio.fail_after(20):
            await site.backend.closed.wait()
        await site.idle()


async def test_large_bodies_pass_and_so_do_refusals(proxy: Any, tmp_path: Path) -> None:
    large, small = (chat().replace(b"hello?", b"x" * size) for size in (20_000_000, 200_000))
    async with front("direct") as site, behind(proxy, site, tmp_path) as client:
        served = await client.post("/v1/chat/completions", content=large)
        refused = await client.post(
            "/v1/chat/completions", content=small, headers={"authorization": "Bearer other"}
        )
        site.applications.serving.is_draining = True  # and ready, or a check could come before the request
        draining = await client.post("/v1/chat/completions", content=small)

    assert [served.status_code, refused.status_code] == [200, 401]
    assert (draining.status_code, draining.json()["error"]["code"]) == (503, "draining")


async def test_engines_behind_one_proxy_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    if shutil.which("nginx", path=PROXIES) is None:
        pytest.skip(f"no nginx: `.ci/proxies FOLDER` fetches it, {ENVIRON}=FOLDER has the tests use it")
    fleet = simulated({"one": "h100-tp1-light", "two": "h100-tp1-light"})
    figures = {"profile": "h100-tp1-light", "limits": {"knee_seqs": 1}}
    async with AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(simulator(options)) for name, options in fleet.items()
        }
        with reserved_port() as port:
            text = before_engines(tmp_path, port, {name: one.url for name, one in engines.items()})
        (tmp_path / "proxy.conf").write_text(text)
        command = ["nginx", "-e", str(tmp_path / "error.log"), "-c", str(tmp_path / "proxy.conf")]
        process = await anyio.open_process(command, env={**os.environ, "PATH": PROXIES})
        stack.push_async_callback(process.wait)
        stack.callback(process.kill)
        running = await stack.enter_async_context(
            site(
                tmp_path,
                fleet={},
                backends={name: {"url": f"http://127.0.0.1:{port}/{name}", **figures} for name in engines},
                pools={"all": list(engines)},
                models={"gemma-4": {"classes": [{"class": "chat", "pools": ["all"]}]}},
            )
        )
        status = running.gateway.fleet.statuses()
        await running.eventually(lambda: all(status[name].engine is not None for name in engines))
        client, served = running.openai(), list[str]()

        async def ask() -> None:
            raw = await client.chat.completions.with_raw_response.create(
                model="gemma-4", messages=[{"role": "user", "content": "Why is the sky blue?"}]
            )
            served.append(raw.headers["x-gateway-backend"])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            tasks.start_soon(ask)

    assert sorted(served) == ["one", "two"]
