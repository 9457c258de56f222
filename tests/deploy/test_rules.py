"""Every alert fires when it should, and keeps quiet when it should, by promtool."""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.prometheus import program

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules.yml"
_ALL = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in _ALL if "alert" in rule}
RECORDS = [rule for rule in _ALL if "record" in rule]


@dataclass(frozen=True)
class Case:
    """One alert, and what it says of these series (a value per minute, or `interval`) at which minute."""

    alert: str
    series: Mapping[str, str]
    at: float
    summary: str = ""  # "": it does not fire
    labels: Mapping[str, str] = field(default_factory=dict)
    interval: str = "1m"  # between two values


def requests(ending: str, per_minute: float, name: str = "short_chat") -> dict[str, str]:
    series = f'gateway_requests_total{{traffic_class="{name}",backend="b",ending="{ending}"}}'
    return {series: f"0+{per_minute}x60"}


def unknown(code: str, per_minute: float) -> dict[str, str]:
    series = f'gateway_requests_total{{traffic_class="",backend="",ending="rejected",code="{code}"}}'
    return {series: f"0+{per_minute}x60"}


def first_tokens(timeliness: str, per_minute: float) -> dict[str, str]:
    series = f'gateway_first_tokens_total{{traffic_class="short_chat",timeliness="{timeliness}"}}'
    return {series: f"0+{per_minute}x60"}


def looks(in_time: float) -> dict[str, str]:
    return {
        'gateway_event_loop_delay_seconds_bucket{instance="a",le="0.025"}': f"0+{in_time}x60",
        'gateway_event_loop_delay_seconds_count{instance="a"}': "0+1200x60",
    }


def webhooks(outcome: str, values: str) -> dict[str, str]:
    return {f'gateway_webhooks_total{{{TARGET},endpoint="ops",outcome="{outcome}"}}': values}


TARGET = 'job="gemma-gateway",instance="a"'
STARTED = f"process_start_time_seconds{{{TARGET}}}"
UP = 'up{job="gemma-gateway",instance="a"}'
OPEN = 'process_open_fds{job="gemma-gateway",instance="a"}'
MOST = 'process_max_fds{job="gemma-gateway",instance="a"}'
CONNECTIONS = 'gateway_connections{instance="a",listener="applications"}'
CONNECTIONS_MAX = 'gateway_connections_max{instance="a",listener="applications"}'
REFUSED = 'gateway_attempts_total{instance="a",backend="light-0",outcome="busy"}'
TAKEN = 'gateway_attempts_total{instance="a",backend="light-0",outcome="ok"}'
STATE = 'gateway_backend_state{instance="a",backend="light-0",state="%s"}'
SERVED = 'gateway_class_served{instance="%s",model="m",traffic_class="%s"}'
USABLE = 'gateway_backend_usable{instance="%s",backend="light-0"}'
LOG_DROPPED = 'gateway_log_lines_dropped_total{instance="a"}'
DRAINED = 'gateway_backend_drained{instance="a",backend="light-0"}'
CONFIGURED = {DRAINED: "0x500"}
ALONE = 'gateway_store_mode{instance="a",mode="alone"}'
RELOADED = 'gateway_config_last_reload_successful{instance="a"}'
CONFIG = 'gateway_config_info{job="gemma-gateway",instance="%s",version="%s"}'
WORKER_CONFIG = CONFIG.replace("gemma-gateway", "gemma-gateway-worker")
HANGS = 'gateway_backend_state_changes_total{instance="a",backend="light-0",state="hung"}'
EJECTIONS = 'gateway_backend_state_changes_total{instance="a",backend="light-0",state="ejected"}'
RESTARTS = 'gateway_backend_restarts_total{instance="a",backend="light-0"}'
KNEE = 'gateway_knee_used_ratio{instance="a",backend="light-0"}'
DRIFTED = 'gateway_estimate_drifted{instance="a",backend="light-0"}'
COUNTED = 'gateway_count_drift_lasting_seqs{instance="a",backend="light-0"}'
OLDEST = 'gateway_oldest_wait_seconds{instance="a",model="m",traffic_class="docs"}'
LIMIT = 'gateway_wait_limit_seconds{instance="a",model="m",traffic_class="docs"}'
BOX = 'gateway_box_state{instance="a",box="spark",state="%s"}'
QUARANTINE = 'gateway_box_quarantined{instance="a",box="spark",backend="qwen"}'
JOBS_WAIT = 'gateway_jobs_oldest_wait_seconds{instance="a",lane="m/docs"}'
ENDED = 'gateway_store_jobs_ended_total{instance="%s",lane="m/docs",outcome="%s"}'
LANE = {"lane": "m/docs"}
LIGHT = {"backend": "light-0"}
OPS = {"endpoint": "ops"}
PENDING = 'gateway_webhooks_pending{instance="a",endpoint="ops"}'

