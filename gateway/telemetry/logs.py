"""Log lines: one per request, one per state change. JSON for machines, short lines on a terminal.

Recurring problems are logged a few times a minute, with the number of suppressed lines: `RateLimitFilter`.

Never in a log: prompts, answers, keys, query strings.
"""

import asyncio
import json
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TextIO

import anyio
import msgspec

from gateway.clock import SystemClock
from gateway.core import versions
from gateway.core.count_check import Cause, CountDrift
from gateway.core.health import BackendStatus, Outcome, ProbeFault, State
from gateway.core.jobs import AttemptEnd, AttemptOutcome, JobStatus
from gateway.core.usage import AttemptRecord, Ending, RequestRecord
from gateway.core.value import valueclass
from gateway.core.versions import VersionBound
from gateway.core.webhooks import SCHEDULE_S, WebhookAttempt, WebhookOutcome
from gateway.events import about
from gateway.ports import Clock
from gateway.telemetry.log_output import outlet_of

log = logging.getLogger("gateway.process")
requests_log = logging.getLogger("gateway.requests")
fleet_log = logging.getLogger("gateway.fleet")
jobs_log = logging.getLogger("gateway.jobs")
webhooks_log = logging.getLogger("gateway.webhooks")

LOOK_S, AGAIN_S = 5.0, 0.1
"""Interval between two rounds that write what was held back, and while a reader is behind. A choice."""

CALM_S = 60.0
CALM_LINES = 10
"""Period, and maximum number of lines of one kind within it. A choice: nobody reads more, and a backend that
flaps must not fill a disk."""

_SUBJECTS = ("backend", "box", "endpoint", "lane", "store", "worker")
_ONE_EACH = frozenset(
    {
        *("request", "request_queued", "job_ended", "batch_ended", "config_change"),
        *("operator_cancelled_job", "operator_retried_job"),
        "webhook_lost",  # whoever waits for it has to be told which it was
        "log_lines_dropped",  # as often as `LOOK_S` allows
    }
)

QUEUED_S = 0.01
"""Waits for a slot that are shorter are not written. A choice: a request that starts at once takes its slot
in less, from a store too, and no such wait explains a slow answer."""

READ_S = 0.1
"""Times to receive, decode and count a body that are shorter are not written. A choice: one of 2 MB that
comes at once takes half of that (docs/performance.md), and no such time explains a slow answer."""

_LEVELS = {Ending.FAILED: logging.ERROR, Ending.BROKEN: logging.ERROR, Ending.SHED: logging.WARNING}


class _JsonFormatter(logging.Formatter):
    def __init__(self, worker: int | None) -> None:
        super().__init__()
        self._who = {} if worker is None else {"worker": worker}
        self._second = 0
        self._openings: dict[str, str] = {}  # of request lines, by level

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        if fields.get("event") == "request":
            return self.request_line(record.levelname, record.created, fields)
        line = {**self._origin(record), **fields, "message": record.getMessage()}
        if kept_back := getattr(record, "kept_back", 0):
            line["kept_back"] = kept_back
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)

    def request_line(self, level: str, created: float, fields: dict[str, Any]) -> str:
        """Format the line of a request. Its beginning is cached for a second."""
        if int(created) != self._second:
            self._second = int(created)
            self._openings.clear()
        opening = self._openings.get(level)
        if opening is None:
            name = requests_log.name
            record = logging.LogRecord(name, logging.getLevelNamesMapping()[level], "", 0, "", (), None)
            record.created = created
            opening = self._openings[level] = json.dumps(self._origin(record)).removesuffix("}") + ", "
        return opening + _plain_json(fields)[1:]

    def _origin(self, record: logging.LogRecord) -> dict[str, Any]:
        return {
            "at": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "log": record.name,
            **self._who,
        }


def _plain_json(line: dict[str, Any]) -> str:
    """Like `json.dumps` for strings, integers and short decimals, in a third of its time."""
    try:
        text = msgspec.json.format(msgspec.json.encode(line), indent=0).decode()
    except UnicodeEncodeError:  # a lone surrogate in a model name
        return json.dumps(line)
    return text if text.isascii() and "\x7f" not in text else json.dumps(line)  # which json.dumps escapes


