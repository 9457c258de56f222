"""Every published figure the engine model is held to, and what the fitted model makes of it.

The tests assert both columns, `benchmarks/simulator.py` prints them. Sources are the tags of
docs/measurements.md: OPR and OPR-B (2x H100 audit), LDI (H200), DSF (DGX Spark FP8), DSN (DGX Spark
NVFP4 and the MoE model).
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from benchmarks.closed_loop import Measured, closed_loop
from gateway.core.profile import Profile
from gateway.profiles import load


class Metric(StrEnum):
    """What a figure measures, with its unit."""

    TOKENS_PER_S = "tok/s"  # output tokens of all requests, per second
    REQUEST_TOKENS_PER_S = "tok/s/req"  # decode rate of one request
    TPOT_MS = "TPOT ms"
    TTFT_S = "TTFT s"
    LATENCY_S = "latency s"


@dataclass(frozen=True, slots=True)
class Figure:
    """One number: as published, and as the fitted model gives it."""

    metric: Metric
    published: float
    model: float

    @property
    def model_error(self) -> float:
        """The model's relative error."""
        return self.model / self.published - 1


@dataclass(frozen=True, slots=True)
class Point:
    """One published measurement.

    Attributes:
        id: Short and unique.
        system: Heading of the table it stands in.
        source: Tag of its source.
        profile: Profile it was measured on.
        prompt_tokens, output_tokens: Of each request.
        concurrency: Callers that send one request after another.
        requests: In the whole run.
        figures: What it measured.
        max_num_seqs, max_num_batched_tokens, context_tokens, kv_tokens: Launch flags and logged KV size
            where the run deviates from the profile.
        accept: Tokens per step where the text was not random.
    """

    id: str
    system: str
    source: str
    profile: str
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    requests: int
    figures: tuple[Figure, ...]
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    context_tokens: int | None = None
    kv_tokens: int | None = None
    accept: float | None = None

    def deployment(self) -> Profile:
        """Return the profile with this run's flags."""
        profile = load(self.profile)
        capacity, flags, perf = profile.capacity, profile.flags, profile.perf
        if self.kv_tokens is not None and capacity.kv is not None:
            capacity = replace(capacity, kv_blocks=capacity.kv.total_blocks(self.kv_tokens))
        if self.context_tokens is not None:
            capacity = replace(capacity, context_tokens=self.context_tokens)
        if self.max_num_seqs is not None:
            flags = replace(flags, max_num_seqs=self.max_num_seqs)
        if self.max_num_batched_tokens is not None:
            flags = replace(flags, max_num_batched_tokens=self.max_num_batched_tokens)
        if self.accept is not None:
            perf = replace(perf, accept=self.accept)
        return replace(profile, capacity=capacity, flags=flags, perf=perf)

    def run(self) -> Measured:
        """Return what the engine model measures at this point, in virtual time."""
        return closed_loop(
            self.deployment(),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            concurrency=self.concurrency,
            requests=self.requests,
        )


def value(measured: Measured, metric: Metric) -> float:
    """Return one metric of a run, in that metric's unit."""
    match metric:
        case Metric.TOKENS_PER_S:
            return measured.tokens_per_s
        case Metric.REQUEST_TOKENS_PER_S:
            return measured.request_tokens_per_s
        case Metric.TPOT_MS:
            return measured.tpot_s * 1e3
        case Metric.TTFT_S:
            return measured.ttft_s
        case Metric.LATENCY_S:
            return measured.latency_s


def _loaded(
    tokens_per_s: tuple[float, float], tpot_ms: tuple[float, float], ttft_s: tuple[float, float] | None
) -> tuple[Figure, ...]:
    figures = (Figure(Metric.TOKENS_PER_S, *tokens_per_s), Figure(Metric.TPOT_MS, *tpot_ms))
    return figures if ttft_s is None else (*figures, Figure(Metric.TTFT_S, *ttft_s))


def _h100(
    label: str,
    source: str,
    concurrency: int,
    figures: tuple[Figure, ...],
    *,
    seqs: int,
    kv_tokens: int | None = None,
) -> Point:
    """Return a point of the 4K/512 sweep on one card: 400 requests of random tokens."""
    return Point(
        f"h100-{label}",
        _H100,
        source,
        "h100-tp1-light",
        4096,
        512,
        concurrency,
        400,
        figures,
        max_num_seqs=seqs,
        kv_tokens=kv_tokens,
    )


