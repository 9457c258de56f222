"""A real Prometheus for tests: where it is, and how it is run."""

import os
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import yaml

from support import clients

ENVIRON = "TEST_PROMETHEUS"
WITHOUT = f"no Prometheus: `.ci/prometheus FOLDER` fetches it, {ENVIRON}=FOLDER has the tests use it"
READY_S = 60.0


def program(name: str) -> Path:
    """Return the path of `prometheus` or `promtool`; the test is skipped where there is none."""
    folder = os.environ.get(ENVIRON)
    if not folder:
        pytest.skip(WITHOUT)
    path = Path(folder, name)
    assert path.exists(), f"{ENVIRON} names a folder without {name}"
    return path


def described() -> str:
    """Return what queries and rules are tested with, for the report's header."""
    return f"prometheus: {os.environ[ENVIRON]}" if os.environ.get(ENVIRON) else WITHOUT


@dataclass(frozen=True)
class Prometheus:
    """A server that scrapes."""

    client: httpx.AsyncClient

    async def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer of its API.

        Raises:
            AssertionError: it says that something is wrong.
        """
        answer = (await self.client.get(f"/api/v1/{path}", params=parameters)).json()
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        return answer["data"]

    async def query(self, expression: str) -> Sequence[Mapping[str, Any]]:
        """Return what an expression is now."""
        found: Sequence[Mapping[str, Any]] = (await self.get("query", query=expression))["result"]
        return found


@asynccontextmanager
async def prometheus(folder: Path, target: str, port: int, rules: Path) -> AsyncIterator[Prometheus]:
    """Run one that scrapes `target` (host:port) five times a second as the job gemma-gateway, with rules."""
    binary = program("prometheus")
    config = folder / "prometheus.yml"
    config.write_text(
        yaml.safe_dump(
            {
                "global": {
                    "scrape_interval": "200ms",
                    "scrape_timeout": "200ms",
                    "evaluation_interval": "1s",
                },
                "scrape_configs": [
                    {"job_name": "gemma-gateway", "static_configs": [{"targets": [target]}]},
                ],
                "rule_files": [str(rules)],
            }
        )
    )
    process = await anyio.open_process(
        [
            str(binary),
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=None,
    )
    async with process, clients.http(base_url=f"http://127.0.0.1:{port}") as client:
        try:
            with anyio.fail_after(READY_S):
                while not await _is_ready(client):
                    assert process.returncode is None, "Prometheus has ended"
                    await anyio.sleep(0.05)  # another process: there is no event to wait for
            yield Prometheus(client)
        finally:
            process.kill()


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/-/ready")).status_code == 200
    except httpx.HTTPError:
        return False
