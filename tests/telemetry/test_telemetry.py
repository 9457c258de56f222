"""What is kept of a request: metrics, a log line, the journal. Never its text."""

import io
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.rankings import ranking_of

from gateway.clock import SystemClock
from gateway.core.backends import Backend, Capacity, KneeStep
from gateway.core.box import Box, Quarantine
from gateway.core.box import State as BoxState
from gateway.core.box_swaps import Swap, SwapCause
from gateway.core.count_check import CountDrift
from gateway.core.decision import Candidate, Decision, Exclusion
from gateway.core.drift import Drift
from gateway.core.health import BackendStatus, EngineSample, Outcome, ProbeFault, State
from gateway.core.jobs import (
    AttemptEnd,
    AttemptOutcome,
    Beginning,
    Job,
    JobError,
    JobStatus,
    NewJob,
)
from gateway.core.knee_estimate import Confidence, KneeEstimate, LimitedBy, Uncertainty
from gateway.core.load import Demand, Load
from gateway.core.request import CountMode, Estimate
from gateway.core.swap_policy import Backlog, Cause, Plan
from gateway.core.tpot_control import TpotControl
from gateway.core.usage import AttemptRecord, Ending, RequestRecord, Usage
from gateway.core.versions import bounds
from gateway.core.webhooks import Delivery, WebhookAttempt, WebhookOutcome, failed, judge
from gateway.pipeline import BackendSnapshot
from gateway.pipeline.box_controller import BoxSnapshot
from gateway.telemetry import gauges, logs
from gateway.telemetry.journal import Journal, is_notable
from gateway.telemetry.logs import RequestLog
from gateway.telemetry.metrics import DURATION_BUCKETS_S, NOTED_MAX, TTFT_BUCKETS_S, Metrics
from gateway.telemetry.recorder import Recorders

BACKENDS = {
    name: Backend(name, f"http://{name}", Capacity(context_tokens=100, knee=(KneeStep(None, 64),)))
    for name in ("light-0", "push")
}
DECISION = Decision(
    model="gemma-4",
    traffic_class="short_chat",
    class_reason="takes everything else",
    pools=("light", "push"),
    estimate=Estimate(100, 116, CountMode.EXACT),
    demand=Demand(seqs=1, prompt_tokens=100, total_tokens=200),
    candidates=ranking_of(
        Candidate("light-0", "light"), Candidate("push", "push", excluded=Exclusion.AT_KNEE)
    ),
)
UNOPPOSED = replace(DECISION, candidates=ranking_of(Candidate("light-0", "light")))
RECORD = RequestRecord(
    id="req-1",
    model="gemma-4",
    stream=True,
    ending=Ending.COMPLETED,
    status=200,
    error_code="",
    key="team-a",
    wall_at=1.0,
    received_at=10.0,
    estimated_at=10.001,
    admitted_at=10.201,
    first_byte_at=10.5,
    ended_at=12.5,
    decision=DECISION,
    backend="light-0",
    pool="light",
    usage=Usage(prompt_tokens=110, completion_tokens=21),
)
ATTEMPT = AttemptRecord(
    "req-1", "light-0", "light", "short_chat", Outcome.FAILED, "status 500: boom", 1.0, None, 2.0
)


def metrics(**fields: object) -> Metrics:
    nothing = (
        *("loads", "statuses", "drifts", "count_drifts", "snapshots", "waiting", "store_modes"),
        *("oldest_waits_s", "wait_limits_s", "wants", "boxes", "served", "objections", "connections"),
    )
    sources = {"backends": lambda: BACKENDS, "replicas": lambda: 1, "dropped_lines": int}
    subject = Metrics()
    gauges.register(subject.registry, **{**sources, **dict.fromkeys(nothing, dict), **fields})  # type: ignore[arg-type]
    return subject


def value(subject: Metrics, name: str, **labels: str) -> float | None:
    return subject.registry.get_sample_value(name, labels)


def test_a_served_request_is_measured() -> None:
    subject = metrics()

    subject.finished(RECORD)

    where = {"traffic_class": "short_chat", "backend": "light-0"}
    total = {**where, "pool": "light", "ending": "completed", "code": ""}
    assert value(subject, "gateway_requests_total", **total) == 1
    assert value(subject, "gateway_time_to_first_token_seconds_sum", **where) == 0.5
    assert value(subject, "gateway_time_per_output_token_seconds_sum", **where) == pytest.approx(0.1)
    assert value(subject, "gateway_request_duration_seconds_sum", **where) == 2.5
    assert value(subject, "gateway_input_tokens_total", **where) == 110
    assert value(subject, "gateway_output_tokens_total", **where) == 21
    assert value(subject, "gateway_estimate_error_ratio_bucket", backend="light-0", le="0.05") == 0
    assert value(subject, "gateway_estimate_error_ratio_bucket", backend="light-0", le="0.1") == 1
    assert value(subject, "gateway_estimate_seconds_sum") == pytest.approx(0.001)
    assert value(subject, "gateway_queue_seconds_sum", traffic_class="short_chat") == pytest.approx(0.2)
    assert value(subject, "gateway_exclusions_total", backend="push", reason="at_knee") == 1
    assert value(subject, "gateway_spills_total", traffic_class="short_chat", pool="push") is None


ORDINARY = replace(RECORD, stream=False, route="/v1/chat/completions", decision=UNOPPOSED)