def _h100_long(concurrency: int, figures: tuple[Figure, ...]) -> Point:
    """Return a 16K/1K point on one card: booted with a 262,144 window at utilisation 0.94 (~102K tokens).

    The step's token budget is not printed. 16,384, as on two cards, is what the fit used: with 8,192
    the time per output token comes out 6.8 % higher.
    """
    return Point(
        f"h100-16k-c{concurrency}",
        _H100,
        "OPR-B",
        "h100-tp1-light",
        16384,
        1024,
        concurrency,
        100,
        figures,
        max_num_batched_tokens=16384,
        context_tokens=262144,
        kv_tokens=102_000,
    )


def _push(label: str, source: str, concurrency: int, figures: tuple[Figure, ...]) -> Point:
    """Return a 4K/512 point on two cards; `light` runs them with the one-card flags."""
    light = label == "light"
    return Point(
        f"2xh100-{label}-c{concurrency}",
        _PUSH,
        source,
        "h100-tp2-push",
        4096,
        512,
        concurrency,
        400,
        figures,
        max_num_seqs=64 if light else None,
        max_num_batched_tokens=8192 if light else None,
        context_tokens=32768 if light else None,
    )


def _push_long(source: str, concurrency: int, figures: tuple[Figure, ...]) -> Point:
    """Return a 16K/1K point on two cards: 100 requests."""
    return Point(
        f"2xh100-16k-c{concurrency}", _PUSH, source, "h100-tp2-push", 16384, 1024, concurrency, 100, figures
    )


def _h200(profile: str, concurrency: int, latency_s: tuple[float, float], rate: tuple[float, float]) -> Point:
    """Return a 38/256 point: `concurrency` requests at once."""
    figures = (Figure(Metric.LATENCY_S, *latency_s), Figure(Metric.TOKENS_PER_S, *rate))
    system = "H200 NVL FP8-dynamic" if profile == "h200-fp8" else "H200 NVL BF16"
    return Point(
        f"{profile}-c{concurrency}", system, "LDI", profile, 38, 256, concurrency, concurrency, figures
    )


def _spark(
    profile: str, prompt: int, concurrency: int, ttft_s: tuple[float, float] | None, rate: tuple[float, float]
) -> Point:
    """Return a DGX Spark point: 128 tokens out, `concurrency` requests at once.

    A measurement "at depth d" prefills d + 2,048 tokens.
    """
    figures: tuple[Figure, ...] = (Figure(Metric.REQUEST_TOKENS_PER_S, *rate),)
    if ttft_s is not None:
        figures = (Figure(Metric.TTFT_S, *ttft_s), *figures)
    system = "DGX Spark FP8" if profile == "spark-fp8" else "2x DGX Spark FP8, TP=2"
    return Point(
        f"{profile}-{prompt}-c{concurrency}",
        system,
        "DSF",
        profile,
        prompt,
        128,
        concurrency,
        concurrency,
        figures,
    )


def _single(profile: str, rate: tuple[float, float]) -> Point:
    """Return a system of which one stream's rate is all that is published."""
    figures = (Figure(Metric.REQUEST_TOKENS_PER_S, *rate),)
    return Point(profile, "One stream", "DSN", profile, 128, 256, 1, 1, figures)


_H100 = "H100 TP=1"
_PUSH = "2x H100 TP=2"

