"""Describes the difference between two configurations, for operators. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from gateway.core.policy import Bound
from gateway.core.reloads import Changes
from gateway.core.versions import VersionBound
from gateway.settings.document import Document
from gateway.settings.fields import Section
from gateway.settings.policies import KIND_WAITS, pools_of, waiting_of
from gateway.settings.sections.fleet import NULL_LIFTS, LimitsSection, ModalitiesSection
from gateway.settings.sections.models import ClassSection

LIVE = frozenset(
    {
        *("backends", "pools", "models", "profiles", "keys"),
        *("timeouts", "routing", "allowed_origins", "answers", "health", "shutdown"),
    }
)
"""Sections that can change at run time."""

AT_START = tuple(name for name in Document.model_fields if name not in LIVE)
"""Sections that are read once, at startup."""

LIVE_IF_HELD = frozenset({"drain"})
"""Keys of a backend that can change at run time even if it belongs to a box; see `held`."""

_INHERITED = "the profile's"


def changes(old: Document, new: Document, in_flight: Mapping[str, int]) -> Changes:
    """Return the differences. `in_flight`: running requests per backend, which finish there."""
    return Changes(
        (
            *_backends(old, new, in_flight),
            *_pools(old, new, in_flight),
            *_models(old, new),
            *_keys(old, new),
            *_rest(old, new),
        ),
        tuple(_at_start(old, new)),
    )


def held(old: Document) -> frozenset[str]:
    """Return the backends of which only `LIVE_IF_HELD` can change at run time: those of boxes."""
    return frozenset(name for box in old.boxes.values() for name in box.backends)


def held_profiles(old: Document) -> frozenset[str]:
    """Return the profiles of these backends, which stay with them."""
    return frozenset(old.backends[name].profile for name in held(old))


def awaiting(old: Document, new: Document) -> frozenset[str]:
    """Return the new backends whose box begins to run with the next start: until then they get no requests.

    Nobody knows before which of their models are in, and one that sleeps would keep its requests waiting.
    """
    boxed = held(new) - held(old)
    return frozenset(name for name in boxed if name not in old.backends or old.backends[name].drain)


def _backends(old: Document, new: Document, in_flight: Mapping[str, int]) -> Iterator[str]:
    for name in sorted(set(old.backends) - set(new.backends) - held(old)):
        yield f"backend {name} is gone{_finishing(in_flight.get(name, 0))}"
    waits = awaiting(old, new)
    for name, section in new.backends.items():
        if name not in old.backends:
            until = ", drained until its box runs" if name in waits else ""
            yield f"backend {name} is new ({section.profile}, {section.url}){until}"
            continue
        for path, before, after in _leaves(old.backends[name], section):
            if (name in held(old) and path not in LIVE_IF_HELD) or (name in waits and path == "drain"):
                continue
            ends = _finishing(in_flight.get(name, 0)) if path == "url" else ""
            yield f"backend {name}: {path} {_shown(before)} -> {_shown(after)}{ends}"


def _pools(old: Document, new: Document, in_flight: Mapping[str, int]) -> Iterator[str]:
    limits, wanted = _pool_limits(old), _pool_limits(new)
    for name in sorted(set(old.pools) - set(new.pools)):
        yield f"pool {name} is gone"
    for name, section in new.pools.items():
        if name not in old.pools:
            yield f"pool {name} is new: {', '.join(section.backends)}"
            continue
        before = old.pools[name]
        for lost in [one for one in before.backends if one not in section.backends]:
            yield f"pool {name} loses {lost}{_finishing(in_flight.get(lost, 0))}"
        for gained in [one for one in section.backends if one not in before.backends]:
            yield f"pool {name} gains {gained}"
        own, its = _plain(before) | limits[name], _plain(section) | wanted[name]
        for path, one, other in _differences(own, its, ""):
            if path != "backends":
                yield f"pool {name}: {path} {_shown(one)} -> {_shown(other)}"


def _pool_limits(document: Document) -> Mapping[str, Mapping[str, Any]]:
    """Return the limits of each pool that depend on which classes it is for, if it does not set them."""
    found = {}
    for name, pool in pools_of(document).items():
        found[name] = {"gates": asdict(pool.gates)}
        if document.jobs is not None:
            found[name]["jobs"] = asdict(pool.jobs)
    return found


def _models(old: Document, new: Document) -> Iterator[str]:
    for name in sorted(set(old.models) - set(new.models)):
        yield f"model {name} is gone"
    for name, section in new.models.items():
        if name not in old.models:
            yield f"model {name} is new: {', '.join(one.name for one in section.classes)}"
            continue
        before = old.models[name]
        yield from _classes(
            f"model {name}",
            {one.name: _class_plain(one) for one in before.classes},
            {one.name: _class_plain(one) for one in section.classes},
        )
        for path, one, other in _leaves(before, section):
            if path != "classes":
                yield f"model {name}: {path} {_shown(one)} -> {_shown(other)}"


def _class_plain(section: ClassSection) -> Mapping[str, Any]:
    """Return the values of a class, with the waits that depend on its kind if it does not set them."""
    plain: dict[str, Any] = _plain(section)
    waiting = waiting_of(section)
    return plain | {"waiting": plain["waiting"] | {name: getattr(waiting, name) for name in KIND_WAITS}}


def _classes(model: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for name in old:
        if name not in new:
            yield f"{model}: class {name} is gone"
    for name, section in new.items():
        if name not in old:
            yield f"{model}: class {name} is new"
            continue
        for path, before, after in _differences(old[name], section, ""):
            yield f"{model}: class {name}: {path} {_shown(before)} -> {_shown(after)}"
    kept, wanted = [name for name in old if name in new], [name for name in new if name in old]
    if kept != wanted:
        yield f"{model}: classes are tried in another order: {', '.join(new)}"


def _keys(old: Document, new: Document) -> Iterator[str]:
    before, after = old.keys or {}, new.keys or {}
    if bool(before) is not bool(after):
        yield "callers need an API key" if after else "callers no longer need an API key"
    for name in sorted(set(before) | set(after)):
        if name not in after:
            yield f"key {name} is gone"
        elif name not in before:
            yield f"key {name} is new"
        elif before[name] != after[name]:
            yield f"key {name} has changed"


def _rest(old: Document, new: Document) -> Iterator[str]:
    """Yield the changes of all other sections."""
    for section in sorted(LIVE - {"backends", "pools", "models", "keys"}):
        before, after = getattr(old, section), getattr(new, section)
        if section == "profiles":
            after = {name: one for name, one in before.items() if name in held_profiles(old)} | after
        for path, one, other in _differences(_plain(before), _plain(after), section):
            yield f"{path} {_shown(one)} -> {_shown(other)}"


def _at_start(old: Document, new: Document) -> Iterator[str]:
    for section in AT_START:
        if getattr(old, section) != getattr(new, section):
            yield section
    for name in sorted(held(old)):
        wanted = new.backends.get(name)
        if wanted is None or any(
            path not in LIVE_IF_HELD for path, *_ in _leaves(old.backends[name], wanted)
        ):
            yield f"backend {name}, which belongs to a box"


def _leaves(old: Section, new: Section) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, before, after) of all differing values."""
    return _differences(_plain(old), _plain(new), "")


def _plain(value: Any) -> Any:
    if isinstance(value, LimitsSection | ModalitiesSection):
        lifted = NULL_LIFTS & value.model_fields_set
        return {
            name: _INHERITED if one is None and name not in lifted else _plain(one) for name, one in value
        }
    if isinstance(value, Section):
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain(one) for one in value)
    return value


def _differences(old: Any, new: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys((*old, *new)):
            inner = f"{path}.{name}" if path else str(name)
            yield from _differences(old.get(name), new.get(name), inner)
    elif old != new:
        yield path, old, new


def _shown(value: Any) -> str:
    """Format a value roughly as a person would write it."""
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value).removesuffix(".0")
        case str():
            return value
        case VersionBound():
            return value.text
        case Bound():
            return f"{value.op.value} {value.value}"
        case tuple() | list() | set() | frozenset():
            return f"[{', '.join(_shown(one) for one in value)}]"
        case dict():
            return f"{{{', '.join(f'{name}: {_shown(one)}' for name, one in value.items())}}}"
    return str(value)


def _finishing(count: int) -> str:
    if not count:
        return ""
    return f"; {count} request finishes on it" if count == 1 else f"; {count} requests finish on it"