@given(
    st.lists(
        st.builds(
            partial(replace, ORDINARY),
            stream=st.booleans(),
            due_s=st.sampled_from([None, 0.4, 0.6]),
            is_spill=st.booleans(),
            usage=st.sampled_from([None, Usage(110, 21), Usage(90, 1)]),
            decision=st.sampled_from([UNOPPOSED, UNOPPOSED, DECISION, None]),
            backend=st.sampled_from(["light-0", "push"]),
            ending=st.sampled_from([Ending.COMPLETED, Ending.COMPLETED, Ending.FAILED]),
            ended_at=st.floats(11, 400),
        ),
        max_size=NOTED_MAX + 5,
    )
)
def test_requests_counted_together_are_counted_like_single_ones(records: list[RequestRecord]) -> None:
    together, single = metrics(), metrics()

    for record in records:
        together.finished(record)
        single._count(record)  # `finished` would count it as one that is alike

    assert figures(together) == pytest.approx(figures(single))


def figures(subject: Metrics) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in subject.registry.collect()
        for sample in family.samples
        if sample.name.startswith("gateway") and not sample.name.endswith("_created")
    }


def test_how_many_gateways_there_are_and_how_they_count() -> None:
    assert value(metrics(), "gateway_replicas") == 1
    assert value(metrics(), "gateway_store_mode", mode="shared") is None

    subject = metrics(replicas=lambda: 3, store_modes=lambda: {"shared": False, "alone": True})

    assert value(subject, "gateway_replicas") == 3
    assert value(subject, "gateway_store_mode", mode="shared") == 0
    assert value(subject, "gateway_store_mode", mode="alone") == 1


def test_a_first_token_is_late_when_its_class_wants_it_sooner_and_somebody_looks_on() -> None:
    subject = metrics()
    for due_s, route in (
        (0.4, "/v1/completions"),
        (0.6, "/v1/completions"),
        (0.4, ""),
        (None, "/v1"),
    ):
        subject.finished(replace(RECORD, due_s=due_s, route=route))
    subject.finished(replace(RECORD, due_s=0.4, route="/v1/chat/completions", stream=False))

    where = {"traffic_class": "short_chat", "backend": "light-0"}
    for timeliness in ("late", "timely"):
        assert value(subject, "gateway_first_tokens_total", **where, timeliness=timeliness) == 1
    assert value(subject, "gateway_time_to_first_token_seconds_count", **where) == 4


def test_a_first_token_that_a_caller_no_longer_waited_for_is_late() -> None:
    subject = metrics()
    left = replace(
        RECORD, ending=Ending.LEFT, route="/v1/chat/completions", first_byte_at=None, usage=None, due_s=2.0
    )
    subject.finished(left)  # after 2.5 s
    subject.finished(replace(left, backend="", pool=""))  # still in line
    subject.finished(replace(left, due_s=3.0))  # sooner than anybody wants it
    subject.finished(replace(left, route=""))
    subject.finished(replace(left, stream=False))

    late = {"traffic_class": "short_chat", "timeliness": "late"}
    assert value(subject, "gateway_first_tokens_total", **late, backend="light-0") == 1
    assert value(subject, "gateway_first_tokens_total", **late, backend="") == 1
    assert b'timeliness="timely"' not in subject.exposition()[0]()
    assert value(subject, "gateway_time_to_first_token_seconds_count", **late) is None


def test_a_spill_is_counted() -> None:
    subject = metrics()

    subject.finished(replace(RECORD, pool="push", backend="push", is_spill=True))

    assert value(subject, "gateway_spills_total", traffic_class="short_chat", pool="push") == 1


def test_a_job_that_finds_no_room_is_no_request_that_was_refused() -> None:
    subject = metrics()
    total = {
        "traffic_class": "short_chat",
        "pool": "light",
        "backend": "light-0",
        "ending": "shed",
        "code": "",
    }

    subject.finished(replace(RECORD, ending=Ending.SHED, route=""))
    assert value(subject, "gateway_requests_total", **total) is None
    subject.finished(replace(RECORD, ending=Ending.SHED, route="/v1/chat/completions"))
    assert value(subject, "gateway_requests_total", **total) == 1


def test_an_unknown_model_leaves_no_label_of_the_callers_choosing() -> None:
    subject = metrics()

    subject.finished(
        replace(
            RECORD, model="x" * 10_000, decision=None, backend="", pool="", first_byte_at=None, usage=None
        )
    )

    assert b"xxxx" not in subject.exposition()[0]()


def test_a_token_rate_needs_a_stream_of_two_tokens() -> None:
    assert replace(RECORD, usage=Usage(110, 1)).tpot_s is None
    assert replace(RECORD, first_byte_at=None).tpot_s is None


def test_what_is_reported_as_a_sum_is_not_taken_for_one_of_its_parts() -> None:
    subject = metrics()
    where = {"traffic_class": "short_chat", "backend": "light-0"}
    demands = [Demand(seqs=8, prompt_tokens=100, total_tokens=200, prompts=prompts) for prompts in (1, 8)]
    several_answers, several_prompts = [
        replace(RECORD, usage=Usage(110 * demand.prompts, 160), decision=replace(DECISION, demand=demand))
        for demand in demands
    ]

    for record in (several_answers, several_prompts):
        subject.finished(record)

    assert value(subject, "gateway_time_per_output_token_seconds_count", **where) is None
    assert value(subject, "gateway_estimate_error_ratio_bucket", backend="light-0", le="0.1") == 1
    assert value(subject, "gateway_estimate_error_ratio_count", backend="light-0") == 1
    assert value(subject, "gateway_input_tokens_total", **where) == 110 + 880
    assert value(subject, "gateway_output_tokens_total", **where) == 320