class _HumanFormatter(logging.Formatter):
    def __init__(self, worker: int | None) -> None:
        who = "" if worker is None else f"worker {worker}: "
        super().__init__(f"%(asctime)s %(levelname)-7s {who}%(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format the line without any traceback.

        It may contain a backend's words, which must neither control the terminal nor look like another line.
        """
        lines = super().formatMessage(record).split("\n")
        return "\n  ".join("".join(char if char.isprintable() else " " for char in line) for line in lines)

    def format(self, record: logging.LogRecord) -> str:
        kept_back = getattr(record, "kept_back", 0)
        return super().format(record) + (f" (and {kept_back} earlier lines like this)" if kept_back else "")


@dataclass(slots=True)
class _Minute:
    """The lines of one kind within a period."""

    since: float
    lines: int = 1
    newest: logging.LogRecord | None = None  # the latest suppressed one

    def is_over(self, now: float) -> bool:
        """Return whether the period is over at `now` (epoch seconds), or the clock was set back."""
        return not 0 <= now - self.since < CALM_S


class RateLimitFilter(logging.Filter):
    """Limits the rate of log lines per event and subject.

    When the period is over, the latest suppressed line is written with the number of suppressed ones, so that
    the last line always shows the current state. Lines about requests, and about jobs and batches that have
    ended, are not limited.
    """

    def __init__(self) -> None:
        """Start without history."""
        super().__init__()
        self._seen: dict[tuple[object, ...], _Minute] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line may be written now."""
        fields = getattr(record, "fields", {})
        name = fields.get("event", record.name)
        if name in _ONE_EACH or hasattr(record, "kept_back"):
            return True
        kind = (name, *(fields.get(subject) for subject in _SUBJECTS))
        minute = self._seen.get(kind)
        if minute is None or minute.is_over(record.created):
            self._seen[kind] = _Minute(record.created)
            if minute is not None and minute.newest is not None:
                record.kept_back = minute.lines - CALM_LINES
            return True
        minute.lines += 1
        if minute.lines <= CALM_LINES:
            return True
        minute.newest = record
        return False

    def over(self, now: float) -> Sequence[logging.LogRecord]:
        """Return the latest suppressed line per kind whose period is over at `now` (epoch seconds)."""
        found = []
        for kind, minute in list(self._seen.items()):
            if not minute.is_over(now):
                continue
            del self._seen[kind]
            if minute.newest is not None:
                minute.newest.kept_back = minute.lines - CALM_LINES - 1  # this one is written
                found.append(minute.newest)
        return found


async def run(clock: Clock) -> None:
    """Write suppressed and held-back lines when they are due, until cancelled."""
    is_behind = False
    while True:
        await anyio.sleep(AGAIN_S if is_behind else LOOK_S)
        tell_kept_back(clock.wall())
        is_behind = not all([lines.catch_up() for lines in _all_lines()])


def say(line: str) -> None:
    """Write a line as it is, where the log lines go. Like these, it is dropped if it cannot be written."""
    for lines in _all_lines():
        lines.say(line)


def dropped_lines() -> int:
    """Return the number of lines dropped because they could not be written."""
    return sum(lines.output.dropped for lines in _all_lines())


def _all_lines() -> Iterator["_Lines"]:
    return (handler for handler in logging.getLogger().handlers if isinstance(handler, _Lines))


def tell_kept_back(now: float) -> None:
    """Write suppressed lines whose period is over at `now` (epoch seconds)."""
    for handler in logging.getLogger().handlers:
        for calm in handler.filters:
            if isinstance(calm, RateLimitFilter):
                for record in calm.over(now):
                    handler.handle(record)


def set_up(level: str = "info", stream: TextIO | None = None, *, worker: int | None = None) -> None:
    """Send all log lines to `stream` (default: standard error), as JSON, or in human form on a terminal.

    If several processes share a stream, each line contains the number of its `worker`.
    """
    stream = stream or sys.stderr
    handler = _Lines(stream)
    handler.addFilter(RateLimitFilter())
    handler.setFormatter(_HumanFormatter(worker) if stream.isatty() else _JsonFormatter(worker))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "uvicorn.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # The gateway logs failed requests itself; uvicorn would log them again.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)


def gather_in(loop: asyncio.AbstractEventLoop) -> None:
    """From now on, write all lines of an event loop iteration together, at its end."""
    for lines in _all_lines():
        lines.gather_in(loop)


class _Lines(logging.Handler):
    """Writes all lines of an event loop iteration in one call, which is most of a line's cost.

    Warnings, errors and lines from other threads are written immediately.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.output = outlet_of(stream)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._gathered: list[str] = []
        self._told_of = 0

    def gather_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Collect the lines logged in `loop`, which runs in this thread."""
        self._loop, self._thread = loop, threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or collect it."""
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 - as every handler does
            self.handleError(record)
            return
        if self._gathers(record.levelno):
            self._gather(line)
        else:
            self._write(line + "\n")

    def takes_request(self, level: int, created: float, record: RequestRecord) -> bool:
        """Accept a request's line without a `logging` record, which would cost more than the line.

        Returns whether it was accepted.
        """
        if not isinstance(self.formatter, _JsonFormatter) or not self._gathers(level):
            return False
        self._gather(
            self.formatter.request_line(logging.getLevelName(level), created, request_fields(record))
        )
        return True

    def _gathers(self, level: int) -> bool:
        """Return whether a line of that level is collected, if it is logged in this thread."""
        return (
            self._loop is not None
            and level < logging.WARNING
            and threading.get_ident() == self._thread
            and not self._loop.is_closed()
        )

    def _gather(self, line: str) -> None:
        assert self._loop is not None
        if not self._gathered:
            self._loop.call_soon(self.flush)
        self._gathered.append(line + "\n")

    def flush(self) -> None:
        """Write the collected lines."""
        self._write()

    def close(self) -> None:
        """Write what is left, if it is being read."""
        self.flush()
        self.output.close()
        super().close()

    def say(self, line: str) -> None:
        """Write a line as it is, after those collected so far."""
        self._write(line + "\n")

    def catch_up(self) -> bool:
        """Write held-back lines. Return whether none are left, after reporting dropped ones."""
        self.flush()
        if self.output.is_behind:
            return False
        before = self.output.dropped
        if lines := before - self._told_of:
            log.warning(
                "%d log lines could not be written",
                lines,
                extra=about("log_lines_dropped", lines=lines),
            )
            # If the report is dropped too, it is made again, and is not one of the lines that are missing.
            self._told_of += (self.output.dropped - before) or lines
        return True

    def _write(self, *lines: str) -> None:
        """Write the collected lines, followed by `lines`."""
        with self.lock or nullcontext():
            gathered, self._gathered = self._gathered, []
            self.output.write([*gathered, *lines])


class RequestLog:
    """`ports.Recorder` that writes a line per request."""

    def __init__(self) -> None:
        """Prepare the parts that all lines share, which are most of what `logging` computes per record."""
        alike = requests_log.makeRecord(
            requests_log.name, logging.INFO, __file__, 0, "", (), None, "finished"
        )
        self._alike = vars(alike)
        self._started_at = alike.created - alike.relativeCreated / 1000
        self._wall = SystemClock().wall

    def attempt(self, record: AttemptRecord) -> None:
        """See `ports.Recorder.attempt`. Failed attempts are logged even if the request succeeded."""
        if record.outcome.is_fault:
            fleet_log.warning(
                "attempt on %s failed: %s",
                record.backend,
                record.detail,
                extra=about(
                    "attempt_failed", id=record.request_id, backend=record.backend, reason=record.detail
                ),
            )

    def finished(self, record: RequestRecord) -> None:
        """See `ports.Recorder.finished`."""
        level = _LEVELS.get(record.ending, logging.INFO)
        if not requests_log.isEnabledFor(level):
            return
        now, only = self._wall(), _only_handler(requests_log)
        if isinstance(only, _Lines) and only.takes_request(level, now, record):
            return
        requests_log.handle(self._line(level, now, request_fields(record)))

    def _line(self, level: int, now: float, fields: dict[str, Any]) -> logging.LogRecord:
        line = logging.LogRecord.__new__(logging.LogRecord)
        vars(line).update(
            self._alike,
            levelno=level,
            levelname=logging.getLevelName(level),
            created=now,
            msecs=now % 1 * 1000,
            relativeCreated=(now - self._started_at) * 1000,
            msg=_Sentence(fields),
            fields=fields,
        )
        return line


def _only_handler(logger: logging.Logger | None) -> logging.Handler | None:
    """Return the handler that receives a logger's records; None if there are several, or none."""
    only = None
    while logger is not None:
        for handler in logger.handlers:
            if only is not None:
                return None
            only = handler
        logger = logger.parent if logger.propagate else None
    return only


def backend_changed(
    backend_id: str, old: BackendStatus, new: BackendStatus, allowed: tuple[VersionBound, ...] = ()
) -> None:
    """Log changes of a backend's state, of whether it serves the right models, and is a single engine.

    `allowed`: the range of versions that its engine may have.
    """
    if new.model_error != old.model_error and (new.model_error or new.served_models):
        fleet_log.log(
            logging.WARNING if new.model_error else logging.INFO,
            "%s: %s",
            backend_id,
            new.model_error or "serves the right model now",
            extra=about("backend_model", backend=backend_id, reason=new.model_error or None),
        )
    wrong, before = _wrong_version(new, allowed), _wrong_version(old, allowed)
    if wrong != before and (wrong or new.served_models):
        fleet_log.log(
            logging.WARNING if wrong else logging.INFO,
            "%s: %s",
            backend_id,
            f"{wrong}: it gets no requests" if wrong else "its engine has an allowed version now",
            extra=about("backend_version", backend=backend_id, reason=wrong or None),
        )
    if new.is_asleep is not old.is_asleep:
        fleet_log.info(
            "%s: %s",
            backend_id,
            new.reason if new.is_asleep else "sleeps no longer",
            extra=about("backend_sleep", backend=backend_id, reason=new.reason if new.is_asleep else None),
        )
    if new.shared_at is not None and old.shared_at is None:
        fleet_log.warning(
            "%s: %s",
            backend_id,
            new.metrics_error,
            extra=about("backend_shared", backend=backend_id, reason=new.metrics_error),
        )
    # A certificate that turns out to be wrong is worth a line: nothing else would change until it is mended.
    is_told = new.probe_fault is not ProbeFault.TLS or old.probe_fault is ProbeFault.TLS
    if new.state is old.state and (is_told or new.state is not State.BOOTING):
        return
    # A box stopping its own models is not a problem.
    is_good = new.state in (State.UP, State.PROBATION, State.OUT) or old.state is State.OUT
    level = logging.INFO if is_good else logging.WARNING
    fleet_log.log(
        level,
        "%s: %s -> %s (%s)",
        backend_id,
        old.state,
        new.state,
        new.reason,
        extra=about(
            "backend_state",
            backend=backend_id,
            before=old.state.value,
            state=new.state.value,
            reason=new.reason,
        ),
    )


def _wrong_version(status: BackendStatus, allowed: tuple[VersionBound, ...]) -> str:
    """Return why an engine's version is not allowed; "" if it is, or is not known yet."""
    return versions.misfit(allowed, status.version) if status.served_models else ""  # queried together


def count_drifted(drift: CountDrift) -> None:
    """Log when an engine's count begins or ceases to differ from the gateway's."""
    level = logging.INFO if drift.cause is Cause.NONE else logging.WARNING
    fleet_log.log(
        level,
        "%s: the engine has %+d sequences compared with the gateway's count (%s)",
        drift.backend,
        drift.lasting_seqs,
        drift.cause.sentence(),
        extra=about(
            "count_drift",
            backend=drift.backend,
            seqs=drift.lasting_seqs,
            cause=drift.cause.value,
            reason=drift.cause.sentence(),
        ),
    )


def job_attempt_ended(end: AttemptEnd) -> None:
    """Log jobs that have ended, or will not be retried."""
    if end.outcome not in (AttemptOutcome.ENDED, AttemptOutcome.POISONED):
        return
    job, is_poisoned = end.job, end.outcome is AttemptOutcome.POISONED
    status = end.status or JobStatus.FAILED
    code = "job_poisoned" if is_poisoned else end.error.code if end.error else None
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
        extra=about(
            "job_ended",
            id=job.id,
            lane=job.new.lane,
            status=status.value,
            code=code,
            key=job.new.key,
            attempts=job.attempt,
            failures=job.failures + is_poisoned,
            waited_s=round(end.waited_s, 3),
            took_s=round(end.took_s, 3),
            total_s=round(end.lasted_s, 3),
        ),
    )


