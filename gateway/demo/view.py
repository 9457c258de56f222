"""The live view: a story in, exactly as many lines as the terminal has, none wider than it.

Pure. Columns have fixed widths, so that nothing jumps. Only the sixteen colours of the terminal's own
theme are used, never white or black, so that it reads on dark and on light.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.text import Text

from gateway.core.value import valueclass
from gateway.demo import words
from gateway.demo.site import BOOT_S
from gateway.demo.story import BoxGauge, Entry, Exchange, Gauge, Note, Stage, Story

STATE_STYLES = {
    "up": "green",
    "out": "dim",
    "starting": "dim",
    "unknown": "dim",
    "booting": "yellow",
    "probation": "yellow",
    "draining": "yellow",
    "ejected": "bold red",
    "hung": "bold red",
    "down": "bold red",
}
CLASS_STYLES = {"short_chat": "cyan", "long_document": "magenta", "reasoning": "bright_blue", "qwen": "green"}
_BOX_STYLES = {"resident": "green", "failed": "bold red", "starting": "dim", "unknown": "dim"}
_SILENT = frozenset({"booting", "down", "out"})
_MOODS = {"good": "green", "bad": "bold red", "plain": "yellow"}
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_SPIN = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"

_SPIN_PER_S = 8
"""Steps of the spinner per second. A choice, below `run.FRAMES_PER_S`."""

_HEADING = "dim underline"

_HEADER_LINES = 2
_FOOTER_LINES = 2
"""Lines above the fleet and below the list, as `View` prints them."""


@valueclass(frozen=True, slots=True)
class Cell:
    """One column of a line: text cut or padded to `width` characters."""

    text: str
    width: int
    style: str = ""
    right: bool = False


class View:
    """The story at one moment, as something rich can print at any size."""

    def __init__(self, story: Story, now: float) -> None:
        """Show `story` as it is at `now`."""
        self._story = story
        self._now = now

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield as many lines as the terminal has."""
        height = options.height or console.size.height
        shown = lines(self._story, self._now, options.max_width, height)
        for number, line in enumerate(shown):
            if number:
                yield Segment.line()
            yield from line.render(console, end="")


def lines(story: Story, now: float, width: int, height: int) -> list[Text]:
    """Return exactly `height` lines, each exactly `width` characters wide."""
    fleet = [
        _fleet_heading(width),
        *(_backend(gauge, story.speed, width) for gauge in story.fleet.values()),
        _box(story, width),
    ]
    room = max(0, height - _HEADER_LINES - len(fleet) - 1 - _FOOTER_LINES)
    # What runs stays at the end, in sight; what is over scrolls away.
    latest = sorted(story.entries, key=_ended_at)[-room:] if room else []
    rows = [_row(entry, story, now, width) for entry in latest]
    rows += [_blank(width)] * (room - len(rows))
    shown = [
        _title(story, now, width),
        _caption(story, width),
        *fleet,
        _list_heading(width),
        *rows,
        _reason(story, width),
        _totals(story, width),
    ]
    return shown[:height] + [_blank(width)] * (height - len(shown))


# ------------------------------------------------------------------ frame


def _title(story: Story, now: float, width: int) -> Text:
    pace = f"simulated GPUs at {story.speed:g}x" if story.speed != 1 else "simulated GPUs in real time"
    right = f"{story.url}/v1  {words.clock(now)}" if story.url else words.clock(now)
    left = Text.assemble((" Gemma Gateway ", "bold reverse"), "  ", (pace, "bold"))
    if story.speed != 1 and width >= 110:
        left.append("  times and rates are GPU time", "dim")
    return _ends(left, Text(right, "dim"), width)


def _caption(story: Story, width: int) -> Text:
    return _fit(Text.assemble(" ", (words.cut(story.caption, width - 2), "italic")), width)


def _reason(story: Story, width: int) -> Text:
    """Return the last single request with its whole reason: the answer to "why did it go there?"."""
    for exchange in reversed(story.exchanges):
        if exchange.why is not None and exchange.stage.is_over and not exchange.ask.burst:
            name = f"{exchange.ask.kind.value} → {exchange.backend or 'nowhere'}"
            full = f"{exchange.traffic_class}: {exchange.why.full}"
            text = words.cut(full, max(0, width - 9 - len(name)))
            return _fit(Text.assemble((" why ", "dim"), (name, "bold"), ("  ", ""), (text, "")), width)
    return _blank(width)


