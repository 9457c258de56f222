"""What the measurements say: best rounds, the table against the goals, the regression gate. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.overhead.scenarios import RATE_HZ

GATEWAY, NGINX, VLLM_ROUTER, DIRECT = "gateway", "nginx", "vllm-router", "direct"
DELIVERED_MIN = 0.98

GATE: Mapping[str, tuple[str, float]] = {
    "short": ("a short request", 30.0),
    "streams-256": ("a streamed chunk", 2.4),
    "large": ("a request of 1 MB beyond its token count", 24.0),
}
"""How many times nginx's CPU in the same run a unit of work may cost before `--gate` fails.

Above all that was measured, also on the processor on which the ratio is highest (docs/performance.md): the
same code costs 12 times nginx's CPU per short request on one, 23 on another. Smaller steps backwards are for
`benchmarks.steps --most`, which counts the same on every machine. A gate at the goals, which are not reached,
would fail whatever is changed. It moves with the figures.
"""


@dataclass(frozen=True)
class Run:
    """One target's measurements of one round.

    Attributes:
        target: Its name.
        round: From 0.
        results: By scenario: what load.c printed, with `cpu_s`, `counted_s` (what token counts took of it,
            where that was timed), `at_rest_s` (what so long a rest takes, where that was measured),
            `processes` (name and CPU seconds of each), `resident_mb`, `left_behind`; where there is a
            disturbance, `disturbed` has the same again.
    """

    target: str
    round: int
    results: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Count:
    """What the gateway's token count is on its own, best of the rounds.

    Attributes:
        us: CPU of a count of the 1 MB request's text, in microseconds.
        tokens: That it has.
        vocabulary_mb: Memory that the vocabulary holds.
    """

    us: float
    tokens: int
    vocabulary_mb: float


@dataclass(frozen=True)
class Streams:
    """How streams fared.

    Attributes:
        delivered: Share of the chunks due that arrived.
        delay_p99_ms: From the engine's sending to the caller's reading.
    """

    delivered: float
    delay_p99_ms: float

    @property
    def held(self) -> bool:
        """Return whether as good as nothing was left behind."""
        return self.delivered >= DELIVERED_MIN


class Measured:
    """All runs of one target. Every figure is that of its best round: neighbours only ever add.

    All but the CPU of a chunk: whoever is kept from running finds several chunks when it runs again, and
    handles them for less. There the calmest round counts, the one with the shortest median delay.
    """

    def __init__(self, runs: Sequence[Run], target: str, count: Count | None = None) -> None:
        """Take those of `target`; `count` is what counting costs it, where it does."""
        self._runs = [run.results for run in runs if run.target == target]
        self._count = count

    def _of(self, scenario: str) -> list[Mapping[str, Any]]:
        return [results[scenario] for results in self._runs if scenario in results]

    def _best(self, scenario: str, figure: Callable[[Mapping[str, Any]], float | None]) -> float | None:
        found = map(figure, self._of(scenario))
        return min((one for one in found if one is not None), default=None)

    def cpu_us(self, scenario: str) -> float | None:
        """Return the CPU per chunk of streams, per request of everything else."""
        if scenario.startswith("streams"):
            rounds = [one for one in self._of(scenario) if one["chunks"]]
            calmest = min(rounds, key=lambda one: float(one["delay_us"]["p50"]), default=None)
            return None if calmest is None else 1e6 * calmest["cpu_s"] / calmest["chunks"]
        return self._best(
            scenario, lambda result: 1e6 * result["cpu_s"] / result["good"] if result["good"] else None
        )

    def beyond_count_us(self, scenario: str = "large") -> float | None:
        """Return the CPU per long request without what its token count took there and then.

        Nor with what goes on at rest: at some twenty requests a second that would be a millisecond of each.
        """

        def figure(result: Mapping[str, Any]) -> float | None:
            beyond_s: float = result["cpu_s"] - result["counted_s"] - result["at_rest_s"]
            return 1e6 * beyond_s / result["good"] if result["good"] else None

        return self._best(scenario, figure)

    def counted_us(self) -> float | None:
        """Return the CPU that the token count of a 1 MB request took between requests."""
        return self._best(
            "large", lambda result: 1e6 * result["counted_s"] / result["good"] if result["good"] else None
        )

    def latency_p50_ms(self) -> float | None:
        """Return the median latency in open loop."""
        p50_us = self._best("latency", lambda result: _quantile(result["latency_us"]["p50"]))
        return None if p50_us is None else p50_us / 1000

    def per_second(self, scenario: str) -> float | None:
        """Return answers a second, of the round with the most."""
        least = self._best(scenario, lambda result: -result["good"] / result["seconds"])
        return -least if least else None

    def streams(self, count: int) -> Streams | None:
        """Return how that many streams fared, in the round that held them with the shortest delay."""
        rounds = [
            Streams(one["chunks"] / (one["seconds"] * count * RATE_HZ), one["delay_us"]["p99"] / 1000)
            for one in self._of(f"streams-{count}")
            if one["chunks"]
        ]
        return min(rounds, key=lambda one: (not one.held, one.delay_p99_ms), default=None)

    def gap_above_idle_ms(self) -> float | None:
        """Return by how much the p99 of the distance between two chunks grows while 1 MB bodies arrive."""
        idle_us = self._best("gap", lambda result: _quantile(result["gap_us"]["p99"]))
        disturbed_us = self._best("gap", lambda result: _quantile(result["disturbed"]["gap_us"]["p99"]))
        return None if idle_us is None or disturbed_us is None else (disturbed_us - idle_us) / 1000

    def single_reads(self) -> float | None:
        """Return the share of reads that brought exactly one chunk."""
        worst = self._best(
            "each", lambda result: -result["single_reads"] / result["reads"] if result["reads"] else None
        )
        return None if worst is None else -worst

    def memory_mb(self) -> float | None:
        """Return the resident memory with 1,024 streams open, the vocabulary left out."""
        whole = self._best("streams-1024", lambda result: result["resident_mb"])
        return whole if whole is None or self._count is None else whole - self._count.vocabulary_mb

    def shares(self, scenario: str) -> dict[str, float]:
        """Return each process's share of the CPU over all rounds, by name; those without any are left out."""
        used_s: dict[str, float] = {}
        for result in self._of(scenario):
            for name, cpu_s in result["processes"]:
                used_s[name] = used_s.get(name, 0) + cpu_s
        whole_s = sum(used_s.values()) or 1
        found = {name: cpu_s / whole_s for name, cpu_s in used_s.items() if cpu_s / whole_s >= 0.005}
        return dict(sorted(found.items(), key=lambda one: -one[1]))

    def unclean(self) -> list[str]:
        """Return what went wrong in any round: then its figures say little."""
        found = []
        for results in self._runs:
            for scenario, result in results.items():
                for part in (result, result.get("disturbed", {})):
                    wrong = {name: part[name] for name in ("bad", "broken", "missed") if part.get(name)}
                    wrong |= {"left behind": part["left_behind"]} if part.get("left_behind") else {}
                    found += [f"{scenario}: {count} {name}" for name, count in wrong.items()]
        return found


