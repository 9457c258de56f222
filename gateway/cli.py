"""The `gemma-gateway` command. Exit status: 0 ok, 1 failure, 2 usage or configuration.

Every command imports what it needs when it runs, so that `--help` and `version` stay quick and a
gateway that serves never loads what only the demo needs.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, ClassVar

import rich_click as click
from click.core import ParameterSource

from gateway import __version__, standard_streams
from gateway.commands import CONFIG_ENV, config_file, config_option, fail, json_option, usable
from gateway.core.errors import ConfigError, GatewayError
from gateway.exiting import FAILURE, USAGE

if TYPE_CHECKING:
    from gateway.settings import CheckReport, Problem, Settings

WORKERS_ENV = "GEMMA_GATEWAY_WORKERS"

log_level_option = click.option(
    "--log-level",
    default="info",
    show_default=True,
    type=click.Choice(["debug", "info", "warning", "error"]),
    help="The lowest level that is logged.",
)


class Commands(click.RichGroup):
    """The commands of this file, and those defined in other modules, which are imported only when used."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "box-switch": "gateway.simulator.box_command",
        "demo": "gateway.demo.command",
        "jobs": "gateway.job_commands",
        "replay": "gateway.replay.command",
        "simulate": "gateway.simulator.command",
        "simulate-box": "gateway.simulator.box_command",
    }

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all names."""
        return sorted((*super().list_commands(ctx), *self.elsewhere))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command with that name, or None."""
        if cmd_name not in self.elsewhere:
            return super().get_command(ctx, cmd_name)
        command: click.Command = getattr(import_module(self.elsewhere[cmd_name]), cmd_name.replace("-", "_"))
        return command


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="gemma-gateway", message="%(prog)s %(version)s")
def main() -> None:
    """One OpenAI-compatible URL in front of a fleet of Gemma 4 servers.

    New here? `gemma-gateway demo` shows everything on this machine, without a GPU.
    """
    standard_streams.open_closed()


@main.command()
@config_file
@log_level_option
@click.option(
    "--workers",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    envvar=WORKERS_ENV,
    show_envvar=True,
    help="Number of processes that share the port.",
)
def serve(config: Path, log_level: str, workers: int) -> None:
    """Run the gateway until SIGTERM, then let running requests finish."""
    from gateway import process

    sys.exit(process.serve(config, log_level, workers))


@main.command()
@config_file
@log_level_option
@click.option("--admin", metavar="HOST:PORT", help="Admin port, overriding `admin` in the file.")
def worker(config: Path, log_level: str, admin: str | None) -> None:
    """Run jobs that gateways have accepted, until SIGTERM. It has no port for applications.

    On SIGTERM it takes no more jobs, finishes those whose answers have begun, and returns the others.
    """
    from gateway import process

    sys.exit(process.work(config, log_level, admin))


@main.command()
@config_file
@json_option
def check(config: Path, as_json: bool) -> None:
    """Report all errors and warnings in a configuration file, with line numbers and suggestions."""
    from gateway import settings

    report = settings.check(config)
    report = replace(report, problems=(*report.problems, *_store_faults(report.settings)))
    damaged = tuple(_vocabulary_faults(report.settings))
    warnings = (*report.warnings, *damaged)
    if as_json:
        found = {
            "ok": report.ok,
            "problems": [str(problem) for problem in report.problems],
            "warnings": [str(warning) for warning in warnings],
            "summary": list(report.summary),
        }
        click.echo(json.dumps(found, indent=2))
    else:
        for problem in report.problems:
            click.echo(f"{click.style('error', fg='red')}: {problem}")
        for warning in warnings:
            click.echo(f"{click.style('warning', fg='yellow')}: {warning}")
        for line in report.summary:
            click.echo(line)
        click.echo(_verdict(report, (*report.unmet, *damaged)))
    sys.exit(0 if report.ok else USAGE)


def _verdict(report: "CheckReport", unmet: "Sequence[Problem]") -> str:
    if not report.ok:
        return f"{len(report.problems)} problem(s)"
    if not unmet:
        return "ok"
    lines = ", ".join(str(line) for line in sorted({one.line for one in unmet}))
    return f"ok, but in this environment `serve` does not start, because of the warnings for line {lines}"


def _vocabulary_faults(settings: "Settings | None") -> "Iterator[Problem]":
    """Yield why the vocabulary of a configuration cannot be used, if it is there."""
    from gateway.settings.files import file_fault
    from gateway.tokenizer import vocab

    if settings is None or settings.named.vocab is None or file_fault(settings.named.vocab):
        return
    try:
        vocab.load(settings.named.vocab)
    except ConfigError as error:
        yield settings.problem(("tokenizer", "vocab"), str(error))