def test_gauges_are_read_when_asked_for() -> None:
    engine = EngineSample(at=0, running=3, waiting=1, kv_usage=0.25)
    subject = metrics(
        loads=lambda: {"light-0": Load(seqs=32, share=500_000, kv_blocks=7)},
        statuses=lambda: {"light-0": BackendStatus(state=State.UP, engine=engine)},
        drifts=lambda: {"light-0": Drift(median_tokens=40.0, drifted=True)},
        waiting=lambda: {("gemma-4", "short_chat"): 3, ("gemma-4", "removed"): 1, ("qwen", "removed"): 0},
        oldest_waits_s=lambda: {("gemma-4", "short_chat"): 12.5, ("gemma-4", "removed"): 2.5},
        wait_limits_s=lambda: {("gemma-4", "short_chat"): 15.0, ("gemma-4", "idle"): 60.0},
        served=lambda: {("gemma-4", "short_chat"): True},
        wants=lambda: {"light-0": Backlog(3, 1.0), "push": Backlog()},
    )

    assert value(subject, "gateway_in_flight", backend="light-0") == 32
    assert value(subject, "gateway_in_flight", backend="push") == 0
    assert value(subject, "gateway_knee_used_ratio", backend="light-0") == 0.5
    assert value(subject, "gateway_engine_running", backend="light-0") == 3
    assert value(subject, "gateway_engine_running", backend="push") is None
    assert value(subject, "gateway_backend_state", backend="light-0", state="up") == 1
    assert value(subject, "gateway_backend_state", backend="light-0", state="down") == 0
    assert value(subject, "gateway_estimate_drift_tokens", backend="light-0") == 40
    assert value(subject, "gateway_estimate_drifted", backend="light-0") == 1
    line = {"model": "gemma-4", "traffic_class": "short_chat"}
    assert value(subject, "gateway_waiting", **line) == 3
    assert value(subject, "gateway_oldest_wait_seconds", **line) == 12.5
    assert value(subject, "gateway_wait_limit_seconds", **line) == 15
    assert value(subject, "gateway_class_served", **line) == 1
    idle = {"model": "gemma-4", "traffic_class": "idle"}  # nobody has ever waited there
    assert value(subject, "gateway_waiting", **idle) == 0
    assert value(subject, "gateway_oldest_wait_seconds", **idle) == 0
    removed = {"model": "gemma-4", "traffic_class": "removed"}  # from the configuration, but not yet empty
    assert value(subject, "gateway_waiting", **removed) == 1
    assert value(subject, "gateway_oldest_wait_seconds", **removed) == 2.5
    assert value(subject, "gateway_waiting", model="qwen", traffic_class="removed") is None
    assert value(subject, "gateway_oldest_wait_seconds", model="qwen", traffic_class="removed") is None
    assert value(subject, "gateway_backend_waiting", backend="light-0") == 3
    assert value(subject, "gateway_backend_waiting", backend="push") == 0


def shown(subject: Metrics, prefix: str) -> dict[str, float]:
    """Return all samples whose names begin so, by name and labels, without those that are 0."""
    return {
        " ".join([sample.name.removeprefix(prefix), *sample.labels.values()]): sample.value
        for family in subject.registry.collect()
        for sample in family.samples
        if sample.name.startswith(prefix) and sample.value
    }


def test_gauges_of_engines_and_knees() -> None:
    doubtful = KneeEstimate(41.5, Confidence.LOW, Uncertainty.HIDDEN, LimitedBy.COMPUTE, 20.0, 30.0)
    unknown = replace(doubtful, seqs=None)
    snapshot = BackendSnapshot(
        0.75, 0.05, TpotControl(tpot_s=0.06), {KneeStep(8_000, 64): doubtful, KneeStep(None, 8): doubtful}
    )
    subject = metrics(
        backends=lambda: {**BACKENDS, "push": replace(BACKENDS["push"], drain=True)},
        loads=lambda: {"light-0": Load(kv_blocks=7)},
        statuses=lambda: {
            "light-0": BackendStatus(State.UP, engine=EngineSample(0, 3, 1, 0.25), served_models=("gemma-4",))
        },
        drifts=lambda: {"light-0": Drift(image_tokens=70, image_tokens_expected=280)},
        count_drifts=lambda: {"light-0": CountDrift("light-0", seqs=4, lasting_seqs=2, kv_blocks=9)},
        snapshots=lambda: {
            "light-0": snapshot,
            "push": replace(snapshot, tpot_target_s=None, knees={KneeStep(None, 8): unknown}),
            "idle": replace(snapshot, control=TpotControl(), knees={}),
        },
        connections=lambda: {"applications": (12, 8_192)},
        dropped_lines=lambda: 5,
    )

    assert shown(subject, "gateway_connections") == {" applications": 12, "_max applications": 8_192}

    assert shown(subject, "gateway_backend_") == {
        "usable light-0": 1,
        "state light-0 up": 1,
        "drained push": 1,
        "state push unknown": 1,
    }
    assert shown(subject, "gateway_engine_") == {
        "running light-0": 3,
        "waiting light-0": 1,
        "kv_usage_ratio light-0": 0.25,
    }
    assert shown(subject, "gateway_kv_") == {"blocks light-0": 7, "blocks_taken light-0": 9}
    assert shown(subject, "gateway_count_drift_") == {"seqs light-0": 4, "lasting_seqs light-0": 2}
    assert shown(subject, "gateway_estimate_drifted") == {" light-0": 1}
    assert shown(subject, "gateway_knee_") == {
        "seqs light-0": 64,
        "seqs push": 64,
        "share_ratio light-0": 0.75,
        "share_ratio idle": 0.75,
        "tpot_seconds light-0": 0.06,
        "estimate_seqs light-0 8000 low": 41.5,
        "estimate_seqs light-0 +Inf low": 41.5,
    }
    assert value(subject, "gateway_log_lines_dropped_total") == 5
    assert subject.exposition()[0]()  # no value that is missing spoils the page


