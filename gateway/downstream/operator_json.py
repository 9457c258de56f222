"""Encodes the admin API's data as JSON."""

from typing import Any

import msgspec


def compact(view: Any) -> bytes:
    """Encode without white space. Iterables such as rankings become lists."""
    return msgspec.json.encode(view, enc_hook=list)


def indented(view: Any) -> bytes:
    """Encode with indentation, for people.

    A list piece by piece: in a thread, others can run only between the pieces, and one may be 40 MB long.
    """
    if not isinstance(view, list | tuple) or not view:
        return msgspec.json.format(compact(view), indent=2)
    pieces = [msgspec.json.format(compact(one), indent=2).replace(b"\n", b"\n  ") for one in view]
    return b"[\n  " + b",\n  ".join(pieces) + b"\n]"
