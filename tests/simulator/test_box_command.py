"""`gemma-gateway simulate-box` and `box-switch` as processes."""

import itertools
import signal
import socket
from typing import Any

import pytest
from support import clients
from support.processes import command, running

from gateway.simulator import spark_pair

pytestmark = pytest.mark.anyio

BOX = ["simulate-box", "--port", "0", "--speed", "1000"]


async def switch(control: str, *arguments: str) -> tuple[int, str]:
    """Return the exit status of a `box-switch`, and what it says."""
    ended = await command("box-switch", "--control", control, *arguments)
    return ended.status, (ended.out or ended.err).strip()


async def fetch(url: str) -> Any:
    async with clients.http() as client:
        return (await client.get(url)).json()


async def test_a_box_as_a_process_driven_by_a_command() -> None:
    async with running(*BOX, "--resident", "gemma", "--boots", "qwen=fail,ok") as process:
        control = (await process.wait_for(r"orders at (http://\S+), 1000x")).group(1)
        gemma = (await process.wait_for(r"gemma: gemma4-31b \(spark-nvfp4\) at (\S+)/v1, running")).group(1)
        qwen = (await process.wait_for(r"qwen: qwen \(qwen\) at (\S+)/v1, stopped")).group(1)
        assert (await fetch(f"{gemma}/v1/models"))["data"][0]["id"] == "gemma4-31b"
        ended = [
            await switch(control, "--wait", *order.split())
            for order in ("stop gemma", "start qwen", "start qwen", "start gemma")
        ]
        counted = await fetch(f"{control}/box")
        assert await process.end(signal.SIGTERM) == 0

    assert ended == [
        (0, "gemma is stopped"),
        (1, "qwen is failed: the boot failed"),
        (0, "qwen is running"),
        (1, "gemma is failed: out of memory: gemma needed it while qwen held it"),
    ]
    assert counted["violations"] == 1
    assert len({control, gemma, qwen}) == 3


async def test_the_order_alone_does_not_wait() -> None:
    async with running("simulate-box", "--port", "0") as process:
        control = (await process.wait_for(r"orders at (http://\S+), 1x")).group(1)
        taken = await switch(control, "start", "gemma")
        unknown = await switch(control, "start", "gemini")

    assert taken == (0, "gemma is booting")
    assert unknown == (1, f"{control}: there is no model 'gemini'; there are gemma, qwen")


@pytest.mark.parametrize("control", ["http://127.0.0.1:9", "nowhere", "http://["])
async def test_a_box_that_is_not_there_is_a_failure(control: str) -> None:
    status, said = await switch(control, "start", "gemma")

    assert status == 1
    assert said.startswith(f"{control}: ")
    assert "Traceback" not in said


async def test_an_answer_that_is_no_box_s_is_a_failure() -> None:
    async with running("simulate", "--profile", "spark-nvfp4", "--port", "0") as process:
        url = (await process.wait_for(r"at (http://\S+)/v1")).group(1)
        ended = await switch(url, "start", "gemma")

    assert ended == (1, f"{url}: Not Found")


@pytest.fixture
def ports() -> list[int]:
    """Return three ports in a row that nobody listened on a moment ago."""
    for first in range(20_000, 30_000, 3):
        sockets = [socket.socket() for _ in range(3)]
        try:
            for held, port in zip(sockets, itertools.count(first), strict=False):
                held.bind(("127.0.0.1", port))
            break
        except OSError:
            continue
        finally:
            for held in sockets:
                held.close()
    return [first, first + 1, first + 2]


async def test_models_listen_on_the_ports_after_the_box(ports: list[int]) -> None:
    async with running("simulate-box", "--port", str(ports[0])) as process:
        for name, port in zip(("gemma", "qwen"), ports[1:], strict=True):
            await process.wait_for(rf"{name}: .* at http://127.0.0.1:{port}/v1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param((), "--port", id="no-port"),
        pytest.param(("--model", "gemma"), "'gemma' is not NAME=PROFILE", id="model"),
        pytest.param(("--model", "a=help"), "no profile 'help'", id="profile"),
        pytest.param(("--model", "a=qwen:99999"), "'a=qwen:99999' is not", id="model-port"),
        pytest.param(("--model", "a=qwen", "--model", "a=qwen"), "'a' is given twice", id="twice"),
        pytest.param(("--port", "65534"), "qwen would get port 65536", id="port-too-high"),
        pytest.param(("--port", "9100", "--model", "a=qwen:9100"), "9100 is used twice", id="orders-port"),
        pytest.param(("--model", "a=qwen:91", "--model", "b=qwen:91"), "91 is used twice", id="port-twice"),
        pytest.param(("--resident", "gemini"), "no model 'gemini'", id="resident"),
        pytest.param(("--boots", "gemini=ok"), "no model 'gemini'", id="boots-of-whom"),
        pytest.param(("--boots", "explode"), "'explode'", id="boots"),
        pytest.param(("--fail-chance", "2"), "--fail-chance", id="chance"),
    ],
)
async def test_what_cannot_be_is_a_usage_error(arguments: tuple[str, ...], said: str) -> None:
    ended = await command("simulate-box", *(("--port", "0") if arguments else ()), *arguments)

    assert ended.status == 2
    assert said in ended.err


def test_the_command_runs_the_pair_that_python_has() -> None:
    """Two lists of the same two models, so that `--help` need not load a profile."""
    from gateway.simulator.box_command import _SPARK

    assert {name: f"{options.profile.name}" for name, options in spark_pair().items()} == dict(
        text.split("=") for text in _SPARK
    )