def test_gauges_of_backends_that_get_nothing() -> None:
    """What an engine said before it ceased to say anything is not shown as what it says now."""
    up = BackendStatus(State.UP, engine=EngineSample(0, 3, 1, 0.25), served_models=("gemma-4",))
    subject = metrics(
        statuses=lambda: {"light-0": up, "push": replace(up, metrics_error="status 500")},
        objections=lambda: {"light-0": (Exclusion.SWAPPED_OUT, "Its box runs another model.")},
    )

    assert shown(subject, "gateway_backend_usable") == {" push": 1}
    assert shown(subject, "gateway_engine_running") == {" light-0": 3}


def test_gauges_of_boxes() -> None:
    box = Box(BoxState.RESIDENT, backend="gemma", quarantine={"qwen": Quarantine("It broke.")})
    snapshot = BoxSnapshot(
        box=replace(box, boot_s={"gemma": 95.0}, swaps=3),
        plan=Plan(Cause.AGE, "qwen"),
        wants={"gemma": Backlog(1, oldest_at=100.5), "qwen": Backlog(2, oldest_at=70.0)},
        stored={"gemma": Backlog(), "qwen": Backlog(4, oldest_at=40.0)},
        is_owner=True,
        fence=1,
        waits_for="",
        at=100.0,
    )

    assert shown(metrics(boxes=lambda: {"spark": snapshot}), "gateway_box_") == {
        "state spark resident": 1,
        "serving spark gemma": 1,
        "owner spark": 1,
        "boots_total spark": 3,
        "boot_seconds spark gemma": 95.0,
        "waiting spark gemma": 1,  # for no time: another machine's clock is ahead
        "waiting spark qwen": 2,
        "stored_jobs spark qwen": 4,
        "oldest_wait_seconds spark qwen": 60.0,
        "quarantined spark qwen": 1,
        "swap_planned spark qwen age": 1,
    }
    leaving = replace(snapshot, box=replace(box, state=BoxState.DRAINING), plan=Plan(), is_owner=False)
    found = shown(metrics(boxes=lambda: {"spark": leaving}), "gateway_box_")
    assert not [name for name in found if name.startswith(("serving", "owner", "swap_planned"))]


def test_what_no_backend_has_done_yet_is_counted_as_none() -> None:
    backends = dict(BACKENDS)
    subject = metrics()
    subject.config_in_force("1", backends, 0.0)
    backends["new"] = BACKENDS["push"]
    subject.config_in_force("2", backends, 1.0)

    for name in ("light-0", "push", "new"):
        assert value(subject, "gateway_backend_restarts_total", backend=name) == 0
        assert value(subject, "gateway_backend_state_changes_total", backend=name, state="ejected") == 0


def test_states_and_restarts_are_counted() -> None:
    subject = metrics()
    up = BackendStatus(state=State.UP)

    subject.backend_changed("push", up, replace(up, state=State.PROBATION, restarts=1))

    assert value(subject, "gateway_backend_state_changes_total", backend="push", state="probation") == 1
    assert value(subject, "gateway_backend_restarts_total", backend="push") == 1


def test_a_swap_is_counted_and_timed() -> None:
    subject = metrics()
    subject.boxes_known({"spark": ["qwen"]})
    for cause in SwapCause:
        assert value(subject, "gateway_box_swaps_total", box="spark", backend="qwen", cause=cause.value) == 0

    subject.box_swapped("spark", Swap("qwen", SwapCause.AGE, 290.0))

    assert value(subject, "gateway_box_swaps_total", box="spark", backend="qwen", cause="age") == 1
    assert value(subject, "gateway_box_swap_seconds_bucket", box="spark", backend="qwen", le="240.0") == 0
    assert value(subject, "gateway_box_swap_seconds_bucket", box="spark", backend="qwen", le="300.0") == 1


def test_buckets_reach_beyond_what_is_published() -> None:
    assert TTFT_BUCKETS_S[-1] > 319  # the longest first token: docs/measurements.md
    assert DURATION_BUCKETS_S[-1] > 4 * 3600  # a long job's answer


def test_the_journal_keeps_the_newest() -> None:
    journal = Journal(entries_max=2)

    for number in range(3):
        journal.finished(replace(RECORD, id=f"req-{number}"))

    assert [record.id for record in journal.recent()] == ["req-2", "req-1"]


