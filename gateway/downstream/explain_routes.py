"""`POST /admin/explain`: the decision for a request, on the fleet in its current state."""

from typing import Any, Protocol

import msgspec
from litestar import MediaType, Request, Response, post
from litestar.handlers import BaseRouteHandler

from gateway.core.errors import CallerError, ConfigError, InvalidRequest
from gateway.downstream.config_routes import InvalidConfiguration

BODY_BYTES_MAX = 32 * 1024 * 1024
"""The default maximum size of a request (`requests.max_body_bytes`)."""

CONFIG_CHARS_MAX = 1_000_000
"""Maximum characters of a configuration to try. A choice: many times any real file."""


class RequestForgotten(CallerError):
    """The record of the past request is no longer kept."""

    status = 404
    code = "request_not_found"


class Question(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request for an explanation, as the body of `POST /admin/explain`.

    Attributes:
        request: The body of a request; empty for a past one.
        request_id: The id of a past request; "" for a new one.
        key: Name of the caller's API key; None or "": it has none.
        headers: Headers of the request; case of names does not matter.
        config: Another configuration to decide under; None for the current one.
        config_name: What errors in it call its file; "" for the one in use.
    """

    request: msgspec.Raw = msgspec.Raw()
    request_id: str = ""
    key: str | None = None
    headers: dict[str, str] = {}
    config: str | None = None
    config_name: str = ""


class _Answer(Protocol):
    def as_json(self) -> str: ...


class Explainer(Protocol):
    """Explains decisions."""

    async def explain(self, question: Question) -> _Answer:
        """Return the decision and its explanation.

        Raises:
            ConfigError: the given configuration is invalid.
            RequestForgotten: the record of the given request is no longer kept.
        """


def explain_handlers(explainer: Explainer) -> list[BaseRouteHandler]:
    """Return the route handler of `POST /admin/explain`."""

    @post("/admin/explain", status_code=200, request_max_body_size=BODY_BYTES_MAX)
    async def explain(request: Request[Any, Any, Any]) -> Response[str]:
        question = _question(await request.body())
        try:
            answer = await explainer.explain(question)
        except ConfigError as error:
            raise InvalidConfiguration(str(error)) from error
        return Response(answer.as_json(), media_type=MediaType.JSON)

    return [explain]


def _question(source: bytes) -> Question:
    try:
        asked = msgspec.json.decode(source, type=Question)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is not a valid question for `explain`: {error}.") from error
    if bool(bytes(asked.request)) == bool(asked.request_id):
        raise InvalidRequest("Give either `request`, the body of a request, or `request_id`, of a past one.")
    if asked.config is not None and len(asked.config) > CONFIG_CHARS_MAX:
        raise InvalidRequest(f"`config` is longer than {CONFIG_CHARS_MAX} characters.", param="config")
    return asked
