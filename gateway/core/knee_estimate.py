"""The advisory knee estimate, derived from the observed step times of a backend.

A gateway observes the gap between chunks, which is the engine's step time. It grows with the batch and with
the prompt tokens computed in the same step, and both vary naturally in ordinary traffic:

    step = fixed + per_seq * B + per_token * P

    B sequences decoding     P prompt tokens computed     (means per step, over a window)

With `r` prompt tokens per output step, a server kept at `B` sequences computes `P = r * B` of them per
step, so it makes `B / (fixed + slope * B)` sequence steps per second with `slope = per_seq + per_token * r`.
The knee is where 10 % more sequences yield 1 % more throughput: `B = 8.18 * fixed / slope`, at 89 % of the
maximum throughput. The estimate is capped at the KV slots, whose limit does not show in step times.

The three coefficients come from weighted least squares over windows, kept as exponentially decaying sums, so
memory is constant. Every estimate has a confidence level, and gives no figure if the confidence is too low.
It is never applied automatically (docs/knee.md).
"""

import math
from dataclasses import replace
from enum import StrEnum

from gateway.core.tpot_control import NOTHING_SEEN, GapWindow
from gateway.core.value import valueclass

MORE_SEQS = 0.1
LESS_GAIN = 0.01
"""At the knee, `MORE_SEQS` more sequences in flight yield `LESS_GAIN` more tokens/s: the definition
(docs/knee.md)."""

KNEE_RATIO = (MORE_SEQS - LESS_GAIN) / (LESS_GAIN * (1 + MORE_SEQS))
"""Ratio of the growing part of a step to the fixed part at the knee: 8.18, computed from the definition."""

STEPS_MIN = 50
"""Minimum number of steps per window; shorter windows are merged until they have as many. A choice: with long
prompts, a step takes a second or more, and a window would have one or two."""

HALF_LIFE_S = 600.0
HALF_LIFE_WINDOWS = 100
"""Half-life of observations: the longer of the two. A choice: traffic changes within the hour, and an
estimate needs windows enough."""

WINDOWS_MIN = 30
"""Minimum total weight of windows for an estimate. A choice: ten per coefficient."""

SPREAD_MIN = 0.1
"""Minimum standard deviation of the batch over its mean; below it the fixed part cannot be determined. Chosen
on the cases of docs/knee.md#the-estimate."""

ERROR_HIGH = 0.06
ERROR_LOW = 0.2
"""Relative standard error of the knee: the upper limits for high and for low confidence. Chosen on the cases
of docs/knee.md#the-estimate."""

BENT_LOW = 1.5
BENT_UNKNOWN = 3.0
"""Standard errors of the product term above zero: beyond the first, confidence is low; beyond the second, the
linear model does not hold and the knee is unknown. Chosen on the same cases."""

REACH_HIGH = 3.0
REACH_LOW = 5.0
"""Ratio of the knee to the largest batch seen: the upper limits for high and for low confidence. Chosen on
the same cases."""

HIDDEN_SHARE = 0.2
"""Windows with a larger share of hidden sequences are skipped: their effect on the steps is unknown. A
choice: more windows against less error in each."""

OUTLIER = 3.0
"""Residuals beyond this many standard deviations get less weight (Huber). A choice: noise alone hardly ever
goes so far."""

STREAMS_KEPT = 500
"""Number of streams over which the shape of a class is averaged. A choice: it settles, and follows a change
of traffic."""

_Vector = tuple[float, ...]
_Matrix = tuple[_Vector, ...]


class Confidence(StrEnum):
    """How far to trust an estimate."""

    HIGH = "high"
    LOW = "low"
    UNKNOWN = "unknown"  # no figure is given


