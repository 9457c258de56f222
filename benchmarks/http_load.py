"""The callers of the routing benchmark over HTTP: a socket for each, streamed, as patient as in virtual time.

`drive` sends every request at its time, whatever became of those before it, and notes what came back in
the same `Fate` that the virtual fleet fills. Raw asyncio with httptools and prompts made beforehand: a
client library costs more per chunk than the gateway under test.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httptools

from benchmarks.scoring import document_ttft_s
from benchmarks.traffic import Arrival, Kind
from benchmarks.virtual_fleet import PATIENCE_S, Fate
from gateway.core.class_counts import WEIGHTS
from gateway.simulator.template import render

MODEL = "gemma"
STREAM_INTERVAL = {Kind.CHAT: 10, Kind.LONG: 1, Kind.REASONING: 25}
"""Tokens per event after the first (`stream_interval`), so that relaying is not what is measured. Only one
for documents: ten tokens of a server that reads another one may be farther apart than a timeout."""

_HEAD_S = 0.5  # real seconds between the call and the first arrival
_POOL_WORDS = 20_003
_WORDS_MAX = 260_000


# ------------------------------------------------------------------ prompts


def request_body(arrival: Arrival) -> bytes:
    """Return the body of a request that the simulator counts and the gateway estimates as `arrival` says.

    The simulator takes every word of up to ten letters for one token, the gateway's class counts weigh its
    letters: so the number of words is the length, and how long they are is how wrong the estimate is.
    """
    is_reasoning = arrival.kind is Kind.REASONING
    around = _around(is_reasoning)
    words = max(1, arrival.prompt_tokens - around)
    body = (
        '{"model":"%s","messages":[{"role":"user","content":"%s"}],"max_tokens":%d,"ignore_eos":true,'
        '"stream":true,"stream_options":{"include_usage":true},"stream_interval":%d%s}'
    )
    text = _text(arrival.id, words, max(1, arrival.estimate_tokens - around))
    thinking = ',"reasoning_effort":"high"' if is_reasoning else ""
    interval = STREAM_INTERVAL[arrival.kind]
    return (body % (MODEL, text, arrival.output_tokens, interval, thinking)).encode()


def _text(number: int, words: int, estimate_tokens: int) -> str:
    """Return so many words, another text for each number, that class counts take for so many tokens."""
    letters = (estimate_tokens - WEIGHTS[b"s"] * (words - 1)) / WEIGHTS[b"l"]
    width = max(1, min(9, int(letters / words)))
    wider = max(0, min(words, round(letters) - width * words))
    start = number * 17 % _POOL_WORDS
    return (_cut(width, start, words - wider) + _cut(width + 1, start, wider)).strip()


def _cut(width: int, start: int, words: int) -> str:
    return _pool(width)[start * (width + 1) : (start + words) * (width + 1)]


@cache
def _pool(width: int) -> str:
    """Return words of one width, each after a blank: a position in it can be computed."""
    dice = random.Random(width)
    once = "".join(
        " " + "".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=width)) for _ in range(_POOL_WORDS)
    )
    return once * (_WORDS_MAX // _POOL_WORDS + 2)


@cache
def _around(thinking: bool) -> int:
    """Return the tokens that the chat template puts around a single message."""
    return render([{"role": "user", "content": ""}], thinking=thinking).count()


# ------------------------------------------------------------------ one call


@dataclass(slots=True)
class Heard:
    """What a run's callers heard, beside the fates.

    Attributes:
        statuses: Answers per status and error code.
        retry_after_s: The Retry-After of every refusal, in seconds of the clock.
        flaws: What no caller should ever see: answers that broke or were not as long as asked for.
        lags_s: Per request, how late it was sent, in seconds of the clock.
        prompt_errors: Requests whose length the simulator counted otherwise than planned.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    retry_after_s: list[float] = field(default_factory=list)
    flaws: list[str] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)
    prompt_errors: int = 0