def test_the_journal_keeps_what_went_wrong_or_was_late_beside_the_rest() -> None:
    journal = Journal(entries_max=2, notable_max=2)
    late = replace(RECORD, id="late", ttft_target_s=0.4, route="/v1/chat/completions")

    for record in (late, *(replace(RECORD, id=f"req-{number}") for number in range(5))):
        journal.finished(record)

    assert [(number, record.id) for number, record in journal.since(0)] == [
        (6, "req-4"),
        (5, "req-3"),
        (1, "late"),
    ]
    assert [record.id for _, record in journal.since(5)] == ["req-4"]
    assert journal.count == 6
    assert journal.find("late") is late
    assert journal.find("req-0") is None


def test_of_many_requests_the_journal_keeps_some_of_each_second_and_all_that_went_wrong() -> None:
    journal = Journal()
    ended = [(number, number / 100, Ending.COMPLETED) for number in range(10_000)]  # 100 a second
    ended[5_000] = (5_000, 50.0, Ending.FAILED)
    for number, at, ending in ended:
        journal.finished(replace(RECORD, id=f"req-{number}", ended_at=at, ending=ending))

    kept = [int(record.id.removeprefix("req-")) for record in journal.recent()]
    assert journal.count == 10_000
    assert len(kept) == 1_001
    assert kept[0] >= 9_990
    assert kept[-1] <= 5_005  # 20 a second
    assert {one - other for one, other in pairwise(kept)} <= {1, 4, 5, 6}
    assert journal.find("req-5000") is not None


def test_in_the_journal_refusals_displace_nothing_else() -> None:
    journal = Journal(entries_max=2, notable_max=3)
    endings = [Ending.COMPLETED, *[Ending.SHED] * 4, Ending.COMPLETED, Ending.SHED]
    for number, ending in enumerate(endings):
        journal.finished(replace(RECORD, id=f"req-{number}", ending=ending))

    assert [record.id for record in journal.recent()] == [f"req-{number}" for number in (6, 5, 4, 3, 0)]
    assert [number for number, _ in journal.since(4)] == [7, 6, 5]


@pytest.mark.parametrize("per_s", [1, 19])
def test_of_few_requests_the_journal_keeps_all(per_s: int) -> None:
    journal = Journal()
    for number in range(1_000):
        journal.finished(replace(RECORD, id=f"req-{number}", ended_at=number / per_s))
    assert len(journal.recent()) == 1_000


def test_after_a_quiet_time_the_journal_keeps_a_burst() -> None:
    journal = Journal()
    for at in (100.0, 200.0):
        for number in range(300):
            journal.finished(replace(RECORD, id=f"req-{at}-{number}", ended_at=at))
    assert 400 <= len(journal.recent()) <= 402


def test_a_console_is_told_of_the_newest_and_of_what_went_wrong_before() -> None:
    journal = Journal()
    journal.finished(replace(RECORD, id="lost", ending=Ending.FAILED))
    for number in range(900):
        journal.finished(replace(RECORD, id=f"req-{number}", ended_at=float(number)))
    told = [record.id for _, record in journal.since(0)]
    assert told == [*(f"req-{number}" for number in range(899, 699, -1)), "lost"]


@pytest.mark.parametrize(
    ("fields", "is_so"),
    [
        ({}, False),
        ({"ttft_target_s": 0.6}, False),
        ({"ttft_target_s": 0.4}, True),
        ({"ttft_target_s": 0.4, "stream": False}, False),  # it had its place in time
        ({"ttft_target_s": 0.1, "stream": False}, True),
        ({"ttft_target_s": 0.4, "route": ""}, False),  # a job: nobody looks on
        ({"ending": Ending.LEFT}, False),
        ({"ending": Ending.LEFT, "ttft_target_s": 0.4, "first_byte_at": None}, False),
        ({"ending": Ending.SHED}, True),
        ({"ending": Ending.REJECTED}, True),
        ({"attempts": (ATTEMPT, ATTEMPT)}, True),
    ],
)
def test_what_is_notable(fields: dict[str, Any], is_so: bool) -> None:
    assert is_notable(replace(RECORD, **{"route": "/v1/chat/completions", **fields})) is is_so


def test_a_recorder_hands_everything_on() -> None:
    first, second, subject = Journal(), Journal(), metrics()
    recorders = Recorders((first, second, subject))

    recorders.attempt(ATTEMPT)
    recorders.finished(RECORD)

    assert first.recent() == second.recent() == (RECORD,)
    assert value(subject, "gateway_attempts_total", backend="light-0", outcome="failed") == 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level


@pytest.mark.usefixtures("_logging_as_it_was")
def test_a_backends_words_do_not_control_a_terminal() -> None:
    out = Terminal()
    logs.set_up("info", out)

    logging.getLogger("gateway.fleet").warning("b: serves %s", "m\x1b[2J\x9b1m\u202e\r\n12:00:00 ERROR   é")

    first, second = out.getvalue().splitlines()
    assert first.endswith("WARNING b: serves m [2J 1m  ")
    assert second == "  12:00:00 ERROR   é"


