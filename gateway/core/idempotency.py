"""Idempotency keys: a caller's word that two requests are one, and what is kept of the answer meanwhile.

    free -> RUNNING -> kept, for a day
              |
              +-> free again: it failed, its caller left, or its gateway died

A key counts within one API key and one route. The request it stands for is told by its body alone, byte for
byte: headers say how a request is carried and where it goes, and change between two tries of one client
(`x-stainless-retry-count`, trace ids). What is asked stands in the body, and an SDK that tries again sends
the same one.

Pure: draft-ietf-httpapi-idempotency-key-header-07 is where the names and statuses come from.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256

from gateway.core.errors import InvalidRequest

HEADER = "idempotency-key"
KEY_CHARS_MAX = 255

_BARE = re.compile(r"[!#-~][!-~]*")
_QUOTED = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')  # RFC 8941, section 3.3.3
_ESCAPED = re.compile(r'\\(["\\])')


class Standing(StrEnum):
    """What became of a request that came with a key."""

    BEGUN = "begun"  # it is the first: it has to be run
    RUNNING = "running"  # the first one has not ended
    REUSED = "reused"  # the key stands for another body


@dataclass(frozen=True, slots=True)
class Promise:
    """That a request is run once, as one runner of it sees that.

    Attributes:
        owner: Name of the caller's API key; None where the gateway has none.
        route: Where the key was used.
        key: The caller's, as `read_key` returns it.
        fingerprint: Of the body, as `fingerprint` returns it.
        runner: Names this try of it, unguessably: what it writes is refused once another has the key.
    """

    owner: str | None
    route: str
    key: str
    fingerprint: str
    runner: str

    @property
    def id(self) -> str:
        """Hash of route and key: of one length, and without what callers write."""
        return sha256(f"{len(self.route)}:{self.route}{self.key}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer as its first caller got it: status, headers, and the bytes of its body."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes

    def encoded(self) -> bytes:
        """Return it as a line of JSON and the body."""
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in self.headers]
        return json.dumps({"status": self.status, "headers": headers}).encode() + b"\n" + self.body

    @classmethod
    def decoded(cls, record: bytes) -> "KeptAnswer":
        """Return the one that was encoded so."""
        line, _, body = record.partition(b"\n")
        head = json.loads(line)
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head["headers"]]
        return cls(head["status"], pairs, body)


def read_key(written: str) -> str:
    """Return the key that a header gives: a quoted string, as the draft has it, and a bare one are the same.

    Raises:
        InvalidRequest: it is no key.
    """
    written = written.strip(" \t")
    quoted = _QUOTED.fullmatch(written)
    key = _ESCAPED.sub(r"\1", quoted[1]) if quoted else written
    if not 1 <= len(key) <= KEY_CHARS_MAX or not (quoted or _BARE.fullmatch(written)):
        message = (
            f"`Idempotency-Key` must be 1 to {KEY_CHARS_MAX} printable ASCII characters, quoted or bare."
        )
        raise InvalidRequest(message, code="invalid_idempotency_key", param="Idempotency-Key")
    return key


def fingerprint(body: bytes) -> str:
    """Return what tells a body from any other."""
    return sha256(body).hexdigest()
