"""Starts and stops the models of a box, and sends canary requests: `ports.Switch`.

There are three ways to start and stop a model: commands, HTTP requests, and vLLM's sleep mode. A model is
resident if its port answers or, in sleep mode, if its server is awake. A stop is complete when the model is
no longer resident. Every request has a timeout, follows no redirects and ignores proxy settings.
"""

import hashlib
import json
import logging
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio

from gateway.core import canary
from gateway.core.answers import REFUSED_FOR_LOAD
from gateway.core.backends import Backend
from gateway.core.canary import Canary
from gateway.core.value import valueclass
from gateway.events import about
from gateway.upstream import commands
from gateway.upstream.commands import Command
from gateway.upstream.faults import NO_SUCH_PATH, Failed, is_refused

log = logging.getLogger("gateway.boxes")

IS_IN_S = 10.0
"""Timeout for checking whether a model is resident. A choice: about what three probes take by default
(`health`) until a server counts as down. A busy server that is taken for one that is not there is stopped."""

GONE_S = 30.0
"""How long a server may continue to answer after it was stopped. A choice: it frees its memory meanwhile."""

LOOK_S = 0.25
"""Interval for checking that, and for asking a full server its canary. A choice: a swap takes minutes."""


@valueclass(frozen=True, slots=True)
class Call:
    """An HTTP request. `body` is sent as JSON unless it is None."""

    method: str
    url: str
    body: Any = None


@valueclass(frozen=True, slots=True)
class ByCommand:
    """A model started and stopped by commands. `{fence}` in a word is replaced by the fencing token."""

    start: Command
    stop: Command


@valueclass(frozen=True, slots=True)
class ByRequest:
    """A model started and stopped by HTTP requests, which carry the fencing token as `x-gateway-fence`."""

    start: Call
    stop: Call
    token: str | None = None
    timeout_s: float = 60.0


@valueclass(frozen=True, slots=True)
class BySleep:
    """A model put to sleep and woken up in a vLLM server that keeps running."""

    level: int = 1
    timeout_s: float = 60.0


@valueclass(frozen=True, slots=True)
class Member:
    """One model of a box.

    Attributes:
        backend: Its server.
        way: How it is started and stopped.
        canary: Its canary request.
        secret: The API key of its server, or None.
        verify: How to verify its server's certificate.
        launch_record: A file that stores the hash of its launch command, or None.
    """

    backend: Backend
    way: ByCommand | ByRequest | BySleep
    canary: Canary
    secret: str | None = None
    verify: ssl.SSLContext | bool = True
    launch_record: Path | None = None

    @property
    def launch_hash(self) -> str:
        """A hash of its launch command."""
        match self.way:
            case ByCommand(start, _):
                what: Any = [list(start.words), start.shell]
            case ByRequest(start, _):
                what = [start.method, start.url, start.body]
            case BySleep(level):
                what = level
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


