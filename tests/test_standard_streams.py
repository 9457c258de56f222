"""A process that was started with closed standard streams has harmless ones."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import anyio
import httpx
import pytest
from support import clients
from support.processes import COMMAND, lonely_config, reserved_port, until

SCRIPT = """
import os, sys
from gateway.standard_streams import open_closed
open_closed()
sys.stdout.write("out \\u65e5"), sys.stderr.write("err"), sys.stdin.read()
sys.stdout.flush(), sys.stderr.flush()
assert os.open(os.devnull, os.O_RDONLY) > 2
assert all(os.get_inheritable(number) for number in (0, 1, 2))
"""


@pytest.mark.parametrize(
    ("closed", "out", "err"),
    [
        ("", "out 日", "err"),
        ("<&-", "out 日", "err"),
        (">&-", "", "err"),
        ("2>&-", "out 日", ""),
        ("<&- >&- 2>&-", "", ""),
    ],
)
def test_nothing_else_gets_their_numbers(closed: str, out: str, err: str) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", SCRIPT],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "PYTHONUTF8": "1"},
    )
    assert (done.returncode, done.stdout.decode(), done.stderr.decode()) == (0, out, err)


async def test_a_gateway_without_input_and_output_serves(tmp_path: Path) -> None:
    file, log = lonely_config(tmp_path), tmp_path / "log"
    command = [*COMMAND, "serve", "--config", str(file)]
    process = await anyio.open_process(
        ["/bin/sh", "-c", f'exec "$@" <&- >&- 2>"{log}"', "sh", *command], stdin=subprocess.DEVNULL
    )

    async def serves() -> bool:
        assert process.returncode is None
        return log.exists() and "console: http" in log.read_text()

    try:
        await until(serves)
        url = re.findall(r"serves (\S+)/v1", log.read_text())[0]
        async with clients.http(timeout=10.0) as client:
            assert (await client.get(f"{url}/v1/models")).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.aclose()


@contextmanager
def nobody_reads() -> Iterator[int]:
    """Give the end for writing of a pipe that is full, and that nobody reads."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with suppress(BlockingIOError):
        while True:
            os.write(write, b"-" * 65_536)
    os.set_blocking(write, True)
    yield write
    os.close(read)
    os.close(write)


@contextmanager
def full_disk() -> Iterator[int]:
    with open("/dev/full", "wb", buffering=0) as file:
        yield file.fileno()


@contextmanager
def reader_gone() -> Iterator[int]:
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


# All write in the same way. What one of several wrote otherwise would wait for somebody to read it.
@pytest.mark.parametrize(
    ("log", "workers"), [(nobody_reads, 1), (full_disk, 1), (reader_gone, 1), (nobody_reads, 2)]
)
async def test_a_gateway_whose_log_cannot_be_written_serves(
    tmp_path: Path, log: Callable[[], AbstractContextManager[int]], workers: int
) -> None:
    file = lonely_config(tmp_path)
    with reserved_port() as port, log() as stderr:
        file.write_text(file.read_text().replace("listen: 127.0.0.1:0", f"listen: 127.0.0.1:{port}"))
        process = await anyio.open_process(
            [*COMMAND, "serve", "--config", str(file), "--workers", str(workers)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
        try:
            async with clients.http(timeout=30.0) as client:

                async def serves() -> bool:
                    assert process.returncode is None
                    with suppress(httpx.TransportError):
                        return (await client.get(f"http://127.0.0.1:{port}/v1/models")).status_code == 200
                    return False

                await until(serves)
            process.send_signal(signal.SIGTERM)
            with anyio.fail_after(30):
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
            await process.aclose()


def test_a_simulated_server_whose_log_cannot_be_written_serves() -> None:
    with full_disk() as stderr, reserved_port() as port:
        process = subprocess.Popen(
            [*COMMAND, "simulate", "--profile", "h100-tp1-light", "--port", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
        try:
            with httpx.Client(trust_env=False, transport=httpx.HTTPTransport(retries=5)) as client:
                assert client.get(f"http://127.0.0.1:{port}/health", timeout=30.0).status_code == 200
        finally:
            process.terminate()
            assert process.wait(30) is not None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(
    "arguments", [["check", "--config", "FILE"], ["schema"], ["--help"], ["demo", "--plain"]]
)
def test_a_full_disk_is_told_in_one_line(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "FILE").write_text("backends: {}\n")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, timeout=60
        )
    assert (done.returncode, done.stderr) == (1, "error: the output: No space left on device\n")
