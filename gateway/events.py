"""What a log line is about, for machines: the name of the event, and its fields.

A line is written with `logging`, by whoever knows of the event, in words for people; `extra=about(...)` says
the same in fields. docs/logs.md lists every event, and a test holds it to the code.
"""

from typing import Any


def about(name: str, **fields: Any) -> dict[str, Any]:
    """Return the `extra` of a log call. What is None is left out. Names are stable, as metrics' are.

    Never a field: prompts, answers, keys, query strings.
    """
    return {"fields": {"event": name, **{key: value for key, value in fields.items() if value is not None}}}
