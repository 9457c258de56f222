"""TPOT control: limits the share of its knee that a backend may use, to meet the TPOT target.

There are three parts. All are pure; the time is an argument.

* `GapMeter` observes one backend: the start, first token and end of each request, and a counter that the
  relay increments per chunk. No other work is done per chunk, and no chunk is parsed.
* `GapWindow` holds the observations of a few seconds. While `d` sequences decode, each gets a chunk per
  engine step. So the integral of `d` over time divided by the chunks is the mean gap between two chunks of
  a stream, without a timestamp per chunk.
* `adjust` moves the share of the knee in force: additive increase, multiplicative decrease.

The share never exceeds the configured curve. It does not move while the backend is not full, because the gap
then says nothing about the limit.

The TPOT of a window is its gap divided by the tokens per chunk of the streams that ended. If several chunks
arrive in one read, or a read carries no token, both change by the same factor and the TPOT stays correct.
"""

from dataclasses import replace
from enum import StrEnum

from gateway.core.admission import WHOLE, job_reserve
from gateway.core.backends import Capacity
from gateway.core.value import valueclass

WINDOW_S = 2.0
"""Interval for closing windows. A choice: the batch hardly changes within one."""

WINDOW_MAX_S = 20.0
"""Maximum length of a window that is kept open while a prompt is in prefill. A choice: a prompt of 64K tokens
takes as long on PUSH (docs/measurements.md#latency-model)."""


# ------------------------------------------------------------------ observations


@valueclass(frozen=True, slots=True)
class GapWindow:
    """Observations of one backend over a period. Windows can be added with `+`.

    Values in sequence seconds are integrals over the window: 3 sequences for 2 s make 6.

    Attributes:
        duration_s: Its length.
        busy_s: The part of it in which at least one visible sequence decoded.
        decoding_seq_s: Visible sequences past their first token.
        waiting_seq_s: Visible sequences without a first token.
        hidden_seq_s: Sequences whose steps are not observable: non-streaming answers, several choices, and
            the load of other gateways.
        chunks: Chunks relayed after the first of each visible stream: sequences times engine steps.
        steps: Engine steps in which a visible sequence decoded: chunks over decoding sequences.
        prompt_tokens: Prompt tokens of visible streams whose first token came while others decoded.
        ended_tokens: Output tokens after the first, of the visible streams that ended.
        ended_chunks: Chunks after the first, of the same streams.
        share_s: Share of the knee in flight, including other gateways, in millionths times seconds.
        share_max: The highest share in flight, in millionths.
        has_jobs: Whether any of the sequences was a job, which leaves a part of the share free.
        has_spills: Whether any of them was a spill, which does so, too.
    """

    duration_s: float = 0.0
    busy_s: float = 0.0
    decoding_seq_s: float = 0.0
    waiting_seq_s: float = 0.0
    hidden_seq_s: float = 0.0
    chunks: int = 0
    steps: float = 0.0
    prompt_tokens: int = 0
    ended_tokens: int = 0
    ended_chunks: int = 0
    share_s: float = 0.0
    share_max: int = 0
    has_jobs: bool = False
    has_spills: bool = False

    def __add__(self, other: "GapWindow") -> "GapWindow":
        """Return the two windows merged into one."""
        return GapWindow(
            duration_s=self.duration_s + other.duration_s,
            busy_s=self.busy_s + other.busy_s,
            decoding_seq_s=self.decoding_seq_s + other.decoding_seq_s,
            waiting_seq_s=self.waiting_seq_s + other.waiting_seq_s,
            hidden_seq_s=self.hidden_seq_s + other.hidden_seq_s,
            chunks=self.chunks + other.chunks,
            steps=self.steps + other.steps,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            ended_tokens=self.ended_tokens + other.ended_tokens,
            ended_chunks=self.ended_chunks + other.ended_chunks,
            share_s=self.share_s + other.share_s,
            share_max=max(self.share_max, other.share_max),
            has_jobs=self.has_jobs or other.has_jobs,
            has_spills=self.has_spills or other.has_spills,
        )

    def beside(self, seqs: int) -> "GapWindow":
        """Return the window with so many more hidden sequences all the time."""
        return replace(self, hidden_seq_s=self.hidden_seq_s + seqs * self.duration_s)

    @property
    def gap_s(self) -> float | None:
        """Mean seconds between two chunks of a stream, as seen by callers; None without chunks."""
        return self.decoding_seq_s / self.chunks if self.chunks else None

    @property
    def in_flight_seq_s(self) -> float:
        """All sequences in flight, times seconds."""
        return self.decoding_seq_s + self.waiting_seq_s + self.hidden_seq_s


