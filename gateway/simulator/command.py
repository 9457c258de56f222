"""`gemma-gateway simulate`: one simulated Gemma 4 server on a port."""

from contextlib import suppress
from functools import partial

import rich_click as click

from gateway import open_files, tcp
from gateway.commands import Number, fail
from gateway.exiting import USAGE
from gateway.simulator.options import Fault, FaultOrder, Quirk, SimulatorOptions

host_option = click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
speed_option = click.option(
    "--speed",
    default=1.0,
    show_default=True,
    type=Number(min=0, min_open=True),
    help="Engine seconds per second of the clock. All other durations are engine time.",
)
_at_least_one = partial(click.option, show_default=True, type=click.IntRange(min=1))
answer_tokens_option = _at_least_one("--answer-tokens", default=200, help="Median length of an answer.")
thought_tokens_option = _at_least_one(
    "--thought-tokens", default=450, help="Median length of the reasoning before it."
)
stream_interval_option = _at_least_one(
    "--stream-interval", default=1, help="Tokens per event of a stream, from the second event on."
)


def _boot(text: str) -> float | None:
    if text == "profile":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 86_400:
        raise click.BadParameter(
            f"{text!r} is neither a number of seconds nor `profile`", param_hint="--boot"
        )
    return seconds


def _list_profiles(context: click.Context, _: click.Parameter, profile: str) -> str:
    if profile != "help" or context.resilient_parsing:
        return profile
    from gateway import profiles

    for name in profiles.names():
        click.echo(f"{name:<20} {profiles.load(name).title}")
    return context.exit()


@click.command()
@click.option(
    "--profile",
    required=True,
    is_eager=True,
    callback=_list_profiles,
    help="The deployment to imitate; `help` lists them.",
)
@click.option(
    "--port",
    required=True,
    type=click.IntRange(0, tcp.PORT_MAX),
    help="Port to listen on; 0 for any free one.",
)
@host_option
@speed_option
@click.option(
    "--boot",
    default="0",
    show_default=True,
    metavar="SECONDS",
    help="Seconds for which it refuses connections at first; `profile`: the boot time of its profile.",
)
@click.option(
    "--api-key", envvar="VLLM_API_KEY", help="API key that its /v1 routes require.  [env: VLLM_API_KEY]"
)
@click.option(
    "--served-model", metavar="NAME", help="Name under which it serves the model, if not the profile's."
)
@click.option("--seed", default=0, show_default=True, help="Seed for its texts and their lengths.")
@click.option(
    "--accept",
    type=Number(min=1),
    help="Tokens per step with speculative decoding, if not the profile's.",
)
@click.option(
    "--max-num-queued-reqs", type=click.IntRange(min=1), help="Requests it holds before it answers 503."
)
@click.option(
    "--enable-prefix-caching/--no-enable-prefix-caching",
    "prefix_caching",
    default=True,
    show_default=True,
    help="Whether it computes what prompts have in common once.",
)
@click.option(
    "--enable-prompt-tokens-details",
    "prompt_tokens_details",
    is_flag=True,
    help="Say in `usage` how much of a prompt was cached.",
)
@stream_interval_option
@click.option(
    "--shutdown-timeout",
    default=0.0,
    show_default=True,
    type=Number(min=0),
    help="Seconds that running answers get after SIGTERM; 0 cuts them off, as vLLM does.",
)
@answer_tokens_option
@thought_tokens_option
@click.option(
    "--fault",
    type=click.Choice([fault.value for fault in Fault]),
    help="Simulate this fault. POST /simulator/fault changes it.",
)
@click.option("--fault-count", type=click.IntRange(min=1), help="Number of requests affected. [default: all]")
@click.option("--fault-seconds", type=Number(min=0), help="How long faults like refuse and hang last.")
@click.option("--fault-after", default=3, show_default=True, help="Events a stream sends before it breaks.")
@click.option(
    "--quirk",
    "quirks",
    multiple=True,
    type=click.Choice([quirk.value for quirk in Quirk]),
    help="Simulate this known engine bug.",
)
def simulate(
    profile: str,
    port: int,
    host: str,
    speed: float,
    boot: str,
    api_key: str | None,
    served_model: str | None,
    seed: int,
    accept: float | None,
    max_num_queued_reqs: int | None,
    prefix_caching: bool,
    prompt_tokens_details: bool,
    stream_interval: int,
    shutdown_timeout: float,
    answer_tokens: int,
    thought_tokens: int,
    fault: str | None,
    fault_count: int | None,
    fault_seconds: float | None,
    fault_after: int,
    quirks: tuple[str, ...],
) -> None:
    """Run one simulated Gemma 4 server until SIGTERM: vLLM's API, a real deployment's latency, no GPU."""
    from gateway import profiles

    try:
        deployment = profiles.load(profile)
    except KeyError as error:
        raise click.BadParameter(str(error.args[0]), param_hint="--profile") from error

    import anyio

    from gateway.simulator.server import serve

    order = None if fault is None else FaultOrder(Fault(fault), fault_count, fault_seconds, fault_after)
    options = SimulatorOptions(
        profile=deployment,
        host=host,
        port=port,
        speed=speed,
        boot_s=_boot(boot),
        api_key=api_key,
        served_model=served_model,
        seed=seed,
        accept=accept,
        max_num_queued_reqs=max_num_queued_reqs,
        shutdown_timeout_s=shutdown_timeout,
        answer_tokens=answer_tokens,
        thought_tokens=thought_tokens,
        fault=order,
        quirks=frozenset(Quirk(quirk) for quirk in quirks),
        prefix_caching=prefix_caching,
        prompt_tokens_details=prompt_tokens_details,
        stream_interval=stream_interval,
    )

    def ready(url: str) -> None:
        with suppress(OSError):  # nobody reads it
            click.echo(f"{options.model} ({profile}) at {url}/v1, {speed:g}x", err=True)

    async def main() -> None:
        await serve(options, ready=ready)

    open_files.raise_limit()
    try:
        anyio.run(main)
    except OSError as error:
        fail(f"cannot listen on {tcp.address(host, port)}: {error.strerror or error}", USAGE)