CASES = [
    Case("GatewayDown", {UP: "1x5 0x10"}, 7),
    Case(
        "GatewayDown", {UP: "1x5 0x10"}, 9, "a cannot be scraped", {"job": "gemma-gateway", "instance": "a"}
    ),
    Case("GatewayNoBackend", {SERVED % ("a", "chat"): "0x20", SERVED % ("a", "docs"): "1x20"}, 9),
    Case(
        "GatewayNoBackend",
        {SERVED % ("a", "chat"): "1x5 0x10", SERVED % ("a", "docs"): "0x20", SERVED % ("b", "docs"): "1x20"},
        9,
        "a has no backend that can take requests",
        {"instance": "a"},
    ),
    Case("GatewayClassNoBackend", {SERVED % ("a", "docs"): "0x20", SERVED % ("b", "docs"): "1x20"}, 9),
    Case(
        "GatewayClassNoBackend",
        {SERVED % ("a", "docs"): "0x20", SERVED % ("b", "docs"): "0x20", SERVED % ("a", "chat"): "1x20"},
        9,
        "no backend can take requests for m/docs",
        {"model": "m", "traffic_class": "docs"},
    ),
    Case("GatewayRequestsFail", requests("completed", 199) | requests("broken", 1), 20),
    Case(
        "GatewayRequestsFail",
        requests("completed", 97) | requests("broken", 2) | requests("failed", 1),
        20,
        "3% of all requests fail or break off",
    ),
    Case(
        "GatewayRequestsFail",
        requests("completed", 4990)
        | requests("completed", 4, "images")
        | requests("broken", 1, "images")
        | requests("failed", 5, "images"),
        20,
        "60% of images requests fail or break off",
        {"traffic_class": "images"},
    ),
    # Of a class with hardly any traffic, two or three failures in five minutes may be chance.
    Case(
        "GatewayRequestsFail",
        requests("completed", 1000)
        | requests("completed", 0.5, "images")
        | requests("failed", 0.5, "images"),
        20,
    ),
    # The only backend of a class hangs with whatever it is given, and is out for 5 to 60 s each time.
    Case(
        "GatewayClassFlaps",
        {SERVED % ("a", "docs"): "1x20 0x1 1x3 0x1 1x3 0x2 1x3 0x3 1x3 0x3 1x3 0x3"},
        14,
        "m/docs loses its last backend again and again",
        {"model": "m", "traffic_class": "docs"},
        "15s",
    ),
    Case("GatewayClassFlaps", {SERVED % ("a", "docs"): "1x20 0x8 1x40"}, 10, interval="15s"),
    Case("GatewayClassFlaps", {SERVED % ("a", "docs"): "0x80"}, 14, interval="15s"),  # GatewayClassNoBackend
    Case(
        "GatewayClassFlaps",
        {SERVED % ("a", "docs"): "0x80", SERVED % ("b", "docs"): "1x80"},
        14,
        interval="15s",
    ),
    Case("GatewayCallersRejected", requests("completed", 60) | unknown("invalid_api_key", 40), 20),
    Case("GatewayCallersRejected", requests("completed", 10) | unknown("invalid_json", 90), 20),
    Case(
        "GatewayCallersRejected",
        requests("completed", 10) | unknown("invalid_api_key", 70) | unknown("model_not_found", 20),
        20,
        "90% of requests have an unknown API key, model or class",
    ),
    Case("GatewayShedsLoad", requests("completed", 96) | requests("shed", 4), 20),
    Case(
        "GatewayShedsLoad",
        requests("completed", 90) | requests("shed", 10),
        20,
        "10% of short_chat requests are refused",
        {"traffic_class": "short_chat"},
    ),
    # One caller beyond its quota of jobs: refused before they have a class, among those that are served.
    Case("GatewayShedsLoad", requests("completed", 96) | requests("shed", 4, ""), 20),
    Case(
        "GatewayShedsLoad",
        requests("completed", 90) | requests("shed", 10, ""),
        20,
        "10% of all requests are refused",
    ),
    Case("GatewayFirstTokenLate", first_tokens("timely", 96) | first_tokens("late", 4), 30),
    Case(
        "GatewayFirstTokenLate",
        first_tokens("timely", 90) | first_tokens("late", 10),
        30,
        "TTFT p95 is above target: 10% of short_chat streams are late",
        {"traffic_class": "short_chat"},
    ),
    Case("GatewayWaitsLong", {OLDEST: "80x20", LIMIT: "120x20"}, 10),
    Case(
        "GatewayWaitsLong",
        {OLDEST: "10 9 4 10 10 10 5 10 10 10 10 7 9 9 9 4 9 9 9 9 9 9 6 9 9 9 9 9", LIMIT: "10x40"},
        6.5,
        "a request for m/docs has waited 9s",
        {"model": "m", "traffic_class": "docs"},
        interval="15s",
    ),
    Case(
        "GatewayWaitsLong",
        {OLDEST: "110x20", LIMIT: "120x20"},
        10,
        "a request for m/docs has waited 1m 50s",
        {"model": "m", "traffic_class": "docs"},
    ),
    Case("GatewayLogLinesDropped", {LOG_DROPPED: "7x30"}, 20),
    Case(
        "GatewayLogLinesDropped",
        {LOG_DROPPED: "0x10 3x30"},
        15,
        "a cannot write its log: lines are missing",
        {"instance": "a"},
    ),
    Case("GatewayEventLoopLate", looks(1195), 20),
    Case("GatewayOpenFilesShort", {OPEN: "900x9", MOST: "1000x9"}, 5),
    Case("GatewayOpenFilesShort", {OPEN.replace("gemma-gateway", "vllm"): "950x9", MOST: "1000x9"}, 5),
    Case(
        "GatewayOpenFilesShort",
        {OPEN: "950x9", MOST: "1000x9"},
        5,
        "a has 950 files open, nearly all that it may",
        {"job": "gemma-gateway", "instance": "a"},
    ),
    Case("GatewayConnectionsShort", {CONNECTIONS: "7372x9", CONNECTIONS_MAX: "8192x9"}, 5),
    Case(
        "GatewayConnectionsShort",
        {CONNECTIONS: "7373x9", CONNECTIONS_MAX: "8192x9"},
        5,
        "a has 7373 connections to a port, nearly all that it may",
        {"instance": "a", "listener": "applications"},
    ),
    Case(
        "GatewayEventLoopLate",
        looks(1100),
        20,
        "a: 8.333% of event loop samples are over 25 ms late",
        {"instance": "a"},
    ),
    Case("GatewayStoreAlone", {ALONE: "0x20"}, 10),
    Case(
        "GatewayStoreAlone",
        {ALONE: "0x5 1x10"},
        10,
        "a: the store does not answer; limits are not shared",
        {"instance": "a", "mode": "alone"},
    ),
    Case("GatewayConfigReloadFailed", {RELOADED: "1x20"}, 10),
    Case(
        "GatewayConfigReloadFailed",
        {RELOADED: "1x5 0x10"},
        10,
        "a could not use its new configuration",
        {"instance": "a"},
    ),
    Case("GatewayConfigsDiffer", {CONFIG % ("a", "1"): "1x40", CONFIG % ("b", "1"): "1x40"}, 30),
    Case("GatewayConfigsDiffer", {CONFIG % ("a", "1"): "1x40", WORKER_CONFIG % ("w", "2"): "1x40"}, 30),
    Case(
        "GatewayConfigsDiffer",
        {CONFIG % ("a", "1"): "1x40", CONFIG % ("b", "2"): "1x40"},
        30,
        "gemma-gateway: 2 different configurations are in force",
        {"job": "gemma-gateway"},
    ),
    Case("GatewayBackendDown", {STATE % "ejected": "1x20", STATE % "down": "0x20"}, 10),
    Case(
        "GatewayBackendDown",
        {STATE % "hung": "0x5 1x10", STATE % "down": "0x20"},
        10,
        "light-0 does not answer or makes no progress",
        LIGHT,
    ),
    Case("GatewayBackendDown", {STATE % "down": "1x20", DRAINED: "1x20"}, 10),
    Case(
        "GatewayBackendDown",
        {STATE % "down": "1x20", DRAINED: "0x20"},
        10,
        "light-0 does not answer or makes no progress",
        LIGHT,
    ),
    Case("GatewayBackendKeptOut", {STATE % "up": "1x20", USABLE % "a": "0x2 1x20", **CONFIGURED}, 9),
    Case("GatewayBackendKeptOut", {STATE % "out": "1x20", USABLE % "a": "0x20", **CONFIGURED}, 9),
    Case("GatewayBackendKeptOut", {STATE % "up": "1x20", USABLE % "a": "0x20", DRAINED: "1x20"}, 9),
    Case(
        "GatewayBackendKeptOut",
        {STATE % "up": "1x20", USABLE % "a": "0x20", USABLE % "b": "0x20", **CONFIGURED},
        9,
        "light-0 answers but is given no requests: another model, version, or asleep",
        {"backend": "light-0"},
    ),
    Case("GatewayBackendEjected", {STATE % "ejected": "0x20 1x3", DRAINED: "0x23"}, 32),  # it is gone at 24
    Case("GatewayBackendFlaps", {EJECTIONS: "0+1x30", DRAINED: "0x30"}, 40),
    Case("GatewayBackendFlaps", {EJECTIONS: "0+1x60", DRAINED: "0x30 1x30"}, 40),
    Case("GatewayBackendRestarts", {RESTARTS: "0x10 1x5 2x10", DRAINED: "0x25"}, 60),
    Case("GatewayBackendEjected", {STATE % "ejected": "1x40", DRAINED: "1x40"}, 35),
    Case("GatewayBackendEjected", {STATE % "ejected": "0x20 1x3 0x10", **CONFIGURED}, 25),
    Case(
        "GatewayBackendEjected",
        {STATE % "ejected": "0x20 1x20", **CONFIGURED},
        35,
        "light-0 was ejected for most of the last 10 minutes",
        LIGHT,
    ),
    Case("GatewayBackendFlaps", {EJECTIONS: "0+0.1x60", **CONFIGURED}, 40),
    Case("GatewayBackendFlaps", {EJECTIONS: "5x40 6x2 7x2 8x2 9x10", **CONFIGURED}, 50.5),
    Case(
        "GatewayBackendFlaps",
        {EJECTIONS: "0x40 1x2 2x2 3x2 4x2 5x10", **CONFIGURED},
        55.5,
        "light-0 was ejected or hung 5 times in half an hour",
        LIGHT,
    ),
    Case(
        "GatewayBackendFlaps",
        {EJECTIONS: "0+1x60", **CONFIGURED},
        40,
        "light-0 was ejected or hung 30 times in half an hour",
        LIGHT,
    ),
    Case(
        "GatewayBackendFlaps",
        {HANGS: "0x40 1x2 2x2 3x10", EJECTIONS: "0x40 1x2 2x14", **CONFIGURED},
        55.5,
        "light-0 was ejected or hung 5 times in half an hour",
        LIGHT,
    ),
    Case("GatewayBackendRefuses", {REFUSED: "0+6x60", TAKEN: "0+100x60", **CONFIGURED}, 40),
    Case("GatewayBackendRefuses", {REFUSED: "0+1x60", **CONFIGURED}, 40),
    Case("GatewayBackendRefuses", {REFUSED: "0+60x60", DRAINED: "1x60"}, 40),
    Case("GatewayBackendRefuses", {REFUSED: "0+60x30 1800x30", TAKEN: "0+100x60", **CONFIGURED}, 50),
    Case(
        "GatewayBackendRefuses",
        {REFUSED: "0+60x60", TAKEN: "0+240x60", **CONFIGURED},
        40,
        "light-0 refuses 20% of its requests because of load",
        LIGHT,
    ),
    Case("GatewayBackendRestarts", {RESTARTS: "0x10 1x20", **CONFIGURED}, 25.5),
    Case("GatewayBackendRestarts", {RESTARTS: "1x400 2x60", **CONFIGURED}, 420.5),
    Case(
        "GatewayBackendRestarts",
        {RESTARTS: "0x10 1x5 2x10", **CONFIGURED},
        25.5,
        "the engine of light-0 has restarted 2 times in 6 hours",
        LIGHT,
    ),
    Case("GatewayBackendAtKnee", {KNEE: "0.9x60", **CONFIGURED}, 50),
    Case("GatewayBackendAtKnee", {KNEE: "0x10 1x15 0x60", **CONFIGURED}, 30),
    Case(
        "GatewayBackendAtKnee",
        # With a knee of 4, one slot is free for a moment.
        {KNEE: "1x12 0.75 1x12 0.75 1x12 0.75 1x12", **CONFIGURED},
        35,
        "light-0 has been at its knee for half an hour",
        LIGHT,
    ),
    Case(
        "GatewayBackendAtKnee",
        {KNEE: "1x60", **CONFIGURED},
        50,
        "light-0 has been at its knee for half an hour",
        LIGHT,
    ),
    Case("GatewayEstimateDrift", {DRIFTED: "0x60"}, 30),
    Case(
        "GatewayEstimateDrift",
        {DRIFTED: "0x5 1x60"},
        30,
        "token counts of light-0 differ from the estimates",
        LIGHT,
    ),
    Case("GatewayCountDrift", {COUNTED: "0x60"}, 30),
    Case(
        "GatewayCountDrift",
        {COUNTED: "-2x60"},
        30,
        "light-0 runs 2 sequences more or fewer than the gateways count",
        LIGHT,
    ),
    Case("GatewayBoxFailed", {BOX % "failed": "0x10"}, 8),
    Case(
        "GatewayBoxFailed",
        {BOX % "failed": "0x5 1x10"},
        8,
        "box spark serves nothing and needs an operator",
        {"box": "spark"},
    ),
    Case("GatewayBoxQuarantined", {QUARANTINE: "0x10"}, 8),
    Case(
        "GatewayBoxQuarantined",
        {QUARANTINE: "0x5 1x10"},
        8,
        "qwen of box spark is quarantined: it is not started",
        {"box": "spark", "backend": "qwen"},
    ),
    Case("GatewayJobsWaitLong", {JOBS_WAIT: "3000x60"}, 30),
    Case("GatewayJobsWaitLong", {JOBS_WAIT: "4000x60"}, 30, "a job of m/docs has waited 1h 6m 40s", LANE),
    Case("GatewayJobsPoisoned", {ENDED % ("a", "poisoned"): "3x200"}, 150),
    Case("GatewayJobsPoisoned", {ENDED % ("a", "failed"): "0x5 9x100"}, 20),
    Case(
        "GatewayJobsPoisoned",
        {ENDED % ("a", "poisoned"): "0x5 1x100", ENDED % ("b", "poisoned"): "0x5 1x100"},
        20,
        "jobs of m/docs were given up after too many failed attempts",
        LANE,
    ),
    Case("GatewayJobsExpired", {ENDED % ("a", "expired"): "0x5 1x200"}, 150),
    Case(
        "GatewayJobsExpired",
        {ENDED % ("a", "expired"): "1x100 2x100"},
        120,
        "jobs of m/docs did not end within the time their callers allowed",
        LANE,
    ),
    Case("GatewayJobsStoreAway", {'gateway_jobs_store_away{instance="a"}': "0x20"}, 10),
    Case(
        "GatewayJobsStoreAway",
        {'gateway_jobs_store_away{instance="a"}': "0x5 1x20"},
        10,
        "the job store does not answer, or refuses to write: no jobs are accepted",
    ),
    Case("GatewayJobsDrained", {'gateway_jobs_drained{instance="a"}': "1x300"}, 200),
    Case(
        "GatewayJobsDrained",
        {'gateway_jobs_drained{instance="a"}': "1x300"},
        250,
        "workers have taken no jobs for hours: an operator drained them",
    ),
    Case("GatewayWebhooksFail", {PENDING: "3x60"} | webhooks("delivered", "0+1x60"), 50),
    Case("GatewayWebhooksFail", {PENDING: "1x5 0x60"} | webhooks("failed", "2x60"), 50),
    Case("GatewayWebhooksFail", {PENDING: "3x60"} | webhooks("delivered", "0x40 1x60"), 42),
    *(  # one delivery, long after one that failed, and long before the next attempt
        Case(
            "GatewayWebhooksFail",
            {PENDING: "1x300"} | webhooks("failed", "2x5 3x30 4x120 5x300"),
            at,
            "no delivery reaches the webhook endpoint ops",
            OPS,
        )
        for at in (20, 33, 90, 150, 280)
    ),
    Case("GatewayWebhooksLost", webhooks("delivered", "_x5 1x60"), 20),
    Case(  # one more, after a restart
        "GatewayWebhooksLost",
        webhooks("given_up", "1x90 0x2 1x10"),
        95,
        "deliveries to the webhook endpoint ops were lost",
        OPS,
    ),
    # Long ago, and Prometheus was away an hour ago, or is new.
    Case("GatewayWebhooksLost", webhooks("gone", "1x60 _x30 1x150") | {STARTED: "0x300"}, 140),
    Case("GatewayWebhooksLost", webhooks("gone", "_x120 1x150") | {STARTED: "_x120 0x150"}, 125),
    Case(  # before the first look at a process that has just started
        "GatewayWebhooksLost",
        webhooks("given_up", "_x5 1x60") | {STARTED: "_x5 290x60"},
        20,
        "deliveries to the webhook endpoint ops were lost",
        OPS,
    ),
]