def _totals(story: Story, width: int) -> Text:
    counts = story.counts()
    running = counts[Stage.WAITING] + counts[Stage.STREAMING]
    taken = sum(one.prompt_tokens or 0 for one in story.exchanges if one.stage is Stage.ANSWERED)
    given = sum(one.output_tokens for one in story.exchanges)
    moved = sum(one.why is not None and bool(one.why.moved_from) for one in story.exchanges)
    text = Text.assemble(
        " ",
        (f"{len(story.exchanges)} sent", "bold"),
        f"  {running} running  ",
        (f"{counts[Stage.ANSWERED]} answered", "green"),
        f"  {counts[Stage.REFUSED]} refused  ",
        (f"{counts[Stage.FAILED]} failed", "bold red" if counts[Stage.FAILED] else "dim"),
    )
    if width >= 100:
        text.append(f"  {moved} retried")
    tokens = f"{words.thousands(taken)} in  {words.thousands(given)} out"
    return _ends(text, Text(tokens, "dim"), width)


# ------------------------------------------------------------------ fleet


def _fleet_cells(width: int) -> tuple[int, bool]:
    """Return the width of the bar, and whether there is room for the reason of a state."""
    wide = width >= 120
    fixed = 1 + 8 + 1 + 9 + 1 + 5 + 1 + 4 + 1 + 8 + 1 + 5 + 1 + 8 + 1
    rest = width - fixed
    return (min(48, rest - 42) if wide else max(4, rest)), wide


def _fleet_heading(width: int) -> Text:
    bar, wide = _fleet_cells(width)
    label = "share of its knee in use" if bar >= 25 else "knee in use"
    return _line(
        width,
        Cell("backend", 8),
        Cell("state", 9),
        Cell(label, bar),
        Cell("reqs", 5, right=True),
        Cell("knee", 4, right=True),
        Cell("run+wait", 8, right=True),
        Cell("KV", 5, right=True),
        Cell("tokens/s", 8, right=True),
        *([Cell(" reason", width)] if wide else []),
        style=_HEADING,
    )


def _backend(gauge: Gauge, speed: float, width: int) -> Text:
    bar, wide = _fleet_cells(width)
    if gauge.state in _SILENT:
        gauge = replace(gauge, running=None, waiting=None, kv_usage=None, tokens_per_s=None)
    engine = "" if gauge.running is None else f"{gauge.running}+{gauge.waiting}"
    rate = None if gauge.tokens_per_s is None else gauge.tokens_per_s / speed
    pace = "" if rate is None else f"{rate:,.0f}" if rate >= 9.95 or rate == 0 else f"{rate:.1f}"
    state = STATE_STYLES.get(gauge.state, "yellow")
    quiet = "dim" if not gauge.in_flight else ""
    line = _line(20, Cell(gauge.name, 8, "bold"), Cell(gauge.state, 9, state))
    line.append_text(_bar(gauge.knee_used, bar))
    rest = _line(
        width - 20 - bar,
        Cell(str(gauge.in_flight), 5, quiet or "bold", right=True),
        Cell(words.share(gauge.knee_used), 4, quiet, right=True),
        Cell(engine, 8, quiet, right=True),
        Cell(words.share(gauge.kv_usage), 5, quiet, right=True),
        Cell(pace, 8, quiet, right=True),
        *([Cell(f" {gauge.reason}", width, "dim" if gauge.state == "up" else state)] if wide else []),
    )
    line.append_text(rest)
    return _fit(line, width)


def _box(story: Story, width: int) -> Text:
    """Return what the machine does whose models take turns, and what waits for them."""
    box = story.box
    state = Text.assemble(
        (" box      ", "bold"), (f"{words.cut(box.state, 9):9}", _BOX_STYLES.get(box.state, "yellow"))
    )
    state.append(f" {words.cut(_doing(box, story.speed), max(1, width - 21))}")
    waits = ", ".join(f"{count} {name}" for name, count in box.waiting.items() if count)
    jobs = f"{sum(job.is_over for job in story.jobs)}/{len(story.jobs)} jobs" if story.jobs else ""
    right = f"waiting: {waits}  {jobs}" if waits else jobs
    if state.cell_len + cell_len(right) + 3 > width:
        right = jobs
    return _ends(state, Text(words.cut(right, width), "cyan" if waits else "dim"), width)


