"""What several commands share: options, and how they end."""

import math
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import rich_click as click
from click.core import ParameterSource

from gateway.core.errors import ConfigError
from gateway.exiting import FAILURE, USAGE

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

CONFIG_ENV = "GEMMA_GATEWAY_CONFIG"

PIPED_WIDTH = 250
"""Characters per line if the output is not a terminal. A choice: nothing is truncated, no name is broken."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class Number(click.FloatRange):
    """A range of finite numbers."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or end with a message."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def config_option(help: str, *, required: bool = True) -> Callable[[F], F]:
    """Return the option for the configuration file, which defaults to the variable CONFIG_ENV."""
    return click.option(
        "--config",
        "-c",
        type=click.Path(path_type=Path, dir_okay=False),
        envvar=CONFIG_ENV,
        show_envvar=True,
        required=required,
        help=help,
    )


def config_file(command: Callable[..., None]) -> Callable[..., None]:
    """Let `command` take its `config` as the argument FILE, by option, or from the variable CONFIG_ENV."""

    @click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False))
    @config_option("The configuration file, instead of FILE.", required=False)
    @click.pass_context
    @wraps(command)
    def run(context: click.RichContext, /, file: Path | None, config: Path | None, **options: Any) -> None:
        if file is not None and context.get_parameter_source("config") is ParameterSource.COMMANDLINE:
            raise click.UsageError("Two configurations are given: name one.")
        chosen = file or config
        if chosen is None:
            raise click.UsageError(f"No configuration is given: name its FILE, or set {CONFIG_ENV}.")
        command(config=chosen, **options)

    return run


def usable(action: Callable[[], T]) -> T:
    """Return the result of `action`; an unusable configuration ends the command with status 2."""
    try:
        return action()
    except ConfigError as error:
        for line in str(error).splitlines():
            click.echo(f"{click.style('error', fg='red')}: {line}", err=True)
        sys.exit(USAGE)


def fail(message: str, status: int = FAILURE) -> NoReturn:
    """End the command with a message."""
    click.echo(message, err=True)
    sys.exit(status)
