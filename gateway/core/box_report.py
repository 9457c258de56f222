"""Encodes what gateway processes tell each other about a box. Pure.

Processes have different clocks, so every time is sent as an age in seconds. Anything that cannot be decoded
is ignored: it may come from another version of the gateway.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import field, fields
from math import inf
from typing import Any

from gateway.core.box import Box, Quarantine, State
from gateway.core.swap_policy import Backlog, Cause
from gateway.core.value import valueclass

UNHEARD_MAX_S = 15.0
"""How long a process that does not say what it knows is waited for. A choice: the note of one that has died
is gone by then, and one that cannot reach the store uses the model that it knows to be in (docs/boxes.md)."""

_TIMES = ("since", "resident_since", "batch_at", "busy_at", "served_at", "moved_at", "oldest_at")
_MAPPED = frozenset(
    {"state", "cause", "quarantine", "restarts", "boot_s", "pending", "due_at", "failure", "fence"}
)
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
        "failure": box.failure,
        "fence": box.fence,
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
            failure=str(report.get("failure", "")),
            fence=int(report.get("fence", 0)),
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


@valueclass(frozen=True, slots=True)
class Note:
    """What a process tells the owner.

    Attributes:
        knows: The state of the box, and whose model that is about, as this process knows and heeds it.
        wants: Its demand, per backend.
    """

    knows: tuple[str, str] = ("", "")
    wants: Mapping[str, Backlog] = field(default_factory=dict)


def stage(box: Box) -> tuple[str, str]:
    """Return what processes know of a box: see `Note`."""
    return box.state.value, box.backend


def note(wants: Mapping[str, Backlog], box: Box, now: float) -> str:
    """Encode the local demand and what this process knows of the box, for the owner."""
    waiting = {
        name: [one.count, _age(one.oldest_at, now), _age(one.started_at, now)]
        for name, one in wants.items()
        if one != Backlog()
    }
    return json.dumps({"knows": stage(box), "wants": waiting})


def read_note(text: str, now: float) -> Note:
    """Decode another process's note; an empty one if that is not possible."""
    try:
        said = json.loads(text)
        state, backend = said.get("knows", ("", ""))  # the version before said only what it wants
        wants = {
            str(name): Backlog(int(count), _at(oldest, now), _at(started, now))
            for name, (count, oldest, started) in said.get("wants", said).items()
        }
        return Note((str(state), str(backend)), wants)
    except (ValueError, OverflowError, RecursionError, TypeError, AttributeError):
        return Note()


class Hearing:
    """Tracks since when all other processes have known what a box is doing, for its owner."""

    def __init__(self) -> None:
        """Start without knowing of anybody."""
        self.forget()

    def forget(self) -> None:
        """Forget what the others have known: this process has not heard of them."""
        self._stage: tuple[str, str] | None = None
        self._said_at = 0.0
        self._heard_at: float | None = None

    def heard_s(self, box: Box, others: Iterable[Note], now: float) -> float:
        """Return for how long all others have known the state that the owner has just published.

        A negative number if they do not all know it; but after `UNHEARD_MAX_S` they count as if they did.
        """
        if stage(box) != self._stage:
            self._stage, self._said_at, self._heard_at = stage(box), now, None
        is_late = now - self._said_at >= UNHEARD_MAX_S
        if self._heard_at is None and (is_late or all(one.knows == self._stage for one in others)):
            self._heard_at = now
        return -inf if self._heard_at is None else now - self._heard_at


def _age(at: float | None, now: float) -> float | None:
    return None if at is None else round(now - at, 3)


def _at(age: float | None, now: float) -> float | None:
    return None if age is None else now - float(age)
