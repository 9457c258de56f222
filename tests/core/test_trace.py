"""W3C Trace Context: what counts as a `traceparent`, and the ids made of it."""

import random

import pytest

from gateway.core.trace import SpanRef, Trace, is_chosen, parse, passed_on

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("header", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),  # flags that are not known yet
        (f"00-{TRACE}-{SPAN}-02", False),
        (f"01-{TRACE}-{SPAN}-01-what-comes-later", True),  # a later version has more at its end
        (f" 00-{TRACE}-{SPAN}-01 ", True),
    ],
)
def test_a_header_that_counts(header: str, sampled: bool) -> None:
    assert parse(header) == SpanRef(int(TRACE, 16), int(SPAN, 16), sampled)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "garbage",
        f"00-{TRACE}-{SPAN}",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",  # version 00 has nothing more
        f"00-{TRACE}-{SPAN}-0g",
        f"00-{TRACE}-{SPAN}-01\n00-{TRACE}-{SPAN}-01",
    ],
)
def test_a_header_that_does_not(header: str) -> None:
    assert parse(header) is None


def test_a_header_is_written_as_it_is_read() -> None:
    header = f"00-{TRACE}-{SPAN}-01"
    found = parse(header)
    assert found is not None
    assert found.traceparent == header


def test_children_are_different_and_always_the_same() -> None:
    trace = Trace(SpanRef(7, 9, is_sampled=True))
    children = [trace.child(number) for number in range(1, 2000)]
    assert len({child.span_id for child in children} | {trace.own.span_id}) == 2000
    assert all(child.trace_id == 7 and child.is_sampled and 0 < child.span_id < 1 << 64 for child in children)
    assert [trace.child(number) for number in range(1, 2000)] == children


def test_a_share_of_all_traces_is_chosen() -> None:
    dice = random.Random(1)
    ids = [dice.getrandbits(128) for _ in range(10_000)]
    assert not any(is_chosen(one, 0.0) for one in ids)
    assert all(is_chosen(one, 1.0) for one in ids)
    assert 800 < sum(is_chosen(one, 0.1) for one in ids) < 1200
    assert {one for one in ids if is_chosen(one, 0.1)} < {one for one in ids if is_chosen(one, 0.2)}


def test_where_the_gateway_has_no_spans_the_caller_s_is_passed_on() -> None:
    found = passed_on(f"00-{TRACE}-{SPAN}-01")
    assert found is not None
    assert not found.is_ours
    assert found.own.trace_id == int(TRACE, 16)
    assert passed_on(None) is None
    assert passed_on("garbage") is None