class Call(asyncio.Protocol):
    """One request on one connection, from its first byte to the last of its answer.

    Attributes:
        settled: Done once nothing that still happens can change its score.
    """

    def __init__(self, fate: Fate, body: bytes, clock: "Clock", heard: Heard) -> None:
        self.fate = fate
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._body = body
        self._clock = clock
        self._heard = heard
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._headers: dict[bytes, bytes] = {}
        self._rest = b""
        self._usage: dict[str, int] | None = None
        self._is_over = False

    async def start(self, host: str, port: int) -> None:
        """Connect and send; whatever happens then is noted."""
        try:
            await asyncio.get_running_loop().create_connection(lambda: self, host, port)
        except OSError as error:
            self._flaw(f"not connected: {error}")
            self._end()

    def leave(self) -> None:
        """Close the connection: the caller has lost patience. Not if the first token is there."""
        if not self._is_over and self.fate.first_at is None:
            self.fate.left = True
            self._heard.statuses["left"] += 1
            self._end()

    def late(self) -> None:
        """Note that its objective is missed."""
        if not self.settled.done():
            self.settled.set_result(None)

    def cut(self) -> None:
        """Close the connection at the end of the run."""
        if not self._is_over:
            self.fate.is_undecided = True
            self._heard.statuses["cut at the end"] += 1
            self._end()

    # -------------------------------------------------------------- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.Transport)
        if self._is_over:
            transport.abort()
            return
        self._transport = transport
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
            f"content-length: {len(self._body)}\r\n\r\n"
        )
        transport.write(head.encode() + self._body)
        self._body = b""

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._flaw(f"no HTTP: {error}")
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note an answer that broke."""
        if not self._is_over:
            self._flaw("the connection was lost")
            self._end()

    # -------------------------------------------------------------- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header."""
        self._headers[name.lower()] = value

    def on_body(self, data: bytes) -> None:
        """Look through the events of a stream; keep the body of a refusal."""
        self._rest += data
        if self._parser.get_status_code() != 200:
            return
        *events, self._rest = self._rest.split(b"\n\n")
        for event in events:
            self._event(event)

    def on_message_complete(self) -> None:
        """Note how it ended."""
        if self._is_over:
            return
        status = self._parser.get_status_code()
        if status == 200:
            self._flaw("the stream ended without [DONE]")
        else:
            self._refused(status)
        self._end()

    # -------------------------------------------------------------- inside

    def _event(self, event: bytes) -> None:
        fate = self.fate
        if event == b"data: [DONE]":
            self._done()
        elif event.startswith(b'data: {"error"'):
            self._flaw(event.decode(errors="replace")[:200])
            self._end()
        elif fate.first_at is None and event.startswith(b"data:"):
            if _has_token(json.loads(event[5:])):
                fate.first_at = self._clock.now()
                fate.backend = self._headers.get(b"x-gateway-backend", b"").decode()
                waited_s = float(self._headers.get(b"x-gateway-queue-ms", b"0")) / 1000
                fate.sent_at = fate.arrival.at + waited_s * self._clock.speed
                if fate.arrival.kind is Kind.LONG:
                    self.late()  # its objective is about the first token alone
        elif b'"choices":[]' in event:
            self._usage = json.loads(event[5:])["usage"]

    def _done(self) -> None:
        fate, usage = self.fate, self._usage
        if fate.first_at is None or usage is None:
            self._flaw("a stream without a token or without usage")
        else:
            fate.done_at = self._clock.now()
            fate.output_tokens = usage["completion_tokens"]
            self._heard.statuses["200"] += 1
            self._heard.prompt_errors += usage["prompt_tokens"] != fate.arrival.prompt_tokens
            if fate.output_tokens != fate.arrival.output_tokens:
                self._flaw(f"{fate.output_tokens} tokens instead of {fate.arrival.output_tokens}")
        self._end()

    def _refused(self, status: int) -> None:
        try:
            code = json.loads(self._rest)["error"]["code"]
        except (ValueError, KeyError, TypeError):
            code = "unreadable"
        self._heard.statuses[f"{status} {code}"] += 1
        if status not in (400, 429, 503) or code == "unreadable":
            self._flaw(f"{status} {code}")
            return
        self.fate.refused = str(status)
        if status != 400:
            after = self._headers.get(b"retry-after", b"")
            if after.isdigit():
                self._heard.retry_after_s.append(float(after))
            else:
                self._flaw(f"{status} with Retry-After {after.decode(errors='replace')!r}")

    def _flaw(self, text: str) -> None:
        arrival = self.fate.arrival
        self._heard.flaws.append(f"{arrival.kind} {arrival.id} at {self._clock.now():.1f} s: {text}")

    def _end(self) -> None:
        self._is_over = True
        self.late()
        if self._transport is not None:
            self._transport.abort()


def _has_token(chunk: dict[str, Any]) -> bool:
    return any(
        choice["delta"].get("content") or choice["delta"].get("reasoning")
        for choice in chunk.get("choices", ())
    )


# ------------------------------------------------------------------ all of them


class Clock:
    """Engine seconds since the run began: those of the clock times `speed`."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self._began = asyncio.get_running_loop().time() + _HEAD_S

    def now(self) -> float:
        """Return the engine seconds that have passed."""
        return (asyncio.get_running_loop().time() - self._began) * self.speed

    def when(self, at: float) -> float:
        """Return the event loop's time of a moment of the run."""
        return self._began + at / self.speed

    async def until(self, at: float) -> None:
        """Wait for a moment of the run."""
        delay_s = self.when(at) - asyncio.get_running_loop().time()
        if delay_s > 0:
            await asyncio.sleep(delay_s)


async def drive(
    plan: Sequence[tuple[Arrival, bytes]], host: str, port: int, clock: Clock
) -> tuple[list[Fate], Heard]:
    """Send all requests, each at its time; return what became of them.

    Ends when every chat has ended and every document has its first token or has missed its objective.
    What still runs then, and every reasoning request, is cut and noted as undecided.
    """
    loop, heard = asyncio.get_running_loop(), Heard()
    calls: list[Call] = []
    async with asyncio.TaskGroup() as tasks:
        try:
            for arrival, body in plan:
                await clock.until(arrival.at)
                call = Call(Fate(arrival), body, clock, heard)
                heard.lags_s.append(max(0.0, loop.time() - clock.when(arrival.at)))
                calls.append(call)
                tasks.create_task(call.start(host, port))
                if arrival.kind in PATIENCE_S:
                    loop.call_at(clock.when(arrival.at + PATIENCE_S[arrival.kind]), call.leave)
                if arrival.kind is Kind.LONG:
                    loop.call_at(clock.when(arrival.at + document_ttft_s(call.fate)), call.late)
            await asyncio.gather(
                *(call.settled for call in calls if call.fate.arrival.kind is not Kind.REASONING)
            )
        finally:
            for call in calls:
                call.cut()
    return [call.fate for call in calls], heard
