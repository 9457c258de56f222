"""`gemma-gateway replay`: for people and for programs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import rich_click as click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway import settings
from gateway.commands import config_option, fail, json_option, usable
from gateway.replay import reading
from gateway.replay.comparing import Report, compare
from gateway.replay.figures import Figures, Side
from gateway.replay.reading import Unusable

PIPED_WIDTH = 160
"""Characters per line if the output is not a terminal. A choice: wide enough for the tables."""

BROKEN_SHOWN = 10
"""Maximum broken lines that are listed. A choice: `--json` has them all."""


@click.command()
@click.argument(
    "files",
    metavar="DECISIONS...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
)
@config_option("The configuration to try.")
@json_option
def replay(files: tuple[Path, ...], config: Path, as_json: bool) -> None:
    """Show what another configuration would have done with the requests in a decision log.

    Give it all files of a log, of all gateways in front of the same fleet. Sends nothing. docs/replay.md
    says how far to trust the figures.
    """
    tried = usable(lambda: settings.load(config))
    try:
        report = compare(reading.read(files), tried)
    except Unusable as error:
        fail(str(error))
    if as_json:
        click.echo(json.dumps(asdict(report), indent=2))
    else:
        show(report)


def show(report: Report) -> None:
    """Print a report for people."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPED_WIDTH)
    for line in _head(report):
        console.print(line)
    for line in report.notes:
        console.print(f"[yellow]note[/]: {escape(line)}", soft_wrap=True)
    console.print()
    if not report.recorded_policy:
        console.print("what moves is not known")
    elif not report.moved:
        console.print("no request moves")
    else:
        console.print(f"[bold]{report.moved}[/] of {report.decided} requests move:")
        for what, moves in report.moves.items():
            for move in moves:
                said = f"{move.before} -> {move.after}: {move.requests} (such as {move.example})"
                console.print(f"  {what} {escape(said)}", soft_wrap=True)
    for refusal in report.refusals:
        new = f", {refusal.new} of them not refused before" if report.recorded_policy else ""
        words = escape(f"{refusal.example}: {refusal.words}")
        console.print(
            f"[bold red]{refusal.requests}[/] would be refused ({refusal.code}){new}; {words}", soft_wrap=True
        )
    if report.accepted:
        console.print(f"[green]{report.accepted}[/] that were refused would be accepted")
    console.print()
    console.print(_table(report))
    for line in _distance(report):
        console.print(line, soft_wrap=True)
    console.print(_served(report))


def _head(report: Report) -> Iterator[str]:
    first, last = _time(report.first_at), _time(report.last_at)
    yield f"[bold]{report.requests}[/] requests, {first} to {last} UTC"
    yield f"recorded under {report.recorded_policy or 'an unknown policy'}, tried: {report.other_policy}"
    if report.undecided:
        ends = ", ".join(f"{count} {ending}" for ending, count in sorted(report.undecided.items()))
        yield f"not decided again, because their prompts were never counted: {ends}"
    if report.broken:
        yield f"[yellow]lines that could not be read: {len(report.broken)}[/]"
        yield from (f"  {escape(line)}" for line in report.broken[:BROKEN_SHOWN])
        if len(report.broken) > BROKEN_SHOWN:
            yield f"  and {len(report.broken) - BROKEN_SHOWN} more (--json has them all)"


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


_COLUMNS = (
    *("class", "", "requests", "shed", "wait p50", "p95", "TTFT p50", "p95", "late", "total p50"),
    "tokens/s",
)


def _table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in {"class", ""} else "right")
    known = _sides(report)
    for traffic_class in dict.fromkeys(name for side in known.values() for name in side.classes):
        label = traffic_class
        for name, side in known.items():
            if traffic_class in side.classes:
                style = "bold" if name == "predicted" else None
                table.add_row(label, name, *_cells(side.classes[traffic_class]), style=style)
                label = ""
    return table


def _sides(report: Report) -> Mapping[str, Side]:
    sides = {"recorded": report.recorded, "simulated": report.simulated, "predicted": report.predicted}
    return {name: side for name, side in sides.items() if side is not None}


def _cells(figures: Figures) -> Sequence[str]:
    return (
        str(figures.requests),
        _percent(figures.shed_share),
        _seconds(figures.wait_p50_s),
        _seconds(figures.wait_p95_s),
        _seconds(figures.ttft_p50_s),
        _seconds(figures.ttft_p95_s),
        _percent(figures.late_share),
        _seconds(figures.total_p50_s),
        f"{figures.tokens_per_s:.1f}",
    )


def _distance(report: Report) -> Iterator[str]:
    """Yield the differences between the simulation of the recorded policy and the recording."""
    if report.simulated is None:
        return
    yield "how far the simulation of the recorded policy is from what was recorded:"
    for name, own in report.recorded.classes.items():
        other = report.simulated.classes.get(name)
        if other is None:
            continue
        parts = [
            f"{what} {two / one - 1:+.0%}"
            for what, one, two in (
                ("TTFT p50", own.ttft_p50_s, other.ttft_p50_s),
                ("p95", own.ttft_p95_s, other.ttft_p95_s),
                ("total p50", own.total_p50_s, other.total_p50_s),
                ("p95", own.total_p95_s, other.total_p95_s),
            )
            if one and two is not None
        ]
        if own.wait_p95_s is not None and other.wait_p95_s is not None:
            parts.append(f"wait p95 {other.wait_p95_s - own.wait_p95_s:+.2f} s")
        parts.append(f"shed {100 * (other.shed_share - own.shed_share):+.1f} points")
        yield f"  {name}: {', '.join(parts)}"
    if report.same_pool_share is not None:
        yield f"  {_percent(report.same_pool_share)} of what was served is served in the pool that served it"


def _served(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("served by")
    known = {name: side.served for name, side in _sides(report).items()}
    for name in known:
        table.add_column(name, justify="right")
    for backend in sorted({one for served in known.values() for one in served}):
        table.add_row(backend, *(str(served.get(backend, 0)) for served in known.values()))
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