def _doing(box: BoxGauge, speed: float) -> str:
    match box.state:
        case "resident" if box.target:
            return f"runs {box.backend}; {box.target} is next{', after its batch' if box.held else ''}"
        case "resident":
            return f"runs {box.backend}"
        case "draining":
            return f"{box.backend} finishes its requests, then {box.target} starts"
        case "stopping":
            return f"{box.backend} stops, then {box.target} starts"
        case "booting":
            return f"{box.backend} boots: {max(0.0, BOOT_S - box.for_s * speed):.0f} s to go"
        case "checking":
            return f"{box.backend} answers a test question first"
    return box.reason


def _bar(share: float, width: int) -> Text:
    """Return a bar of `width` characters, filled in eighths."""
    share = min(1.0, max(0.0, share))
    eighths = round(share * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    whole, part = divmod(eighths, 8)
    filled = "█" * whole + (_EIGHTHS[part] if part else "")
    style = "green" if share < 0.75 else "yellow"  # full is no fault: red is for faults
    return Text.assemble((filled, style), ("·" * (width - len(filled)), "dim"))


# ------------------------------------------------------------------ list


@valueclass(frozen=True, slots=True)
class _Columns:
    what: int
    traffic_class: int
    where: int
    why: int


def _columns(width: int) -> _Columns:
    """Return the widths that share what the fixed columns (status, first token, tokens/s) leave."""
    rest = width - (1 + 3 + 1) - (1 + 13 + 1 + 8 + 1 + 7 + 1 + 6 + 1)
    what = min(46, max(8, 18 if width < 96 else 18 + (width - 96) // 3))
    return _Columns(what, 13, 8, max(0, rest - what))


def _list_heading(width: int) -> Text:
    columns = _columns(width)
    return _line(
        width,
        Cell("", 3),
        Cell("request", columns.what),
        Cell("class", columns.traffic_class),
        Cell("went to", columns.where),
        Cell("first", 7, right=True),
        Cell("tok/s", 6, right=True),
        Cell("why", columns.why),
        style=_HEADING,
    )


def _ended_at(entry: Entry) -> float:
    """Return when an entry became the past; infinity while it runs."""
    if isinstance(entry, Note):
        return entry.at
    exchanges = entry if isinstance(entry, list) else [entry]
    return max(math.inf if one.ended_at is None else one.ended_at for one in exchanges)


def _row(entry: Entry, story: Story, now: float, width: int) -> Text:
    if isinstance(entry, Note):
        text = Text.assemble(" ··· ", (words.cut(entry.text, width - 6), _MOODS[entry.mood]))
        return _fit(text, width)
    if isinstance(entry, list):
        return _burst_row(entry, story.speed, now, width)
    return _exchange_row(entry, story.speed, now, width)


def _exchange_row(exchange: Exchange, speed: float, now: float, width: int) -> Text:
    columns = _columns(width)
    over = exchange.stage.is_over
    first = exchange.first_s(now)
    rate = exchange.rate(now)
    why, why_style = _why_of(exchange, columns.why)
    return _line(
        width,
        _mark(exchange, now),
        Cell(_what(exchange, columns.what), columns.what, "" if over else "bold"),
        Cell(exchange.traffic_class, columns.traffic_class, CLASS_STYLES.get(exchange.traffic_class, "")),
        Cell(exchange.backend or ("nowhere" if over else ""), columns.where, "bold"),
        Cell(
            words.seconds(_times(first, speed)),
            7,
            "dim" if exchange.stage is Stage.WAITING else "",
            right=True,
        ),
        Cell(words.rate(rate and rate / speed), 6, "" if over else "dim", right=True),
        Cell(why, columns.why, why_style),
    )


def _burst_row(burst: Sequence[Exchange], speed: float, now: float, width: int) -> Text:
    columns = _columns(width)
    over = [exchange for exchange in burst if exchange.stage.is_over]
    served = Counter(exchange.backend for exchange in burst if exchange.backend)
    pools = dict.fromkeys(exchange.pool for exchange in burst if exchange.pool)
    firsts = [one.first_s(now) for one in burst if one.first_at is not None]
    rates = [rate for one in over if (rate := one.rate(now)) is not None]
    failed = sum(exchange.stage is Stage.FAILED for exchange in burst)
    if failed:
        mark = Cell("ERR", 3, "bold red")
    elif len(over) == len(burst):
        mark = Cell("200", 3, "green")
    else:
        mark = Cell(_spinner(now), 3, "cyan", right=True)
    classes = dict.fromkeys(exchange.traffic_class for exchange in burst if exchange.traffic_class)
    progress = f"{len(burst)} {burst[0].ask.kind.value}s"
    if len(over) < len(burst):
        progress += f", {len(over)} done"
    moved = sum(one.why is not None and bool(one.why.moved_from) for one in burst)
    spread = ", ".join(f"{name} {count}" for name, count in sorted(served.items()))
    parts = [spread, f"{moved} retried after a crash" if moved else ""]
    why = "; ".join(part for part in parts if part)
    if len(why) > columns.why:
        why = " + ".join(str(count) for _, count in sorted(served.items()))
        why += f"; {moved} retried" if moved else ""
    return _line(
        width,
        mark,
        Cell(progress, columns.what, "" if len(over) == len(burst) else "bold"),
        Cell(next(iter(classes), ""), columns.traffic_class, CLASS_STYLES.get(next(iter(classes), ""), "")),
        Cell(next(iter(pools), "") if len(pools) < 2 else f"{len(pools)} pools", columns.where, "bold"),
        Cell(words.seconds(_times(_median(firsts), speed)), 7, right=True),
        Cell(words.rate(_times(_median(rates), 1 / speed)), 6, right=True),
        Cell(why, columns.why, "dim"),
    )


def _mark(exchange: Exchange, now: float) -> Cell:
    match exchange.stage:
        case Stage.ANSWERED:
            return Cell(str(exchange.status), 3, "green")
        case Stage.REFUSED:
            return Cell(str(exchange.status), 3, "yellow")
        case Stage.FAILED:
            return Cell(str(exchange.status or "ERR"), 3, "bold red")
        case Stage.STREAMING:
            return Cell("▸", 3, "bold green", right=True)
    return Cell(_spinner(now), 3, "cyan", right=True)


def _what(exchange: Exchange, width: int) -> str:
    """Return kind, size and, where there is room, what it is about."""
    text = exchange.ask.kind.value
    if exchange.prompt_tokens is not None:
        text += f" {words.tokens(exchange.prompt_tokens)}"
    elif exchange.ask.about_tokens:
        text += f" ~{words.tokens(exchange.ask.about_tokens)}"
    title = exchange.ask.title
    return f"{text}  {words.cut(title, width - len(text) - 2)}" if title and width - len(text) > 12 else text


def _why_of(exchange: Exchange, width: int) -> tuple[str, str]:
    """Return the reason at the length that fits, and its style."""
    if exchange.stage is Stage.FAILED:
        return exchange.problem or exchange.code, "bold red"
    if exchange.why is not None:
        style = "yellow" if exchange.stage is Stage.REFUSED else "dim"
        return (exchange.why.full if len(exchange.why.full) <= width else exchange.why.brief), style
    match exchange.stage:
        case Stage.WAITING:
            return "waiting", "dim"
        case Stage.STREAMING:
            return exchange.text.replace("\n", " ")[-max(1, width) :].lstrip(), "dim italic"
    return exchange.code, "dim"


def _spinner(now: float) -> str:
    return _SPIN[int(now * _SPIN_PER_S) % len(_SPIN)]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


# ------------------------------------------------------------------ lines of an exact width


def _line(width: int, *cells: Cell, style: str = "") -> Text:
    """Return the cells, a blank before each of them, in a line of exactly `width` characters."""
    line = Text(no_wrap=True, end="")
    for cell in cells:
        line.append(" ")
        text = words.cut(cell.text, cell.width)
        padding = " " * (cell.width - cell_len(text))
        line.append(padding + text if cell.right else text + padding, cell.style or None)
    line = _fit(line, width)
    if style:
        line.stylize(style)
    return line


def _ends(left: Text, right: Text, width: int) -> Text:
    """Return a line with `left` at its start and `right`, where there is room, at its end."""
    gap = width - left.cell_len - right.cell_len - 1
    if gap < 2:
        return _fit(left, width)
    left.append(" " * gap)
    left.append_text(right)
    return _fit(left, width)


def _fit(line: Text, width: int) -> Text:
    line.truncate(max(0, width), overflow="crop", pad=True)
    line.no_wrap, line.end = True, ""
    return line


def _blank(width: int) -> Text:
    return Text(" " * width, no_wrap=True, end="")
