"""Options shared by several commands."""

import math
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import rich_click as click
from click.core import ParameterSource

F = TypeVar("F", bound=Callable[..., Any])

CONFIG_ENV = "GEMMA_GATEWAY_CONFIG"

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
