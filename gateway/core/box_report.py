"""Encodes what gateway processes tell each other about a box. Pure.

Processes have different clocks, so every time is sent as an age in seconds. Anything that cannot be decoded
is ignored: it may come from another version of the gateway.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gateway.core.box import Box, Quarantine, State
from gateway.core.swap_policy import Backlog, Cause

_TIMES = ("since", "resident_since", "batch_at", "busy_at", "served_at", "moved_at", "oldest_at")
_MAPPED = frozenset({"state", "cause", "quarantine", "restarts", "boot_s", "pending", "due_at"})
_OWN = frozenset({"known_restarts", "retry_at", "is_timed"})  # private to who counted or ordered
_PLAIN = tuple(one.name for one in fields(Box) if one.name not in {*_TIMES, *_MAPPED, *_OWN})


def written(box: Box, now: float) -> str:
    """Encode the owner's state of a box."""
    report: dict[str, Any] = {name: getattr(box, name) for name in _PLAIN}
    report |= {name: round(now - getattr(box, name), 3) for name in _TIMES}
    report |= {
        "state": box.state.value,
        "cause": box.cause.value,
        "pending": list(box.pending),
        "due_at": _age(box.due_at, now),
        "quarantine": {
            name: [held.reason, round(now - held.at, 3), held.gone] for name, held in box.quarantine.items()
        },
        "restarts": {name: [round(now - at, 3) for at in times] for name, times in box.restarts.items()},
        "boot_s": dict(box.boot_s),
    }
    return json.dumps(report)


def read(text: str, now: float) -> Box | None:
    """Decode the state of a box that has just been received; None if that is not possible."""
    try:
        report = json.loads(text)
        simple: dict[str, Any] = {name: report[name] for name in _PLAIN}
        simple |= {name: now - float(report[name]) for name in _TIMES}
        return Box(
            **simple,
            state=State(report["state"]),
            cause=Cause(report["cause"]),
            pending=tuple(report["pending"]),
            due_at=_at(report.get("due_at"), now),
            quarantine={
                name: Quarantine(str(reason), now - float(age), bool(gone))
                for name, (reason, age, gone) in report["quarantine"].items()
            },
            restarts={
                name: tuple(now - float(age) for age in ages) for name, ages in report["restarts"].items()
            },
            boot_s={name: float(took) for name, took in report["boot_s"].items()},
        )
    except (ValueError, OverflowError, RecursionError, KeyError, TypeError, AttributeError):
        return None


def note(wants: Mapping[str, Backlog], now: float) -> str:
    """Encode the local demand, for the owner."""
    return json.dumps(
        {
            name: [one.count, _age(one.oldest_at, now), _age(one.started_at, now)]
            for name, one in wants.items()
            if one != Backlog()
        }
    )


def read_note(text: str, now: float) -> Mapping[str, Backlog]:
    """Decode another process's demand; empty if that is not possible."""
    try:
        return {
            str(name): Backlog(int(count), _at(oldest, now), _at(started, now))
            for name, (count, oldest, started) in json.loads(text).items()
        }
    except (ValueError, OverflowError, RecursionError, TypeError, AttributeError):
        return {}


def _age(at: float | None, now: float) -> float | None:
    return None if at is None else round(now - at, 3)


def _at(age: float | None, now: float) -> float | None:
    return None if age is None else now - float(age)
