"""Checks references between parts of the file. Works on the plain data, so that an invalid reference is
reported together with all other problems.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from ipaddress import IPv6Address, ip_address
from socket import inet_aton, inet_ntoa
from typing import Any
from urllib.parse import urlsplit

from gateway import profiles
from gateway.core.webhooks import address_refusal
from gateway.settings.addresses import address, overlap
from gateway.settings.document import Document
from gateway.settings.problems import Finding, Known, no_such_key
from gateway.settings.yaml_tree import Path

_NUMERIC = re.compile(r"[0-9a-fx.]*\d")
"""An IPv4 address in any notation that the system's resolver accepts: 127.1 is one."""

_THIS_MACHINE = frozenset({"127.0.0.1", "::1", "0.0.0.0", "::"})

API_KEY = "API key"

_LISTENERS = {name: Document.model_fields[name].default for name in ("listen", "admin")}
"""The addresses of this gateway, with their defaults."""


def findings(data: Any) -> Iterator[Finding]:
    """Yield all references to missing names, and all duplicates."""
    top = _mapping(data)
    yield from _profiles(top)
    yield from _quirks(top)
    yield from _urls(top)
    yield from _pools(top)
    yield from _boxes(top)
    yield from _models(top)
    yield from _webhooks(top)
    yield from _listeners(top)


def _profiles(top: Mapping[str, Any]) -> Iterator[Finding]:
    site = _mapping(top.get("profiles"))
    shipped = Known(profiles.names())
    known = Known((*profiles.names(), *site))
    for name, section in site.items():
        base = _mapping(section).get("extends")
        if isinstance(base, str) and base not in shipped:
            path = ("profiles", name, "extends")
            yield _unknown(path, "shipped profile", base, shipped)
    for name, section in _mapping(top.get("backends")).items():
        used = _mapping(section).get("profile")
        if isinstance(used, str) and used not in known:
            yield _unknown(("backends", name, "profile"), "profile", used, known)


def _quirks(top: Mapping[str, Any]) -> Iterator[Finding]:
    known = Known(profiles.QUIRKS)
    for name, section in _mapping(top.get("backends")).items():
        path: Path = ("backends", name, "quirks")
        own = _mapping(_mapping(section).get("quirks"))
        for key in ("add", "remove"):
            yield from _names((*path, key), "quirk", own.get(key), known)
        added = _one_or_list(own.get("add"))
        for quirk in _one_or_list(own.get("remove")):
            if quirk in added:
                yield Finding((*path, "remove"), f"quirk {quirk} is added and removed")


def _urls(top: Mapping[str, Any]) -> Iterator[Finding]:
    seen: dict[str, str] = {}
    own = _own_servers(top)
    for name, section in _mapping(top.get("backends")).items():
        url = _mapping(section).get("url")
        if not isinstance(url, str) or (server := _server(url)) is None:
            continue
        where = server + urlsplit(url).path.rstrip("/")
        if server in own:
            message = f"this is the gateway itself (`{own[server]}`); a backend is another server"
            yield Finding(("backends", name, "url"), message)
        elif where in seen:
            message = (
                f"{name} has the URL of {seen[where]}; one server is one backend, or it is counted twice"
            )
            yield Finding(("backends", name, "url"), message)
        seen.setdefault(where, name)


def _own_servers(top: Mapping[str, Any]) -> dict[str, str]:
    """Return the listeners' settings by host and port, as `_server` writes those of a URL."""
    own = {}
    for name, default in _LISTENERS.items():
        try:
            listener = address(top.get(name, default))
        except (AttributeError, ValueError):  # reported where it stands; or admin is off
            continue
        if listener.port:  # otherwise the system chooses one
            own[f"{_host(listener.host)}:{listener.port}"] = name
    return own


def _pools(top: Mapping[str, Any]) -> Iterator[Finding]:
    backends = Known(_mapping(top.get("backends")))
    for name, section in _mapping(top.get("pools")).items():
        path: Path = ("pools", name)
        listed = section
        if isinstance(section, Mapping):
            path, listed = (*path, "backends"), section.get("backends")
        yield from _names(path, "backend", listed, backends)


def _boxes(top: Mapping[str, Any]) -> Iterator[Finding]:
    backends = Known(_mapping(top.get("backends")))
    taken: dict[str, str] = {}
    for name, section in _mapping(top.get("boxes")).items():
        members = _mapping(_mapping(section).get("backends"))
        for member in members:
            path: Path = ("boxes", name, "backends", member)
            if member not in backends:
                yield replace(_unknown(path, "backend", member, backends), at_key=True)
            elif member in taken:
                yield Finding(path, f"{member} is in the box {taken[member]} already", at_key=True)
            taken.setdefault(member, name)
        default = _mapping(section).get("default")
        if isinstance(default, str) and members and default not in members:
            yield _unknown(("boxes", name, "default"), "backend of this box", default, Known(members))


