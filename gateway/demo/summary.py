"""What the demo ends with: a table per class and backend, a sentence per class, and how to go on."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.core.value import valueclass
from gateway.demo import words
from gateway.demo.site import MODEL
from gateway.demo.story import Exchange, Stage, Story
from gateway.demo.view import CLASS_STYLES


@valueclass(frozen=True, slots=True)
class Line:
    """One class on one backend.

    Attributes:
        traffic_class, backend: Which; backend "" where the request was served nowhere.
        requests: How many.
        prompt_tokens, first_s, tokens_per_s: Medians; times in GPU time, None where unknown. The first
            token is that of streamed answers.
        errors: Requests that ended otherwise than they should.
    """

    traffic_class: str
    backend: str
    requests: int
    prompt_tokens: float | None
    first_s: float | None
    tokens_per_s: float | None
    errors: int


def table_lines(story: Story) -> list[Line]:
    """Return the lines of the table, classes in the order in which they first occurred."""
    groups: dict[tuple[str, str], list[Exchange]] = {}
    classes = list(dict.fromkeys(exchange.traffic_class for exchange in story.exchanges))
    for exchange in story.exchanges:
        groups.setdefault((exchange.traffic_class, exchange.backend), []).append(exchange)
    ordered = sorted(groups, key=lambda key: (classes.index(key[0]), key[1] == "", key[1]))
    return [_line(key, groups[key], story.speed) for key in ordered]


def _line(key: tuple[str, str], group: Sequence[Exchange], speed: float) -> Line:
    firsts = [one.first_at - one.sent_at for one in group if one.ask.stream and one.first_at is not None]
    rates = [rate for one in group if (rate := one.rate(one.ended_at or 0.0)) is not None]
    prompts = [one.prompt_tokens for one in group if one.prompt_tokens is not None]
    return Line(
        traffic_class=key[0],
        backend=key[1],
        requests=len(group),
        prompt_tokens=statistics.median(prompts) if prompts else None,
        first_s=statistics.median(firsts) * speed if firsts else None,
        tokens_per_s=statistics.median(rates) / speed if rates else None,
        errors=sum(one.stage is not Stage.ANSWERED and one.stage is not Stage.REFUSED for one in group),
    )


def sentences(story: Story) -> Iterator[tuple[str, str]]:
    """Yield `(class, what was decided and why)`, a sentence per class, from the gateway's own reasons."""
    groups: dict[str, list[Exchange]] = {}
    for exchange in story.exchanges:
        if exchange.traffic_class:
            groups.setdefault(exchange.traffic_class, []).append(exchange)
    for traffic_class, group in groups.items():
        yield traffic_class, _sentence(group)


def _sentence(group: Sequence[Exchange]) -> str:
    served = [one for one in group if one.stage is Stage.ANSWERED]
    reasons = [one.why for one in served if one.why is not None]
    spilled = Counter(one.pool for one in served if one.why is not None and one.why.spilled)
    pools = Counter(one.pool for one in served)
    parts = [
        f"{pools[pool] - spilled[pool]:,} served by pool {pool}"
        for pool in pools
        if pools[pool] > spilled[pool]
    ]
    parts += [
        f"{count:,} spilled to pool {pool} because the pools before it were full"
        for pool, count in spilled.items()
    ]
    moved = Counter(name for why in reasons for name in why.moved_from)
    parts += [f"{count:,} retried elsewhere when {name} failed" for name, count in moved.items()]
    misfits: dict[tuple[str, str], list[str]] = {}
    for why in reasons:
        for backend, reason, detail in why.excluded:
            if reason in ("context_exceeded", "modality"):
                misfits.setdefault((backend, reason), []).append(detail)
    parts += [
        f"{len(details):,} could not go to {backend} ({details[0]})"
        for (backend, _), details in misfits.items()
    ]
    refused = Counter(one.code for one in group if one.stage is Stage.REFUSED)
    parts += [f"{count} refused with {code}" for code, count in refused.items()]
    what_happened = "; ".join(parts) or "none was answered"
    return f"{words.plural(len(group), 'request')}: {_class_reason(group)}. {what_happened}."


def _class_reason(group: Sequence[Exchange]) -> str:
    """Return the condition that put them into their class, without the figures of a single request."""
    reasons = Counter(one.why.class_reason for one in group if one.why is not None)
    if not reasons:
        return "the gateway gave no reason"
    reason = reasons.most_common(1)[0][0]
    first, _, rest = reason.partition(" ")
    figure, _, bound = rest.partition(" ")
    return f"{first} {bound} tokens" if figure.replace(",", "").isdigit() else reason


