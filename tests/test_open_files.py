"""A process takes as many open files as it can get, and says when it runs out of them."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from gateway.open_files import OpenFiles
from gateway.telemetry.metrics import Metrics

TOLD = "gateway.process"


def started_with(soft: int, hard: int) -> tuple[int, int]:
    """Return the limits that a process gets that is started with these."""
    script = (
        "import json, resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "from gateway.open_files import raise_limit\n"
        "raise_limit()\n"
        "print(json.dumps(resource.getrlimit(resource.RLIMIT_NOFILE)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    now, most = json.loads(done.stdout)
    return now, most


def test_as_many_as_the_hard_limit_allows() -> None:
    assert started_with(256, 512) == (512, 512)
    assert started_with(512, 512) == (512, 512)


@pytest.fixture
def room_for() -> Iterator[list[int]]:
    """Yield what is opened in a test; it is closed, and the limit put back."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened: list[int] = []
    yield opened
    for one in opened:
        os.close(one)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_it_is_said_once_when_few_are_left_and_once_when_there_are_enough(
    room_for: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", TOLD)
    files = OpenFiles()

    def told() -> list[str]:
        files.look()
        files.look()
        found = [record.__dict__["fields"]["event"] for record in caplog.records]
        caplog.clear()
        return found

    assert told() == []
    here = len(os.listdir("/proc/self/fd"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (here + 100, hard))
    while len(os.listdir("/proc/self/fd")) <= 0.9 * (here + 100):
        room_for.append(os.open(os.devnull, os.O_RDONLY))
    assert told() == ["open_files_short"]
    with suppress(OSError):
        while True:
            room_for.append(os.open(os.devnull, os.O_RDONLY))
    assert told() == []
    for _ in range(40):
        os.close(room_for.pop())
    assert told() == ["open_files_enough"]


def test_that_no_file_is_left_shows_in_the_metrics(room_for: list[int]) -> None:
    metrics = Metrics()
    here = len(os.listdir("/proc/self/fd"))
    limit = here + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with suppress(OSError):
        while True:
            room_for.append(os.open(os.devnull, os.O_RDONLY))
    told = metrics.exposition()[0]().decode()
    assert f"process_open_fds {limit:.1f}" in told
    assert f"process_max_fds {limit:.1f}" in told