@pytest.mark.usefixtures("_logging_as_it_was")
def test_a_request_is_one_json_line() -> None:
    out = io.StringIO()
    logs.set_up("info", out)

    RequestLog().finished(RECORD)

    (line,) = out.getvalue().splitlines()
    fields = json.loads(line)
    assert fields["level"] == "info"
    assert fields["class"] == "short_chat"
    assert fields["why"] == "takes everything else"
    assert fields["backend"] == "light-0"
    assert fields["key"] == "team-a"
    assert (fields["estimate"], fields["prompt_tokens"], fields["output_tokens"]) == (100, 110, 21)
    assert (fields["queue_s"], fields["first_token_s"], fields["total_s"]) == (0.2, 0.5, 2.5)


@pytest.mark.parametrize("admitted_at", [10.001, 10.0105, None], ids=["at once", "from a store", "never"])
def test_a_request_that_did_not_wait_for_its_slot_says_nothing_of_it(admitted_at: float | None) -> None:
    assert "queue_s" not in logs.request_fields(replace(RECORD, admitted_at=admitted_at))


@pytest.mark.parametrize(("estimated_at", "read_s"), [(10.09, None), (12.5, 2.5), (None, None)])
def test_a_request_whose_body_took_long_says_how_long(
    estimated_at: float | None, read_s: float | None
) -> None:
    assert logs.request_fields(replace(RECORD, estimated_at=estimated_at)).get("read_s") == read_s


@pytest.mark.usefixtures("_logging_as_it_was")
@pytest.mark.parametrize(
    "record",
    [
        RECORD,
        replace(RECORD, model='"\\\n\x00', key=None),
        replace(RECORD, model="gemmá-4"),
        replace(RECORD, model="\x7f"),
        replace(RECORD, model="\ud83d"),  # half of a pair, which JSON can say and UTF-8 cannot
        replace(RECORD, usage=Usage(10**30, 1)),
        replace(RECORD, ended_at=10.00012),
    ],
    ids=["plain", "escapes", "letters", "control", "surrogate", "huge", "short"],
)
def test_a_requests_line_is_written_as_the_standard_library_writes_json(record: RequestRecord) -> None:
    out = io.StringIO()
    logs.set_up("info", out, worker=2)

    RequestLog().finished(record)

    (line,) = out.getvalue().splitlines()
    fields = json.loads(line)
    assert line == json.dumps(fields)
    assert list(fields)[:6] == ["at", "level", "log", "worker", "event", "id"]
    assert fields["model"] == record.model


@pytest.mark.usefixtures("_logging_as_it_was")
def test_requests_of_one_second_and_of_the_next_say_when_they_ended_and_at_which_level() -> None:
    out = io.StringIO()
    logs.set_up("info", out)
    (handler,) = logging.getLogger().handlers
    said = [(0.0, "INFO"), (0.9, "ERROR"), (1.0, "ERROR"), (1.1, "INFO"), (0.9, "INFO")]

    for second, level in said:
        facts = {"created": 1_700_000_000 + second, "levelname": level, "fields": {"event": "request"}}
        handler.handle(logging.makeLogRecord({"levelno": logging.INFO, **facts}))

    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [
        (datetime.strptime(line["at"], "%Y-%m-%dT%H:%M:%S%z").timestamp() - 1_700_000_000, line["level"])
        for line in lines
    ] == [(int(second), level.lower()) for second, level in said]


def test_a_requests_log_record_is_one_as_any_other(caplog: pytest.LogCaptureFixture) -> None:
    clock = SystemClock()
    recorder, before = RequestLog(), clock.wall()
    with caplog.at_level(logging.INFO):
        recorder.finished(replace(RECORD, ending=Ending.SHED))
        recorder.finished(RECORD)
        logs.requests_log.info("plain", extra={"fields": {}})

    shed, served, plain = caplog.records
    assert (shed.levelno, shed.levelname, served.levelname) == (logging.WARNING, "WARNING", "INFO")
    assert served.message == (
        "200 short_chat -> light-0, 100 tokens, waited 0.20 s, first token 0.50 s, 2.50 s, completed"
    )
    assert served.fields["backend"] == "light-0"  # type: ignore[attr-defined]
    assert vars(served).keys() == vars(plain).keys()
    for name in ("name", "process", "thread", "exc_info", "args"):
        assert vars(served)[name] == vars(plain)[name]
    assert before <= shed.created <= served.created <= plain.created
    assert 0 <= served.relativeCreated <= plain.relativeCreated


@pytest.mark.usefixtures("_logging_as_it_was")
def test_a_request_below_the_level_has_no_line() -> None:
    out = io.StringIO()
    logs.set_up("warning", out)

    RequestLog().finished(RECORD)

    assert out.getvalue() == ""


@pytest.mark.usefixtures("_logging_as_it_was")
@pytest.mark.parametrize(
    ("ending", "level"),
    [("completed", "INFO"), ("rejected", "INFO"), ("shed", "WARNING"), ("broken", "ERROR")],
)
def test_levels_mean_something(ending: str, level: str) -> None:
    out = Terminal()
    logs.set_up("info", out)

    RequestLog().finished(replace(RECORD, ending=Ending(ending)))

    (line,) = out.getvalue().splitlines()
    assert f" {level} " in line
    assert "short_chat -> light-0, 100 tokens, waited 0.20 s, first token 0.50 s, 2.50 s" in line


