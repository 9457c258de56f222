"""Which requests are kept as traces, and what their spans say. How they are sent: e2e/test_tracing.py."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from support.rankings import ranking_of
from telemetry.test_telemetry import ATTEMPT, BACKENDS, DECISION
from telemetry.test_telemetry import RECORD as SERVED

from gateway.core.decision import Candidate, Exclusion, Ranking
from gateway.core.health import Outcome
from gateway.core.load import Demand
from gateway.core.usage import Ending, RequestRecord
from gateway.telemetry.tracing import WHOLE_MAX, KeepReason, TraceRules, Tracing, considered

RECORD = replace(SERVED, route="/v1/chat/completions")
FIRST = Candidate("light-0", "light", score=0.5)
FULL = tuple((f"light-{number}", Exclusion.AT_KNEE) for number in range(1, 101))


def kept(record: RequestRecord, **rules: Any) -> tuple[list[KeepReason], Sequence[ReadableSpan]]:
    """Return why a request is kept, if it is, and its spans, its own last. By default, the share is 0."""
    exporter, reasons = InMemorySpanExporter(), list[KeepReason]()
    subject = Tracing(
        TraceRules(**{"share": 0.0, **rules}), exporter, "gateway", lambda: BACKENDS, reasons.append
    )
    subject.finished(replace(record, trace=subject.begin(None)))
    subject._processor.force_flush()
    subject.close()
    return reasons, exporter.get_finished_spans()


def spans(record: RequestRecord) -> Sequence[ReadableSpan]:
    return kept(record, share=1.0)[1]


def facts(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.parametrize(
    ("fields", "rules", "reasons"),
    [
        ({}, {}, []),
        ({}, {"share": 1.0}, ["chosen"]),
        ({"ending": Ending.LEFT}, {}, []),
        ({"ending": Ending.HANDED_OVER}, {}, []),
        *(({"ending": one}, {}, ["failed"]) for one in ("failed", "broken", "shed", "rejected")),
        ({}, {"slow_total_s": 2.5}, []),  # it takes 2.5 s, and its first token 0.5
        ({}, {"slow_total_s": 2.4}, ["slow"]),
        ({"ending": Ending.FAILED}, {"slow_total_s": 2.4, "share": 1.0}, ["failed"]),
        ({}, {"slow_total_s": 2.4, "share": 1.0}, ["slow"]),
        ({"ttft_target_s": 0.5}, {}, []),
        ({"ttft_target_s": 0.4}, {}, ["slow"]),
        ({"ttft_target_s": 0.2}, {"slow_factor": 2.5}, []),
        ({"ttft_target_s": 0.2}, {"slow_factor": 2.4}, ["slow"]),
        ({"ttft_target_s": 0.4, "stream": False}, {}, []),
        ({"ttft_target_s": 0.4, "route": ""}, {}, []),
        ({"ttft_target_s": 2.4, "ending": Ending.LEFT, "first_byte_at": None}, {}, ["slow"]),
        ({"ttft_target_s": 2.5, "ending": Ending.LEFT, "first_byte_at": None}, {}, []),
    ],
)
def test_failed_and_slow_requests_are_kept_beside_a_share_of_all(
    fields: dict[str, Any], rules: dict[str, Any], reasons: list[str]
) -> None:
    fields = {**fields, "ending": Ending(fields.get("ending", "completed"))}

    why, found = kept(replace(RECORD, **fields), **rules)

    assert why == reasons
    assert bool(found) is bool(reasons)


def test_a_request_without_a_place_in_a_trace_is_not_kept() -> None:
    exporter = InMemorySpanExporter()
    subject = Tracing(TraceRules(share=1.0), exporter, "gateway", lambda: BACKENDS)
    subject.finished(RECORD)
    subject.close()

    assert exporter.get_finished_spans() == ()


def test_each_attempt_is_a_span_that_says_how_it_went() -> None:
    second = replace(
        ATTEMPT, outcome=Outcome.OK, detail="", started_at=10.3, first_byte_at=10.5, ended_at=12.5
    )
    attempts = (ATTEMPT, replace(second, connected_at=10.4))

    failed, connect, first, decode, answered = (
        span for span in spans(replace(RECORD, attempts=attempts)) if span.name not in OWN
    )

    assert [span.name for span in (connect, first, decode)] == [
        *("gateway.connect", "gateway.first_token", "gateway.decode")
    ]
    assert connect.end_time == first.start_time
    assert [(span.name, span.kind) for span in (failed, answered)] == [("chat gemma-4", SpanKind.CLIENT)] * 2
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.status.description == "status 500: boom"
    assert facts(failed)["error.type"] == "failed"
    assert answered.status.status_code is StatusCode.UNSET
    assert [facts(span).get("http.request.resend_count") for span in (failed, answered)] == [None, 1]
    assert [facts(span).get("gen_ai.usage.output_tokens") for span in (failed, answered)] == [None, 21]
    assert [event.name for event in answered.events] == ["first_token"]
    assert answered.events[0].timestamp == first.end_time == decode.start_time
    assert not failed.events


OWN = frozenset({"gateway.estimate", "gateway.admission", "POST /v1/chat/completions", "gateway.job"})


@pytest.mark.parametrize("connected_at", [None, 10.3])
def test_an_attempt_on_a_connection_that_was_kept_has_no_span_for_connecting(
    connected_at: float | None,
) -> None:
    attempt = replace(ATTEMPT, started_at=10.3, ended_at=12.5, connected_at=connected_at)

    assert [span.name for span in spans(replace(RECORD, attempts=(attempt,))) if span.name not in OWN] == [
        "chat gemma-4"
    ]


def test_a_job_has_no_caller() -> None:
    own = spans(replace(RECORD, route=""))[-1]

    assert (own.name, own.kind) == ("gateway.job", SpanKind.CONSUMER)
    assert not [name for name in facts(own) if name.startswith("http.")]


def test_a_request_that_became_a_job_waited_for_no_slot() -> None:
    found = spans(replace(RECORD, ending=Ending.HANDED_OVER, admitted_at=None))

    assert [span.name for span in found] == ["gateway.estimate", "POST /v1/chat/completions"]


def test_a_request_that_got_no_slot_waited_until_it_ended() -> None:
    _, waited, own = spans(replace(RECORD, ending=Ending.SHED, admitted_at=None, is_spill=True))

    assert waited.name == "gateway.admission"
    assert waited.end_time == own.end_time
    assert facts(waited) == {"gateway.spill": True}


def test_a_request_is_classified_once_its_prompt_is_counted() -> None:
    estimate, *_, own = spans(RECORD)

    assert [(event.name, event.timestamp) for event in own.events] == [("classified", estimate.end_time)]
    assert not spans(replace(RECORD, estimated_at=None))[-1].events


@pytest.mark.parametrize(("prompts", "error"), [(1, 10), (2, None)])  # of several, a sum is reported
def test_the_error_of_an_estimate_is_that_of_one_prompt(prompts: int, error: int | None) -> None:
    demand = Demand(seqs=prompts, prompt_tokens=100, total_tokens=200, prompts=prompts)

    own = spans(replace(RECORD, decision=replace(DECISION, demand=demand)))[-1]

    assert facts(own).get("gateway.estimate_error_tokens") == error


def unranked() -> tuple[Candidate, ...]:
    raise AssertionError("the fleet was ranked")


def test_a_small_fleet_is_told_whole() -> None:
    full = Candidate("light-1", "light", excluded=Exclusion.AT_KNEE, detail="64 of 64")

    assert considered(ranking_of(FIRST, full), WHOLE_MAX) == [
        "light-0: score 0.50",
        "light-1: at_knee (64 of 64)",
    ]


@pytest.mark.parametrize(("first", "said"), [(FIRST, ["light-0: first choice"]), (None, [])])
def test_a_large_fleet_is_not_ranked_to_be_told(first: Candidate | None, said: list[str]) -> None:
    told = considered(Ranking(first, FULL, unranked), WHOLE_MAX + 1)

    assert told[: len(said) + 1] == [*said, "light-1: at_knee"]
    assert len(told) == len(said) + WHOLE_MAX