NOTHING_SEEN = GapWindow()
"""The empty window, as the start of sums."""


class GapMeter:
    """Observes one backend in one gateway process. Not thread-safe.

    The holder of a slot calls `opened` when the request is sent, `answered` at the first token of a visible
    stream, and `ended` exactly once. The relay increments `chunks` for every later chunk of a visible stream,
    and does nothing else per chunk. Between two calls the number of decoding sequences is constant, so the
    number of steps is chunks over sequences.

    Windows end with a first token if possible. A long prompt stretches the steps before its first token, and
    a window that ended in between would contain those steps but not the prompt.

    Times are monotonic seconds and never decrease.

    Attributes:
        chunks: Chunks since the window began, without the first of each stream.
    """

    __slots__ = (
        "_busy_s",
        "_chunks_seen",
        "_decoding",
        "_decoding_seq_s",
        "_ended_chunks",
        "_ended_tokens",
        "_has_jobs",
        "_has_spills",
        "_hidden",
        "_hidden_seq_s",
        "_jobs",
        "_now",
        "_others_seqs",
        "_others_share",
        "_prompt_tokens",
        "_share",
        "_share_max",
        "_share_s",
        "_since",
        "_spills",
        "_steps",
        "_waiting",
        "_waiting_seq_s",
        "_whole",
        "chunks",
    )

    def __init__(self, now: float) -> None:
        """Begin the first window, with nothing in flight."""
        self._now = now
        self._decoding = self._waiting = self._hidden = self._jobs = self._spills = 0
        self._has_jobs = self._has_spills = False
        self._share = self._share_max = 0
        self._others_share = self._others_seqs = 0
        self._whole: GapWindow | None = None
        self._begin()

    def opened(
        self, now: float, *, share: int, hidden_seqs: int = 0, is_job: bool = False, is_spill: bool = False
    ) -> None:
        """Note a request that takes `share` millionths of the knee.

        It is one visible stream, or `hidden_seqs` sequences that are not observable.
        """
        if hidden_seqs:
            self._hidden += hidden_seqs
            self._hidden_seq_s -= hidden_seqs * now
        else:
            self._advance(now)
            self._waiting += 1
        self._share += share
        self._share_s -= share * now
        if is_job:
            self._jobs += 1
            self._has_jobs = True
        if is_spill:
            self._spills += 1
            self._has_spills = True
        self._note_peak()

    def others(self, now: float, *, share: int, seqs: int) -> None:
        """Set the load that other gateways have in flight on the backend."""
        if share == self._others_share and seqs == self._others_seqs:
            return
        self._hidden_seq_s -= (seqs - self._others_seqs) * now
        self._share_s -= (share - self._others_share) * now
        self._others_share, self._others_seqs = share, seqs
        self._note_peak()

    def answered(self, now: float, *, prompt_tokens: int) -> None:
        """Note the first token of a visible stream."""
        self._advance(now)
        if self._decoding:
            self._prompt_tokens += prompt_tokens
        self._waiting -= 1
        self._decoding += 1
        if now - self._since >= WINDOW_S:
            self._cut()

    def ended(
        self,
        now: float,
        *,
        share: int,
        hidden_seqs: int = 0,
        is_job: bool = False,
        is_spill: bool = False,
        is_answered: bool = True,
        tokens: int | None = None,
        chunks: int = 0,
    ) -> None:
        """Note the end of a request; all members that `opened` has, too, are the same as there.

        `tokens` is its output after the first token according to `usage`, None without `usage`. `chunks` is
        the number of times it incremented the counter.
        """
        if hidden_seqs:
            self._hidden -= hidden_seqs
            self._hidden_seq_s += hidden_seqs * now
        else:
            self._advance(now)
            if is_answered:
                self._decoding -= 1
            else:
                self._waiting -= 1
        self._share -= share
        self._share_s += share * now
        if is_job:
            self._jobs -= 1
        if is_spill:
            self._spills -= 1
        if tokens is not None and chunks:
            self._ended_tokens += tokens
            self._ended_chunks += chunks

    def close(self, now: float) -> GapWindow | None:
        """Return the observations up to the last suitable end of a window, or None if there is none yet.

        Meant to be called every `WINDOW_S`. A prompt in prefill keeps the window open, for at most
        `WINDOW_MAX_S`.
        """
        self._advance(now)
        age_s = now - self._since
        if self._whole is None and age_s > 0 and (not self._waiting or age_s >= WINDOW_MAX_S):
            self._cut()
        whole, self._whole = self._whole, None
        return whole

    def _begin(self) -> None:
        now = self._since = self._now
        self._busy_s = self._decoding_seq_s = self._waiting_seq_s = self._steps = 0.0
        # Integrals over time, without the value at this moment times this moment: each change at `t` is then
        # a single product, and nothing has to be computed in between.
        self._hidden_seq_s = -(self._hidden + self._others_seqs) * now
        self._share_s = -(self._share + self._others_share) * now
        self.chunks = self._chunks_seen = self._prompt_tokens = self._ended_tokens = self._ended_chunks = 0
        self._share_max = 0
        self._has_jobs, self._has_spills = self._jobs > 0, self._spills > 0
        self._note_peak()

    def _note_peak(self) -> None:
        share = self._share + self._others_share
        if share > self._share_max:
            self._share_max = share

    def _cut(self) -> None:
        seen = GapWindow(
            duration_s=self._now - self._since,
            busy_s=self._busy_s,
            decoding_seq_s=self._decoding_seq_s,
            waiting_seq_s=self._waiting_seq_s,
            hidden_seq_s=self._hidden_seq_s + (self._hidden + self._others_seqs) * self._now,
            chunks=self.chunks,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            ended_tokens=self._ended_tokens,
            ended_chunks=self._ended_chunks,
            share_s=self._share_s + (self._share + self._others_share) * self._now,
            share_max=self._share_max,
            has_jobs=self._has_jobs,
            has_spills=self._has_spills,
        )
        self._whole = seen if self._whole is None else self._whole + seen
        self._begin()

    def _advance(self, now: float) -> None:
        passed_s = now - self._now
        self._now = now
        if self._decoding:
            self._busy_s += passed_s
            self._decoding_seq_s += self._decoding * passed_s
            self._steps += (self.chunks - self._chunks_seen) / self._decoding
        self._chunks_seen = self.chunks
        self._waiting_seq_s += self._waiting * passed_s


