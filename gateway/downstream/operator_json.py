"""Encodes the admin API's data as JSON."""

from typing import Any

import msgspec


def compact(view: Any) -> bytes:
    """Encode without white space. Iterables such as rankings become lists."""
    return msgspec.json.encode(view, enc_hook=list)


def indented(view: Any) -> bytes:
    """Encode with indentation, for people."""
    return msgspec.json.format(compact(view), indent=2)
