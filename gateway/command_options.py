"""Options shared by several commands."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import rich_click as click

F = TypeVar("F", bound=Callable[..., Any])

CONFIG_ENV = "GEMMA_GATEWAY_CONFIG"

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def config_option(help: str = "The configuration file.", *, required: bool = True) -> Callable[[F], F]:
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