# ------------------------------------------------------------------ control

DOWN = 0.9
"""Factor of a step down. A choice, judged by `benchmarks/knee.py --control`: at the knee most of the gap
grows with the batch, so TPOT falls by 9 %."""

BAND = 0.9
"""The share is held while TPOT is between this fraction of the target and the target. A choice: as wide as a
step down, so that a step does not leave it on the other side."""

FAR = 0.25
"""A TPOT this far from the target, as a fraction of it, leads to a move after only `DECIDE_FAR_S`. A choice:
more than traffic alone moves it."""

DECIDE_FAR_S = 10.0
DECIDE_S = 30.0
"""Observation time before a move, if TPOT is far from the target and otherwise. A choice: over 10 s of chat,
the prefills alone move the gap by a tenth."""

DECIDE_STEPS = 50
"""Minimum number of engine steps observed before a move. A choice; it dominates where steps take seconds."""

UP_STEPS = 32
"""A step up is the ceiling divided by this, and at least one sequence. A choice: from a fifth to all in 5
minutes."""

WAITING_SHARE = 0.3
"""The engine is queuing if more than this share of the visible sequences has no first token. A choice: in
chat, prefill takes a smaller part of a request."""

WAITING_SEQS = 2
"""And if there are more than this many. A choice: a single prompt in prefill is not a queue."""

ENDED_CHUNKS_KEPT = 4000
"""Number of chunks of ended streams over which tokens per chunk are averaged. A choice: some thirty chats."""


class Move(StrEnum):
    """Outcome of the last window, with the reason."""

    UP = "up"  # TPOT below the band
    DOWN = "down"  # TPOT above the target
    DOWN_ENGINE_QUEUE = "down_engine_queue"  # the engine is queuing by itself
    HELD_IN_BAND = "held_in_band"
    HELD_AT_LIMIT = "held_at_limit"  # at the ceiling or the floor
    HELD_NOT_FULL = "held_not_full"  # the backend was not full: the gap says nothing about the limit
    HELD_UNSEEN = "held_unseen"  # no steps to observe: answers in one piece, several choices, a standstill
    WATCHING = "watching"  # too few observations since the last move, or the load still exceeds the share


