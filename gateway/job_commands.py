"""`gemma-gateway jobs`: what operators ask of the admin port, for people and for programs."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx
import rich_click as click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway import command_http, settings, tcp
from gateway.commands import PIPED_WIDTH, config_option, fail, json_option
from gateway.core.errors import ConfigError
from gateway.core.jobs import JobStatus
from gateway.exiting import USAGE

ADMIN_ENV = "GEMMA_GATEWAY_ADMIN"
DEFAULT = "http://127.0.0.1:9090"

_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_STYLES = {"completed": "green", "failed": "red", "in_progress": "cyan", "cancelled": "dim"}

_LIST, _JOB, _DRAIN = {"drained", "lanes", "jobs"}, {"id", "status", "position"}, {"drained"}
"""Members by which an answer of the admin port is known from that of another server. A choice."""

F = TypeVar("F", bound=Callable[..., Any])


def _common(command: F) -> F:
    """Add the options shared by all commands here."""
    options = (
        click.option(
            "--admin", metavar="URL", envvar=ADMIN_ENV, show_envvar=True, help="URL of the admin port."
        ),
        config_option("A configuration file that names the admin port.", required=False),
        json_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


def _named(_: click.Context, param: click.Parameter, job_id: str) -> str:
    """Return the id. An empty one, such as an unset variable of a script, would ask for all jobs."""
    if not job_id:
        raise click.BadParameter("it is empty", param=param)
    return job_id


_of_a_job = click.argument("job_id", metavar="ID", callback=_named)


@click.group()
def jobs() -> None:
    """List, inspect, cancel, retry and drain jobs.

    Uses the admin port of any gateway or worker on the same store: --admin, else the address in the
    configuration file, else http://127.0.0.1:9090.
    """


@jobs.command("list")
@click.option(
    "--status", type=click.Choice([status.value for status in JobStatus]), help="Only jobs with this status."
)
@click.option("--key", help="Only jobs of the API key with this name.")
@click.option("--lane", metavar="MODEL/CLASS", help="Only jobs of this lane.")
@click.option(
    "--limit",
    default=100,
    show_default=True,
    type=click.IntRange(1, 1000),
    help="Maximum number of jobs to show.",
)
@_common
def list_(
    status: str | None,
    key: str | None,
    lane: str | None,
    limit: int,
    admin: str | None,
    config: Path | None,
    as_json: bool,
) -> None:
    """Show the lanes with their waiting and running jobs, then the jobs, newest first."""
    filters = {"status": status, "key": key, "lane": lane, "limit": str(limit)}
    asked = {name: value for name, value in filters.items() if value is not None}
    view = _ask("GET", _base(admin, config), "", _LIST, asked)
    if as_json:
        click.echo(json.dumps(view, indent=2))
        return
    console = _console()
    if view["drained"]:
        console.print(_drained(view))
    console.print(_lanes(view["lanes"]) if view["lanes"] else "no jobs are waiting or running")
    if view["jobs"]:
        console.print()
        console.print(_jobs(view["jobs"]))


@jobs.command()
@_of_a_job
@_common
def show(job_id: str, admin: str | None, config: Path | None, as_json: bool) -> None:
    """Show everything known about a job, except the text of request and answer."""
    view = _ask("GET", _base(admin, config), f"/{quote(job_id, safe='')}", _JOB)
    if as_json:
        click.echo(json.dumps(view, indent=2))
    else:
        _console().print(_history(view))


@jobs.command()
@_of_a_job
@_common
def cancel(job_id: str, admin: str | None, config: Path | None, as_json: bool) -> None:
    """Cancel a waiting or running job. Fails if it has ended."""
    view = _ask("POST", _base(admin, config), f"/{quote(job_id, safe='')}/cancel", _JOB)
    _done(view, as_json, f"{view['id']} is {view['status']}")
    if view["status"] != JobStatus.CANCELLED:
        fail(f"{_plain(view['id'])} had already ended")


@jobs.command()
@_of_a_job
@_common
def retry(job_id: str, admin: str | None, config: Path | None, as_json: bool) -> None:
    """Run a failed or cancelled job again from the start. It no longer expires."""
    view = _ask("POST", _base(admin, config), f"/{quote(job_id, safe='')}/retry", _JOB)
    place = "" if view["position"] is None else f", place {view['position']} of {view['lane']}"
    _done(view, as_json, f"{view['id']} is {view['status']}{place}")


@jobs.command()
@click.option("--undo", is_flag=True, help="Let workers take jobs again.")
@_common
def drain(undo: bool, admin: str | None, config: Path | None, as_json: bool) -> None:
    """Stop all workers on this store from taking jobs. New jobs are accepted; running ones finish.

    The order is kept in the store: it survives restarts, until --undo.
    """
    view = _ask("POST", _base(admin, config), "/undrain" if undo else "/drain", _DRAIN)
    _done(view, as_json, "workers take jobs" if not view["drained"] else _drained(view).plain)


# ------------------------------------------------------------------ HTTP


def _base(admin: str | None, config: Path | None) -> str:
    """Return the URL of the admin port. Ends the command with status 2 if it is invalid."""
    if admin is not None:
        try:
            parts = urlsplit(admin)
            is_url = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_url = False
        if not is_url:
            raise click.BadParameter("write it as http://host:port", param_hint="--admin")
        return admin.rstrip("/")
    if config is None:
        return DEFAULT
    try:
        where = settings.load(config).admin
    except ConfigError as error:
        fail(str(error), USAGE)
    if where is None or where.port == 0:
        fail(f"{config}: it does not say where the admin port is: give --admin URL", USAGE)
    host = _ANYWHERE.get(where.host, where.host)
    return f"http://{tcp.address(host, where.port)}"


def _ask(method: str, base: str, path: str, members: Set[str], query: Mapping[str, str] | None = None) -> Any:
    """Return the admin port's answer. Ends the command with status 1 if it is an error or lacks `members`."""
    try:
        url = f"{base}/admin/jobs{path}"
        answer = command_http.request(method, url, timeout_s=command_http.ADMIN_S, params=query)
        said = answer.json()
        if answer.status_code == 200 and said.keys() >= members:
            return said
        fail(_plain(said["error"]["message"]))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        fail(f"nothing answers at {base}: {reason}; give the admin port with --admin URL or --config FILE")
    except (AttributeError, ValueError, KeyError, TypeError):  # a proxy's, or another program's
        fail(f"{base} is not the admin port of a gateway (status {answer.status_code})")