def render(story: Story) -> RenderableType:
    """Return the summary."""
    counts = story.counts()
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading, justify in (
        ("class", "left"),
        ("backend", "left"),
        ("requests", "right"),
        ("prompt", "right"),
        ("first token", "right"),
        ("tok/s", "right"),
        ("errors", "right"),
    ):
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    previous = ""
    for line in table_lines(story):
        style = CLASS_STYLES.get(line.traffic_class, "")
        table.add_row(
            Text("" if line.traffic_class == previous else line.traffic_class or "(none)", style=style),
            line.backend or Text("refused", style="yellow"),
            f"{line.requests:,}",
            words.tokens(line.prompt_tokens),
            words.seconds(line.first_s),
            "" if line.tokens_per_s is None else words.rate(line.tokens_per_s).removesuffix("/s"),
            Text(str(line.errors), style="bold red" if line.errors else "dim"),
        )
        previous = line.traffic_class
    total = Text.assemble(
        (words.plural(len(story.exchanges), "request"), "bold"),
        ", ",
        (f"{counts[Stage.ANSWERED]:,} answered", "green"),
        f", {counts[Stage.REFUSED]} refused as intended, ",
        (f"{counts[Stage.FAILED]} failed", "bold red" if counts[Stage.FAILED] else ""),
        ".",
    )
    taken = Text(_turns(story))
    pace = Text(_pace(story.speed), style="dim")
    why = Table.grid(padding=(0, 2, 0, 0))
    for name, text in sentences(story):
        why.add_row(Text(name, style=CLASS_STYLES.get(name, "bold")), text)
    return Group(total, taken, Text(), table, Text(), why, Text(), pace)


def _turns(story: Story) -> str:
    """Return what came of the box and of the jobs."""
    swaps = f"The box swapped models {words.plural(story.box.boots, 'time')}"
    if story.left_out:
        return (
            f"{swaps}, for chats: jobs are left out here ({story.left_out}). With jobs, such work runs"
            " in the background, and nobody waits for it."
        )
    ended = sum(job.is_over for job in story.jobs)
    return f"{words.plural(len(story.jobs), 'job')} submitted, {ended} ended. {swaps}."


def _pace(speed: float) -> str:
    if speed == 1:
        return "Medians. The GPUs are simulated, in real time; the gateway and the client are real."
    return (
        f"Medians, in GPU time: wall-clock time times {speed:g}. The GPUs are simulated; "
        "the gateway and the client are real, and their milliseconds are multiplied too."
    )


def problems(story: Story) -> Iterator[str]:
    """Yield what went wrong, a line each."""
    yield from story.problems
    for exchange in story.failures:
        name = f"{exchange.ask.kind.value} ({exchange.request_id or 'no request id'})"
        yield f"{name} at {exchange.backend or 'no backend'}: {exchange.problem}"


NEXT = "Next: `gemma-gateway demo --serve` keeps this fleet up for your own requests."


def snippets(url: str, admin_url: str, config: str) -> Mapping[str, str]:
    """Return what to paste, by the heading it stands under."""
    # Short lines: a terminal that breaks one would break what is pasted.
    curl = (
        f"curl -N {url}/v1/chat/completions \\\n"
        "  -H 'content-type: application/json' \\\n"
        f"""  -d '{{"model": "{MODEL}", "stream": true,\n"""
        """       "messages": [{"role": "user", "content": "Hello!"}]}'"""
    )
    sdk = (
        "from openai import OpenAI\n"
        f'client = OpenAI(base_url="{url}/v1", api_key="not-needed")\n'
        'hello = [{"role": "user", "content": "Hello!"}]\n'
        f'answer = client.chat.completions.create(model="{MODEL}", messages=hello)\n'
        "print(answer.choices[0].message.content)"
    )
    look = (
        f"{admin_url}/     # the console, for a browser\n"
        f"curl {admin_url}/admin/backends     # the fleet\n"
        f"curl {admin_url}/admin/requests     # the last decisions\n"
        f"curl {admin_url}/metrics            # for Prometheus"
    )
    why = (
        f"""echo '{{"model": "{MODEL}",\n"""
        """       "messages": [{"role": "user", "content": "Hello!"}]}' \\\n"""
        f"  | gemma-gateway explain --config {config} -"
    )
    return {"shell": curl, "Python": sdk, "operators": look, "why would it go there?": why}
