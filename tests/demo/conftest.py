"""A story at several moments, made by hand: what the view, the plain lines and the summary are shown."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from gateway.demo import prompts
from gateway.demo.prompts import Ask, Kind
from gateway.demo.reasons import RouteReason
from gateway.demo.story import BoxGauge, Exchange, Gauge, Stage, Story, SubmittedJob

ANYTHING = RouteReason(
    "no other class matches", "light-0 ties with light-1, and is listed first", "no other class"
)


def answered(ask: Ask, at: float, **fields: Any) -> Exchange:
    """Return an exchange that went well."""
    exchange = Exchange(
        ask,
        at,
        first_at=at + 0.1,
        ended_at=at + 1.1,
        stage=Stage.ANSWERED,
        status=200,
        request_id="req-1",
        traffic_class="short_chat",
        pool="light",
        backend="light-0",
        prompt_tokens=38,
        output_tokens=101,
        why=ANYTHING,
    )
    for name, value in fields.items():
        setattr(exchange, name, value)
    return exchange


def _add(story: Story, *exchanges: Exchange) -> None:
    for exchange in exchanges:
        story.exchanges.append(exchange)
        story.entries.append(exchange)


def _busy() -> Story:
    story = Story(speed=10.0, url="http://127.0.0.1:43911")
    story.caption = "A document of 190,000 tokens: minutes of reading on PUSH. " * 4
    up = Gauge("light-0", "up", "answers", 64, 1.0, 64, 12, 0.4567, 17_900.0)
    story.fleet = {
        "light-0": up,
        "light-1": replace(up, name="light-1", state="probation", in_flight=2, knee_used=0.03),
        "push": replace(up, name="push", in_flight=1, knee_used=0.0625, tokens_per_s=1.0),
        "spark": Gauge("spark", "ejected", "3 requests failed, the last with status 500: " + "x" * 300),
        "tpu": Gauge("tpu", "booting", "connection refused; it has 600 s to boot", running=6, waiting=0),
    }
    story.box = BoxGauge("booting", "qwen", for_s=1.0, reason="3 wait" * 99, waiting={"spark": 0, "qwen": 3})
    story.jobs = [SubmittedJob("resp_1"), SubmittedJob("resp_2", "completed")]
    document = Ask(Kind.DOCUMENT, {}, title="docstrings, 129 files of Python", about_tokens=190_000)
    too_long = Ask(Kind.TOO_LONG, {}, title="47 files", refusal="context_length_exceeded")
    _add(
        story,
        answered(prompts.chat(0), 1.0),
        answered(
            document, 2.0, traffic_class="long_document", pool="push", backend="push", prompt_tokens=191_544
        ),
        Exchange(
            too_long,
            3.0,
            ended_at=3.2,
            stage=Stage.REFUSED,
            status=400,
            code="context_length_exceeded",
            request_id="req-2",
            traffic_class="long_document",
            prompt_tokens=295_512,
            why=RouteReason(
                "prompt 295,512 >= 16,000",
                "push: needs 295,812 tokens, holds 262,144",
                "too long for push",
                excluded=(("push", "context_exceeded", "needs 295,812 tokens, holds 262,144"),),
            ),
        ),
        Exchange(document, 4.0),
        Exchange(
            prompts.chat(1),
            5.0,
            first_at=5.1,
            stage=Stage.STREAMING,
            backend="light-1",
            text="One\ntwo " * 90,
        ),
        Exchange(
            prompts.chat(2), 5.5, ended_at=6.0, stage=Stage.FAILED, status=502, problem="502: " + "no " * 99
        ),
    )
    story.note(6.5, "light-0: up → booting: connection refused " + "y" * 200, "bad")
    for number in range(40):
        exchange = story.begin(prompts.chat(number, burst=1), 7.0)
        exchange.backend, exchange.pool, exchange.traffic_class = f"light-{number % 2}", "light", "short_chat"
    return story


def _unpronounceable() -> Story:
    """Names and texts from elsewhere: wide characters, control characters, markup, very long names."""
    story = Story(speed=2.5, url="http://127.0.0.1:1")
    story.caption = "漢字 [bold]not markup[/] 🙂 \x1b[31m"
    name = "a-backend-with-a-name-that-is-far-too-long-for-its-column"
    story.box = BoxGauge("a-state-of-some-future-version", name, name, waiting={"漢字": 10**9})
    story.fleet = {name: Gauge(name, "a-state-of-some-future-version", "漢字" * 100, 12_345, 7.5, 999_999, 9)}
    _add(
        story,
        answered(
            prompts.chat(0), 0.0, traffic_class="漢字_class_of_a_site", backend=name, text="漢\t字" * 50
        ),
        Exchange(
            replace(prompts.chat(3), title="漢字 🙂\r\x1b[2J" * 9),
            0.5,
            stage=Stage.STREAMING,
            text="漢\t字\x07" * 99,
        ),
    )
    return story


_MOMENTS: Mapping[str, Callable[[], Story]] = {
    "before-the-start": lambda: Story(speed=10.0),
    "everything-at-once": _busy,
    "foreign-texts": _unpronounceable,
}


@pytest.fixture(params=list(_MOMENTS))
def any_story(request: pytest.FixtureRequest) -> Story:
    """Every story in turn."""
    return _MOMENTS[str(request.param)]()


@pytest.fixture
def busy_story() -> Story:
    """A story in which everything that can happen is happening."""
    return _busy()
