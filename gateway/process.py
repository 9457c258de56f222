"""The gateway as a process: what `gemma-gateway serve` runs, from a file's name to an exit status."""

import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio

from gateway import __version__, app, memory, names, open_files, settings, supervisor
from gateway.core.errors import ConfigError, NotYet
from gateway.telemetry import logs

T = TypeVar("T")
USAGE = 2


def serve(config: Path, log_level: str = "info", workers: int = 1) -> int:
    """Serve until a signal; return the exit status. What it listens on, and what is wrong, goes to stderr.

    With more than one worker, this process only looks after them.
    """
    logs.set_up(log_level)
    try:
        loaded = settings.load(config)
        for warning in loaded.warnings:
            _say(f"warning: {warning}")
        if workers > 1:
            return anyio.run(
                partial(supervisor.serve, loaded, os.environ, workers, log_level, ready=_announce_workers)
            )
        run(app.serve, loaded, os.environ, ready=_announce)
    except ConfigError as error:
        for line in str(error).splitlines():
            _say(f"error: {line}")
        return status_of(error)
    return 0


def work(config: Path, log_level: str = "info", admin: str | None = None) -> int:
    """Work jobs off until a signal; return the exit status. Otherwise as `serve`.

    `admin`: where operators connect, in place of what the file says.
    """
    logs.set_up(log_level)
    try:
        loaded = settings.load(config).for_job_worker(admin)
        for warning in loaded.warnings:
            _say(f"warning: {warning}")
        run(app.serve, loaded, os.environ, ready=_announce)
    except ConfigError as error:
        for line in str(error).splitlines():
            _say(f"error: {line}")
        return status_of(error)
    return 0


def status_of(error: ConfigError) -> int:
    """Return the exit status of a process that could not start: 1 if it may be able to a moment later."""
    return supervisor.FAILURE if isinstance(error, NotYet) else USAGE


def run(function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
    """Run a coroutine function to its end, on uvloop where it is installed.

    For a process that serves: it keeps the memory that it frees, may open as many files as it can get, and
    looks every host name up by itself.
    """
    memory.keep_freed(os.environ)
    open_files.raise_limit()
    options = {"loop_factory": names.loop_factory()}
    return anyio.run(partial(function, *args, **kwargs), backend_options=options)


def _announce(running: app.Running) -> None:
    does = f"serves {running.url}/v1" if running.url else "runs jobs"
    _say(f"gemma-gateway {__version__} {does}")
    if running.admin_url:
        _say(f"operators: {running.admin_url}/admin/backends")
        _say(f"console: {running.admin_url}/")


def _announce_workers(serving: supervisor.Serving) -> None:
    _say(f"gemma-gateway {__version__} serves {serving.url}/v1 with {serving.workers} workers")
    for number, url in enumerate(serving.admin_urls):
        _say(f"operators: {url}/admin/backends (worker {number})")
        _say(f"console: {url}/ (worker {number})")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
