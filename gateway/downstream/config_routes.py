"""The configuration API on the admin port: read, check, replace, roll back."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
from litestar import MediaType, Request, Response, get, post, put
from litestar.handlers import BaseRouteHandler

from gateway.core.errors import CallerError, InvalidRequest, RouteNotFound
from gateway.core.reloads import Reload, Version

_TAG = re.compile(r'(?:W/)?("?)(?P<version>[0-9a-f]*)\1')  # also as the versions' list and the log have it


class Configurations(Protocol):
    """The current configuration, and how to replace it."""

    @property
    def path(self) -> Path:
        """Path of the file."""

    @property
    def versions(self) -> Sequence[Version]:
        """Recent versions, the current one first."""

    async def plan(self, source: bytes) -> Reload:
        """Return the changes that a new configuration would make, without applying it."""

    async def put(self, source: bytes, by: str, check: Callable[[str], None]) -> Reload:
        """Apply a new configuration and write it to the file.

        `check` is called with each version that is replaced: the one in force, when no concurrent change is
        possible any more, and one that is only in the file. If it raises, nothing changes.

        Raises:
            OSError: the file cannot be written.
        """


class InvalidConfiguration(InvalidRequest):
    """The configuration is invalid. Nothing has changed."""

    code = "invalid_configuration"


class ConfigurationChanged(CallerError):
    """The configuration has changed since the operator read it."""

    status = 412
    code = "configuration_changed"


class MatchRequired(CallerError):
    """The request does not say which version it replaces."""

    status = 428
    code = "if_match_required"


def config_handlers(configurations: Configurations) -> Sequence[BaseRouteHandler]:
    """Return the route handlers under `/admin/config`."""
    desk = _Handlers(configurations)

    @get("/admin/config", sync_to_thread=False)
    def show() -> Response[bytes]:
        return desk.tagged(Response(desk.current.source, media_type="application/yaml"))

    @get("/admin/config/versions", sync_to_thread=False)
    def versions() -> Response[bytes]:
        return desk.tagged(Response(desk.versions(), media_type=MediaType.JSON))

    @post("/admin/config/check", status_code=200)
    async def check(request: Request[Any, Any, Any]) -> Response[Any]:
        return desk.tagged(_shown(await configurations.plan(await request.body())))

    @put("/admin/config", status_code=200)
    async def replace(request: Request[Any, Any, Any]) -> Response[Any]:
        check = partial(desk.check_match, request.headers.get("if-match"))
        check(desk.current.id)  # before reading the body
        return await desk.replaced(await request.body(), "put", check)

    @post("/admin/config/rollback", status_code=200)
    async def rollback(request: Request[Any, Any, Any]) -> Response[Any]:
        check = partial(desk.check_match, request.headers.get("if-match"))
        check(desk.current.id)
        return await desk.replaced(desk.source_of(request.query_params.get("version")), "rollback", check)

    return [show, versions, check, replace, rollback]


class _Handlers:
    """State shared by the handlers."""

    def __init__(self, configurations: Configurations) -> None:
        self._configurations = configurations

    @property
    def current(self) -> Version:
        return self._configurations.versions[0]

    def tagged(self, response: Response[Any]) -> Response[Any]:
        response.headers["etag"] = f'"{self.current.id}"'
        return response

    def versions(self) -> bytes:
        listed = [
            {
                "version": one.id,
                "at": one.at,
                "by": one.by,
                "in_force": index == 0,
                "needs_restart": one.needs_restart,
            }
            for index, one in enumerate(self._configurations.versions)
        ]
        return msgspec.json.encode(listed)

    def source_of(self, version: str | None) -> bytes:
        known = {one.id: one.source for one in self._configurations.versions}
        if version is None or version not in known:
            raise RouteNotFound(f"Known versions: {', '.join(known)}.", code="version_not_found")
        return known[version]

    def check_match(self, given: str | None, replaced: str) -> None:
        """Reject a change that is not based on the version that it replaces: in force, or only written."""
        if given is None:
            message = 'Say which configuration this replaces: `If-Match: "VERSION"`, from the ETag of GET.'
            raise MatchRequired(message)
        tags = (_TAG.fullmatch(tag.strip()) for tag in given.split(","))
        if given.strip() != "*" and replaced not in {tag["version"] for tag in tags if tag is not None}:
            where = "in force now" if replaced == self.current.id else "in the file, not yet in force here"
            raise ConfigurationChanged(f"The configuration has changed: {replaced} is {where}.")

    async def replaced(self, source: bytes, by: str, check: Callable[[str], None]) -> Response[Any]:
        try:
            found = await self._configurations.put(source, by, check)
        except OSError as error:
            path = self._configurations.path
            message = f"{path} cannot be written ({error.strerror}), so nothing has changed."
            raise InvalidConfiguration(message, code="configuration_not_writable") from error
        return self.tagged(_shown(found))


def _shown(found: Reload) -> Response[bytes]:
    if found.error:
        raise InvalidConfiguration(found.error)
    body: Mapping[str, Any] = {
        "version": found.version,
        "changes": found.changes.now,
        "needs_restart": found.changes.at_start,
        "warnings": found.warnings,
    }
    return Response(msgspec.json.encode(body), media_type=MediaType.JSON)
