"""The workarounds for one request on one backend with quirks."""

from collections.abc import Callable
from dataclasses import field
from typing import Any, Protocol

from gateway.core.quirks.remedy import Remedy
from gateway.core.request import Endpoint, Request
from gateway.core.value import valueclass


class RemedyRequest(Protocol):
    """A request as seen by workarounds. `ports.Incoming` implements it."""

    @property
    def request(self) -> Request:
        """The parts of it that the gateway interprets."""

    def member(self, name: str) -> Any:
        """Return a decoded member of its body; None if it is missing or cannot be decoded."""


@valueclass(frozen=False, slots=True)
class Plan:
    """The workarounds for a request, added by the rules of its backend's quirks.

    Attributes:
        asked: The request.
        thinks: Whether it reasons, by its body or by its model's name.
        changes: New values for members of the body.
        remedies: Applied to the answer, in order.
        assembles: Whether the backend is asked for a stream that is assembled into a non-streaming answer.
    """

    asked: RemedyRequest
    thinks: bool
    changes: dict[tuple[str, ...], object] = field(default_factory=dict)
    remedies: list[Remedy] = field(default_factory=list)
    assembles: bool = False

    @property
    def is_chat(self) -> bool:
        """Whether the request is a chat."""
        return self.asked.request.endpoint is Endpoint.CHAT

    @property
    def is_streamed(self) -> bool:
        """Whether the backend is asked for a stream."""
        return self.assembles or self.asked.request.stream


@valueclass(frozen=True, slots=True)
class Workaround:
    """The workaround of one quirk.

    Attributes:
        issue: Where it is reported, e.g. "vLLM #49955".
        versions: Affected engine versions.
        rule: Adds the workaround to the plan of a request that the quirk may affect. None if the quirk only
            affects scheduling and no answer has to be changed.
        is_for_tools: Whether the rule leaves requests without tools alone.
    """

    issue: str
    versions: str
    rule: Callable[[Plan], None] | None = None
    is_for_tools: bool = False