def _quantile(us: float) -> float | None:
    """Return what load.c says of a quantile: of nothing it is -1."""
    return None if us == -1 else us


# ------------------------------------------------------------------ against the goals

MISSED, MUST, AIM, UNKNOWN = "missed", "must", "aim", "-"


@dataclass(frozen=True)
class Bound:
    """One side of a goal: `figure` is at most `at_most`; no figure, no verdict."""

    figure: float | None
    at_most: float


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        measure: What is measured.
        must: In words.
        aim: In words.
        must_bounds: All must hold.
        aim_bounds: Likewise.
        cells: By target.
    """

    measure: str
    must: str
    aim: str
    must_bounds: Sequence[Bound]
    aim_bounds: Sequence[Bound]
    cells: Mapping[str, str]

    @property
    def verdict(self) -> str:
        """Return how far the gateway has come."""
        known = [bound.figure for bound in (*self.must_bounds, *self.aim_bounds)]
        if not known or None in known:
            return UNKNOWN
        if not _hold(self.must_bounds):
            return MISSED
        if self.aim_bounds and not _hold(self.aim_bounds):
            return MUST if self.must_bounds else MISSED
        return AIM


def _hold(bounds: Sequence[Bound]) -> bool:
    return all(bound.figure is not None and bound.figure <= bound.at_most for bound in bounds)


def ratio(left: float | None, right: float | None) -> float | None:
    """Return left / right where both are known."""
    return left / right if left is not None and right else None


def rows(measured: Mapping[str, Measured]) -> list[Row]:
    """Return the table's lines; `measured` has the gateway, and whatever else ran."""
    nothing = Measured([], "")
    gateway, nginx, router = (measured.get(name, nothing) for name in (GATEWAY, NGINX, VLLM_ROUTER))
    direct_ms = measured.get(DIRECT, nothing).latency_p50_ms()

    def cpu(figure: Callable[[Measured], float | None]) -> tuple[float | None, dict[str, str]]:
        ours = ratio(figure(gateway), figure(nginx))
        cells = {name: _text(figure(one), "us") for name, one in measured.items()}
        if ours is not None:
            cells[GATEWAY] += f", {ours:.2f} x nginx"
        return ours, cells

    def added_ms(one: Measured) -> float | None:
        latency_ms = one.latency_p50_ms()
        return None if latency_ms is None or direct_ms is None else latency_ms - direct_ms

    def each(figure: Callable[[Measured], float | None], unit: str) -> dict[str, str]:
        return {name: _text(figure(one), unit) for name, one in measured.items()}

    chunk, chunk_cells = cpu(lambda one: one.cpu_us("streams-256"))
    short, short_cells = cpu(lambda one: one.cpu_us("short"))
    large, large_cells = cpu(Measured.beyond_count_us)
    to_router = ratio(gateway.cpu_us("short"), router.cpu_us("short"))
    if to_router is not None:
        short_cells[GATEWAY] += f", {to_router:.2f} x vllm-router"
    routed = VLLM_ROUTER in measured
    single = gateway.single_reads()
    return [
        Row(
            "CPU per streamed chunk, 256 streams",
            "1.35 x nginx",
            "1.2 x nginx",
            [Bound(chunk, 1.35)],
            [Bound(chunk, 1.2)],
            chunk_cells,
        ),
        Row(
            "CPU per short request, 32 connections",
            "8 x nginx, 2 x vllm-router",
            "4 x nginx, 1 x vllm-router",
            [Bound(short, 8), *([Bound(to_router, 2)] if routed else [])],
            [Bound(short, 4), *([Bound(to_router, 1)] if routed else [])],
            short_cells,
        ),
        Row(
            "CPU per 1 MB request, beyond the token count",
            "2 x nginx",
            "1.2 x nginx",
            [Bound(large, 2)],
            [Bound(large, 1.2)],
            large_cells,
        ),
        _streams_row(measured, 512, must_ms=5),
        _streams_row(measured, 1024, aim_ms=10),
        Row(
            "latency added at 100 requests/s, p50",
            "0.6 ms",
            "0.35 ms",
            [Bound(added_ms(gateway), 0.6)],
            [Bound(added_ms(gateway), 0.35)],
            each(added_ms, "ms"),
        ),
        Row(
            "chunk gap p99 while 1 MB bodies arrive, above idle",
            "25 ms",
            "5 ms",
            [Bound(gateway.gap_above_idle_ms(), 25)],
            [Bound(gateway.gap_above_idle_ms(), 5)],
            each(Measured.gap_above_idle_ms, "ms"),
        ),
        Row(
            "reads that bring exactly one chunk",
            "100 %",
            "",
            [Bound(None if single is None else 1 - single, 0)],
            [],
            {name: _share(one.single_reads()) for name, one in measured.items()},
        ),
        Row(
            "memory at 1,024 streams, beyond the vocabulary",
            "150 MB",
            "80 MB",
            [Bound(gateway.memory_mb(), 150)],
            [Bound(gateway.memory_mb(), 80)],
            each(Measured.memory_mb, "MB"),
        ),
    ]


