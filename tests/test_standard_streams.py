"""A process that was started with closed standard streams has harmless ones."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import httpx
import pytest
from support.processes import COMMAND, lonely_config, until

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
        async with httpx.AsyncClient(trust_env=False, timeout=10.0) as client:
            assert (await client.get(f"{url}/v1/models")).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.aclose()
