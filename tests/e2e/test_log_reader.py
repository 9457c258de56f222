"""A gateway whose log nobody reads, as a real process: it serves, stops, and has its lines for later."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from support import clients
from support.processes import COMMAND, descendants, lonely_config, until

REQUESTS = 400
"""Their lines are more than a pipe takes."""


class Reader:
    """What a gateway writes its log to."""

    def __init__(self) -> None:
        self._end, self.gateways_end = os.pipe()
        os.set_blocking(self._end, False)
        self.text = ""

    async def finds(self, pattern: str, times: int = 1) -> bool:
        """Read what is there, and return whether it holds what is looked for."""
        try:
            while data := os.read(self._end, 65_536):
                self.text += data.decode()
        except BlockingIOError:
            pass
        return len(re.findall(pattern, self.text)) >= times

    def falls_behind(self) -> None:
        """Let the pipe be full."""
        again = os.open(f"/proc/self/fd/{self.gateways_end}", os.O_WRONLY | os.O_NONBLOCK)
        try:
            for size in (4096, 1):
                with suppress(BlockingIOError):
                    while True:
                        os.write(again, b"\n" * size)
        finally:
            os.close(again)

    def close(self) -> None:
        """Be gone."""
        os.close(self._end)


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader()
    yield made
    made.close()


async def test_a_gateway_whose_log_nobody_reads_goes_on(tmp_path: Path, reader: Reader) -> None:
    file = lonely_config(tmp_path)
    process = await anyio.open_process(
        [*COMMAND, "serve", "--config", str(file)], stdin=subprocess.DEVNULL, stderr=reader.gateways_end
    )
    os.close(reader.gateways_end)
    try:
        await until(lambda: reader.finds("console: http"))
        url = re.findall(r"serves (\S+)/v1", reader.text)[0]
        async with clients.http(timeout=10.0) as client:

            async def ask() -> None:
                for _ in range(REQUESTS):
                    answer = await client.post(f"{url}/v1/chat/completions", json={"model": "none"})
                    assert answer.status_code == 400

            await ask()
            await until(lambda: reader.finds('"event": "request"', times=REQUESTS))
            assert "log_lines_dropped" not in reader.text
            await ask()
        process.send_signal(signal.SIGTERM)
        with anyio.fail_after(30):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await process.aclose()


async def test_what_the_parent_of_workers_could_not_write_comes_once_its_reader_is_back(
    tmp_path: Path, reader: Reader
) -> None:
    file = lonely_config(tmp_path)
    process = await anyio.open_process(
        [*COMMAND, "serve", "--config", str(file), "--workers", "2"],
        stdin=subprocess.DEVNULL,
        stderr=reader.gateways_end,
    )
    frozen = None

    async def started_again() -> bool:
        nonlocal frozen
        found = [pid for pid in descendants(process.pid) if pid not in before and is_worker(pid)]
        frozen = found[0] if found else None
        return frozen is not None

    try:
        await until(lambda: reader.finds(r"console: http\S+ \(worker 1\)"))
        reader.falls_behind()
        before = [*descendants(process.pid)]
        first = int(re.findall(r"worker 0 \(pid (\d+)\) accepts", reader.text)[0])
        os.kill(first, signal.SIGKILL)
        await until(started_again)
        assert frozen is not None
        os.kill(frozen, signal.SIGSTOP)  # of which the parent would have another line to write

        await until(lambda: reader.finds('"event": "worker_ended", "worker": 0'))
    finally:
        os.close(reader.gateways_end)
        if frozen is not None:
            os.kill(frozen, signal.SIGKILL)
        process.kill()
        await process.wait()
        await process.aclose()


def is_worker(pid: int) -> bool:
    return b"gateway.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
