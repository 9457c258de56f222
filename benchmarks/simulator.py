"""Published figures against the simulated backend: `python benchmarks/simulator.py`.

Without options the engine runs in virtual time, every point in seconds. `--http PROFILE` sends the same
load to a real simulated server, over real sockets, `--speed` times faster than life, and scales the
times back: what is left between the two columns is the cost of HTTP, Python and this machine.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from statistics import fmean

import anyio

if not __package__:  # python benchmarks/simulator.py
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.closed_loop import Measured
from benchmarks.published import POINTS, Point, value
from benchmarks.routing import machine
from gateway.profiles import names
from gateway.simulator import SimulatorOptions, serve

TEMPLATE_TOKENS = 13  # what the chat template adds to a single user message


def main() -> None:
    """Print the comparison the arguments ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--http", metavar="PROFILE", choices=names(), help="run this profile's points over HTTP"
    )
    parser.add_argument("--speed", type=float, default=10.0, help="how much faster than life (default: 10)")
    parser.add_argument("--points", default="", help="only points whose id contains this")
    parser.add_argument("--serve", metavar="POINT", help=argparse.SUPPRESS)  # the child's side of --http
    arguments = parser.parse_args()
    points = [point for point in POINTS if arguments.points in point.id]
    if arguments.serve:
        point = next(point for point in POINTS if point.id == arguments.serve)
        # The published prompts are random: none begins as another one does.
        options = SimulatorOptions(point.deployment(), speed=arguments.speed, prefix_caching=False)
        anyio.run(lambda: serve(options, ready=lambda url: print(url, flush=True)))
    elif arguments.http:
        print(f"{machine()}; over HTTP, {arguments.speed:g} times faster than life\n")
        compare_http([point for point in points if point.profile == arguments.http], arguments.speed)
    else:
        print(f"{machine()}; virtual time\n")
        compare(points)


def compare(points: list[Point]) -> None:
    """Print every figure as published and as simulated, and the error by system."""
    began = time.perf_counter()
    errors: dict[str, list[float]] = {}
    system = ""
    steps = 0
    for point in points:
        if point.system != system:
            system = point.system
            print(f"\n{system}")
            print(f"{'point':22} {'source':6} {'figure':10} {'published':>10} {'simulated':>10} {'error':>8}")
        measured = point.run()
        steps += measured.steps
        for figure in point.figures:
            simulated = value(measured, figure.metric)
            error = simulated / figure.published - 1
            errors.setdefault(system, []).append(abs(error))
            print(
                f"{point.id:22} {point.source:6} {figure.metric:10} "
                f"{figure.published:10.5g} {simulated:10.5g} {error:+8.1%}"
            )
    print("\nmean and worst error")
    errors["all"] = [error for of_system in errors.values() for error in of_system]
    for name, found in errors.items():
        print(f"{name:22} {sum(found) / len(found):6.1%} {max(found):6.1%}  {len(found)} figures")
    print(f"\n{steps:,} engine steps in {time.perf_counter() - began:.1f} s")


def compare_http(points: list[Point], speed: float) -> None:
    """Print every figure as published, as simulated in virtual time, and as measured over HTTP."""
    print(f"{'point':22} {'figure':10} {'published':>10} {'virtual':>10} {'http':>10} {'http/virtual':>13}")
    for point in points:
        virtual, real = point.run(), anyio.run(over_http, point, speed)
        for figure in point.figures:
            expected, measured = value(virtual, figure.metric), value(real, figure.metric)
            print(
                f"{point.id:22} {figure.metric:10} {figure.published:10.5g} "
                f"{expected:10.5g} {measured:10.5g} {measured / expected - 1:+13.1%}"
            )


async def over_http(point: Point, speed: float) -> Measured:
    """Return what clients of a simulated server measure at a point, in engine time."""
    command = [sys.executable, __file__, "--serve", point.id, "--speed", str(speed)]
    async with await anyio.open_process(command, stderr=None) as server:
        assert server.stdout is not None
        url = (await server.stdout.receive()).decode().strip()
        try:
            return await closed_loop(url, point, speed)
        finally:
            server.terminate()


async def closed_loop(url: str, point: Point, speed: float) -> Measured:
    """Return the figures of a run with `point.concurrency` clients, each sending one after another."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    body = {
        "messages": [{"role": "user", "content": "river " * (point.prompt_tokens - TEMPLATE_TOKENS)}],
        "max_tokens": point.output_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode() + content
    timings: list[tuple[float, float]] = []
    left = iter(range(point.requests))

    async def caller() -> None:
        for _ in left:
            timings.append(await timed(host, int(port), request))

    began = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for _ in range(point.concurrency):
            tasks.start_soon(caller)
    duration = (time.perf_counter() - began) * speed
    first = [first * speed for first, _ in timings]
    total = [total * speed for _, total in timings]
    decode = [end - begin for begin, end in zip(first, total, strict=True)]
    return Measured(
        tokens_per_s=point.requests * point.output_tokens / duration,
        ttft_s=fmean(first),
        tpot_s=fmean(decode) / max(1, point.output_tokens - 1),
        latency_s=fmean(total),
        duration_s=duration,
        steps=0,
    )


async def timed(host: str, port: int, request: bytes) -> tuple[float, float]:
    """Return seconds to the first event and to the last, of one streamed request."""
    reader, writer = await asyncio.open_connection(host, port)
    began = time.perf_counter()
    writer.write(request)
    first = last = 0.0
    tail = b""
    while received := await reader.read(65536):
        last = time.perf_counter()
        if not first and b"data: " in received:
            first = last
        tail = (tail + received)[-64:]
    writer.close()
    if b"data: [DONE]" not in tail:
        raise RuntimeError(f"a stream broke off: {tail!r}")
    return first - began, last - began


if __name__ == "__main__":
    main()