def webhook_attempted(attempt: WebhookAttempt) -> None:
    """Log failed webhook deliveries, by the endpoint's name, never its URL."""
    delivery = attempt.delivery
    if attempt.outcome is WebhookOutcome.DELIVERED:
        return
    number, subject = delivery.failures + 1, delivery.subject
    if attempt.retry_s is not None:
        webhooks_log.warning(
            "webhook %s: %s (%s) failed: %s; attempt %d of %d, the next in %.0f s",
            *(delivery.endpoint, delivery.id, subject, attempt.detail),
            *(number, len(SCHEDULE_S), attempt.retry_s),
            extra=about(
                "webhook_failed",
                endpoint=delivery.endpoint,
                id=delivery.id,
                subject=subject,
                outcome=attempt.outcome.value,
                reason=attempt.detail,
                attempt=number,
                retry_s=round(attempt.retry_s),
            ),
        )
        return
    then = {
        WebhookOutcome.GONE: "nothing more is sent to it until the gateway restarts",
        WebhookOutcome.DROPPED: "this delivery was dropped",
    }.get(attempt.outcome, f"given up after {number} attempts")
    webhooks_log.error(
        "webhook %s: %s (%s) failed: %s; %s",
        *(delivery.endpoint, delivery.id, subject, attempt.detail, then),
        extra=about(
            "webhook_lost",
            endpoint=delivery.endpoint,
            id=delivery.id,
            subject=subject,
            outcome=attempt.outcome.value,
            reason=attempt.detail,
            attempt=number,
        ),
    )