def _done(view: Mapping[str, Any], as_json: bool, sentence: str) -> None:
    click.echo(json.dumps(view, indent=2) if as_json else _plain(sentence))


# ------------------------------------------------------------------ output for people


def _console() -> Console:
    return Console(
        highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else PIPED_WIDTH
    )


def _drained(view: Mapping[str, Any]) -> Text:
    return Text(f"drained for {_span(view['drained_for_s'])}: workers take no jobs", style="bold yellow")


def _lanes(lanes: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("lane", "queued", "in progress", "oldest waits", "ended per minute")
    for lane in lanes:
        rate = lane["drain_per_s"]
        table.add_row(
            _plain(lane["lane"]),
            str(lane["queued"]),
            str(lane["in_progress"]),
            _span(lane["oldest_wait_s"]),
            "" if rate is None else f"{60 * rate:.3g}",
        )
    return table


def _jobs(found: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("id", "status", "place", "lane", "priority", "key", "attempts", "age", "worker", "error")
    for job in found:
        failures = f", {job['failures']} failed" if job["failures"] else ""
        table.add_row(
            _plain(job["id"]),
            Text(job["status"], style=_STYLES.get(job["status"], "")),
            "" if job["position"] is None else str(job["position"]),
            _plain(job["lane"]),
            job["priority"],
            _plain(job["key"] or ""),
            f"{job['attempts']}{failures}",
            _span(job["age_s"]),
            _plain(job["worker"] or ""),
            _plain((job["error"] or {}).get("code", "")),
        )
    return table


def _history(job: Mapping[str, Any]) -> Table:
    """Return the details of a job, in chronological order."""
    error = job["error"]
    rests = "" if job["rests_s"] is None else f", not before {_span(job['rests_s'])} from now"
    place = "" if job["position"] is None else f", place {job['position']} in its lane{rests}"
    lines = {
        "id": job["id"],
        "status": f"{job['status']}{place}",
        "lane": f"{job['lane']}, {job['priority']} priority",
        "key": job["key"],
        "batch": job["batch"],
        "accepted": _moment(job["created_at"], job["age_s"]),
        "last taken": _moment(job["started_at"], None, job["worker"]),
        "running for": None if job["running_s"] is None else _span(job["running_s"]),
        "ended": _moment(job["ended_at"], None),
        "total time": _span(job["total_s"]) if job["ended_at"] is not None else None,
        "expires in": None if job["expires_in_s"] is None else _span(job["expires_in_s"]),
        "attempts": f"{job['attempts']}, of which {job['failures']} failed",
        "last setback": job.get("setback"),  # the previous version knows of none
        "answer": f"{job['chunks']} chunks; {job['bytes']:,} bytes kept, including its request",
        "error": None if error is None else f"{error['code']}: {error['message']}",
    }
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in lines.items():
        if value is not None:
            table.add_row(name, _plain(value))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=number == 0, overflow="fold")
    return table


def _moment(at: float | None, ago_s: float | None, worker: str | None = None) -> str | None:
    if at is None:
        return None
    written = datetime.fromtimestamp(at).astimezone().isoformat(sep=" ", timespec="seconds")
    ago = "" if ago_s is None else f", {_span(ago_s)} ago"
    return f"{written}{ago}{f' by {worker}' if worker else ''}"


def _span(seconds: float | None) -> str:
    """Format a duration: 5 s, 12 min, 3 h 05 min, 2 d 4 h."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _plain(text: str) -> str:
    """Return text that is safe for terminals and tables: it may contain a backend's words."""
    return "".join(char if char.isprintable() else " " for char in text)