@pytest.mark.usefixtures("_logging_as_it_was")
@pytest.mark.parametrize(
    ("ending", "outcomes", "reason"),
    [
        ("failed", ["failed", "unreachable"], "unreachable here"),
        ("failed", ["draining"], "draining here"),  # no fault, so that `attempt_failed` does not say it
        ("broken", ["failed"], "failed here"),
        ("shed", ["failed"], "failed here"),
        ("shed", [], None),
        ("completed", ["failed", "ok"], None),
        ("rejected", ["rejected"], None),  # an engine's words about a prompt may quote it
        ("left", ["cancelled"], "cancelled here"),  # it may be that its caller read nothing
        ("left", ["rejected"], None),
        ("left", [], None),
    ],
)
def test_a_request_that_was_not_served_says_why_its_last_attempt_ended(
    ending: str, outcomes: Sequence[str], reason: str | None
) -> None:
    attempts = tuple(replace(ATTEMPT, outcome=Outcome(one), detail=f"{one} here") for one in outcomes)
    record = replace(RECORD, ending=Ending(ending), attempts=attempts)
    for out in (io.StringIO(), Terminal()):
        logs.set_up("info", out)

        RequestLog().finished(record)

        (line,) = out.getvalue().splitlines()
        if not isinstance(out, Terminal):
            assert json.loads(line).get("reason") == reason
        else:
            assert line.endswith(f", {ending}" + (f": {reason}" if reason else ""))


@pytest.mark.usefixtures("_logging_as_it_was")
def test_a_change_of_the_world_is_one_line() -> None:
    out = io.StringIO()
    logs.set_up("info", out)
    up, down = BackendStatus(state=State.UP), BackendStatus(state=State.DOWN, reason="no answer for 600 s")

    logs.backend_changed("push", up, down)
    logs.backend_changed("push", down, down)
    RequestLog().attempt(ATTEMPT)
    RequestLog().attempt(replace(ATTEMPT, outcome=Outcome.REJECTED, detail="status 400"))

    state, attempt = [json.loads(line) for line in out.getvalue().splitlines()]
    assert (state["level"], state["before"], state["state"], state["reason"]) == (
        "warning",
        "up",
        "down",
        "no answer for 600 s",
    )
    assert (attempt["event"], attempt["id"]) == ("attempt_failed", "req-1")
    assert (attempt["backend"], attempt["reason"]) == ("light-0", "status 500: boom")


@pytest.mark.usefixtures("_logging_as_it_was")
def test_a_wrong_model_is_one_line_and_so_is_its_end() -> None:
    out = io.StringIO()
    logs.set_up("info", out)
    unknown, right = BackendStatus(State.UP), BackendStatus(State.UP, served_models=("gemma",))
    wrong = BackendStatus(State.UP, served_models=("qwen",), model_error="serves qwen, not gemma")

    for old, new in ((right, wrong), (wrong, wrong), (wrong, unknown), (wrong, right), (right, right)):
        logs.backend_changed("push", old, new)

    said = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(one["event"], one["level"], one["message"], one.get("reason")) for one in said] == [
        ("backend_model", "warning", "push: serves qwen, not gemma", "serves qwen, not gemma"),
        ("backend_model", "info", "push: serves the right model now", None),
    ]


@pytest.mark.usefixtures("_logging_as_it_was")
def test_a_version_that_is_not_allowed_is_one_line_and_so_is_its_end() -> None:
    """Its state alone says that it is up."""
    out = io.StringIO()
    logs.set_up("info", out)
    unknown = BackendStatus(State.UP)
    right, wrong, none = (
        BackendStatus(State.UP, served_models=("gemma",), version=version) for version in ("0.23", "0.24", "")
    )

    for old, new in ((unknown, right), (right, wrong), (wrong, wrong), (wrong, unknown), (unknown, none)):
        logs.backend_changed("push", old, new, bounds("< 0.24"))
    logs.backend_changed("push", none, right, bounds("< 0.24"))
    logs.backend_changed("push", right, wrong)

    said = [json.loads(line) for line in out.getvalue().splitlines()]
    newer, silent = "engine version 0.24, not < 0.24", "the engine does not report its version"
    assert [(one["event"], one["level"], one["message"], one.get("reason")) for one in said] == [
        ("backend_version", "warning", f"push: {newer}: it gets no requests", newer),
        ("backend_version", "warning", f"push: {silent}: it gets no requests", silent),
        ("backend_version", "info", "push: its engine has an allowed version now", None),
    ]


@pytest.mark.usefixtures("_logging_as_it_was")
def test_several_engines_at_one_url_are_one_line() -> None:
    out = io.StringIO()
    logs.set_up("info", out)
    alone = BackendStatus(State.UP)
    shared = replace(alone, shared_at=1.0, metrics_error="several engines")

    for old, new in ((alone, shared), (shared, replace(shared, shared_at=2.0)), (shared, alone)):
        logs.backend_changed("push", old, new)

    (said,) = [json.loads(line) for line in out.getvalue().splitlines()]
    assert (said["event"], said["level"], said["reason"]) == ("backend_shared", "warning", "several engines")


@pytest.mark.usefixtures("_logging_as_it_was")
def test_that_an_engine_sleeps_is_one_line_and_so_is_its_end() -> None:
    out = io.StringIO()
    logs.set_up("info", out)
    awake = BackendStatus(State.UP)
    asleep = replace(awake, is_asleep=True, reason="its engine sleeps")

    for old, new in ((awake, asleep), (asleep, asleep), (asleep, awake), (awake, awake)):
        logs.backend_changed("push", old, new)

    said = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(one["event"], one["level"], one["message"], one.get("reason")) for one in said] == [
        ("backend_sleep", "info", "push: its engine sleeps", "its engine sleeps"),
        ("backend_sleep", "info", "push: sleeps no longer", None),
    ]