class Uncertainty(StrEnum):
    """The main reason why the confidence is not high. A small, fixed set: a metric label."""

    NONE = "none"
    FEW_WINDOWS = "few_windows"  # not observed for long enough, or idle
    HIDDEN = "hidden"  # too much of its load is not observable: non-streaming answers, other users
    NO_STREAMS = "no_streams"  # no stream of this class has ended here
    NO_SPREAD = "no_spread"  # the batch size hardly varies: saturated, or a constant trickle
    NO_LINE = "no_line"  # steps do not grow with the batch, or have no fixed part
    BENT = "bent"  # steps grow, but prompts cost more in a large batch than in a small one
    NOISY = "noisy"  # too much scatter
    OUT_OF_REACH = "out_of_reach"  # the knee would be far beyond every batch seen


class LimitedBy(StrEnum):
    """The resource that limits throughput at the knee."""

    COMPUTE = "compute"
    KV_SLOTS = "kv_slots"


@valueclass(frozen=True, slots=True)
class ClassShape:
    """Mean shape of the streams of one length class on one backend, as decaying sums.

    Attributes:
        streams, prompt_tokens, chunks: Sums over completed streams; chunks after the first.
        block_chunks: Sum of KV blocks times chunks, because a stream holds its blocks for all its chunks.
    """

    streams: float = 0.0
    prompt_tokens: float = 0.0
    chunks: float = 0.0
    block_chunks: float = 0.0

    def with_stream(self, *, prompt_tokens: int, chunks: int, kv_blocks: int) -> "ClassShape":
        """Return the shape after one more stream. `kv_blocks`: for prompt and output; 0 if not counted."""
        kept = 1 - 1 / STREAMS_KEPT
        return ClassShape(
            streams=self.streams * kept + 1,
            prompt_tokens=self.prompt_tokens * kept + prompt_tokens,
            chunks=self.chunks * kept + chunks,
            block_chunks=self.block_chunks * kept + kv_blocks * chunks,
        )

    def slots_seqs(self, kv_blocks: int | None) -> float | None:
        """Return how many such sequences fit into that many blocks; None if blocks are not counted."""
        if kv_blocks is None or not self.block_chunks:
            return None
        return kv_blocks * self.chunks / self.block_chunks


@valueclass(frozen=True, slots=True)
class KneeEstimate:
    """Estimated knee of one length class on one backend, for operators.

    Attributes:
        seqs: Sequences in flight at the knee; None if the confidence is UNKNOWN.
        confidence: How far to trust it.
        doubt: Why the confidence is not higher.
        limited_by: The resource that limits throughput there.
        decoding_seqs: Mean batch seen.
        decoding_seqs_max: Largest mean batch of a window, decaying.
    """

    seqs: float | None
    confidence: Confidence
    doubt: Uncertainty
    limited_by: LimitedBy
    decoding_seqs: float
    decoding_seqs_max: float