def _models(top: Mapping[str, Any]) -> Iterator[Finding]:
    pools, keys = Known(_mapping(top.get("pools"))), Known(_mapping(top.get("keys")))
    taken: dict[str, str] = {}
    for model, section in _mapping(top.get("models")).items():
        path: Path = ("models", model)
        if "${" in model:
            message = "${NAME} is replaced in values only, not in the name of a key: write the name itself"
            yield Finding(path, message, at_key=True)
        for place, name in _public_names(path, model, section):
            if name in taken:
                yield Finding(place, f'"{name}" already names a model: {taken[name]}')
            taken.setdefault(name, model)
        classes: dict[str, int] = {}
        for index, written in enumerate(_list(_mapping(section).get("classes"))):
            one, at = _mapping(written), (*path, "classes", index)
            yield from _names((*at, "pools"), "pool", one.get("pools"), pools)
            key = _mapping(one.get("when")).get("key")
            yield from _names((*at, "when", "key"), API_KEY, key, keys)
            label = one.get("class")
            if isinstance(label, str) and label in classes:
                message = f"class {label} is listed twice; use one entry, or two names: they label metrics"
                yield Finding((*at, "class"), message)
            elif isinstance(label, str):
                classes[label] = index


def _public_names(path: Path, model: str, section: Any) -> Iterator[tuple[Path, str]]:
    yield path, model
    for kind in ("aliases", "reasoning_aliases"):
        for index, alias in enumerate(_list(_mapping(section).get(kind))):
            if isinstance(alias, str):
                yield (*path, kind, index), alias


def _webhooks(top: Mapping[str, Any]) -> Iterator[Finding]:
    keys = Known(_mapping(top.get("keys")))
    for name, written in _mapping(top.get("webhooks")).items():
        section, path = _mapping(written), ("webhooks", name)
        yield from _names((*path, "keys"), API_KEY, section.get("keys"), keys)
        url, allow_private = section.get("url"), section.get("allow_private") is True
        if isinstance(url, str) and (why := _never_sent_to(url, allow_private)):
            hint = "; `allow_private: true` allows it" if why in ("private", "loopback") else ""
            yield Finding((*path, "url"), f"webhooks are never sent to this address ({why}){hint}")


def _never_sent_to(url: str, allow_private: bool) -> str:
    """Return why nothing may be sent to the IP address in a URL; "" if it may, or for a name."""
    try:
        host = urlsplit(url).hostname or ""
        ip_address(host)
    except ValueError:
        return ""
    return address_refusal(host, allow_private=allow_private)


def _listeners(top: Mapping[str, Any]) -> Iterator[Finding]:
    listen, admin = (top.get(name, default) for name, default in _LISTENERS.items())
    try:
        clash = overlap(address(listen), address(admin))
    except (AttributeError, ValueError):  # reported where it stands; or admin is off
        return
    if clash:
        message = f"admin and listen are the same address ({listen}); operators get a port of their own"
        yield Finding(("admin" if "admin" in top else "listen",), message)


def _names(path: Path, kind: str, listed: Any, known: Known) -> Iterator[Finding]:
    single = isinstance(listed, str)
    seen: set[str] = set()
    for index, name in enumerate([listed] if single else _list(listed)):
        if not isinstance(name, str):
            continue
        place = path if single else (*path, index)
        if name not in known:
            yield _unknown(place, kind, name, known)
        elif name in seen:
            yield Finding(place, f"{kind} {name} is listed twice")
        seen.add(name)


def _unknown(path: Path, kind: str, name: str, known: Known) -> Finding:
    suggestion, listing = known.instead_of(name)
    missing = no_such_key(name, suggestion) if kind == API_KEY else f'there is no {kind} "{name}"'
    return Finding(path, f"{missing}{listing}", suggestion)


def _server(url: str) -> str | None:
    """Return the normalized host and port of a URL, or None.

    Names are not resolved: two names of one server are different, unless both mean this machine.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        return None
    return f"{_host(parts.hostname)}:{port}" if parts.hostname else None


def _host(written: str) -> str:
    name = written.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return "localhost"
    try:
        address = ip_address(inet_ntoa(inet_aton(name)) if _NUMERIC.fullmatch(name) else name)
    except (ValueError, OSError):
        return name
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return "localhost" if str(address) in _THIS_MACHINE else str(address)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _one_or_list(value: Any) -> list[Any]:
    return [value] if isinstance(value, str) else _list(value)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