@pytest.mark.usefixtures("_logging_as_it_was")
def test_the_end_of_a_job_is_one_line_and_that_of_an_attempt_none() -> None:
    out = io.StringIO()
    logs.set_up("info", out)
    new = NewJob("resp_1", "alice", "m/light", b"secret", b"{}")
    job = Job(new, JobStatus.IN_PROGRESS, attempt=3, failures=2, created_at=10.0, started_at=14.0)
    end = AttemptEnd(job, AttemptOutcome.ENDED, Beginning.NEW, 1.5, JobStatus.COMPLETED)
    refused = replace(end, status=JobStatus.FAILED, error=JobError("wrong", "secret"))
    for outcome in set(AttemptOutcome) - {AttemptOutcome.ENDED, AttemptOutcome.POISONED}:
        logs.job_attempt_ended(replace(end, outcome=outcome, status=None))
    for one in (end, refused, replace(end, outcome=AttemptOutcome.POISONED, status=None)):
        logs.job_attempt_ended(one)

    said = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(one["level"], one["status"], one.get("code"), one["failures"]) for one in said] == [
        ("info", "completed", None, 2),
        ("info", "failed", "wrong", 2),
        ("warning", "failed", "job_poisoned", 3),
    ]
    took = ", m/light, attempt 3, taken after 4.0 s, took 1.5 s"
    assert [one["message"] for one in said] == [
        f"job resp_1: completed{took}",
        f"job resp_1: failed (wrong){took}",
        f"job resp_1: failed (job_poisoned){took}",
    ]
    assert "secret" not in out.getvalue()


@pytest.mark.usefixtures("_logging_as_it_was")
def test_a_wrong_certificate_of_a_backend_that_boots_is_one_line() -> None:
    out = io.StringIO()
    logs.set_up("info", out)
    booting = BackendStatus(state=State.BOOTING, reason="refused", probe_fault=ProbeFault.REFUSED)
    wrong = replace(booting, reason="TLS: certificate has expired", probe_fault=ProbeFault.TLS)

    logs.backend_changed("push", booting, replace(booting, reason="no route"))
    logs.backend_changed("push", booting, wrong)
    logs.backend_changed("push", wrong, wrong)

    (line,) = [json.loads(line) for line in out.getvalue().splitlines()]
    assert (line["before"], line["state"], line["reason"]) == ("booting", "booting", wrong.reason)


@pytest.mark.usefixtures("_logging_as_it_was")
def test_a_line_says_which_worker_wrote_it() -> None:
    machine, person = io.StringIO(), Terminal()
    for out in (machine, person):
        logs.set_up("info", out, worker=1)
        logging.getLogger("gateway.test").warning("it works")

    assert json.loads(machine.getvalue())["worker"] == 1
    assert person.getvalue().endswith("WARNING worker 1: it works\n")


@pytest.mark.usefixtures("_logging_as_it_was")
def test_an_exception_stays_on_one_line() -> None:
    out = io.StringIO()
    logs.set_up("info", out)

    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("gateway.test").exception("it failed")

    (line,) = out.getvalue().splitlines()
    assert "ValueError: boom" in json.loads(line)["exception"]


DELIVERY = Delivery("evt_1", "ops", claim=1, failures=1, body=b'{"data":{"id":"resp_7"}}')


@pytest.mark.parametrize(
    ("attempt", "level", "line"),
    [
        pytest.param(
            failed(DELIVERY, "HTTP 500"),
            "WARNING",
            "webhook ops: evt_1 (resp_7) failed: HTTP 500; attempt 2 of 10, the next in ",
            id="again",
        ),
        pytest.param(
            failed(replace(DELIVERY, failures=9), "HTTP 500"),
            "ERROR",
            "webhook ops: evt_1 (resp_7) failed: HTTP 500; given up after 10 attempts",
            id="given-up",
        ),
        pytest.param(
            judge(DELIVERY, 410),
            "ERROR",
            "webhook ops: evt_1 (resp_7) failed: HTTP 410; "
            "nothing more is sent to it until the gateway restarts",
            id="gone",
        ),
        pytest.param(
            WebhookAttempt(
                DELIVERY, WebhookOutcome.DROPPED, "too many deliveries are already waiting for it"
            ),
            "ERROR",
            "webhook ops: evt_1 (resp_7) failed: too many deliveries are already waiting for it; "
            "this delivery was dropped",
            id="dropped",
        ),
    ],
)
def test_a_webhook_that_fails_has_a_line(
    caplog: pytest.LogCaptureFixture, attempt: WebhookAttempt, level: str, line: str
) -> None:
    logs.webhook_attempted(attempt)
    (record,) = caplog.records
    assert record.levelname == level
    assert record.message.startswith(line)
    fields = record.fields  # type: ignore[attr-defined]
    assert (fields["outcome"], fields["subject"]) == (attempt.outcome.value, "resp_7")
    assert fields["event"] == ("webhook_failed" if level == "WARNING" else "webhook_lost")


def test_a_webhook_that_is_delivered_has_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        logs.webhook_attempted(judge(DELIVERY, 204))
    assert caplog.records == []
