"""What operators are shown, as JSON."""

from typing import Any

import msgspec


def compact(view: Any) -> bytes:
    """Return it in one line. What is no list to JSON and can be gone through, a ranking, is shown as one."""
    return msgspec.json.encode(view, enc_hook=list)


def indented(view: Any) -> bytes:
    """Return it for people."""
    return msgspec.json.format(compact(view), indent=2)