@valueclass(frozen=True, slots=True)
class TpotTarget:
    """The operator's target, and the limits of the share.

    Attributes:
        tpot_s: Target for the mean seconds per output token.
        seq_share: Share of one sequence of the shortest length class, in millionths.
        floor_share: Minimum share: one sequence of the longest class.
        reserve: Part of the share that jobs leave free (0..1).
        spill_reserve: Part of it that spills leave free (0..1).
    """

    tpot_s: float
    seq_share: int
    floor_share: int
    reserve: float = 0.0
    spill_reserve: float = 0.0

    @classmethod
    def of(
        cls, capacity: Capacity, tpot_s: float, reserve: float = 0.0, spill_reserve: float = 0.0
    ) -> "TpotTarget":
        """Return the target for a backend with this knee curve, and what jobs and spills leave free of it."""
        knees = [step.seqs for step in capacity.knee]
        return cls(tpot_s, WHOLE // max(knees), WHOLE // min(knees), reserve, spill_reserve)


@valueclass(frozen=True, slots=True)
class TpotControl:
    """State of the control loop of one backend.

    Attributes:
        share: The share of the knee in force, in millionths: admission's limit on `Load.share`.
        move: Outcome of the last window.
        tpot_s: The last TPOT measured while the backend was full, or None.
        seen: Observations since the last move.
        ended_tokens, ended_chunks: Decaying sums over the streams that ended.
    """

    share: int = WHOLE
    move: Move = Move.WATCHING
    tpot_s: float | None = None
    seen: GapWindow = NOTHING_SEEN
    ended_tokens: float = 0.0
    ended_chunks: float = 0.0


def adjust(state: TpotControl, window: GapWindow, target: TpotTarget) -> TpotControl:
    """Return the state after one more window of its backend."""
    state = _with_streams_ended(state, window)
    if not _is_full(window, state.share, target):
        return replace(state, move=Move.HELD_NOT_FULL, seen=NOTHING_SEEN)
    if window.share_s > (state.share + target.seq_share) * window.duration_s:
        # Streams from before the last step down still run, so the gap does not reflect the share in force.
        return replace(state, move=Move.WATCHING, seen=NOTHING_SEEN)
    seen = state.seen + window
    state = replace(state, seen=seen, move=Move.WATCHING)
    if seen.duration_s < DECIDE_FAR_S:
        return state
    gap_s = seen.gap_s
    if gap_s is None and seen.duration_s >= DECIDE_S:
        return replace(state, move=Move.HELD_UNSEEN, seen=NOTHING_SEEN)
    if gap_s is None or seen.steps < DECIDE_STEPS:
        return state
    # An engine that has stood still has many without a first token, too, but only until it goes on.
    if _is_queueing(seen) and _is_queueing(window):
        # Hidden sequences are assumed to queue in the same proportion as visible ones.
        visible_seq_s = seen.decoding_seq_s + seen.waiting_seq_s
        decoding = seen.share_s / seen.duration_s * seen.decoding_seq_s / visible_seq_s
        return _moved(state, min(round(decoding), round(state.share * DOWN)), Move.DOWN_ENGINE_QUEUE, target)
    if not state.ended_chunks:
        return state
    tpot_s = gap_s * state.ended_chunks / max(1.0, state.ended_tokens)
    if seen.duration_s < DECIDE_S and abs(tpot_s / target.tpot_s - 1) < FAR:
        return state
    state = replace(state, tpot_s=tpot_s)
    if tpot_s > target.tpot_s:
        return _moved(state, round(state.share * DOWN), Move.DOWN, target)
    if tpot_s < target.tpot_s * BAND:
        return _moved(state, state.share + max(target.seq_share, WHOLE // UP_STEPS), Move.UP, target)
    return replace(state, move=Move.HELD_IN_BAND, seen=NOTHING_SEEN)


def _moved(state: TpotControl, share: int, move: Move, target: TpotTarget) -> TpotControl:
    share = min(WHOLE, max(target.floor_share, share))
    return replace(
        state, share=share, move=Move.HELD_AT_LIMIT if share == state.share else move, seen=NOTHING_SEEN
    )


def _is_full(window: GapWindow, share: int, target: TpotTarget) -> bool:
    """Return whether one more request of average size would not have fitted at the window's peak.

    If jobs or spills were among them, one more of these. Documents that use up what spills leave free are not
    considered.
    """
    if not window.in_flight_seq_s:
        return False
    for_jobs = job_reserve(share, target.seq_share, target.reserve) if window.has_jobs else 0
    for_own = round(share * target.spill_reserve) if window.has_spills else 0
    share_per_seq = window.share_s / window.in_flight_seq_s
    return window.share_max + share_per_seq > share - max(for_jobs, for_own)


def _is_queueing(seen: GapWindow) -> bool:
    visible = seen.decoding_seq_s + seen.waiting_seq_s
    return (
        seen.waiting_seq_s > WAITING_SHARE * visible and seen.waiting_seq_s > WAITING_SEQS * seen.duration_s
    )


def _with_streams_ended(state: TpotControl, window: GapWindow) -> TpotControl:
    kept = max(0.0, 1 - window.ended_chunks / ENDED_CHUNKS_KEPT)
    return replace(
        state,
        ended_tokens=state.ended_tokens * kept + window.ended_tokens,
        ended_chunks=state.ended_chunks * kept + window.ended_chunks,
    )
