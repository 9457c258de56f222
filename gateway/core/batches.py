"""Batches: files of requests that are worked off within a day, line by line, as OpenAI's Batch API has them.

    input file -> lines -> a job each -> output lines and error lines, in the order in which they end

A batch is validated as a whole before any of it runs: one bad line fails it, and names what is wrong with
every line, up to `ERRORS_MAX`. Ids of lines come of the batch and the line's number, so reading a file again
after a crash makes the same ids.

    VALIDATING    becomes IN_PROGRESS, FAILED, EXPIRED or CANCELLING
    IN_PROGRESS   becomes FINALIZING, EXPIRED or CANCELLING
    FINALIZING    becomes COMPLETED
    CANCELLING    becomes CANCELLED

Pure: lines are arguments; the store makes every step from one status to the next.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NoReturn

ENDPOINTS = ("/v1/chat/completions", "/v1/responses")
LINES_MAX = 50_000
"""Requests of one batch; OpenAI's limit."""

FILE_BYTES_MAX = 200 * 1024 * 1024
"""Bytes of an input file; OpenAI's limit, read as mebibytes."""

ERRORS_MAX = 100
"""Errors of an input file that are reported; reading ends with the last of them."""

CUSTOM_ID_MAX = 512
"""Characters of a `custom_id`. OpenAI names no limit; metadata values have this one."""

WINDOW_S = 86_400
"""The one completion window there is, "24h"."""

OPEN_MAX = 100
"""Batches of one API key that may be open at once."""

KEPT_MAX = 10_000
"""Batches of one API key that are kept; the oldest go first."""

KEEP_S = 30 * 86_400
"""How long a batch is kept after its end: as long as its files, at most."""


