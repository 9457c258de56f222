"""Interprets what a backend says: errors in five shapes, verdicts, usage. Pure.

With vLLM, status 200 proves nothing: an engine that is stopping answers 200 with partial text and
`finish_reason: "abort"`, and one whose worker process died sends an `error` event before `[DONE]`.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.core.errors import (
    BackendRejected,
    BodyRefused,
    GatewayError,
    UpstreamBusy,
    UpstreamFailed,
    UpstreamFaulty,
)
from gateway.core.health import Outcome
from gateway.core.usage import Usage
from gateway.core.value import valueclass

ABORTED = "abort"
"""The finish_reason of an aborted answer: the engine is stopping, or was told to abort it."""

REFUSED_FOR_LOAD = frozenset({408, 429, 503})
"""Statuses of a backend that has no room for a request now."""

_OVERLONG = re.compile(
    r"maximum context length|max_model_len|context window|available context size|the model's context length",
    re.IGNORECASE,
)
_CALLERS_FAULT = re.compile(
    r"(?:image|audio|video) input is not supported|Failed to parse (?:messages|tools): ", re.IGNORECASE
)
"""Messages with which llama.cpp's server rejects unsupported requests, with status 500."""
_STOPPING = re.compile(r"after shutdown|shutting down", re.IGNORECASE)
_CRASHED = re.compile(
    r"EngineCore|EngineDead|engine core|\AThe server had an error while processing your request\.\Z",
    re.IGNORECASE,
)
"""Messages of an API server whose engine died. The last one is that of vLLM 0.33 (its `EngineDeadError`)."""
_NO_MODEL = re.compile(r"model .{1,200} does not exist", re.IGNORECASE | re.DOTALL)
_GISTS: Sequence[tuple[re.Pattern[str], str]] = (
    (_CRASHED, "the engine died"),
    (_STOPPING, "it is stopping"),
    (_NO_MODEL, "it does not know the model by this name"),
    (_OVERLONG, "the prompt is too long for it"),
)
_PRIVATE: Sequence[tuple[re.Pattern[str], str]] = (
    (re.compile(r"https?://[^\s'\"<>]+"), "[url]"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"), "[address]"),
    (re.compile(r"(?<![\w.])/(?:[\w.+-]+/)+[\w.+-]+"), "[path]"),
)

TOKENS_MAX = 2**53
"""Larger token counts are not credible: up to here, integers are exact as floats."""

MESSAGE_CHARS_MAX = 4_000
"""Maximum characters of a backend's message that are examined, and that a caller gets. A choice: an engine
may quote the whole request, and to search a megabyte for what it says takes seconds."""

_MESSAGE_BYTES_MAX = 6 * MESSAGE_CHARS_MAX
"""The same in bytes of JSON, where a character is up to six (`\\u0000`)."""

_UNSAID = "The backend refused the request without saying why."

_MESSAGE = re.compile(
    r'\s*\{\s*(?:"error"\s*:\s*\{\s*)?"(?:message|detail)"\s*:\s*'
    r'"((?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*)'
)
_LIMITS = frozenset({"max_tokens", "truncate_prompt_tokens"})
"""Members that may themselves be greater than the window, however short the prompt is."""
_OWN_VERDICTS = frozenset({400, 413, 422})
_SAID_LATE = _OWN_VERDICTS | {429, 503}
"""Statuses believed in an error within an answer of status 200."""


@dataclass(frozen=True, slots=True)
class BackendError:
    """A backend's error, normalized from any shape."""

    message: str
    code: str = ""
    param: str | None = None
    status: int | None = None
    """The status by which an engine refuses a request after it has begun a stream, which has status 200."""

    @property
    def is_crash(self) -> bool:
        """Whether the engine behind the server died."""
        return bool(_CRASHED.search(self.message))

    @property
    def gist(self) -> str:
        """A summary in our own words; "" if there is none. The backend's own words may quote the prompt."""
        return next((words for pattern, words in _GISTS if pattern.search(self.message)), "")

    @property
    def public_message(self) -> str:
        """The backend's own words for the caller, without addresses and paths of the operator's machines."""
        message = self.message.encode(errors="replace").decode()  # no lone surrogate
        for pattern, words in _PRIVATE:
            message = pattern.sub(words, message)
        return message


class InvalidAnswer(BackendError):
    """An answer that is broken in itself. The message is ours, so that the log may have it."""

    @property
    def gist(self) -> str:
        """See `BackendError.gist`."""
        return f"status 200, but {self.message[0].lower()}{self.message[1:].rstrip('.')}"


class UnfitAnswer(BackendError):
    """A complete answer that is not what was asked for. The backend is healthy; a retry may succeed."""


class FewerChoices(UnfitAnswer):
    """One with fewer choices than asked for, as of a server that ignores `n`: no retry there succeeds."""

    def __init__(self, found: int, wanted: int) -> None:
        super().__init__(f"The backend answered with {found} of {wanted} choices: it may not support more.")


def read_error(body: bytes) -> BackendError:
    """Parse an error body; one without a recognizable error yields a generic description.

    The shapes of vLLM 0.32: `{"error": {message, type, param, code: int}}` with two spellings of type,
    `{"detail": ...}` from the framework, `{"error": "Unauthorized"}`, and
    `{"type": "error", "error": {...}}`; older ones have the members at the top level.
    """
    try:
        decoded = json.loads(body)
    except (ValueError, RecursionError):
        return BackendError(_beginning(body) or _UNSAID)
    return error_of(decoded) or BackendError(_UNSAID)


def _beginning(body: bytes) -> str:
    """Return the beginning of the message in a truncated body: engines quote the whole input they reject."""
    found = _MESSAGE.match(body[:_MESSAGE_BYTES_MAX].decode(errors="ignore"))
    text = "" if found is None else str(json.loads(f'"{found[1]}"', strict=False))
    return _shortened(text.encode(errors="ignore").decode())  # the cut may have split a character


def error_of(decoded: object) -> BackendError | None:
    """Return the error that a decoded JSON value describes, or None."""
    if not isinstance(decoded, dict):
        return None
    error = decoded.get("error")
    if error and isinstance(error, dict):
        param, code = error.get("param"), error.get("code")
        return BackendError(
            message=_shortened(error.get("message") or error),
            code=code if isinstance(code, str) else "",
            param=param if isinstance(param, str) else None,
            status=code if isinstance(code, int) and code in _SAID_LATE else None,
        )
    if error:
        return BackendError(_shortened(error))
    if "detail" in decoded and "choices" not in decoded:
        detail = decoded["detail"]
        return BackendError(_shortened(detail if isinstance(detail, str) else json.dumps(detail)))
    if decoded.get("object") == "error":
        return BackendError(_shortened(decoded.get("message") or "unknown error"))
    return None


def _shortened(message: object) -> str:
    return str(message)[:MESSAGE_CHARS_MAX]


def verdict(
    status: int, error: BackendError, retry_after_s: float | None = None
) -> tuple[GatewayError, Outcome]:
    """Return the error for the caller for a status other than 200, and the outcome for the backend's health.

    `retry_after_s`: what the backend says of when it may be asked again.

    An `UpstreamError` may be retried elsewhere, and a `BodyRefused`; any other `CallerError` is final.
    """
    if status in (401, 403):
        return UpstreamFaulty("The backend does not accept the gateway's credentials."), Outcome.MISCONFIGURED
    if status in (404, 405) or 300 <= status < 400:
        return UpstreamFaulty(
            f"The backend does not serve this route or model (status {status})."
        ), Outcome.MISCONFIGURED
    if status in REFUSED_FOR_LOAD:
        again_s = 1 if retry_after_s is None else retry_after_s
        message = "The backend refused the request because of load."
        return UpstreamBusy(message, retry_after_s=again_s), Outcome.BUSY
    if status == 500 and _CALLERS_FAULT.match(error.message):
        return _rejected(400, error), Outcome.REJECTED
    if status >= 500 and _STOPPING.search(error.message):
        return UpstreamBusy("The backend is stopping.", retry_after_s=1), Outcome.DRAINING
    if status >= 500 or status < 200:
        kind = UpstreamFailed if error.is_crash else UpstreamFaulty
        return kind(f"The backend failed with status {status}."), Outcome.FAILED
    if status < 300:
        return UpstreamFailed(f"The backend answered with status {status}."), Outcome.FAILED
    if status == 413 and error.message == _UNSAID:  # engines say why, and hardly limit bodies: proxies do
        return BodyRefused(), Outcome.REJECTED
    return _rejected(status, error), Outcome.REJECTED


def _rejected(status: int, error: BackendError) -> BackendRejected:
    message, code = error.public_message, "invalid_request"
    if error.code == "context_length_exceeded" or (_OVERLONG.search(message) and error.param not in _LIMITS):
        # Clients recognize a context overflow by these words, not by the code.
        said = message.rstrip().removesuffix(".")
        message = f"{said}. Input tokens exceed the configured limit [context_length_exceeded]."
        code = "context_length_exceeded"
    own = status if status in _OWN_VERDICTS else 400
    return BackendRejected(message, status=own, code=code, param=error.param)


@valueclass(frozen=True, slots=True)
class Answer:
    """The parts of a complete non-streamed answer that determine whether it is valid."""

    error: BackendError | None
    finish_reasons: tuple[str | None, ...]
    usage: Usage | None

    def fault(self, choices: int) -> BackendError | None:
        """Return what is wrong with the answer despite status 200, or None.

        Each of `choices` must exist and be finished, as in a stream.
        """
        if self.error is not None:
            return self.error
        if ABORTED in self.finish_reasons:
            return BackendError("The engine aborted the request: it is stopping.", code=ABORTED)
        if not self.finish_reasons or not all(self.finish_reasons):  # "" is none, as in a stream
            return InvalidAnswer("The answer is incomplete.")
        found = len(self.finish_reasons)
        return FewerChoices(found, choices) if found < choices else None


def usage_of(usage: object) -> Usage | None:
    """Return the token counts in a `usage` member, or None."""
    if not isinstance(usage, dict):
        return None
    prompt_tokens = usage.get("prompt_tokens")
    if not isinstance(prompt_tokens, int) or not 0 <= prompt_tokens <= TOKENS_MAX:
        return None
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=_count(usage, "completion_tokens"),
        cached_tokens=_count(usage.get("prompt_tokens_details"), "cached_tokens"),
        reasoning_tokens=_count(usage.get("completion_tokens_details"), "reasoning_tokens"),
    )


def _count(holder: Any, name: str) -> int:
    value = holder.get(name) if isinstance(holder, dict) else None
    return value if isinstance(value, int) and 0 <= value <= TOKENS_MAX else 0