POINTS: tuple[Point, ...] = (
    _h100("32", "OPR-B", 32, _loaded((397.9, 388.5), (74.2, 76.0), (2.9, 2.99)), seqs=32),
    _h100("48", "OPR-B", 48, _loaded((399.6, 396.9), (109.6, 111.0), (4.8, 4.45)), seqs=48),
    _h100("light", "OPR", 80, _loaded((408.6, 401.2), (141.4, 141.9), (25.9, 27.6)), seqs=64),
    _h100(
        "128", "OPR-B", 128, _loaded((397.4, 400.5), (168.7, 157.0), (70.5, 73.8)), seqs=128, kv_tokens=93_500
    ),
    _h100(
        "256",
        "OPR-B",
        256,
        _loaded((400.3, 400.5), (165.0, 157.0), (181.8, 181.3)),
        seqs=256,
        kv_tokens=93_500,
    ),
    # MT-Bench: 80 requests of real text; its lengths, 100 in and 256 out, are assumed.
    Point(
        "h100-mt-bench",
        _H100,
        "OPR-B",
        "h100-tp1-light",
        100,
        256,
        20,
        80,
        _loaded((1380.0, 1400.7), (12.8, 13.0), None),
        accept=2.5,
    ),
    _h100_long(64, _loaded((143.5, 143.9), (199.0, 200.7), (200.0, 203.1))),
    _h100_long(128, _loaded((142.3, 143.9), (201.0, 200.7), (319.0, 321.1))),
    _push("light", "OPR", 128, _loaded((741.2, 712.4), (78.0, 80.9), (42.6, 44.3))),
    _push("light", "OPR", 192, _loaded((745.0, 712.4), (77.7, 80.9), (74.5, 77.5))),
    _push("push", "OPR-B", 128, _loaded((729.0, 749.8), (143.9, 143.7), (13.5, 11.9))),
    _push("push", "OPR-B", 192, _loaded((734.8, 756.7), (198.2, 193.3), (27.7, 27.4))),
    _push("push", "OPR-B", 256, _loaded((729.7, 756.7), (200.2, 193.3), (64.4, 61.9))),
    _push_long("OPR-B", 14, _loaded((203.4, 204.5), (61.6, 58.9), (5.4, 6.98))),
    _push_long("OPR-B", 32, _loaded((255.8, 250.7), (100.7, 103.9), (17.0, 17.4))),
    _push_long("OPR", 64, _loaded((278.5, 281.4), (154.0, 159.9), (58.0, 56.0))),
    _push_long("OPR-B", 96, _loaded((274.6, 282.4), (195.0, 196.0), (125.0, 122.7))),
    _push_long("OPR", 128, _loaded((284.0, 282.4), (193.0, 196.0), (137.0, 135.2))),
    _push_long("OPR-B", 192, _loaded((271.5, 282.4), (194.0, 196.0), (137.0, 135.2))),
    _h200("h200-fp8", 1, (3.404, 3.42), (75.2, 75.1)),
    _h200("h200-fp8", 2, (3.444, 3.45), (148.6, 149.0)),
    _h200("h200-fp8", 4, (3.493, 3.50), (292.4, 293.8)),
    _h200("h200-fp8", 8, (3.580, 3.59), (571.2, 571.3)),
    _h200("h200-bf16", 1, (5.041, 5.01), (50.8, 51.2)),
    _h200("h200-bf16", 2, (5.008, 5.04), (102.2, 101.7)),
    _h200("h200-bf16", 4, (5.087, 5.11), (201.3, 200.9)),
    _h200("h200-bf16", 8, (5.233, 5.23), (390.7, 392.1)),
    _spark("spark-fp8", 128, 1, (0.220, 0.218), (6.91, 6.90)),
    _spark("spark-fp8", 512, 1, (0.334, 0.329), (6.84, 6.88)),
    _spark("spark-fp8", 2048, 1, (1.391, 1.16), (6.79, 6.82)),
    _spark("spark-fp8", 128, 2, (0.226, 0.228), (7.01, 6.89)),
    _spark("spark-fp8", 512, 2, (0.538, 0.559), (6.88, 6.86)),
    _spark("spark-fp8", 2048, 2, (2.53, 2.22), (6.81, 6.73)),
    _spark("spark-fp8", 128, 4, (0.318, 0.320), (6.94, 6.88)),
    _spark("spark-fp8", 512, 4, (0.896, 1.02), (6.75, 6.81)),
    _spark("spark-fp8", 2048, 4, (3.95, 4.35), (6.33, 6.55)),
    _spark("spark-fp8", 10240, 1, (8.93, 9.17), (6.4, 6.48)),
    _spark("spark-fp8", 18432, 1, (22.67, 23.1), (6.3, 6.17)),
    _spark("spark2-fp8", 2048, 1, (0.906, 0.895), (11.2, 11.0)),
    _spark("spark2-fp8", 6144, 1, None, (10.3, 10.8)),
    _spark("spark2-fp8", 10240, 1, (5.561, 5.74), (10.1, 10.6)),
    _spark("spark2-fp8", 18432, 1, (13.432, 13.2), (11.0, 10.2)),
    _single("spark-nvfp4", (6.8, 6.8)),
    _single("spark-moe-fp8", (36.9, 36.9)),
    _single("spark-moe-fp8-mtp", (53.7, 53.8)),
)
"""All points, in the order of docs/measurements.md."""