def request_fields(record: RequestRecord) -> dict[str, Any]:
    """Return the members of a request's log line; times in seconds, rounded to 0.1 ms.

    Values that do not apply are left out.
    """
    decision, usage = record.decision, record.usage
    fields: dict[str, Any] = {"event": "request", "id": record.id}
    if record.trace:
        fields["trace"] = f"{record.trace.own.trace_id:032x}"
    if record.job:
        fields["job"] = record.job
    fields["ending"] = record.ending._value_  # `value` would take two calls
    fields["status"] = record.status
    if record.error_code:
        fields["code"] = record.error_code
    if record.model:
        fields["model"] = record.model[:100]
    if record.key:
        fields["key"] = record.key
    if decision:
        fields["class"] = decision.traffic_class
        fields["why"] = decision.class_reason
        fields["estimate"] = decision.estimate.tokens
    if record.backend:
        fields["pool"] = record.pool
        fields["backend"] = record.backend
    fields["attempts"] = len(record.attempts)
    if reason := _reason(record):
        fields["reason"] = reason
    if usage:
        fields["prompt_tokens"] = usage.prompt_tokens
        fields["output_tokens"] = usage.completion_tokens
    fields["stream"] = record.stream
    _add_times(fields, record)
    return fields


def _reason(record: RequestRecord) -> str:
    """Return why the last attempt failed, or ended with its caller.

    "" otherwise: what a backend says of a request that it rejects may quote its prompt.
    """
    last = record.attempts[-1] if record.attempts else None
    if last is None:
        return ""
    is_left = record.ending is Ending.LEFT and last.outcome is Outcome.CANCELLED
    return last.detail if is_left or record.ending in _LEVELS else ""