def _streams_row(
    measured: Mapping[str, Measured], count: int, must_ms: float | None = None, aim_ms: float | None = None
) -> Row:
    found = {name: one.streams(count) for name, one in measured.items()}
    ours = found.get(GATEWAY)
    share = None if ours is None else DELIVERED_MIN - ours.delivered
    delay_ms = None if ours is None else ours.delay_p99_ms

    def bounds(limit_ms: float | None) -> list[Bound]:
        return [] if limit_ms is None else [Bound(share, 0), Bound(delay_ms, limit_ms)]

    def words(limit_ms: float | None) -> str:
        return "" if limit_ms is None else f"98 %, {limit_ms:g} ms"

    cells = {
        name: "" if one is None else f"{_share(one.delivered)}, {_text(one.delay_p99_ms, 'ms')}"
        for name, one in found.items()
    }
    return Row(
        f"{count:,} streams: chunks delivered, delay p99",
        words(must_ms),
        words(aim_ms),
        bounds(must_ms),
        bounds(aim_ms),
        cells,
    )


def _text(figure: float | None, unit: str) -> str:
    if figure is None:
        return ""
    digits = 0 if abs(figure) >= 100 else 1 if abs(figure) >= 10 else 2
    return f"{figure:,.{digits}f} {unit}"


