"""The features of a request without its text: enough to decide it again. Pure."""

from collections.abc import Mapping
from dataclasses import fields
from operator import attrgetter

from gateway.core.policy import ModelPolicy, Policy
from gateway.core.request import Endpoint, Estimate, Prompt, Request
from gateway.core.value import valueclass

OTHER = True
"""Replaces the value of a header that no condition compares: only its presence is stored."""

HeaderValue = str | bool


@valueclass(frozen=True, slots=True)
class RequestFeatures:
    """One request's features and figures. Contains no text written by a caller.

    Attributes:
        policy: Version of the policy it was decided under.
        estimate: The estimated prompt length.
        size_bytes: Memory it occupied.
        patience_s: How long its caller said it would wait for the first token, or None.
        headers: Headers in conditions of the policy: the value if a condition compares it, otherwise `OTHER`.
        model: The requested model, by a name that the configuration knows.
        endpoint, stream, max_tokens, seqs, choices, prompts, reasoning, images, audios, tools, is_job,
            handed_over_as: As in `Request`.
    """

    policy: str
    estimate: Estimate
    size_bytes: int
    patience_s: float | None
    headers: Mapping[str, HeaderValue]
    model: str
    endpoint: Endpoint
    stream: bool = False
    max_tokens: int | None = None
    seqs: int = 1
    choices: int = 1
    prompts: int = 1
    reasoning: bool | None = None
    images: int = 0
    audios: int = 0
    tools: int = 0
    is_job: bool = False
    handed_over_as: str = ""

    @classmethod
    def of(
        cls,
        policy: str,
        model: ModelPolicy,
        request: Request,
        estimate: Estimate,
        size_bytes: int = 0,
        patience_s: float | None = None,
    ) -> "RequestFeatures":
        """Return the features of a request for a model of the policy with that version."""
        headers: dict[str, HeaderValue] = {}
        if request.headers and model.headers:
            for name, values in model.headers.items():
                value = request.headers.get(name)
                if value is not None:
                    headers[name] = value if value in values else OTHER
        # By position, in the order of the fields: the class is wide, and keywords would cost 2 us.
        return cls(policy, estimate, size_bytes, patience_s, headers, *_of_request(request))

    def request(self, key: str | None = None) -> Request:
        """Restore the request, as far as a decision needs it. `key`: name of its caller's API key."""
        return Request(
            **dict(zip(_SHARED, _of_request(self), strict=True)),
            prompt=Prompt(),
            key=key,
            # "" is never the value of a header: it stands for one that no condition compares.
            headers={name: "" if value is OTHER else str(value) for name, value in self.headers.items()},
        )


_ALIKE = {one.name for one in fields(Request)} - {"headers"}
_SHARED = tuple(one.name for one in fields(RequestFeatures) if one.name in _ALIKE)
"""The fields that are as in `Request`; in `RequestFeatures` they are the last ones."""

_of_request = attrgetter(*_SHARED)


def matched_headers(policy: Policy, model: str) -> Mapping[str, frozenset[str]]:
    """Return the headers in conditions of a model's classes, with all values that they are compared with."""
    known = policy.model(model)
    return {} if known is None else known.headers
