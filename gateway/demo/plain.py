"""The demo as plain lines, for logs, pipes and screen readers: one per request as it ends, one per event."""

from collections.abc import Iterator

from gateway.demo import words
from gateway.demo.story import Exchange, Note, Stage, Story

REASON_PATIENCE_S = 30.0
"""How long a line waits for the gateway's reason before it is printed without. A choice: busy machines are
late."""


class PlainLines:
    """Turns a story into lines, each of them once."""

    def __init__(self, story: Story) -> None:
        """Read `story`."""
        self._story = story
        self._caption = ""
        self._told: set[int] = set()  # ids of what has been told; the story keeps them alive

    def news(self, now: float, *, final: bool = False) -> Iterator[str]:
        """Yield what is new; `final` leaves nothing out."""
        story = self._story
        if story.caption != self._caption:
            self._caption = story.caption
            yield f"{words.clock(now)}  --  {story.caption}"
        for entry in list(story.entries):
            if isinstance(entry, Note) and self._is_new(entry):
                yield f"{words.clock(entry.at)}  **  {entry.text}"
        for exchange in sorted(story.exchanges, key=lambda one: one.ended_at or now):
            if exchange.stage.is_over and (final or _is_explained(exchange, now)) and self._is_new(exchange):
                yield request_line(exchange, story.speed, now)

    def _is_new(self, entry: object) -> bool:
        if id(entry) in self._told:
            return False
        self._told.add(id(entry))
        return True


def _is_explained(exchange: Exchange, now: float) -> bool:
    return exchange.why is not None or now - (exchange.ended_at or 0.0) > REASON_PATIENCE_S


def request_line(exchange: Exchange, speed: float, now: float) -> str:
    """Return a request that is over in one line."""
    first, rate = exchange.first_s(now), exchange.rate(now)
    facts = [
        f"{exchange.status or 'ERR'} {exchange.ask.kind.value}",
        f"{words.tokens(exchange.prompt_tokens)} tokens" if exchange.prompt_tokens else "",
        "streamed" if exchange.ask.stream else "",
        f"first token {words.seconds(first * speed)}" if first is not None and exchange.ask.stream else "",
        f"answer {words.seconds(first * speed)}" if first is not None and not exchange.ask.stream else "",
        words.rate(rate / speed) if rate else "",
    ]
    where = f"{exchange.traffic_class or 'no class'} -> {exchange.backend or 'nowhere'}"
    reason = exchange.why.full if exchange.why else ""
    if exchange.stage is Stage.FAILED:
        reason = f"FAILED: {exchange.problem}"
    elif exchange.stage is Stage.REFUSED:
        reason = f"as intended: {exchange.why.full if exchange.why else exchange.code}"
    text = f"{words.clock(exchange.ended_at or now)}  {', '.join(fact for fact in facts if fact)}  {where}"
    return f"{text}  ({reason})" if reason else text