class BatchStatus(StrEnum):
    """Where a batch stands; OpenAI's words."""

    VALIDATING = "validating"
    FAILED = "failed"  # the input file is bad; nothing ran
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether it never changes again."""
        return self in _FINAL


_FINAL = frozenset({BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})


# ------------------------------------------------------------------ the input file


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request of an input file.

    Attributes:
        number: Of the line in the file, from 1.
        custom_id: The caller's own name for it.
        body: The request, JSON.
    """

    number: int
    custom_id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class BatchLineError:
    """What is wrong with an input file.

    Attributes:
        code: Fixed: for programs.
        message: For people. Repeats nothing of a body.
        line: Number of the line, from 1; None where it is the file.
        param: The member at fault, or None.
    """

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class _Bad(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(code)
        self.code, self.message, self.param = code, message, param


LINE_BYTES_MAX = 32 * 1024 * 1024
"""Bytes of a line: what a request body may have where nothing else is configured."""


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line of a file.

    Attributes:
        number: From 1.
        data: Its bytes with its end; None for one that is longer than `LINE_BYTES_MAX`.
        end: Where in the file the next one begins, in bytes.
    """

    number: int
    data: bytes | None
    end: int


class LineSplitter:
    """Cuts a file that comes in pieces into its lines; keeps no more than one of them."""

    def __init__(self, number: int = 0, offset: int = 0) -> None:
        """Begin behind line `number`, which ends at `offset`."""
        self._number, self._end = number, offset
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> Iterator[RawLine]:
        """Yield the lines that are complete with the next bytes of the file."""
        for part in _split(data):
            self._size += len(part)
            if self._size <= LINE_BYTES_MAX:
                self._parts.append(part)
            else:
                self._parts.clear()
            if part.endswith(b"\n"):
                yield self._taken()

    def end(self) -> Iterator[RawLine]:
        """Yield the last line, if nothing ends it but the file's end."""
        if self._size:
            yield self._taken()

    def _taken(self) -> RawLine:
        self._number += 1
        self._end += self._size
        data = b"".join(self._parts) if self._size <= LINE_BYTES_MAX else None
        self._parts, self._size = [], 0
        return RawLine(self._number, data, self._end)


def _split(data: bytes) -> Iterator[bytes]:
    """Yield what the newlines of `data` leave: nothing else ends a line of JSON."""
    start = 0
    while (end := data.find(b"\n", start)) >= 0:
        yield data[start : end + 1]
        start = end + 1
    if start < len(data):
        yield data[start:]


class InputReader:
    """Reads an input file line by line, and keeps nothing of a line but its `custom_id`.

    Empty lines say nothing. After an error of the file as a whole, and after `ERRORS_MAX` errors, no more is
    to be read.

    Attributes:
        count: Requests so far.
        errors: Errors so far.
        is_over: Whether no more is to be read.
    """

    def __init__(self, endpoint: str) -> None:
        """Read a file for `endpoint`, which every line must name."""
        self._endpoint = endpoint
        self._seen: dict[str, int] = {}  # by custom_id, the line
        self._size_bytes = 0
        self.count = self.errors = 0
        self.is_over = False

    def read(self, line: RawLine) -> BatchLine | BatchLineError | None:
        """Return the request of a line, or what is wrong with it, or None for an empty one."""
        self._size_bytes += LINE_BYTES_MAX if line.data is None else len(line.data)
        if self._size_bytes > FILE_BYTES_MAX:
            return self._refused("file_too_large", f"The file has more than {FILE_BYTES_MAX:,} bytes.")
        found = request_of(line, self._endpoint, self._seen)
        if found is None:
            return None
        self.count += 1
        if self.count > LINES_MAX:
            return self._refused("too_many_requests", f"The file has more than {LINES_MAX:,} requests.")
        if isinstance(found, BatchLineError):
            self.errors += 1
            self.is_over = self.errors >= ERRORS_MAX
        return found

    def end(self) -> BatchLineError | None:
        """Return what is wrong with the file as a whole, now that it has been read to its end."""
        return None if self.count else self._refused("empty_file", "The file has no requests.")

    def _refused(self, code: str, message: str) -> BatchLineError:
        self.errors += 1
        self.is_over = True
        return BatchLineError(code, message)


def request_of(line: RawLine, endpoint: str, seen: dict[str, int]) -> BatchLine | BatchLineError | None:
    """Return the request of a line, or what is wrong with it, or None for an empty one.

    `seen`: by `custom_id`, the lines that it must not repeat; this one is put to them.
    """
    try:
        if line.data is None:
            raise _Bad("line_too_long", f"The line has more than {LINE_BYTES_MAX:,} bytes.")
        return _line(line.number, line.data, endpoint, seen) if line.data.strip() else None
    except _Bad as bad:
        return BatchLineError(bad.code, bad.message, line.number, bad.param)


def _line(number: int, raw: bytes, endpoint: str, seen: dict[str, int]) -> BatchLine:
    members = _decoded(raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw)
    custom_id = members.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= CUSTOM_ID_MAX or _is_broken(custom_id):
        raise _Bad(
            "invalid_custom_id",
            f"custom_id must be a string of 1 to {CUSTOM_ID_MAX} characters.",
            "custom_id",
        )
    if (first := seen.setdefault(custom_id, number)) != number:
        raise _Bad("duplicate_custom_id", f"Line {first} has the same custom_id.", "custom_id")
    if members.get("method") != "POST":
        raise _Bad("invalid_method", 'method must be "POST".', "method")
    url = members.get("url")
    if url not in ENDPOINTS:
        raise _Bad("invalid_url", f"url must be {' or '.join(ENDPOINTS)}.", "url")
    if url != endpoint:
        raise _Bad("mismatched_endpoint", f"The batch is for {endpoint}: every line must be.", "url")
    body = members.get("body")
    if not isinstance(body, dict):
        raise _Bad("invalid_body", "body must be a JSON object.", "body")
    if body.get("stream"):
        raise _Bad("invalid_body", "Requests of a batch cannot be streamed: leave out stream.", "body.stream")
    return BatchLine(number, custom_id, _encoded(body))


def _decoded(raw: bytes) -> Mapping[str, Any]:
    try:
        members = json.loads(raw.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise _Bad("invalid_json_line", "The line is not valid JSON in UTF-8.") from None
    if not isinstance(members, dict):
        raise _Bad("invalid_json_line", "The line is not a JSON object.")
    return members


def _encoded(body: Mapping[str, Any]) -> bytes:
    """Return a request as JSON, not escaped: most scripts would take two or three times what they do."""
    try:
        return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which can only be escaped
        return json.dumps(body, separators=(",", ":")).encode()


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)  # NaN and Infinity, which Python reads and JSON has not


def _is_broken(text: str) -> bool:
    """Return whether a text has half of a surrogate pair, which no UTF-8 can hold."""
    return any("\ud800" <= character <= "\udfff" for character in text)


# ------------------------------------------------------------------ the batch


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as its owner sees it.

    Attributes:
        id: `batch_...`, unguessable.
        key: Name of the API key it belongs to, or None.
        endpoint: One of `ENDPOINTS`.
        input_file_id: The file of its requests.
        created_at: Epoch seconds, as all its times.
        status: Where it stands.
        times: When it got into each status it has been in.
        total, completed, failed: Requests: all, those with an answer, those without.
        errors: What is wrong with the input file.
        output_file_id: The file of answers, once there is one.
        error_file_id: The file of failures, once there is one.
        metadata: The owner's own.
        headers: Those of the request that made it which policy may match on; its lines have them too.
        output_keep_s: How long the files it leaves are kept.
    """

    id: str
    key: str | None
    endpoint: str
    input_file_id: str
    created_at: int
    status: BatchStatus = BatchStatus.VALIDATING
    times: Mapping[BatchStatus, int] = field(default_factory=dict)
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: tuple[BatchLineError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    metadata: Mapping[str, str] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    output_keep_s: int = 30 * 86_400

    @property
    def expires_at(self) -> int:
        """When what has not ended of it is given up."""
        return self.created_at + WINDOW_S

    def line_id(self, number: int) -> str:
        """Return the id of a line's request, the same whenever it is asked for."""
        return f"batch_req_{self.line_token(number)}"

    def line_token(self, number: int) -> str:
        """Return what names a line everywhere: 32 hex digits, the same whenever they are asked for."""
        return hashlib.sha256(f"{self.id} {number}".encode()).hexdigest()[:32]

    def file_id(self, kind: str) -> str:
        """Return the id that its file of a `kind`, output or error, has if there is one."""
        return f"file-{hashlib.sha256(f'{self.id} {kind}'.encode()).hexdigest()[:32]}"


def batch_object(batch: Batch) -> dict[str, Any]:
    """Return a batch as the API shows it."""
    errors = [
        {"code": error.code, "line": error.line, "message": error.message, "param": error.param}
        for error in batch.errors
    ]
    timed = [status for status in BatchStatus if status is not BatchStatus.VALIDATING]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.status.value,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{f"{status}_at": batch.times.get(status) for status in timed},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": batch.metadata,
    }