def _share(figure: float | None) -> str:
    return "" if figure is None else f"{min(figure, 1):.1%}".replace("%", " %")


def goals_table(measured: Mapping[str, Measured]) -> list[str]:
    """Return the table against the goals, in Markdown."""
    others = [name for name in measured if name not in (GATEWAY, DIRECT)]
    head = ["measure", "must", "aim", GATEWAY, "reached", *others]
    lines = [
        [row.measure, row.must, row.aim, row.cells.get(GATEWAY, ""), row.verdict]
        + [row.cells.get(name, "") for name in others]
        for row in rows(measured)
        if any(row.cells.values())
    ]
    return table(head, lines)


def throughput_table(measured: Mapping[str, Measured]) -> list[str]:
    """Return what a core of each does, which is not what is asked for but helps to read the rest."""
    lines = []
    for name, one in measured.items():
        cells = [_text(one.per_second("short"), ""), _text(one.per_second("large"), "")]
        cells += [_text(one.latency_p50_ms(), "ms")]
        for count in (256, 512, 1024):
            cpu = None if name == DIRECT else one.cpu_us(f"streams-{count}")
            streams = one.streams(count)
            delay = "" if streams is None else _text(streams.delay_p99_ms, "ms")
            cells.append(", ".join(filter(None, (_text(cpu, "us"), delay))))
        lines.append([name, *(cell.strip() for cell in cells)])
    head = ["", "short requests/s", "1 MB requests/s", "latency p50 at 100/s"]
    head += [f"{count:,} streams: CPU per chunk, delay p99" for count in (256, 512, 1024)]
    return table(head, lines) if any(any(line[1:]) for line in lines) else []


def others_table(measured: Mapping[str, Measured]) -> list[str]:
    """Return what other long requests cost beyond their token count; nothing where none was measured."""
    nginx = measured.get(NGINX, Measured([], ""))
    lines = []
    for name, one in measured.items():
        cells = []
        for scenario in ("agent", "image"):
            used_us = one.beyond_count_us(scenario)
            times = None if one is nginx else ratio(used_us, nginx.beyond_count_us(scenario))
            cells.append(_text(used_us, "us") + ("" if times is None else f", {times:.1f} x nginx"))
        if any(cells):
            lines.append([name, *cells])
    head = ["CPU beyond the token count", "an agent's request of 350 KB", "an image of 1 MB"]
    return table(head, lines) if lines else []


def workers_table(runs: Mapping[int, Measured]) -> list[str]:
    """Return what a unit of work costs with so many processes, and how they have shared it."""
    lines = []
    for workers, one in runs.items():
        for scenario, unit in (("paced", "short request"), ("streams-256", "chunk, 256 streams")):
            shown = ", ".join(
                f"{name} {share:.0%}".replace("%", " %") for name, share in one.shares(scenario).items()
            )
            lines.append([str(workers), unit, _text(one.cpu_us(scenario), "us"), shown])
    return table(["workers", "per", "CPU of all processes", "share of each process"], lines)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return a table in Markdown."""
    rule = ["---"] * len(head)
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *lines)]


# ------------------------------------------------------------------ the gate


def gate(measured: Mapping[str, Measured]) -> list[str]:
    """Return a sentence per bound that is exceeded or could not be checked; none where all is well."""
    nothing = Measured([], "")
    gateway, nginx = measured.get(GATEWAY, nothing), measured.get(NGINX, nothing)
    found = []
    for scenario, (unit, bound) in GATE.items():
        ours = gateway.beyond_count_us() if scenario == "large" else gateway.cpu_us(scenario)
        theirs = nginx.cpu_us(scenario)
        times = ratio(ours, theirs)
        if times is None:
            found.append(f"What {unit} costs could not be compared: the gateway or nginx was not measured.")
        elif times > bound:
            found.append(
                f"{unit[0].upper()}{unit[1:]} costs the gateway {_text(ours, 'us')} of CPU, "
                f"{times:.2f} times nginx's {_text(theirs, 'us')}; at most {bound:g} times is allowed."
            )
    return found
