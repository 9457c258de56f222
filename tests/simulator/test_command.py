"""`gemma-gateway simulate` as a process."""

import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from support.processes import command

SIMULATE = [sys.executable, "-m", "gateway", "simulate"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SIMULATE, *arguments], capture_output=True, text=True, timeout=60)


def test_it_serves_as_told_until_it_is_terminated() -> None:
    command = [
        *SIMULATE,
        "--profile",
        "spark-nvfp4",
        "--port",
        "0",
        "--speed",
        "100",
        "--served-model",
        "mine",
    ]
    command += ["--api-key", "secret", "--fault", "unavailable", "--fault-count", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = process.stderr.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+", said)
        assert url is not None, said
        ask = {"model": "mine", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        with httpx.Client(base_url=url.group(), trust_env=False) as client:
            assert client.get("/v1/models").status_code == 401
            client.headers["authorization"] = "Bearer secret"
            assert client.get("/v1/models").json()["data"][0]["id"] == "mine"
            statuses = [client.post("/v1/chat/completions", json=ask).status_code for _ in range(2)]
            assert statuses == [503, 200]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_help_as_a_profile_lists_them() -> None:
    listed = run("--profile", "help")
    assert listed.returncode == 0
    assert len(listed.stdout.splitlines()) == 11
    assert "tpu-v6e4-moe" in listed.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(("--profile", "h100", "--port", "0"), "no profile 'h100'", id="unknown-profile"),
        pytest.param(("--profile", "h100-tp1-light"), "--port", id="no-port"),
        pytest.param(
            ("--profile", "h100-tp1-light", "--port", "0", "--boot", "soon"), "'soon' is neither", id="boot"
        ),
        pytest.param(("--profile", "h100-tp1-light", "--port", "0", "--speed", "0"), "--speed", id="speed"),
        pytest.param(("--profile", "h100-tp1-light", "--port", "0", "--fault", "x"), "--fault", id="fault"),
    ],
)
async def test_what_cannot_be_is_a_usage_error(arguments: tuple[str, ...], said: str) -> None:
    ended = await command("simulate", *arguments)
    assert ended.status == 2
    assert said in ended.err


def test_a_port_that_is_taken_is_status_2() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = run("--profile", "h100-tp1-light", "--port", port)
    assert ended.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