class BoxSwitch:
    """`ports.Switch` for the models of every box."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        """Prepare to switch these models, by backend id."""
        self._members = members
        if members:  # before the event loop runs, which the 0.2 s of httpx would hold up
            import gateway.upstream.control  # noqa: F401

    def update(self, *, secrets: Mapping[str, str], tls: Mapping[str, ssl.SSLContext | bool]) -> None:
        """Use other API keys and TLS settings for their servers from now on."""
        self._members = {
            name: replace(member, secret=secrets.get(name), verify=tls[name])
            for name, member in self._members.items()
        }

    async def is_resident(self, backend_id: str) -> bool:
        """See `ports.Switch.is_resident`."""
        member = self._members[backend_id]
        if isinstance(member.way, BySleep):
            return await _is_asleep(member) is False
        try:
            await _well(member)
        except Failed:
            return False
        return True

    async def start(self, backend_id: str, fence: int) -> str:
        """See `ports.Switch.start`."""
        member = self._members[backend_id]
        note_launch(member)
        match member.way:
            case ByCommand(start, _):
                return await _run(start, backend_id, fence)
            case ByRequest(start, _):
                return await _request(member.way, start, fence)
            case BySleep(level, timeout_s):
                return await _wake_up(member, level, timeout_s)

    async def stop(self, backend_id: str, fence: int) -> str:
        """See `ports.Switch.stop`."""
        member = self._members[backend_id]
        match member.way:
            case ByCommand(_, stop):
                failure = await _run(stop, backend_id, fence)
            case ByRequest(_, stop):
                failure = await _request(member.way, stop, fence)
            case BySleep(level, timeout_s):
                failure = await _fall_asleep(member, level, timeout_s)
        return failure or await self._gone(backend_id)

    async def ask(self, backend_id: str) -> str:
        """See `ports.Switch.ask`."""
        member = self._members[backend_id]
        try:
            model = member.backend.model or await _served(member)
            question = canary.body(member.canary, model)
            answer = await _once_not_full(member, question)
        except Failed as failure:
            if member.backend.model is not None and failure.status == 404:
                return f"HTTP 404: it does not serve {member.backend.model}"
            return str(failure)
        return canary.fault(member.canary, answer)

    async def _gone(self, backend_id: str) -> str:
        with anyio.move_on_after(GONE_S):
            while not await self._is_out(backend_id):  # noqa: ASYNC110 - the server sends no event
                await anyio.sleep(LOOK_S)
            return ""
        if isinstance(self._members[backend_id].way, BySleep):
            return f"/is_sleeping: it does not say that it sleeps, {GONE_S:g} s after it was told to"
        return f"it still answers {GONE_S:g} s after its stop"

    async def _is_out(self, backend_id: str) -> bool:
        member = self._members[backend_id]
        if isinstance(member.way, BySleep):  # one that does not say whether it sleeps may hold the memory
            return await _is_asleep(member) or await _is_closed(member)
        return not await self.is_resident(backend_id)


# ------------------------------------------------------------------ commands, requests, sleep mode


async def _run(command: Command, backend_id: str, fence: int) -> str:
    words = [word.replace("{fence}", str(fence)) for word in command.words]
    environ = {"GATEWAY_FENCE": str(fence), "GATEWAY_BACKEND": backend_id}
    return await commands.run(replace(command, words=words), environ)


async def _request(way: ByRequest, call: Call, fence: int) -> str:
    headers = {"x-gateway-fence": str(fence)}
    if way.token is not None:
        headers["authorization"] = f"Bearer {way.token}"
    content = None if call.body is None else json.dumps(call.body).encode()
    from gateway.upstream.control import exchange

    try:
        await exchange(call.method, call.url, way.timeout_s, headers, content, verify=True)
    except Failed as failure:
        return str(failure)
    return ""


async def _fall_asleep(member: Member, level: int, timeout_s: float) -> str:
    try:
        await _of(member, "POST", f"/sleep?level={level}", timeout_s)
    except Failed as error:
        failure = f"/sleep: {error}"
    else:
        return ""
    # One that sleeps, and was late to say so, holds no memory, nor does one that is not running; one that
    # rejects the request, or hangs, does.
    return "" if await _is_asleep(member) or await _is_closed(member) else failure


async def _wake_up(member: Member, level: int, timeout_s: float) -> str:
    """Wake a server up. Level 2 discards the weights: unless they are reloaded, answers are garbage.

    One that is not running cannot be woken: whoever runs it starts it again, and it comes up awake.
    """
    reload = json.dumps({"method": "reload_weights"}).encode()
    steps: tuple[tuple[str, bytes | None], ...] = (("/wake_up", None),)
    if level == 2:
        steps = (
            ("/wake_up?tags=weights", None),
            ("/collective_rpc", reload),
            ("/wake_up?tags=kv_cache", None),
        )
    for path, body in steps:
        try:
            await _of(member, "POST", path, timeout_s, body)
        except Failed as failure:
            return "" if is_refused(failure) else f"{path}: {failure}"
    return ""


# ------------------------------------------------------------------ requests


async def _well(member: Member) -> None:
    """Return if a server is well: it says so or, if it has no /health, it has a model. Raises Failed."""
    try:
        await _of(member, "GET", "/health", IS_IN_S)
    except Failed as failure:
        if failure.status not in NO_SUCH_PATH:
            raise
        await _served(member)


async def _is_asleep(member: Member) -> bool | None:
    """Return whether a server in sleep mode sleeps; None if it does not say."""
    try:
        said = json.loads(await _of(member, "GET", "/is_sleeping", IS_IN_S))["is_sleeping"]
    except (Failed, ValueError, RecursionError, KeyError, TypeError):
        return None
    return said if isinstance(said, bool) else None


async def _is_closed(member: Member) -> bool:
    """Return whether nothing listens on a server's port."""
    try:
        await _of(member, "GET", "/health", IS_IN_S)
    except Failed as failure:
        return is_refused(failure)
    return False


async def _served(member: Member) -> str:
    """Return the name of a server's first model. Raises Failed."""
    page = await _of(member, "GET", "/v1/models", IS_IN_S)
    try:
        return str(json.loads(page)["data"][0]["id"])
    except (ValueError, RecursionError, KeyError, IndexError, TypeError):
        raise Failed("/v1/models: no list of models") from None


async def _once_not_full(member: Member, question: bytes) -> bytes:
    """Return the answer to a canary request. Raises Failed.

    A server that refuses it because of load is asked again until the time for it is over: the server may be
    full of what it got before this gateway started, or from others, which is no sign of a bad boot.
    """
    timeout_s = member.canary.timeout_s
    why = f"no answer in {timeout_s:g} s"
    with anyio.move_on_after(timeout_s):
        while True:
            try:
                return await _of(member, "POST", "/v1/chat/completions", timeout_s, question)
            except Failed as failure:
                if failure.status not in REFUSED_FOR_LOAD:
                    raise
                why = str(failure)
            await anyio.sleep(LOOK_S)
    raise Failed(why)


async def _of(
    member: Member, method: str, path: str, timeout_s: float, content: bytes | None = None
) -> bytes:
    from gateway.upstream.control import exchange

    headers = {} if member.secret is None else {"authorization": f"Bearer {member.secret}"}
    return await exchange(
        method, member.backend.url + path, timeout_s, headers, content, verify=member.verify
    )


# ------------------------------------------------------------------ launches


def note_launch(member: Member) -> None:
    """Warn if a model's launch command differs from the last one, and remember it.

    Compile caches are valid only while the flags are byte-identical: after a change, the start is cold.
    """
    path, name = member.launch_record, member.backend.id
    if path is None:
        return
    known: dict[str, Any] = {}
    with suppress(OSError, ValueError, RecursionError):
        read = json.loads(path.read_text(encoding="utf-8"))
        known = read if isinstance(read, dict) else {}
    old, new = known.get(name), member.launch_hash
    if old == new:
        return
    if old is not None:
        log.warning(
            "%s starts with different flags than last time: its compile cache is cold, so it boots slowly",
            name,
            extra=about("launch_changed", backend=name),
        )
    try:
        temporary = path.with_name(f"{path.name}.new")
        temporary.write_text(json.dumps({**known, name: new}, indent=2) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        reason = error.strerror or str(error)
        log.warning(
            "%s cannot be written (%s): a change of start flags will go unnoticed",
            path,
            reason,
            extra=about("launch_not_noted", backend=name, reason=reason),
        )
