"""Counts what a short request costs in Python's own units: bytecodes, and calls of Python functions.

    python -m benchmarks.steps                   a tree of functions, with what each takes per request
    python -m benchmarks.steps --streamed        streams of 200 chunks instead of one answer
    python -m benchmarks.steps --headers 16      with that many more headers, as SDKs send them
    python -m benchmarks.steps --most 10500      with status 1 if a request takes more bytecodes than that

The figures are the same on every machine, so they show what a change to the hot path does where microseconds
do not. Those of functions are the same in every run; the sum varies by 1 %, and by more on a busy machine,
where more answers arrive in pieces: compare several runs. What is measured is the gateway of
benchmarks/overhead, with everything on that a site has on. Work that is not done for requests, such as
probes, is left out: functions called for less than half of the requests, unless by one that is called for
more. So what is done for several requests at a time counts with its share.
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

if not __package__:  # python benchmarks/steps.py
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.overhead import machine, scenarios, targets
from benchmarks.overhead.__main__ import rank_file

ENGINES = 3
WARM = 600
"""Requests before those that are counted. By then CPython has specialized what it will."""
RARE = 0.5
EVERY_US = 10_000
"""Between two chunks of a stream. What is counted is slow: chunks that come faster are read together."""
STREAMS = 16
"""So many at once, so that what happens per second is rare compared with what happens per stream."""
ROOT = Path(__file__).resolve().parents[1]

Path_ = tuple[str, ...]


# ------------------------------------------------------------------ within the gateway's process


class Steps:
    """Counts bytecodes and calls by the functions on the stack."""

    def __init__(self) -> None:
        """Count nothing yet."""
        self.bytecodes: Counter[Path_] = Counter()
        self.calls: Counter[Path_] = Counter()
        self._names: dict[CodeType, str] = {}
        self._paths: dict[FrameType, Path_] = {}  # of the frames on the stack

    def begin(self, *_: object) -> None:
        """Count from now on."""
        sys._getframe().f_trace_opcodes = True  # without one such frame, CPython 3.12 reports no bytecodes
        sys.settrace(self._enter)

    def end(self, output: Path, *_: object) -> None:
        """Write what was counted: a line for each stack, with its bytecodes and calls."""
        sys.settrace(None)
        lines = (f"{self.bytecodes[path]} {self.calls[path]} {'|'.join(path)}" for path in self.calls)
        unfinished = output.with_suffix(".unfinished")
        unfinished.write_text("\n".join(lines))
        unfinished.rename(output)

    def _enter(self, frame: FrameType, event: str, _: object) -> "Callable[..., Any] | None":
        if event != "call":
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        code = frame.f_code
        name = self._names.get(code)
        if name is None:
            where = code.co_filename.rpartition("site-packages/")[2].removeprefix(f"{ROOT}/")
            name = self._names[code] = f"{where}:{code.co_firstlineno} {code.co_qualname}"
        outer = self._paths.get(frame.f_back, ()) if frame.f_back is not None else ()
        path = self._paths[frame] = (*outer, name)
        self.calls[path] += 1

        def within(frame: FrameType, event: str, _: object) -> "Callable[..., Any]":
            if event == "opcode":
                self.bytecodes[path] += 1
            elif event == "return":  # or suspended, if it is a coroutine
                self._paths.pop(frame, None)
            return within

        return within


def run_counted(output: Path, words: list[str]) -> None:
    """Run a command of the gateway, and count from SIGUSR1 to SIGUSR2."""
    from gateway.__main__ import main

    steps = Steps()
    signal.signal(signal.SIGUSR1, steps.begin)
    signal.signal(signal.SIGUSR2, lambda *_: steps.end(output))
    sys.argv = ["gemma-gateway", *words]
    main()


# ------------------------------------------------------------------ around it


def _ask(connections: list[socket.socket], request: bytes) -> None:
    """Send a request on each connection, and read all answers."""
    for one in connections:
        one.sendall(request)
    for one in connections:
        received = b""
        while not _is_whole(received):
            if not (data := one.recv(65_536)):
                raise SystemExit("error: the gateway closed a connection")
            received += data


def _is_whole(received: bytes) -> bool:
    head, found, body = received.partition(b"\r\n\r\n")
    if not found:
        return False
    if not head.startswith(b"HTTP/1.1 200 "):
        raise SystemExit(f"error: {received.decode(errors='replace')}")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.partition(b":")[2])
    return body.endswith(b"0\r\n\r\n")


def _request(body: bytes, port: int, headers: int) -> bytes:
    lines = [b"POST /v1/chat/completions HTTP/1.1", b"host: 127.0.0.1:%d" % port]
    lines += [b"authorization: Bearer " + targets.API_KEY.encode(), b"content-type: application/json"]
    lines += [b"x-stainless-header-%d: value" % number for number in range(headers)]
    lines += [b"content-length: %d" % len(body), b"", b""]
    return b"\r\n".join(lines) + body


def count(options: argparse.Namespace, folder: Path) -> "tuple[Counter[Path_], Counter[Path_]]":
    """Return bytecodes and calls per stack, of all counted requests."""
    compiled = folder / "engine"
    source = ROOT / "benchmarks/overhead/engine.c"
    subprocess.run([os.environ.get("CC", "cc"), "-O2", "-o", str(compiled), str(source)], check=True)
    engines = subprocess.Popen([str(compiled), str(ENGINES)], stdout=subprocess.PIPE, start_new_session=True)
    assert engines.stdout is not None
    ports = [int(port) for port in engines.stdout.readline().split()]
    around = targets.Surroundings(folder, ports, rank_file(options.vocab, folder))
    output = folder / "steps"

    def command(around: targets.Surroundings, port: int) -> targets.Command:
        made = next(one for one in targets.available([]) if one.name == "gateway").command
        assert made is not None
        ordinary = made(around, port)
        words = [sys.executable, "-m", "benchmarks.steps", "--counted", str(output), *ordinary.words[3:]]
        return targets.Command(words, ordinary.files, ordinary.environment)

    running = None
    try:
        running = targets.start(
            targets.Target("gateway", "", command), around, os.sched_getaffinity(0), scenarios.short()
        )
        assert running.process is not None
        body = scenarios.streamed(EVERY_US, 0) if options.streamed else scenarios.short()
        request = _request(body, running.port, options.headers)
        connections = [
            socket.create_connection(("127.0.0.1", running.port)) for _ in range(options.connections)
        ]
        for _ in range(-(-(WARM // (10 if options.streamed else 1)) // options.connections)):
            _ask(connections, request)
        running.process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)
        for _ in range(options.rounds):
            _ask(connections, request)
        time.sleep(0.2)
        running.process.send_signal(signal.SIGUSR2)
        while not output.exists():
            time.sleep(0.05)
    finally:
        if running is not None:
            running.stop()
        machine.stop(engines)
    bytecodes: Counter[Path_] = Counter()
    calls: Counter[Path_] = Counter()
    for line in output.read_text().splitlines():
        stepped, called, path = line.split(" ", 2)
        bytecodes[tuple(path.split("|"))] += int(stepped)
        calls[tuple(path.split("|"))] += int(called)
    return bytecodes, calls


def lines_of(
    bytecodes: "Counter[Path_]", calls: "Counter[Path_]", requests: int, least: float
) -> "tuple[list[str], float]":
    """Return the tree of functions that take at least `least` bytecodes per request, and the sum of all."""
    often: set[Path_] = set()
    for path in sorted(calls, key=len):  # callers before those they call
        if calls[path] >= RARE * requests or path[:-1] in often:
            often.add(path)
    with_inner: Counter[Path_] = Counter()
    for path in often:
        for depth in range(1, len(path) + 1):
            with_inner[path[:depth]] += bytecodes[path]
    lines = ["with inner    itself   calls"]
    for path in sorted(calls, key=list(calls).index):
        if path in often and with_inner[path] >= least * requests:
            figures = (with_inner[path] / requests, bytecodes[path] / requests, calls[path] / requests)
            lines.append("{:10,.0f}{:10,.0f}{:8.1f}  ".format(*figures) + "  " * len(path) + path[-1])
    total = sum(bytecodes[path] for path in often) / requests
    called = sum(calls[path] for path in often) / requests
    lines.append(f"{total:,.0f} bytecodes in {called:,.0f} calls per request")
    return lines, total


def parsed() -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streamed", action="store_true", help="streams of 200 chunks, one each 10 ms")
    parser.add_argument("--headers", type=int, default=0, help="more headers in each request")
    parser.add_argument("--connections", type=int, help=f"requests at the same time: 1, or {STREAMS} streams")
    parser.add_argument(
        "--rounds", type=int, help="requests that are counted, per connection: 100, or 2 streams"
    )
    parser.add_argument("--least", type=float, default=20, help="bytecodes of a function that is shown")
    parser.add_argument("--most", type=float, metavar="N", help="bytecodes per request that are allowed")
    parser.add_argument("--vocab", type=Path, metavar="FILE", help="a tokenizer.json, or a rank file of one")
    options = parser.parse_args()
    options.connections = options.connections or (STREAMS if options.streamed else 1)
    options.rounds = options.rounds or (2 if options.streamed else 100)
    return options


def main() -> None:
    """Count, and print a tree."""
    if sys.argv[1:2] == ["--counted"]:
        run_counted(Path(sys.argv[2]), sys.argv[3:])
        return
    options = parsed()
    folder = Path(tempfile.mkdtemp(prefix="steps-"))
    try:
        bytecodes, calls = count(options, folder)
        lines, total = lines_of(bytecodes, calls, options.rounds * options.connections, options.least)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(*lines, sep="\n")
    if options.most is not None and total > options.most:
        raise SystemExit(
            f"error: {total:,.0f} bytecodes per request; at most {options.most:,.0f} are allowed"
        )


if __name__ == "__main__":
    main()
