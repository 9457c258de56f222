"""Batches: files of requests, processed line by line within a day, as in OpenAI's Batch API.

    input file -> lines -> a job each -> output lines and error lines, in the order in which they end

A batch is validated completely before any of it runs: a single bad line fails it, and the errors of all lines
are reported, up to `ERRORS_MAX`. Ids of lines are derived from the batch and the line's number, so reading a
file again after a crash yields the same ids.

    VALIDATING    becomes IN_PROGRESS, FAILED, EXPIRED or CANCELLING
    IN_PROGRESS   becomes FINALIZING, EXPIRED or CANCELLING
    FINALIZING    becomes COMPLETED
    CANCELLING    becomes CANCELLED

Pure: lines are arguments; the store performs the transitions.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from enum import StrEnum
from json.encoder import encode_basestring_ascii
from typing import Any, NoReturn

from gateway.core.value import valueclass
from gateway.core.value_limit import CONTAINERS_MAX, SMALL_BYTES, VALUES_MAX, is_crowded

ENDPOINTS = ("/v1/chat/completions", "/v1/responses")
LINES_MAX = 50_000
"""Maximum requests per batch; OpenAI's limit."""

FILE_BYTES_MAX = 200 * 1024 * 1024
"""Maximum size of an input file; OpenAI's limit, interpreted as mebibytes."""

ERRORS_MAX = 100
"""Maximum errors reported per input file; validation stops at the last of them. A choice: a file with more is
wrong altogether."""

CUSTOM_ID_MAX = 512
"""Maximum characters of a `custom_id`. OpenAI documents no limit; this is the one for metadata values."""

WINDOW_S = 86_400
"""The only supported completion window, "24h"."""

OPEN_MAX = 100
"""Maximum number of open batches per API key. A choice, so that one key cannot fill the store."""

KEPT_MAX = 10_000
"""Maximum number of stored batches per API key; the oldest are deleted first. A choice, like `OPEN_MAX`."""

KEEP_S = 30 * 86_400
"""How long a batch is stored after its end: at most as long as its files (`files.EXPIRES_MAX_S`)."""


class BatchStatus(StrEnum):
    """Status of a batch, in OpenAI's terms."""

    VALIDATING = "validating"
    FAILED = "failed"  # the input file is invalid; nothing ran
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


@valueclass(frozen=True, slots=True)
class BatchLine:
    """A request in an input file.

    Attributes:
        number: Line number in the file, from 1.
        custom_id: The caller's own id.
        body: The request, JSON.
    """

    number: int
    custom_id: str
    body: bytes


