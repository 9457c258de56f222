"""Structured fields for log lines: the name of the event, and its details.

Lines are written with `logging`, in words for people; `extra=about(...)` adds the same in fields for
machines. docs/logs.md lists every event, and a test keeps it complete.
"""

from typing import Any


def about(name: str, **fields: Any) -> dict[str, Any]:
    """Return the `extra` of a log call; fields that are None are omitted. Names are stable, like metrics'.

    Never a field: prompts, answers, keys, query strings.
    """
    return {"fields": {"event": name, **{key: value for key, value in fields.items() if value is not None}}}
