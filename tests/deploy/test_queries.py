"""No query of the dashboard and the rules names a metric, a label or a value that does not exist."""

import json
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.promql import Named, named

from gateway.core.box import State as BoxState
from gateway.core.box_swaps import SwapCause
from gateway.core.health import Outcome, State
from gateway.core.jobs import AttemptOutcome, JobOutcome, JobStatus
from gateway.core.usage import Ending
from gateway.core.webhooks import WebhookOutcome
from gateway.store.fallback import Mode
from gateway.telemetry.loop_watch import BUCKETS_S
from gateway.telemetry.metrics import Timeliness

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "gemma-gateway.json").read_text())
RULES = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text())
SCRAPED = {"up": frozenset({"job", "instance"})}
TARGET = frozenset({"job", "instance"})
CODES = frozenset(
    re.findall(r"^\| .*? \| .*? \| `(\w+)` \|", (ROOT / "docs" / "errors.md").read_text(), re.M)
)
VALUES: Mapping[str, type[StrEnum] | frozenset[str]] = {
    "gateway_attempts_total.outcome": Outcome,
    "gateway_backend_state.state": State,
    "gateway_backend_state_changes_total.state": State,
    "gateway_box_state.state": BoxState,
    "gateway_box_swaps_total.cause": SwapCause,
    "gateway_first_tokens_total.timeliness": Timeliness,
    "gateway_job_attempts_total.outcome": AttemptOutcome,
    "gateway_jobs.status": JobStatus,
    "gateway_requests_total.code": CODES,  # a test holds that page to the code
    "gateway_requests_total.ending": Ending,
    "gateway_store_jobs_ended_total.outcome": JobOutcome,
    "gateway_store_mode.mode": Mode,
    "gateway_webhooks_total.outcome": WebhookOutcome,
}


def documented() -> dict[str, frozenset[str]]:
    """Return what Prometheus has: every series of docs/metrics.md, which a test holds to the code."""
    series: dict[str, frozenset[str]] = dict(SCRAPED)
    page = (ROOT / "docs" / "metrics.md").read_text()
    for name, kind, words in re.findall(r"^\| `(\w+)` \| (\w+) \|([\w, ]*)\|", page, re.M):
        labels = frozenset(re.findall(r"\w+", words)) | TARGET
        if kind == "histogram":
            series |= {f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels}
        else:
            series[name] = labels
    return series


def records() -> Iterator[tuple[str, str]]:
    for group in RULES["groups"]:
        for rule in group["rules"]:
            if "record" in rule:
                yield rule["record"], rule["expr"]


def alerts() -> list[Mapping[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"] if "alert" in rule]


def panels() -> list[Mapping[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str]]:
    yield from records()
    yield from ((rule["alert"], rule["expr"]) for rule in alerts())
    for panel in panels():
        for target in panel["targets"]:
            yield f"panel {panel['title']}, {target['refId']}", target["expr"]
    for note in DASHBOARD["annotations"]["list"]:
        yield f"annotation {note['name']}", note["expr"]


def available() -> dict[str, frozenset[str]]:
    """Return every series by its labels, the recorded ones too; each uses none that comes later."""
    series = documented()
    for name, expression in records():
        found = named(expression)
        assert found.metrics <= set(series), name
        # Grouped: what it is grouped by. Not grouped: all that its metrics have.
        labels = found.labels - {"le"}
        is_grouped = " by " in expression or "sum(" in expression
        series[name] = labels if is_grouped else frozenset().union(*(series[one] for one in found.metrics))
    return series


def wrong(found: Named, series: Mapping[str, frozenset[str]]) -> list[str]:
    """Return what a query names and there is not."""
    faults = [f"no metric {name}" for name in found.metrics - set(series)]
    known = frozenset().union(*(series.get(name, frozenset()) for name in found.metrics))
    faults += [f"no label {label}" for label in found.labels - known]
    for matcher in found.matchers:
        if matcher.label not in series.get(matcher.metric, ()):
            faults.append(f"{matcher.metric} has no label {matcher.label}")
            continue
        kinds = VALUES.get(f"{matcher.metric}.{matcher.label}")
        if kinds is not None:
            faults += [f"no {one} among {kinds}" for one in matcher.values if one not in set(kinds)]
        elif matcher.label == "le":
            faults += [f"no bucket {one}" for one in matcher.values if float(one) not in BUCKETS_S]
        elif matcher.label != "job" and any(matcher.values):  # none is always possible
            faults.append(f"whether {matcher.metric} can have this {matcher.label} is not known here")
    return faults


@pytest.mark.parametrize("query", [pytest.param(query, id=name) for name, query in queries()])
def test_a_query_names_only_what_there_is(query: str) -> None:
    assert wrong(named(query), available()) == []


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("sum(gateway_nothing)", "no metric gateway_nothing"),
        ("sum by (color) (rate(gateway_requests_total[5m]))", "no label color"),
        ('gateway_in_flight{pool="light"}', "gateway_in_flight has no label pool"),
        ('gateway_backend_state{state=~"up|ejcted"}', "no ejcted among"),
        ('gateway_requests_total{code="invalid_key"}', "no invalid_key among"),
        ("gateway_queue_seconds", "no metric gateway_queue_seconds"),
        ('gateway_event_loop_delay_seconds_bucket{le="0.026"}', "no bucket 0.026"),
        ('gateway_in_flight{backend="light-0"}', "is not known here"),
    ],
)
def test_what_a_query_names_wrongly_is_found(query: str, fault: str) -> None:
    (found,) = wrong(named(query), documented())
    assert fault in found