def _add_times(fields: dict[str, Any], record: RequestRecord) -> None:
    received_at, first = record.received_at, record.first_byte_at
    if (read_s := record.read_s) is not None and read_s >= READ_S:
        fields["read_s"] = round(read_s, 4)
    if (queue_s := record.queue_s) is not None and queue_s >= QUEUED_S:
        fields["queue_s"] = round(queue_s, 4)
    if first is not None:
        fields["first_token_s"] = round(first - received_at, 4)
    fields["total_s"] = round(record.ended_at - received_at, 4)


@valueclass(frozen=True, slots=True)
class _Sentence:
    """The human-readable line of a request, formatted on demand."""

    fields: dict[str, Any]

    def __str__(self) -> str:
        fields = self.fields
        where = f"{fields.get('class', '-')} -> {fields.get('backend', '-')}"
        read = f", read in {fields['read_s']:.2f} s" if "read_s" in fields else ""
        waited = f", waited {fields['queue_s']:.2f} s" if "queue_s" in fields else ""
        first = f", first token {fields['first_token_s']:.2f} s" if "first_token_s" in fields else ""
        tokens = f", {fields['estimate']} tokens" if "estimate" in fields else ""
        error = f" {fields['code']}" if "code" in fields else ""
        took = f"{fields['total_s']:.2f} s, {fields['ending']}"
        reason = f": {fields['reason']}" if "reason" in fields else ""
        return f"{fields['status']}{error} {where}{tokens}{read}{waited}{first}, {took}{reason}"