class BatchRefusal(StrEnum):
    """Why a batch was not accepted. Few and fixed: error codes."""

    FILE_NOT_FOUND = "file_not_found"
    INVALID_PURPOSE = "invalid_purpose"
    TOO_MANY_BATCHES = "too_many_batches"
    IDEMPOTENCY_KEY_REUSED = "idempotency_key_reused"  # with another body


# ------------------------------------------------------------------ whoever works at one


class BatchLost(Exception):
    """Another works at the batch by now, or it is over, or the store has lost some of what was done."""


@dataclass(frozen=True, slots=True)
class BatchClaim:
    """A batch, taken.

    Attributes:
        batch: As it was then.
        fence: Names the taking; what a former one writes is refused.
        number: Of the last line that was handed over or written down.
        offset: Where in the input file the next one begins.
    """

    batch: Batch
    fence: str
    number: int = 0
    offset: int = 0


@dataclass(frozen=True, slots=True)
class RunningLine:
    """A line that is a job.

    Attributes:
        job_id: The job.
        number: Of the line.
        custom_id: The caller's own name for it.
    """

    job_id: str
    number: int
    custom_id: str


@dataclass(frozen=True, slots=True)
class BatchSight:
    """How a batch stands.

    Attributes:
        status: Where.
        is_due: Whether its time is over.
        left_s: How much it has left.
        running: Lines that are jobs, whether these have ended or not.
        ended: Some of those whose jobs have ended, in that order.
    """

    status: BatchStatus
    is_due: bool
    left_s: float
    running: int
    ended: tuple[RunningLine, ...]

    @property
    def is_given_up(self) -> bool:
        """Whether no more of it is to run."""
        return self.is_due or self.status is BatchStatus.CANCELLING


# ------------------------------------------------------------------ output and error files


def answered_line(line_id: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Return the line of a request that got an answer, and its end.

    One with a status from 400 on belongs into the error file, one below into the output file.

    Args:
        line_id: See `Batch.line_id`.
        custom_id: The caller's own name for it.
        status: HTTP status of the answer.
        request_id: The `x-request-id` it was worked off under.
        body: The answer, JSON.
    """
    response = {"status_code": status, "request_id": request_id, "body": json.loads(body)}
    return _result_line(line_id, custom_id, response, None)


def unanswered_line(line_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Return the error file's line of a request that got no answer, such as `batch_expired`, and its end."""
    return _result_line(line_id, custom_id, None, {"code": code, "message": message})


def _result_line(
    line_id: str, custom_id: str, response: Mapping[str, Any] | None, error: Mapping[str, str] | None
) -> bytes:
    members = {"id": line_id, "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(members, separators=(",", ":")).encode() + b"\n"