@valueclass(frozen=True, slots=True)
class BatchLineError:
    """An error in an input file.

    Attributes:
        code: A stable code for programs.
        message: For people. Never quotes a body.
        line: Line number, from 1; None for the file as a whole.
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
"""Maximum size of a line: the default maximum of a request body."""


@valueclass(frozen=True, slots=True)
class RawLine:
    """A line of a file.

    Attributes:
        number: From 1.
        data: Its bytes including the line break; None if longer than `LINE_BYTES_MAX`.
        end: Offset of the next line.
    """

    number: int
    data: bytes | None
    end: int


_BLANK_LINES = re.compile(rb"\s*\n")


class LineSplitter:
    """Splits a streamed file into lines; buffers at most one of them.

    Empty lines are counted, but mostly not yielded: a file can have many millions.
    """

    def __init__(self, number: int = 0, offset: int = 0) -> None:
        """Start after line `number`, which ends at `offset`."""
        self._number, self._end = number, offset
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> Iterator[RawLine]:
        """Yield the lines completed by the next bytes of the file."""
        start = 0
        while start < len(data):
            if not self._size and (blank := _BLANK_LINES.match(data, start)) is not None:
                self._number += data.count(b"\n", start, blank.end())
                self._end += blank.end() - start
                start = blank.end()
                continue
            end = data.find(b"\n", start) + 1 or len(data)  # no other character ends a line of JSON
            part, start = data[start:end], end
            self._size += len(part)
            if self._size <= LINE_BYTES_MAX:
                self._parts.append(part)
            else:
                self._parts.clear()
            if part.endswith(b"\n"):
                yield self._taken()

    def end(self) -> Iterator[RawLine]:
        """Yield the last line if the file does not end with a line break."""
        if self._size:
            yield self._taken()

    def _taken(self) -> RawLine:
        self._number += 1
        self._end += self._size
        data = b"".join(self._parts) if self._size <= LINE_BYTES_MAX else None
        self._parts, self._size = [], 0
        return RawLine(self._number, data, self._end)


class InputReader:
    """Validates an input file line by line, keeping only the `custom_id` of each line.

    Empty lines are skipped. Reading stops after an error that concerns the whole file, and after `ERRORS_MAX`
    errors.

    Attributes:
        count: Requests so far.
        errors: Errors so far.
        is_over: Whether reading has stopped.
    """

    def __init__(self, endpoint: str) -> None:
        """Validate a file for `endpoint`, which every line must name."""
        self._endpoint = endpoint
        self._seen: dict[str, int] = {}  # by custom_id, the line
        self._size_bytes = 0
        self.count = 0
        self.errors: list[BatchLineError] = []
        self.is_over = False

    def read(self, line: RawLine) -> BatchLine | BatchLineError | None:
        """Return the request in a line, or its error; None for an empty line."""
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
            self.errors.append(found)
            self.is_over = len(self.errors) >= ERRORS_MAX
        return found

    def end(self) -> BatchLineError | None:
        """Return the error of the file as a whole, after it was read to its end; None if there is none."""
        return None if self.count else self._refused("empty_file", "The file has no requests.")

    def _refused(self, code: str, message: str) -> BatchLineError:
        self.errors.append(BatchLineError(code, message))
        self.is_over = True
        return self.errors[-1]


def request_of(line: RawLine, endpoint: str, seen: dict[str, int]) -> BatchLine | BatchLineError | None:
    """Return the request in a line, or its error; None for an empty line.

    `seen`: lines by `custom_id`, which must not be repeated; this line is added.
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
    if len(raw) > SMALL_BYTES and is_crowded(raw):
        message = f"At most {CONTAINERS_MAX:,} objects and arrays and {VALUES_MAX:,} values per line."
        raise _Bad("too_many_items", message)
    try:
        members = json.loads(raw.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise _Bad("invalid_json_line", "The line is not valid JSON in UTF-8.") from None
    if not isinstance(members, dict):
        raise _Bad("invalid_json_line", "The line is not a JSON object.")
    return members


def _encoded(body: Mapping[str, Any]) -> bytes:
    """Encode a request as JSON without escapes, which would double or triple the size of most scripts."""
    try:
        return json.dumps(body, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:  # a lone surrogate, which can only be escaped
        return json.dumps(body, separators=(",", ":")).encode()
    except ValueError:  # such as 1e999, which is read as infinite, and which JSON cannot say
        raise _Bad("invalid_json_line", "The line has a number that is out of range.") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)  # NaN and Infinity, which Python accepts although JSON does not have them


def _is_broken(text: str) -> bool:
    """Return whether a text contains a lone surrogate, which UTF-8 cannot represent."""
    return any("\ud800" <= character <= "\udfff" for character in text)


# ------------------------------------------------------------------ the batch


@valueclass(frozen=True, slots=True)
class Batch:
    """A batch as its owner sees it.

    Attributes:
        id: `batch_...`, unguessable.
        key: Name of its API key, or None.
        endpoint: One of `ENDPOINTS`.
        input_file_id: The input file.
        created_at: Epoch seconds, like all its times.
        status: Its status.
        times: When it entered each status.
        total, completed, failed: Number of requests: all, those with an answer, those without.
        errors: Errors of the input file.
        output_file_id: The file of answers, if it exists yet.
        error_file_id: The file of failures, if it exists yet.
        metadata: The owner's metadata.
        headers: Headers of the request that created it, which policies may match; its lines have them too.
        output_keep_s: How long its output files are kept.
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
        """Deadline, after which unfinished requests are given up."""
        return self.created_at + WINDOW_S

    def line_id(self, number: int) -> str:
        """Return the id of a line's result; always the same."""
        return f"batch_req_{self.line_token(number)}"

    def line_token(self, number: int) -> str:
        """Return a line's token, from which all its ids are derived: 32 hex digits, always the same."""
        return hashlib.sha256(f"{self.id} {number}".encode()).hexdigest()[:32]

    def file_id(self, kind: str) -> str:
        """Return the id of its output or error file, which may not exist yet; `kind`: output or error."""
        return f"file-{hashlib.sha256(f'{self.id} {kind}'.encode()).hexdigest()[:32]}"


def batch_object(batch: Batch) -> dict[str, Any]:
    """Return the API's batch object."""
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
    """Why a batch was not accepted. A closed set: error codes."""

    FILE_NOT_FOUND = "file_not_found"
    INVALID_PURPOSE = "invalid_purpose"
    TOO_MANY_BATCHES = "too_many_batches"
    IDEMPOTENCY_KEY_REUSED = "idempotency_key_reused"  # with another body


# ------------------------------------------------------------------ for runners


class BatchLost(Exception):
    """Another runner has the batch, it is over, or the store has lost some of its progress."""


@valueclass(frozen=True, slots=True)
class BatchClaim:
    """A batch leased by a runner.

    Attributes:
        batch: Its state at that time.
        fence: Fencing token; writes with an older one are rejected.
        number: The last line that was submitted or written.
        offset: Offset of the next line in the input file.
    """

    batch: Batch
    fence: str
    number: int = 0
    offset: int = 0


@valueclass(frozen=True, slots=True)
class RunningLine:
    """A line that is a job.

    Attributes:
        job_id: The job.
        number: Its line number.
        custom_id: The caller's own id.
    """

    job_id: str
    number: int
    custom_id: str


@valueclass(frozen=True, slots=True)
class BatchSnapshot:
    """The current state of a batch.

    Attributes:
        status: Its status.
        is_due: Whether its deadline has passed.
        left_s: Time until then.
        running: Lines that are jobs, ended or not.
        ended: Some of those whose jobs have ended, in that order.
    """

    status: BatchStatus
    is_due: bool
    left_s: float
    running: int
    ended: tuple[RunningLine, ...]

    @property
    def is_given_up(self) -> bool:
        """Whether no more of it may run."""
        return self.is_due or self.status is BatchStatus.CANCELLING


# ------------------------------------------------------------------ output and error files


def answered_line(line_id: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Return the result line of an answered request, including the line break.

    A status from 400 on belongs in the error file, any other in the output file.

    Args:
        line_id: See `Batch.line_id`.
        custom_id: The caller's own id.
        status: HTTP status of the answer.
        request_id: The `x-request-id` of its job.
        body: The answer, valid JSON. It is not decoded, because it may be megabytes long.
    """
    response = {"status_code": status, "request_id": request_id, "body": None}
    frame = _result_line(line_id, custom_id, response, None)
    escaped = body if body.isascii() else _NOT_ASCII.sub(_json_escaped, body.decode()).encode("ascii")
    before, _, after = frame.rpartition(b'"body":null')
    # JSON has line breaks only between its tokens.
    return b"".join((before, b'"body":', escaped.translate(_NO_BREAKS), after))


def _json_escaped(found: re.Match[str]) -> str:
    """Return characters as in a string of JSON, those that are not ASCII as escapes."""
    return encode_basestring_ascii(found[0])[1:-1]


_NOT_ASCII = re.compile(r'[^\x00-\x7f][^"\\\x00-\x1f]{0,4095}')
"""The rest of a string from such a character on, as far as nothing in it is escaped; in pieces, because no
other thread may run while one is escaped."""

_NO_BREAKS = bytes.maketrans(b"\r\n", b"  ")


def unanswered_line(line_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Return the error line of an unanswered request (such as `batch_expired`), with its line break."""
    return _result_line(line_id, custom_id, None, {"code": code, "message": message})


def _result_line(
    line_id: str, custom_id: str, response: Mapping[str, Any] | None, error: Mapping[str, str] | None
) -> bytes:
    members = {"id": line_id, "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(members, separators=(",", ":")).encode() + b"\n"
