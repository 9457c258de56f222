"""The gateway as a process: what `gemma-gateway serve` runs, from a file name to an exit status."""

import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from gateway import __version__, memory, names, open_files, settings, supervisor
from gateway.core.errors import ConfigError, StartupBlocked
from gateway.exiting import FAILURE, USAGE
from gateway.settings import Settings
from gateway.telemetry import logs

if TYPE_CHECKING:
    from gateway.app import Running

T = TypeVar("T")


def serve(config: Path, log_level: str, workers: int) -> int:
    """Serve until a signal; return the exit status. Addresses and errors are printed to stderr.

    With more than one worker, this process only supervises them.
    """
    logs.set_up(log_level)

    def start(loaded: Settings) -> int:
        if workers == 1:
            return _serve_alone(loaded)
        return anyio.run(
            partial(supervisor.serve, loaded, os.environ, workers, log_level, ready=_announce_workers)
        )

    return _status(lambda: settings.load(config), start)


def work(config: Path, log_level: str, admin: str | None) -> int:
    """Run jobs until a signal; return the exit status. Otherwise like `serve`.

    `admin`: the address for operators, overriding the configuration.
    """
    logs.set_up(log_level)
    return _status(lambda: settings.load(config).for_job_worker(admin), _serve_alone)


def _status(load: Callable[[], Settings], start: Callable[[Settings], int]) -> int:
    """Start with the configuration that `load` returns. Return the exit status."""
    try:
        loaded = load()
        for warning in loaded.warnings:
            logs.say(f"warning: {warning}")
        return start(loaded)
    except ConfigError as error:
        for line in str(error).splitlines():
            logs.say(f"error: {line}")
        return status_of(error)


def status_of(error: ConfigError) -> int:
    """Return the exit status for a failed start: 1 if another attempt may succeed."""
    return FAILURE if isinstance(error, StartupBlocked) else USAGE


def run(function: Callable[..., Awaitable[T]], *args: Any, **kwargs: Any) -> T:
    """Run a coroutine function to completion, on uvloop if it is installed.

    Configures the process for serving: it keeps freed memory, raises its limit on open files, and uses its
    own name resolution.
    """
    memory.keep_freed(os.environ)
    open_files.raise_limit()
    options = {"loop_factory": names.loop_factory()}
    return anyio.run(partial(function, *args, **kwargs), backend_options=options)


def _serve_alone(loaded: Settings) -> int:
    from gateway import app  # 25 MB, which a process that only supervises others does without

    run(app.serve, loaded, os.environ, ready=_announce)
    return 0


def _announce(running: "Running") -> None:
    does = f"serves {running.url}/v1" if running.url else "runs jobs"
    logs.say(f"gemma-gateway {__version__} {does}")
    if running.admin_url:
        logs.say(f"operators: {running.admin_url}/admin/backends")
        logs.say(f"console: {running.admin_url}/")


def _announce_workers(serving: supervisor.Serving) -> None:
    logs.say(f"gemma-gateway {__version__} serves {serving.url}/v1 with {serving.workers} workers")
    for number, url in enumerate(serving.admin_urls):
        logs.say(f"operators: {url}/admin/backends (worker {number})")
        logs.say(f"console: {url}/ (worker {number})")
