"""Runs the engine in real time, and notifies waiting answers of new tokens.

One task steps the engine: it schedules a step, sleeps for its duration, distributes the tokens and wakes
the answers. So all sequences of a server get their tokens at the same time, and a long prefill delays all of
them, as in a real engine.
"""

import itertools
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import anyio
from anyio.lowlevel import checkpoint

from gateway.clock import SystemClock
from gateway.core.engine import Batch, Engine, StepResult
from gateway.simulator.calls import Call
from gateway.simulator.options import SimulatorOptions
from gateway.simulator.script import Script
from gateway.simulator.tally import Gauges, Tally

_SLEEP_MIN_S = 0.0005
"""Shorter waits are skipped. A choice: a timer costs more."""

_SETTLE_S = 0.01
"""Real seconds for a caller to follow an answer with a request. A choice."""

_LAG_MAX_S = 0.25
"""Real seconds; a longer delay is not made up for. A choice: a burst of late steps would be no engine's."""


@dataclass(slots=True, eq=False)
class Seat:
    """One choice in the engine.

    Attributes:
        script: Its content.
        prompt_tokens: Length of its prompt.
        keys: Keys of its prompt's blocks in the prefix cache.
        answer: The answer it belongs to.
        arrived, started, first, last: When it arrived, left the queue, and got its first and latest token.
        gained: Number of tokens produced so far.
        due: The number at which whoever writes the answer has something to write.
        finish: Why it ended, once it has; "abort" if it was cut off.
        preemptions: How often it was preempted.
        cached_tokens: How many tokens of its prompt were in the prefix cache.
        call_ids: Ids of its tool calls.
    """

    script: Script
    prompt_tokens: int
    keys: Sequence[int]
    answer: "Answer"
    arrived: float
    gained: int = 0
    due: float = 1
    finish: str | None = None
    started: float | None = None
    first: float = 0.0
    last: float = 0.0
    preemptions: int = 0
    cached_tokens: int = 0
    call_ids: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        self.call_ids = [f"chatcmpl-tool-{uuid.uuid4().hex[:16]}" for _ in self.script.calls]

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or token id that ended it; None if there is none, or it was cut off."""
        return None if self.finish == "abort" else self.script.stop_reason


class Answer:
    """The choices of a request, and an event for its writer.

    Attributes:
        seats: One per choice.
        is_dead: The engine died under it.
        has_left: The client has disconnected.
        was_left: Whether it has, known or not.
    """

    def __init__(self, call: Call, was_left: Callable[[], bool]) -> None:
        now = anyio.current_time()
        self.seats = [
            Seat(script, call.prompt_tokens[prompt], call.prompt_keys[prompt], self, now)
            for index, script in enumerate(call.scripts)
            for prompt in [call.prompt_of(index)]
        ]
        self.is_dead = False
        self.has_left = False
        self.was_left = was_left
        self._news = anyio.Event()

    @property
    def is_finished(self) -> bool:
        """Whether all choices have ended."""
        return all(seat.finish is not None for seat in self.seats)

    @property
    def has_begun(self) -> bool:
        """Whether any choice has a token, or has ended without one."""
        return any(seat.gained or seat.finish for seat in self.seats)

    async def news(self) -> None:
        """Wait for a change since the last call."""
        await self._news.wait()
        self._news = anyio.Event()

    def wake(self) -> None:
        """Notify the writer."""
        self._news.set()

    def leave(self) -> None:
        """Record that the client has disconnected."""
        self.has_left = True
        self._news.set()


class EngineHost:
    """One engine process, from its start until it is stopped or dies.

    Attributes:
        tally: Its counters.
        is_stopped: It will not step again, dead or stopped.
        cut: Requests whose engine ended, or that were cut off.
    """

    def __init__(self, options: SimulatorOptions, tally: Tally) -> None:
        profile = options.profile
        if options.accept is not None:
            profile = replace(profile, perf=replace(profile.perf, accept=options.accept))
        self.engine = Engine.of(profile)
        self.tally = tally
        self.is_dead = False
        self.is_stopped = False
        self.cut = 0
        self._speed = options.speed
        self._clock = SystemClock()
        self._seats: dict[int, Seat] = {}
        self._numbers = itertools.count()
        self._work = anyio.Event()
        self._resumed: anyio.Event | None = None
        self._last_gauges: Gauges | None = None  # while it hangs
        self._held: list[Answer] | None = None
        self._scope = anyio.CancelScope()

    @property
    def answers(self) -> Sequence[Answer]:
        """All answers in the engine, including held ones."""
        return [*dict.fromkeys(seat.answer for seat in self._seats.values()), *(self._held or ())]

    @property
    def is_idle(self) -> bool:
        """Whether no request is in the engine, except for held ones."""
        return not self._seats

    @property
    def gauges(self) -> Gauges:
        """What /metrics shows of it: while it hangs, what its last step left, whatever came or went since."""
        return self._last_gauges or Gauges(self.engine.running, self.engine.waiting, self.engine.kv_usage)

    async def run(self) -> None:
        """Step the engine until `stop` or `die`."""
        with self._scope:
            deadline = anyio.current_time()
            while True:
                batch = self.engine.schedule()
                if batch is None:
                    self._work = anyio.Event()
                    await self._work.wait()
                    deadline = anyio.current_time()
                    continue
                self._note_started(batch)
                self.tally.kv_usage_peak = max(self.tally.kv_usage_peak, self.engine.kv_usage)
                deadline += batch.duration_s / self._speed
                delay = deadline - anyio.current_time()
                if delay > _SLEEP_MIN_S:
                    await anyio.sleep(delay)
                else:
                    await checkpoint()
                lag_s = anyio.current_time() - deadline
                self.tally.step_lag_peak_s = max(self.tally.step_lag_peak_s, lag_s)
                while self._resumed is not None:
                    await self._resumed.wait()
                now = anyio.current_time()
                if now - deadline > _LAG_MAX_S:
                    self.tally.lost_s += now - deadline
                    deadline = now
                result = self.engine.complete()
                self._hand_out(result, now)
                if result.finished:
                    # The model assumes no time between an answer and its caller's next request. Forming the
                    # next batch a little late lets that request in; the step still ends on time.
                    await anyio.sleep(min(_SETTLE_S, batch.duration_s / self._speed))

    def submit(self, answer: Answer) -> None:
        """Queue all choices of an answer; it is dead at once if the engine is."""
        if self.is_stopped:
            self.cut += not self.is_dead  # the dead engine's server still reports errors
            answer.is_dead = True
            answer.wake()
            return
        if self._held is not None:
            self._held.append(answer)
            return
        for seat in answer.seats:
            number = next(self._numbers)
            self._seats[number] = seat
            self.engine.submit(number, seat.prompt_tokens, len(seat.script.tokens), seat.keys)
        self._note_held()
        held = self.engine.running + self.engine.waiting
        self.tally.requests_peak = max(self.tally.requests_peak, held)
        self._work.set()

    def withdraw(self, answer: Answer) -> None:
        """Abort the rest of an answer: its client has disconnected, or it was cut short."""
        if self._held is not None and answer in self._held:
            self._held.remove(answer)
        mine = [number for number, seat in self._seats.items() if seat.answer is answer]
        for number in mine:
            del self._seats[number]
            self.engine.abort(number)
        if mine:
            self._note_held(len(mine))
            self._work.set()  # its blocks may admit another sequence

    def cut_off(self, answer: Answer) -> None:
        """End an answer now, with finish reason "abort"."""
        self.cut += 1
        for seat in answer.seats:
            if seat.finish is None:
                seat.finish = "abort"
                self.tally.finished["abort"] += 1
        self.withdraw(answer)
        answer.wake()

    def hold(self) -> None:
        """Continue running requests, but hold new ones until `release`."""
        if self._held is None:
            self._held = []

    def release(self) -> None:
        """Queue held requests."""
        held, self._held = self._held or [], None
        for answer in held:
            self.submit(answer)

    def hang(self) -> None:
        """Stop stepping until `resume`."""
        if self._resumed is None:
            self._last_gauges = self.gauges
            self._resumed = anyio.Event()

    def resume(self) -> None:
        """Continue after `hang`."""
        if self._resumed is not None:
            self._resumed.set()
            self._resumed = self._last_gauges = None

    def die(self) -> None:
        """Die; all answers learn that the engine is dead."""
        self.is_dead = True
        for answer in self.answers:
            answer.is_dead = True
            answer.wake()
        self.stop()

    def stop(self) -> None:
        """Stop stepping and drop all requests."""
        self.is_stopped = True
        self.cut += len(self.answers)
        self._held = None
        for number in list(self._seats):
            self.engine.abort(number)
        self._seats.clear()
        self._note_held()
        self._scope.cancel()

    def _note_held(self, aborted: int = 0) -> None:
        self.tally.sequences.note(self._clock.wall(), len(self._seats), aborted)

    def _note_started(self, batch: Batch) -> None:
        now = anyio.current_time()
        for number in batch.started:
            seat = self._seats[number]
            if seat.started is None:
                seat.started = now
                seat.cached_tokens = self.engine.cached_tokens(number)
                self.tally.observe("request_queue_time_seconds", now - seat.arrived)
        for number in batch.preempted:
            self._seats[number].preemptions += 1

    def _hand_out(self, result: StepResult, now: float) -> None:
        tally = self.tally
        since: dict[float, int] = {}
        for number in result.first:
            seat = self._seats[number]
            seat.first = now
            tally.prompt_tokens += seat.prompt_tokens
            tally.observe("time_to_first_token_seconds", now - seat.arrived)
        for number, tokens in result.emitted:
            seat = self._seats[number]
            if seat.gained:
                since[seat.last] = since.get(seat.last, 0) + 1
            seat.gained += tokens
            seat.last = now
            tally.generation_tokens += tokens
            if seat.gained >= seat.due:
                seat.answer.wake()
        for last, count in since.items():
            tally.observe("inter_token_latency_seconds", now - last, count)
        unread = 0  # it ended normally, just before the disconnect would have aborted it
        for number in result.finished:
            seat = self._seats.pop(number)
            seat.finish = seat.script.finish_reason
            seat.answer.wake()
            unread += seat.answer.was_left()
            self._note_finished(seat, now)
        if result.finished:
            self._note_held(unread)

    def _note_finished(self, seat: Seat, now: float) -> None:
        tally = self.tally
        started = seat.started if seat.started is not None else seat.arrived
        # vLLM counts a tool call as an ordinary stop.
        tally.finished["length" if seat.finish == "length" else "stop"] += 1
        tally.observe("e2e_request_latency_seconds", now - seat.arrived)
        tally.observe("request_inference_time_seconds", now - started)
        tally.observe("request_prefill_time_seconds", seat.first - started)
        tally.observe("request_decode_time_seconds", now - seat.first)
        tally.observe("request_prompt_tokens", seat.prompt_tokens)
        tally.observe("request_generation_tokens", seat.gained)
        tally.observe("request_num_preemptions", seat.preemptions)
        if seat.gained > 1:
            tally.observe("request_time_per_output_token_seconds", (now - seat.first) / (seat.gained - 1))
