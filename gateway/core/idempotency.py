"""Idempotency keys: two requests with the same key are one, and its answer is stored meanwhile.

    free -> RUNNING -> stored, for a day
              |
              +-> free again: it failed, its caller left, or its gateway died

A key is scoped to one API key and one route. The request is identified by its body alone, byte for byte:
headers concern transport and routing, and change between two attempts of a client (`x-stainless-retry-count`,
trace ids). The content is in the body, and an SDK that retries sends an identical one.

Pure. Names and statuses follow draft-ietf-httpapi-idempotency-key-header-07.
"""

import json
import re
from collections.abc import Sequence
from enum import StrEnum
from hashlib import sha256

from gateway.core.errors import InvalidRequest
from gateway.core.value import valueclass

HEADER = "idempotency-key"

KEY_CHARS_MAX = 255
"""Maximum characters of a key. A choice, and Stripe's limit: the IETF draft sets none."""

_BARE = re.compile(r"[!#-~][!-~]*")
_QUOTED = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')  # RFC 8941, section 3.3.3
_ESCAPED = re.compile(r'\\(["\\])')


class KeyState(StrEnum):
    """The state of a key when a request arrives with it."""

    BEGUN = "begun"  # it is the first request: run it
    RUNNING = "running"  # the first request has not ended
    REUSED = "reused"  # the key belongs to another body


@valueclass(frozen=True, slots=True)
class IdempotencyClaim:
    """A request's claim on its key.

    Attributes:
        owner: Name of the caller's API key; None if no keys are configured.
        route: The route.
        key: The caller's key, as returned by `read_key`.
        fingerprint: Fingerprint of the body, as returned by `fingerprint`.
        runner: Unguessable id of this attempt: its writes are rejected once another one has the key.
    """

    owner: str | None
    route: str
    key: str
    fingerprint: str
    runner: str

    @property
    def id(self) -> str:
        """Hash of route and key: of constant length, and without text from callers."""
        return sha256(f"{len(self.route)}:{self.route}{self.key}".encode()).hexdigest()

    def record_of(self, answer: bytes) -> bytes:
        """Return what is stored for an answer: it says which body it belongs to."""
        return self.fingerprint.encode() + answer

    def answer_in(self, record: bytes) -> bytes | KeyState:
        """Return the answer in a record, unless it belongs to another body."""
        fingerprint = self.fingerprint.encode()
        return record[len(fingerprint) :] if record.startswith(fingerprint) else KeyState.REUSED


@valueclass(frozen=True, slots=True)
class Idempotency:
    """An idempotency key of a job or a batch: equal keys identify the same one.

    Attributes:
        key: The caller's key.
        route: The route.
        fingerprint: Hash of the body.
    """

    key: str
    route: str
    fingerprint: str

    @classmethod
    def of(cls, written: str | None, route: str, body: bytes) -> "Idempotency | None":
        """Parse the header of a request; None if there is none.

        Raises:
            InvalidRequest: it is not a valid key.
        """
        return None if written is None else cls(read_key(written), route, fingerprint(body))


@valueclass(frozen=True, slots=True)
class StoredAnswer:
    """An answer as sent to its first caller: status, headers, and the bytes of its body."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes

    def encoded(self) -> bytes:
        """Encode as a line of JSON followed by the body."""
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in self.headers]
        return json.dumps({"status": self.status, "headers": headers}).encode() + b"\n" + self.body

    @classmethod
    def decoded(cls, record: bytes) -> "StoredAnswer":
        """Decode a record."""
        line, _, body = record.partition(b"\n")
        head = json.loads(line)
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head["headers"]]
        return cls(head["status"], pairs, body)


def read_key(written: str) -> str:
    """Parse the header: a quoted string, as in the draft, is equivalent to a bare one.

    Raises:
        InvalidRequest: it is not a valid key.
    """
    written = written.strip(" \t")
    quoted = _QUOTED.fullmatch(written)
    key = _ESCAPED.sub(r"\1", quoted[1]) if quoted else written
    if not 1 <= len(key) <= KEY_CHARS_MAX or not (quoted or _BARE.fullmatch(written)):
        message = (
            f"`Idempotency-Key` must be 1 to {KEY_CHARS_MAX} printable ASCII characters, "
            "quoted, or bare without spaces."
        )
        raise InvalidRequest(message, code="invalid_idempotency_key", param="Idempotency-Key")
    return key


def fingerprint(body: bytes) -> str:
    """Return the fingerprint of a body."""
    return sha256(body).hexdigest()
