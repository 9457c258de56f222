"""What is done for one request on one backend because of the backend's quirks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.core.quirks.remedy import Remedy
from gateway.core.values import Endpoint, Request


class Asked(Protocol):
    """A request as the remedies look at it. `ports.Incoming` is one."""

    @property
    def request(self) -> Request:
        """What the gateway reads of it."""

    def member(self, name: str) -> Any:
        """Return a member of its body, decoded; None where there is none, or where it cannot be read."""


@dataclass(slots=True)
class Plan:
    """What to do, put together by the remedies in their order.

    Attributes:
        asked: The request.
        changes: Members of the body that become something else.
        remedies: What the answer passes through, in order.
        assembles: The backend is asked for a stream, of which the caller gets one whole answer.
    """

    asked: Asked
    changes: dict[tuple[str, ...], object] = field(default_factory=dict)
    remedies: list[Remedy] = field(default_factory=list)
    assembles: bool = False

    @property
    def is_chat(self) -> bool:
        """Whether it is a chat."""
        return self.asked.request.endpoint is Endpoint.CHAT

    @property
    def is_streamed(self) -> bool:
        """Whether the backend is asked for a stream."""
        return self.assembles or self.asked.request.stream


@dataclass(frozen=True, slots=True)
class Workaround:
    """What is done about one quirk.

    Attributes:
        issue: Where it is reported, e.g. "vLLM #49955".
        versions: Engine versions it is known of.
        rule: Puts what it needs into the plan of a request that the quirk may show on. None where backends
            are chosen with it in mind, and no answer has to be mended.
    """

    issue: str
    versions: str
    rule: Callable[[Plan], None] | None = None
