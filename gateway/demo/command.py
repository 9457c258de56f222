"""`gemma-gateway demo`: the whole gateway on this machine, without a GPU."""

import sys

import rich_click as click

from gateway.commands import Number


@click.command()
@click.option(
    "--serve", is_flag=True, help="Keep the fleet and the gateway running afterwards, for your own requests."
)
@click.option(
    "--speed",
    default=10.0,
    show_default=True,
    type=Number(min=1, max=100),
    help="GPU seconds per second of the clock. 1 is real time.",
)
@click.option(
    "--port",
    default=0,
    type=click.IntRange(0, 65535),
    help="Port of the gateway.  [default: a free port]",
)
@click.option("--plain", is_flag=True, help="Print plain lines instead of the live view.")
@click.option("--requests", "size", default="full", type=click.Choice(["full", "small"]), hidden=True)
def demo(serve: bool, speed: float, port: int, plain: bool, size: str) -> None:
    """Watch the gateway at work on this machine: no GPU, no internet, half a minute.

    Five simulated Gemma 4 servers, a Qwen that shares a machine with one of them, and the real gateway
    run as processes on loopback. The `openai` client sends chats, documents, an image, reasoning, tool
    calls and jobs, and you see what goes where, and why.
    """
    from gateway.demo.run import DemoOptions, run

    sys.exit(run(DemoOptions(speed=speed, size=size, port=port, serve=serve, plain=plain)))
