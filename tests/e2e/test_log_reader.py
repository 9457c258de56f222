"""A gateway whose log nobody reads, as a real process: it serves, stops, and has its lines for later."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from support import clients
from support.processes import COMMAND, lonely_config, until

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
