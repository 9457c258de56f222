"""Log lines: one per request, one per change of the world. JSON for machines, short lines on a terminal.

Never in a log: prompts, answers, keys, query strings.
"""

import json
import logging
import sys
from typing import Any, TextIO

from gateway.core.count_check import Cause, CountDrift
from gateway.core.health import BackendStatus, State
from gateway.core.jobs import AttemptEnd, AttemptOutcome, JobStatus
from gateway.core.usage import AttemptRecord, Ending, RequestRecord
from gateway.core.webhooks import SCHEDULE_S, WebhookAttempt, WebhookOutcome

requests_log = logging.getLogger("gateway.requests")
fleet_log = logging.getLogger("gateway.fleet")
jobs_log = logging.getLogger("gateway.jobs")
webhooks_log = logging.getLogger("gateway.webhooks")

_LEVELS = {Ending.FAILED: logging.ERROR, Ending.BROKEN: logging.ERROR, Ending.SHED: logging.WARNING}


class _JsonFormatter(logging.Formatter):
    def __init__(self, worker: int | None) -> None:
        super().__init__()
        self._who = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None) or {"message": record.getMessage()}
        line: dict[str, Any] = {
            "at": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "log": record.name,
            **self._who,
            **fields,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _HumanFormatter(logging.Formatter):
    def __init__(self, worker: int | None) -> None:
        who = "" if worker is None else f"worker {worker}: "
        super().__init__(f"%(asctime)s %(levelname)-7s {who}%(message)s", "%H:%M:%S")


def set_up(level: str = "info", stream: TextIO | None = None, *, worker: int | None = None) -> None:
    """Send every log line to `stream` (standard error): JSON, or the human form on a terminal.

    Each says which `worker` wrote it, where several processes write to one stream.
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_HumanFormatter(worker) if stream.isatty() else _JsonFormatter(worker))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "uvicorn.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # What goes wrong in a request is logged by the gateway itself; uvicorn would only say it again.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)


class RequestLog:
    """`ports.Recorder` that writes a line per request."""

    def attempt(self, record: AttemptRecord) -> None:
        """See `ports.Recorder.attempt`. A failed one is worth a line even where another backend saved it."""
        if record.outcome.is_fault:
            fleet_log.warning(
                "attempt on %s failed: %s",
                record.backend,
                record.detail,
                extra={
                    "fields": {"event": "attempt_failed", "backend": record.backend, "reason": record.detail}
                },
            )

    def finished(self, record: RequestRecord) -> None:
        """See `ports.Recorder.finished`."""
        level = _LEVELS.get(record.ending, logging.INFO)
        if requests_log.isEnabledFor(level):
            fields = request_fields(record)
            requests_log.log(level, "%s", _sentence(fields), extra={"fields": fields})


def backend_changed(backend_id: str, old: BackendStatus, new: BackendStatus) -> None:
    """Write a line when a backend's state changed."""
    if new.state is old.state:
        return
    fields = {
        "event": "backend_state",
        "backend": backend_id,
        "from": old.state,
        "to": new.state,
        "reason": new.reason,
    }
    # What a box does with its own models is no cause for worry.
    is_good = new.state in (State.UP, State.PROBATION, State.OUT) or old.state is State.OUT
    level = logging.INFO if is_good else logging.WARNING
    fleet_log.log(
        level, "%s: %s -> %s (%s)", backend_id, old.state, new.state, new.reason, extra={"fields": fields}
    )


def count_drifted(drift: CountDrift) -> None:
    """Write a line when an engine's count has begun, or ceased, to differ from the gateway's."""
    fields = {
        "event": "count_drift",
        "backend": drift.backend,
        "seqs": drift.lasting_seqs,
        "cause": drift.cause.value,
        "reason": drift.cause.sentence(),
    }
    level = logging.INFO if drift.cause is Cause.NONE else logging.WARNING
    fleet_log.log(
        level,
        "%s: the engine has %+d sequences against the gateway's count (%s)",
        drift.backend,
        drift.lasting_seqs,
        drift.cause.sentence(),
        extra={"fields": fields},
    )


def job_attempt_ended(end: AttemptEnd) -> None:
    """Write a line when a job has ended, or will not be tried again."""
    if end.outcome not in (AttemptOutcome.ENDED, AttemptOutcome.POISONED):
        return
    job, is_poisoned = end.job, end.outcome is AttemptOutcome.POISONED
    status = end.status or JobStatus.FAILED
    code = "job_poisoned" if is_poisoned else end.error.code if end.error else None
    fields = {
        "event": "job_ended",
        "id": job.id,
        "lane": job.new.lane,
        "status": status.value,
        "code": code,
        "key": job.new.key,
        "attempts": job.attempt,
        "failures": job.failures + is_poisoned,
        "waited_s": round(end.waited_s, 3),
        "took_s": round(end.took_s, 3),
        "total_s": round(end.lasted_s, 3),
    }
    jobs_log.log(
        logging.WARNING if is_poisoned else logging.INFO,
        "job %s: %s%s, %s, attempt %d, taken after %.1f s, took %.1f s",
        job.id,
        status.value,
        f" ({code})" if code else "",
        job.new.lane,
        job.attempt,
        end.waited_s,
        end.took_s,
        extra={"fields": {name: value for name, value in fields.items() if value is not None}},
    )


def webhook_attempted(attempt: WebhookAttempt) -> None:
    """Write a line when an attempt to deliver a webhook has failed. It names the endpoint, never its URL."""
    delivery = attempt.delivery
    if attempt.outcome is WebhookOutcome.DELIVERED:
        return
    fields = {
        "event": "webhook_failed",
        "endpoint": delivery.endpoint,
        "id": delivery.id,
        "outcome": attempt.outcome.value,
        "reason": attempt.detail,
        "attempt": delivery.failures + 1,
        "retry_s": None if attempt.retry_s is None else round(attempt.retry_s),
    }
    is_retried = attempt.retry_s is not None
    if is_retried:
        then = f"attempt {delivery.failures + 1} of {len(SCHEDULE_S)}, the next in {attempt.retry_s:.0f} s"
    else:
        then = {
            WebhookOutcome.GONE: "it gets nothing more until a restart",
            WebhookOutcome.DROPPED: "it does not get this one",
        }.get(attempt.outcome, f"given up after {delivery.failures + 1} attempts")
    webhooks_log.log(
        logging.WARNING if is_retried else logging.ERROR,
        "webhook %s: %s failed: %s; %s",
        delivery.endpoint,
        delivery.id,
        attempt.detail,
        then,
        extra={"fields": {name: value for name, value in fields.items() if value is not None}},
    )


def request_fields(record: RequestRecord) -> dict[str, Any]:
    """Return the members of a request's log line; times in seconds, rounded to 0.1 ms."""
    decision, usage, first = record.decision, record.usage, record.first_byte_at
    fields: dict[str, Any] = {
        "event": "request",
        "id": record.id,
        "trace": f"{record.trace.own.trace_id:032x}" if record.trace else None,
        "ending": record.ending.value,
        "status": record.status,
        "code": record.error_code,
        "model": record.model[:100],
        "key": record.key,
        "class": decision.traffic_class if decision else "",
        "why": decision.class_reason if decision else "",
        "pool": record.pool,
        "backend": record.backend,
        "attempts": len(record.attempts),
        "estimate": decision.estimate.tokens if decision else None,
        "prompt_tokens": usage.prompt_tokens if usage else None,
        "output_tokens": usage.completion_tokens if usage else None,
        "stream": record.stream,
        "first_token_s": None if first is None else round(first - record.received_at, 4),
        "total_s": round(record.ended_at - record.received_at, 4),
    }
    return {name: value for name, value in fields.items() if value not in (None, "")}


def _sentence(fields: dict[str, Any]) -> str:
    where = f"{fields.get('class', '-')} -> {fields.get('backend', '-')}"
    first = f", first token {fields['first_token_s']:.2f} s" if "first_token_s" in fields else ""
    tokens = f", {fields['estimate']} tokens" if "estimate" in fields else ""
    error = f" {fields['code']}" if "code" in fields else ""
    return f"{fields['status']}{error} {where}{tokens}{first}, {fields['total_s']:.2f} s, {fields['ending']}"
