"""`gemma-gateway simulate-box`, and `box-switch`, which gives it orders."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import rich_click as click

from gateway.commands import Number, fail
from gateway.exiting import USAGE
from gateway.simulator.box_options import BOOT_S, Boot, BoxOptions, profile
from gateway.simulator.command import (
    answer_tokens_option,
    host_option,
    speed_option,
    stream_interval_option,
    thought_tokens_option,
)
from gateway.simulator.options import SimulatorOptions
from gateway.tcp import PORT_MAX

Command = TypeVar("Command", bound=Callable[..., None])

_SPARK = ("gemma=spark-nvfp4", "qwen=qwen")


def _seconds_option(name: str, default: float, help: str) -> Callable[[Command], Command]:
    seconds = Number(min=0)
    return click.option(f"--{name}", f"{name}_s", default=default, show_default=True, type=seconds, help=help)


@click.command("simulate-box")
@click.option(
    "--port",
    required=True,
    type=click.IntRange(0, PORT_MAX),
    help="Port for orders; the models listen on the ports after it. 0: any free ports.",
)
@host_option
@click.option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME=PROFILE[:PORT]",
    help="A model of the box, and the deployment it imitates: a profile of `simulate`, or `qwen`.  "
    f"[default: {' and '.join(_SPARK)}]",
)
@click.option("--resident", metavar="NAME", help="Model that is up at startup. [default: none]")
@click.option(
    "--sleep-mode",
    is_flag=True,
    help="Models have vLLM's /sleep, /wake_up and /is_sleeping; with --resident, all others are asleep.",
)
@speed_option
@_seconds_option("boot", BOOT_S, "Seconds a boot takes.")
@_seconds_option("stop", 0.7, "Seconds from the stop order until the memory is free.")
@_seconds_option("sleep", 2.0, "Seconds to fall asleep.")
@_seconds_option("wake", 5.0, "Seconds to wake up.")
@click.option(
    "--fail-boots",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Number of boots of each model that fail at first.",
)
@click.option(
    "--boots",
    "plans",
    multiple=True,
    metavar="[NAME=]END,...",
    help=f"How later boots end, of each model or of one: {', '.join(Boot)}.",
)
@click.option(
    "--fail-chance",
    default=0.0,
    show_default=True,
    type=Number(0, 1),
    help="Probability that any further boot fails.",
)
@click.option(
    "--seed", default=0, show_default=True, help="Seed for that probability, the texts and their lengths."
)
@answer_tokens_option
@thought_tokens_option
@stream_interval_option
def simulate_box(
    port: int,
    host: str,
    models: tuple[str, ...],
    resident: str | None,
    sleep_mode: bool,
    speed: float,
    boot_s: float,
    stop_s: float,
    sleep_s: float,
    wake_s: float,
    fail_boots: int,
    plans: tuple[str, ...],
    fail_chance: float,
    seed: int,
    answer_tokens: int,
    thought_tokens: int,
    stream_interval: int,
) -> None:
    """Run a simulated box until SIGTERM: two or more models, and memory for one at a time.

    By default it is the DGX Spark that Gemma shares with Qwen. Nothing runs until you start it:

    \b
      gemma-gateway simulate-box --port 9100 --speed 20
      curl -X POST http://127.0.0.1:9100/models/gemma/start
      curl http://127.0.0.1:9100/models
      gemma-gateway box-switch --control http://127.0.0.1:9100 --wait stop gemma

    If a second model starts or wakes while the first holds the memory, both are killed.
    GET /box shows what happened: violations, requests cut off, swaps, and which model answered when.
    """
    import anyio

    from gateway.simulator.box import Box, serve_box

    def common(profile_name: str, model_port: int) -> SimulatorOptions:
        try:
            deployment = profile(profile_name)
        except KeyError as error:
            raise click.BadParameter(f"{error.args[0]}, qwen", param_hint="--model") from error
        return SimulatorOptions(
            deployment,
            host=host,
            port=model_port,
            speed=speed,
            boot_s=boot_s,
            seed=seed,
            answer_tokens=answer_tokens,
            thought_tokens=thought_tokens,
            stream_interval=stream_interval,
            sleep_mode=sleep_mode,
            sleep_s=sleep_s,
            wake_s=wake_s,
        )

    given = {}
    for number, text in enumerate(models or _SPARK, 1):
        name, profile_name, own_port = _model(text)
        if name in given:
            raise click.BadParameter(f"{name!r} is given twice", param_hint="--model")
        following = port + number if port else 0
        given[name] = common(profile_name, following if own_port is None else own_port)
    _check_ports(port, {name: model.port for name, model in given.items()})
    try:
        options = BoxOptions(
            given,
            host=host,
            port=port,
            resident=resident,
            stop_s=stop_s,
            boots={name: _boots(name, fail_boots, plans, given) for name in given},
            fail_chance=fail_chance,
            seed=seed,
        )
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--resident") from error

    def ready(box: Box) -> None:
        with suppress(OSError):  # nobody reads it
            for model in box.models.values():
                serves = f"{model.options.model} ({model.options.profile.name})"
                click.echo(f"{model.name}: {serves} at {model.url}/v1, {model.state}", err=True)
            click.echo(f"orders at {box.url}, {speed:g}x", err=True)

    async def main() -> None:
        await serve_box(options, ready=ready)

    try:
        anyio.run(main)
    except OSError as error:
        fail(f"cannot listen on {host}: {error.strerror or error}", USAGE)


@click.command("box-switch", hidden=True)
@click.option("--control", required=True, metavar="URL", help="URL of the box's port for orders.")
@click.option("--wait", is_flag=True, help="Return when it is done, not when the order is accepted.")
@click.option(
    "--timeout",
    default=900.0,
    show_default=True,
    type=Number(min=0, min_open=True),
    help="Seconds to wait.",
)
@click.argument("order", type=click.Choice(["start", "stop"]))
@click.argument("name")
def box_switch(control: str, wait: bool, timeout: float, order: str, name: str) -> None:
    """Tell a simulated box to start or stop a model.

    Exit status: 0 if the box accepted the order, or with --wait carried it out; otherwise 1.
    """
    from urllib.parse import quote

    import httpx

    url = f"{control.rstrip('/')}/models/{quote(name, safe='')}/{order}"
    try:
        answer = httpx.post(url, params={"wait": str(wait).lower()}, timeout=timeout, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"{control}: {error}")
    try:
        said = answer.json()
    except ValueError:
        fail(f"{control}: HTTP {answer.status_code}, which is not a box's answer")
    if "state" not in said:
        fail(f"{control}: {said.get('detail', said)}")
    text = f"{name} is {said['state']}" + (f": {said['reason']}" if said.get("reason") else "")
    if not answer.is_success:
        fail(text)
    click.echo(text)


def _model(text: str) -> tuple[str, str, int | None]:
    """Return the name, the profile's name and the port in `NAME=PROFILE[:PORT]`."""
    name, equals, rest = text.partition("=")
    profile_name, colon, port = rest.partition(":")
    if not name or not equals or "/" in name or (colon and not (port.isdecimal() and int(port) <= PORT_MAX)):
        raise click.BadParameter(f"{text!r} is not NAME=PROFILE[:PORT]", param_hint="--model")
    return name, profile_name, int(port) if colon else None


def _check_ports(control: int, ports: Mapping[str, int]) -> None:
    used = {control}
    for name, port in ports.items():
        if port > PORT_MAX:
            raise click.BadParameter(f"{name} would get port {port}", param_hint="--port")
        if port and port in used:
            raise click.BadParameter(f"port {port} is used twice", param_hint="--model")
        used.add(port)


def _boots(name: str, failures: int, plans: Sequence[str], names: Iterable[str]) -> tuple[Boot, ...]:
    """Return how the first boots of a model end."""
    ends = [Boot.FAIL] * failures
    for plan in plans:
        whose, equals, listed = plan.rpartition("=")
        if equals and whose not in names:
            raise click.BadParameter(f"there is no model {whose!r}", param_hint="--boots")
        if not equals or whose == name:
            try:
                ends += [Boot(end.strip()) for end in listed.split(",")]
            except ValueError as error:
                raise click.BadParameter(
                    f"{error}; there are {', '.join(Boot)}", param_hint="--boots"
                ) from error
    return tuple(ends)
