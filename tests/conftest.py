"""What every test shares: one event loop, asyncio's; how many run at once; and an end to what they start."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from support import browser, leftovers, node_sdk, prometheus
from support.redis_server import LEGS, legs
from support.scheduling import OneHeavyAtATime
from xdist.remote import Producer

# Where `benchmarks` is. Last: the gateway that is tested is the installed one.
sys.path.append(str(Path(__file__).parents[1]))

WORKERS_PER_CORE = 3  # most of a test's time is another process's: a start, an answer, a lease
WORKERS_MAX = 8
WAITING = frozenset(
    {"browser", "demo", "downstream", "e2e", "jobs", "node", "simulator", "store", "upstream"}
)
"""Folders of tests that wait for sockets and processes, which a neighbour on the machine can hold up."""

# How long an example takes is the machine's business. What fails says how to have it again. There are fewer
# than Hypothesis draws unasked: each run draws others, and is to take less than a quarter of an hour.
settings.register_profile(
    "tests", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # a worker is started by a run that does so already
        config.add_cleanup(leftovers.end_with_this_process())
        _compile_once(config)


def _compile_once(config: pytest.Config) -> None:
    """Have all that is started compile a module once, also where nothing may be written beside its source.

    Else each process compiles the thousand modules of a gateway for itself: half of its start and more.
    """
    cache: pytest.Cache | None = getattr(config, "cache", None)  # none with -p no:cacheprovider
    if cache is not None and os.environ.get("PYTHONDONTWRITEBYTECODE"):
        environ = pytest.MonkeyPatch()
        environ.delenv("PYTHONDONTWRITEBYTECODE")
        environ.setenv("PYTHONPYCACHEPREFIX", str(cache.mkdir("bytecode")))
        config.add_cleanup(environ.undo)


def pytest_xdist_auto_num_workers() -> int | None:
    """Return how many tests run at once; None: what PYTEST_XDIST_AUTO_NUM_WORKERS says."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(WORKERS_PER_CORE * cores, WORKERS_MAX)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneHeavyAtATime | None:
    """Return who does what; None: what `--dist` says."""
    return OneHeavyAtATime(config, log) if config.getoption("dist") == "load" else None


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say how many tests run at once, and against which servers and with which Node SDKs and browser."""
    workers = config.getoption("numprocesses")
    missing = [leg for leg in LEGS if leg not in legs()]
    note = f"; no build of {', '.join(missing)} for this Python" if missing else ""
    return [
        f"at once: {workers} tests; -n0 runs one after the other, in this process"
        if workers
        else "at once: 1",
        f"store: {', '.join(legs())}{note}",
        node_sdk.described(),
        prometheus.described(),
        browser.described(),
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With TEST_AGAIN=1 have such a test run once more if it fails, and listed as `RERUN` at the end.

    For CI, on machines that others share. What draws its examples is not: it would draw others.
    """
    if os.environ.get("TEST_AGAIN") != "1":
        return
    for item in items:
        is_drawn = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        if item.path.relative_to(Path(__file__).parent).parts[0] in WAITING and not is_drawn:
            item.add_marker(pytest.mark.flaky(reruns=1))


def pytest_collection_finish() -> None:
    """Keep what was collected, and all that was imported for it, out of every round of the collector."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """For all but the modules that choose another. Once per module, as what its tests share may need it."""
    return "asyncio"


@pytest.fixture
def without_collector() -> Iterator[None]:
    """No round of the garbage collector while a test runs: what is free was freed by its last user."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