def test_every_alert_has_a_case_where_it_fires_and_one_where_it_does_not() -> None:
    assert {case.alert for case in CASES if case.summary} == set(ALERTS)
    assert {case.alert for case in CASES if not case.summary} == set(ALERTS)


def unit_test(case: Case) -> dict[str, Any]:
    expected = {
        "exp_labels": {"severity": ALERTS[case.alert]["labels"]["severity"], **case.labels},
        "exp_annotations": {"summary": case.summary},
    }
    return {
        "name": f"{case.alert} at {case.at:g}",
        "interval": case.interval,
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "alert_rule_test": [
            {
                "eval_time": f"{case.at * 60:.0f}s",
                "alertname": case.alert,
                "exp_alerts": [expected] if case.summary else [],
            }
        ],
    }


def promtool(*arguments: str) -> str:
    done = subprocess.run(
        [str(program("promtool")), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    said = done.stdout.decode()
    assert done.returncode == 0, said
    return said


def rules_for(alert: str) -> list[dict[str, Any]]:
    """Return an alert's rule behind those that it is computed from: all would take ten times as long."""
    found = [ALERTS[alert]]
    for record in reversed(RECORDS):
        if any(record["record"] in rule["expr"] for rule in found):
            found.insert(0, record)
    return found


def test_the_rules_are_valid() -> None:
    promtool("check", "rules", str(RULES))


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_does_what_it_says(tmp_path: Path, alert: str) -> None:
    cases = [case for case in CASES if case.alert == alert]
    rules = tmp_path / "rules.yml"
    rules.write_text(json.dumps({"groups": [{"name": alert, "rules": rules_for(alert)}]}))
    tests = {
        "rule_files": [str(rules)],
        "evaluation_interval": "20s",  # rules are looked at between two scrapes, too
        "tests": [unit_test(case) for case in cases],
    }
    path = tmp_path / "rules_test.yml"
    path.write_text(json.dumps(tests))
    promtool("test", "rules", str(path))


def test_the_example_configuration_is_valid() -> None:
    promtool("check", "config", str(RULES.parent / "prometheus.yml"))