@valueclass(frozen=True, slots=True)
class StepFit:
    """The regression of one backend, as decaying sums over windows: some thirty numbers.

    Attributes:
        pending: Windows merged until they have enough steps.
        windows: Total weight of windows.
        hidden: Total weight of windows that were skipped, because too many of their sequences were hidden.
        batch, batch_sq: Sums of the sequences decoding per step and of its square.
        batch_max: The largest batch, decaying slowly.
        gram, moments: Normal equations of the relative step time on (1, B, P, B * P); the last column
            only serves to test whether the first three are sufficient.
        residuals: Total weight of residuals, which are counted once there is a fit.
        residual_sq, residual_lag: Sums of squared relative residuals and of products of consecutive ones.
        residual: The last residual.
    """

    pending: GapWindow = NOTHING_SEEN
    windows: float = 0.0
    hidden: float = 0.0
    batch: float = 0.0
    batch_sq: float = 0.0
    batch_max: float = 0.0
    gram: _Matrix = ((0.0,) * 4,) * 4
    moments: _Vector = (0.0,) * 4
    residuals: float = 0.0
    residual_sq: float = 0.0
    residual_lag: float = 0.0
    residual: float = 0.0

    def with_window(self, window: GapWindow) -> "StepFit":
        """Return the fit after one more window."""
        if window.hidden_seq_s > HIDDEN_SHARE * window.in_flight_seq_s:
            return replace(self, pending=NOTHING_SEEN, hidden=self.hidden * _kept(window.duration_s) + 1)
        pending = self.pending + window
        if pending.steps < STEPS_MIN:
            return replace(self, pending=pending)
        batch = pending.chunks / pending.steps + pending.hidden_seq_s / pending.duration_s
        prompt_tokens = pending.prompt_tokens / pending.steps
        row = (1.0, batch, prompt_tokens, batch * prompt_tokens)
        return self._with_row(row, pending.busy_s / pending.steps, pending.duration_s)

    def _with_row(self, row: _Vector, step_s: float, duration_s: float) -> "StepFit":
        residual, weight = None, 1.0
        solution = _solved(self.gram, self.moments) if self.windows >= WINDOWS_MIN / 2 else None
        if solution is not None:
            residual = _dot(solution, row) / step_s - 1
            deviation = math.sqrt(self.residual_sq / self.residuals) if self.residuals >= 10 else math.inf
            if abs(residual) > OUTLIER * deviation:
                weight = OUTLIER * deviation / abs(residual)
                residual *= weight
        kept = _kept(duration_s)
        scaled = tuple(value / step_s for value in row)
        batch = row[1]
        faded = replace(
            self,
            pending=NOTHING_SEEN,
            windows=self.windows * kept + 1,
            hidden=self.hidden * kept,
            batch=self.batch * kept + batch,
            batch_sq=self.batch_sq * kept + batch * batch,
            batch_max=max(self.batch_max * kept**0.25, batch),
            gram=tuple(
                tuple(old * kept + weight * a * b for old, b in zip(column, scaled, strict=True))
                for column, a in zip(self.gram, scaled, strict=True)
            ),
            moments=tuple(old * kept + weight * a for old, a in zip(self.moments, scaled, strict=True)),
            residuals=self.residuals * kept,
            residual_sq=self.residual_sq * kept,
            residual_lag=self.residual_lag * kept,
        )
        if residual is None:
            return faded
        return replace(
            faded,
            residuals=faded.residuals + 1,
            residual_sq=faded.residual_sq + residual * residual,
            residual_lag=faded.residual_lag + residual * self.residual,
            residual=residual,
        )

    @property
    def spread(self) -> float:
        """Standard deviation of the batch over its mean."""
        mean = self.batch / self.windows
        return math.sqrt(max(0.0, self.batch_sq / self.windows - mean * mean)) / mean

    @property
    def variance(self) -> float:
        """Variance of the relative residuals, corrected for autocorrelation."""
        if not self.residual_sq:
            return 0.0
        correlation = min(0.9, max(0.0, self.residual_lag / self.residual_sq))
        return self.residual_sq / self.residuals * (1 + correlation) / (1 - correlation)


def estimate(fit: StepFit, shape: ClassShape, kv_blocks: int | None = None) -> KneeEstimate:
    """Return the estimated knee for streams of that shape on the backend of `fit`.

    `kv_blocks` are the blocks that admission may use (`blocks_planned`), None if blocks are not counted.
    """
    unknown = KneeEstimate(
        seqs=None,
        confidence=Confidence.UNKNOWN,
        doubt=Uncertainty.FEW_WINDOWS,
        limited_by=LimitedBy.COMPUTE,
        decoding_seqs=fit.batch / fit.windows if fit.windows else 0.0,
        decoding_seqs_max=fit.batch_max,
    )
    if fit.windows < WINDOWS_MIN or fit.residuals < WINDOWS_MIN / 3:
        return replace(unknown, doubt=Uncertainty.HIDDEN) if fit.hidden > fit.windows else unknown
    if not shape.chunks:
        return replace(unknown, doubt=Uncertainty.NO_STREAMS)
    inverse = _inverse(fit.gram, 3)
    if fit.spread < SPREAD_MIN or inverse is None:
        return replace(unknown, doubt=Uncertainty.NO_SPREAD)
    compute, error = _compute_knee(fit, shape, inverse)
    if compute is None:
        return replace(unknown, doubt=Uncertainty.NO_LINE)
    slots = shape.slots_seqs(kv_blocks)
    limited_by = LimitedBy.KV_SLOTS if slots is not None and slots < compute else LimitedBy.COMPUTE
    seqs = compute if slots is None else min(compute, slots)
    confidence, doubt = _judged(fit, seqs, error)
    return replace(
        unknown,
        seqs=None if confidence is Confidence.UNKNOWN else seqs,
        confidence=confidence,
        doubt=doubt,
        limited_by=limited_by,
    )


