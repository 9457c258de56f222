"""Reads the members of an OpenAI request that the gateway needs; all others are forwarded unchanged.

The body is decoded one level deep: each member remains raw bytes. The body for a backend is assembled from
these, with the members that the gateway controls replaced. So unknown members, the spelling of numbers and
nested structures are preserved, while a duplicate key or data after the object cannot be interpreted
differently by gateway and backend.

The members that the gateway reads of a chat are decoded a second time, all at once, into `Chat`: a long text
is scanned twice and decoded once. A body that does not fit is decoded member by member, so that each error
names its member.
"""

from gateway.downstream.wire.chat_decoding import chat_of
from gateway.downstream.wire.members import check_size, decoded, members_of
from gateway.downstream.wire.parsing import read, read_members
from gateway.downstream.wire.request import WireRequest
from gateway.downstream.wire.rules import WireRules

__all__ = [
    "WireRules",
    "WireRequest",
    "read",
    "read_members",
    "check_size",
    "members_of",
    "decoded",
    "chat_of",
]
