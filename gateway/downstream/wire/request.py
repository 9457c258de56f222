"""A parsed request, and the body that is assembled of its members for a backend."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.core.request import NO_CHANGES, Changes, Request
from gateway.core.value import valueclass
from gateway.downstream.cut_out import CutOut
from gateway.ports import Arrival, Headers

SHORT_BYTES = 16_384
"""Up to this size, bodies are assembled by msgspec, in a buffer that it grows as needed. A choice: copying
longer ones while it grows costs more."""

_decode_inner = msgspec.json.Decoder(dict[str, msgspec.Raw] | None).decode


@valueclass(frozen=True, slots=True)
class WireRequest:
    """`ports.Incoming` for a parsed body."""

    arrival: Arrival
    request: Request
    forwarded: Headers
    dropped: Sequence[str]
    usage_injected: bool
    size_bytes: int
    members: Mapping[str, msgspec.Raw]
    cut: CutOut | None = None

    def member(self, name: str) -> Any:
        """See `ports.Incoming.member`."""
        raw = self.members.get(name)
        try:
            if raw is not None and self.cut is not None:
                return msgspec.json.decode(self.cut.put_back(bytes(raw)))
            return None if raw is None else msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None  # the backend will report the error

    def body_for(self, served_model: str, changes: Changes = NO_CHANGES) -> bytes:
        """See `ports.Incoming.body_for`."""
        members = _changed(self.members, changes) if changes else self.members
        if self.size_bytes <= SHORT_BYTES:
            body = msgspec.json.encode({"model": served_model, **members})
        else:
            body = encoded({"model": msgspec.json.encode(served_model), **members})
        return body if self.cut is None else self.cut.put_back(body)  # the only copy of the body


def encoded(members: Mapping[str, bytes | msgspec.Raw]) -> bytes:
    """Return what msgspec encodes as well, but without a buffer that grows: a long body is copied once."""
    parts: list[bytes | msgspec.Raw] = []
    for name, written in members.items():
        parts += (b"," if parts else b"{", msgspec.json.encode(name), b":", written)
    parts.append(b"}" if parts else b"{}")
    return b"".join(parts)


def _changed(members: Mapping[str, msgspec.Raw], changes: Changes) -> Mapping[str, msgspec.Raw]:
    """Return the members with `changes` applied; siblings of a change keep their bytes.

    A change within a member that is no object, or nested too deep to be decoded from here, is left out.
    """
    changed = dict(members)
    for (name, *inner), value in changes.items():
        raw = msgspec.Raw(msgspec.json.encode(value))
        if inner:
            try:
                held = _decode_inner(changed.get(name, b"null")) or {}
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                continue  # the backend will report the error
            raw = msgspec.Raw(msgspec.json.encode({**held, inner[0]: raw}))
        changed[name] = raw
    return changed