def test_legends_and_texts_name_labels_that_the_result_has() -> None:
    for panel in panels():
        for target in panel["targets"]:
            shown = set(re.findall(r"{{\s*(\w+)\s*}}", target["legendFormat"]))
            assert shown <= named(target["expr"]).labels, panel["title"]
    for rule in alerts():
        shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        found = named(rule["expr"])
        series = available()
        labels = found.labels or frozenset().union(*(series[one] for one in found.metrics))
        assert shown <= labels, rule["alert"]


def test_the_dashboard_can_be_provisioned() -> None:
    (variable,) = DASHBOARD["templating"]["list"]
    assert (variable["name"], variable["type"], variable["query"]) == (
        "DS_PROMETHEUS",
        "datasource",
        "prometheus",
    )
    assert "id" not in DASHBOARD  # a database's, of the Grafana that it was exported from
    assert DASHBOARD["uid"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    sources = [panel["datasource"] for panel in panels()]
    sources += [target["datasource"] for panel in panels() for target in panel["targets"]]
    assert all(source == {"type": "prometheus", "uid": "${DS_PROMETHEUS}"} for source in sources)
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_the_dashboard_shows_every_metric_or_it_is_said_why_not() -> None:
    shown = frozenset().union(*(named(query).metrics for _, query in queries()))
    rest = {
        name.removesuffix("_bucket")
        for name in documented()
        if not name.endswith(("_sum", "_count")) and name not in shown
    }
    assert rest == {
        "gateway_kv_blocks",  # the engine's own share of its blocks is shown
        "gateway_kv_blocks_taken",
        "gateway_knee_tpot_seconds",
        "gateway_count_drift_seqs",  # a moment's; the lasting one is shown
        "gateway_config_last_reload_success_timestamp_seconds",
        "gateway_box_swap_planned",
        "gateway_box_boots_total",
        "gateway_box_owner",
        "gateway_box_swap_seconds",  # by its sum and count
        "process_virtual_memory_bytes",
    }


def test_the_page_on_alerts_names_panels_that_the_dashboard_has() -> None:
    page = " ".join((ROOT / "docs" / "alerts.md").read_text().split())
    titles = {panel["title"] for panel in DASHBOARD["panels"]}
    assert set(re.findall(r'"([^"]+)"', page)) <= titles


def test_every_alert_has_its_lines_for_whoever_is_on_call() -> None:
    page = (ROOT / "docs" / "alerts.md").read_text()
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", page, re.M | re.S))
    assert list(sections) == [rule["alert"] for rule in alerts()]
    for name, text in sections.items():
        for part in ("**Means**", "**Look at**", "**Do**"):
            assert part in text, f"{name}: {part}"
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning")