def _store_faults(settings: "Settings | None") -> "Iterator[Problem]":
    """Yield why the options in the URL of a configuration's store cannot be used."""
    if settings is None or settings.document.store is None:
        return
    from gateway.store import connections

    try:
        connections.validate(settings.document.store.url)
    except ConfigError as error:
        yield settings.problem(("store", "url"), str(error))


@main.command()
@config_option(
    "The configuration file. With --live: decide under this one instead of the one in force.", required=False
)
@click.argument("request_file", type=click.File("rb"), metavar="REQUEST.json")
@click.option("--key", help="Decide as if the caller used the API key with this name.")
@click.option("--header", "headers", multiple=True, metavar="NAME:VALUE", help="Add a request header.")
@click.option("--live", metavar="ADMIN_URL", help="Ask a running gateway through its admin port.")
@json_option
@click.pass_context
def explain(
    context: click.Context,
    config: Path | None,
    request_file: BinaryIO,
    key: str | None,
    headers: tuple[str, ...],
    live: str | None,
    as_json: bool,
) -> None:
    """Show where a request would go, and why. Sends nothing. `-` reads the request from standard input.

    It is one for /v1/chat/completions; with `prompt`, for /v1/completions; with `input`, for /v1/responses.

    The fleet is assumed to be idle and healthy, as configured; with --live, its current state is used.
    """
    from gateway import explain as explaining
    from gateway import process, settings

    fields = dict(_header(header) for header in headers)
    body = request_file.read()
    try:
        if live is not None:
            is_named = context.get_parameter_source("config") is ParameterSource.COMMANDLINE
            source = config.read_bytes() if config is not None and is_named else None
            found = explaining.ask(
                live,
                body,
                key=key,
                headers=fields,
                config=source,
                config_name=str(config or ""),
            )
        elif config is None:
            raise click.UsageError(f"No configuration is given: use --config FILE, or set {CONFIG_ENV}.")
        else:
            loaded = usable(lambda: settings.load(config))
            explanation = usable(
                lambda: process.run(explaining.explain, loaded, body, key=key, headers=fields)
            )
            found = json.loads(explanation.as_json())
    except GatewayError as error:
        if not as_json:
            fail(f"the gateway would answer {error.status} {error.code}: {error.message}")
        refused = {"status": error.status, "code": error.code, "message": error.message}
        found = {"refused": refused}
    except (explaining.NotAnswered, OSError) as error:
        fail(str(error))
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        explaining.show(found)
    sys.exit(0 if explaining.is_served(found) else FAILURE)


@main.command()
def schema() -> None:
    """Print the JSON Schema of the configuration file, for editors."""
    from gateway import settings

    click.echo(json.dumps(settings.schema(), indent=2))


@main.command()
def version() -> None:
    """Print the version."""
    click.echo(f"gemma-gateway {__version__}")


@main.command()
@click.argument("url", default="http://127.0.0.1:8080/readyz")
def healthcheck(url: str) -> None:
    """Exit with status 0 if URL answers 200, otherwise 1. For containers and scripts without curl."""
    import httpx

    from gateway import command_http

    try:
        answer = command_http.request("GET", url, timeout_s=3.0)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"{url}: {error}")
    click.echo(answer.text.strip())
    sys.exit(0 if answer.status_code == 200 else FAILURE)


@main.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--vocab", type=click.Path(path_type=Path, dir_okay=False), help="Count exactly, with this vocabulary."
)
@json_option
def tokens(file: Path, vocab: Path | None, as_json: bool) -> None:
    """Count the tokens of a text file; show how they were counted and how long it took."""
    from dataclasses import asdict

    from gateway import tokenizer

    measured = usable(lambda: tokenizer.measure(file, None if vocab is None else tokenizer.load(vocab)))
    if as_json:
        click.echo(json.dumps(asdict(measured), default=str))
    else:
        took = f"{measured.seconds * 1000:.1f} ms"
        click.echo(f"{measured.tokens} tokens ({measured.mode.value}), {measured.bytes} bytes, {took}")


@main.group(cls=click.RichGroup)  # not the class of `main`, which adds other commands
def vocab() -> None:
    """Build the vocabulary for exact token counts."""


@vocab.command("build")
@click.argument("tokenizer_json", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option(
    "--out",
    "-o",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write.",
)
def vocab_build(tokenizer_json: Path, out: Path) -> None:
    """Convert the `tokenizer.json` stored next to the weights you serve. You need this only once."""
    from gateway import tokenizer

    built = usable(lambda: tokenizer.build(tokenizer_json, out))
    click.echo(f"{out}: {built.entries} entries, {built.bytes} bytes, {built.seconds:.1f} s")
    click.echo(f"sha256 {built.sha256}")
    for warning in built.warnings:
        click.echo(f"{click.style('warning', fg='yellow')}: {warning}")
    click.echo(f"use it in the configuration: tokenizer: {{vocab: {out}}}")


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise click.BadParameter(f"{text!r} is not NAME:VALUE", param_hint="--header")
    return name.strip().lower(), value.strip()