def _compute_knee(fit: StepFit, shape: ClassShape, inverse: _Matrix) -> tuple[float | None, float]:
    """Return the knee given by compute alone, in sequences in flight, and its relative standard error."""
    fixed, per_seq, per_token = (_dot(line, fit.moments) for line in inverse)
    ratio = shape.prompt_tokens / shape.chunks
    slope = per_seq + per_token * ratio
    if fixed <= 0 or slope <= 0:
        return None, math.inf
    by_part = (1 / fixed, -1 / slope, -ratio / slope)
    variance = fit.variance * _dot(by_part, [_dot(line, by_part) for line in inverse])
    # A sequence is in flight for one step more than it decodes: the step that computes its prompt.
    in_flight = KNEE_RATIO * fixed / slope * (1 + shape.streams / shape.chunks)
    return in_flight, math.sqrt(max(0.0, variance))


def _judged(fit: StepFit, seqs: float, error: float) -> tuple[Confidence, Uncertainty]:
    if error > ERROR_LOW:
        return Confidence.UNKNOWN, Uncertainty.NOISY
    bend = _bend(fit)
    if bend > BENT_UNKNOWN:
        return Confidence.UNKNOWN, Uncertainty.BENT
    reach = seqs / fit.batch_max
    if reach > REACH_HIGH:
        return Confidence.LOW if reach <= REACH_LOW else Confidence.UNKNOWN, Uncertainty.OUT_OF_REACH
    if bend > BENT_LOW:
        return Confidence.LOW, Uncertainty.BENT
    return (Confidence.LOW, Uncertainty.NOISY) if error > ERROR_HIGH else (Confidence.HIGH, Uncertainty.NONE)


def _bend(fit: StepFit) -> float:
    """Return by how many standard errors prompts cost more in a large batch than in a small one."""
    inverse = _inverse(fit.gram, 4)
    deviation = math.sqrt(fit.residual_sq / fit.residuals)
    if inverse is None or not deviation:
        return 0.0
    return _dot(inverse[3], fit.moments) / (math.sqrt(inverse[3][3]) * deviation)


def _kept(duration_s: float) -> float:
    """Return the decay factor of older observations after a window of that length."""
    # The longer half-life is the lower rate.
    return math.pow(0.5, min(duration_s / HALF_LIFE_S, 1 / HALF_LIFE_WINDOWS))


# ------------------------------------------------------------------ small matrices


def _dot(one: _Vector, other: "list[float] | _Vector") -> float:
    return sum(a * b for a, b in zip(one, other, strict=False))


def _solved(gram: _Matrix, moments: _Vector) -> _Vector | None:
    """Return the coefficients of the linear model, without the product term."""
    inverse = _inverse(gram, 3)
    return None if inverse is None else tuple(_dot(line, moments) for line in inverse)


def _inverse(gram: _Matrix, size: int) -> _Matrix | None:
    """Return the inverse of the first `size` rows and columns, or None if they are singular."""
    if min(gram[i][i] for i in range(size)) <= 0:
        return None
    # Scaled to ones on the diagonal, so that the test for singularity does not depend on units.
    scale = [1 / math.sqrt(gram[i][i]) for i in range(size)]
    rows = [
        [gram[i][j] * scale[i] * scale[j] for j in range(size)] + [float(i == j) for j in range(size)]
        for i in range(size)
    ]
    for i in range(size):
        pivot = rows[i][i]
        # A Gram matrix needs no row exchanges; the remaining diagonal element is 1 - R squared.
        if pivot < 1e-7:
            return None
        rows[i] = [value / pivot for value in rows[i]]
        for j in range(size):
            if j != i:
                factor = rows[j][i]
                rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    return tuple(tuple(rows[i][size + j] * scale[i] * scale[j] for j in range(size)) for i in range(size))
