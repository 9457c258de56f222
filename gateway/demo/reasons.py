"""Why a request went where it went, in words: a record of the operators' view, read for a newcomer."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.value import valueclass

Record = Mapping[str, Any]
Excluded = tuple[str, str, str]

_FIGURE = re.compile(r"\b\d{4,9}\b")

_AFFINITY_MIN = 0.05
"""Share of a prompt seen before from which on it is given as the reason. A choice: a few shared words are
none."""

_SAVED_MIN_S = 0.1
"""Less prefill than this is not told to be saved. A choice: nobody notices it."""

_FULL = {"at_knee": "at the knee", "kv_full": "out of KV blocks"}
_NO_CONDITION = "takes everything else"  # as core/classification.py puts it


@valueclass(frozen=True, slots=True)
class RouteReason:
    """The reason, at several lengths.

    Attributes:
        class_reason: Why it is of its class.
        choice: Why this backend of all that could take it.
        brief: The most telling of the two, in about 18 characters.
        moved_from: Backends that failed under it, in order.
        spilled: Whether a later pool of its class served it.
        excluded: `(backend, reason, detail)` of every backend that could not take it.
    """

    class_reason: str
    choice: str
    brief: str
    moved_from: tuple[str, ...] = ()
    spilled: bool = False
    excluded: tuple[Excluded, ...] = ()

    @property
    def full(self) -> str:
        """Both reasons."""
        return f"{self.class_reason}; {self.choice}" if self.choice else self.class_reason


def why(record: Record) -> RouteReason:
    """Return the reason that a request's record gives."""
    decision = record.get("decision")
    if not decision:
        text = record.get("error_code") or "no decision was made"
        return RouteReason(text, "", text)
    candidates: Sequence[Record] = decision["candidates"]
    failed = (attempt["backend"] for attempt in record["attempts"] if attempt["outcome"] != "ok")
    moved = tuple(name for name in failed if name != record["backend"])
    excluded = tuple(
        (c["backend"], c["excluded"], _grouped(c["detail"])) for c in candidates if c["excluded"]
    )
    spilled = bool(record["backend"]) and record["pool"] != decision["pools"][0]
    choice, brief = _choice(record, decision, moved, spilled, excluded)
    reason, reason_brief = _class_reason(decision["class_reason"])
    return RouteReason(reason, choice, brief or reason_brief, moved, spilled, excluded)


def _class_reason(text: str) -> tuple[str, str]:
    if text == _NO_CONDITION:
        return "no other class matches", "no other class"
    text = _grouped(text)
    return text.replace("prompt_tokens", "prompt"), text.removeprefix("prompt_tokens ")


def _grouped(text: str) -> str:
    """Return the text with its large figures written as `16,000`."""
    return _FIGURE.sub(lambda found: f"{int(found.group()):,}", text)


def _choice(
    record: Record, decision: Record, moved: tuple[str, ...], spilled: bool, excluded: Sequence[Excluded]
) -> tuple[str, str]:
    """Return why this backend, and the same in brief where it says more than why this class."""
    candidates: Sequence[Record] = decision["candidates"]
    chosen = next((c for c in candidates if c["backend"] == record["backend"]), None)
    if chosen is None:
        return _sentence(excluded, str(record.get("error_code") or "refused")), _briefly(excluded)
    if moved:
        return f"{' and '.join(moved)} failed, so it was retried on {chosen['backend']}", f"{moved[0]} failed"
    if spilled:
        first = decision["pools"][0]
        return f"spilled: {_sentence(excluded, f'{first} had filled up')}", f"{first} is full"
    affinity = chosen["scores"].get("prefix_affinity", 0.0)
    if affinity >= _AFFINITY_MIN:
        saved_s = chosen["scores"].get("prefill_saved_s", 0.0)
        saves = f", which saves {saved_s:.1f} s" if saved_s >= _SAVED_MIN_S else ""
        seen = f"{affinity:.0%}"
        return f"{chosen['backend']} has seen {seen} of its prefix{saves}", f"{seen} seen before"
    in_pool = [c for c in candidates if c["pool"] == chosen["pool"] and c is not chosen]
    names = {c["backend"] for c in in_pool}
    if out := [one for one in excluded if one[0] in names]:
        return _sentence(out), _briefly(out)
    rivals = [c for c in in_pool if not c["excluded"]]
    if not rivals:
        return f"{chosen['backend']} has {_free(chosen)} of its knee free", ""
    best = max(rivals, key=lambda c: float(c["score"]))
    if chosen["score"] <= best["score"]:
        return f"{chosen['backend']} ties with {best['backend']}, and is listed first", ""
    name = max(chosen["scores"], key=lambda score: chosen["scores"][score] - best["scores"].get(score, 0.0))
    if name == "speed":
        return f"{chosen['backend']} is faster than {best['backend']}", ""
    if name == "slow_context":
        return f"{best['backend']} is busy, and slow at this length", ""
    return f"{chosen['backend']} has {_free(chosen)} of its knee free, {best['backend']} {_free(best)}", ""


def _sentence(excluded: Sequence[Excluded], otherwise: str = "") -> str:
    """Return who could not take it, e.g. `tpu: needs 23211 tokens, holds 16384`."""
    told: dict[str, list[str]] = {}
    for backend, reason, detail in excluded:
        told.setdefault(_FULL.get(reason) or detail or reason, []).append(backend)
    return "; ".join(f"{' and '.join(names)}: {words}" for words, names in told.items()) or otherwise


def _briefly(excluded: Sequence[Excluded]) -> str:
    """Return the same in a few words, for the first of them."""
    if not excluded:
        return ""
    backend, reason, detail = excluded[0]
    match reason:
        case "context_exceeded" | "kv_exceeded":
            return f"too long for {backend}"
        case "modality":
            return f"{backend} {detail}"
        case "unhealthy":
            state, _, why = detail.partition(": ")
            return f"{backend}: {state if why else 'in doubt'}"
        case "at_knee" | "kv_full":
            return f"{backend} is full"
    return f"{backend}: {reason.replace('_', ' ')}"


def _free(candidate: Record) -> str:
    return f"{candidate['scores'].get('spare_knee', 0.0):.0%}"
