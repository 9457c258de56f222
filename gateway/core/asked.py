"""What a request asked, without its text: enough to decide about it again. Pure."""

from collections.abc import Mapping
from dataclasses import field

from gateway.core.value import valueclass
from gateway.core.values import Endpoint, Estimate, ModelPolicy, Policy, Prompt, Request

OTHER = True
"""Stands for the value of a header that no condition names: it was there, and that is all that is kept."""

HeaderValue = str | bool


@valueclass(frozen=True, slots=True)
class Asked:
    """One request's features and figures. Nothing of it is a caller's own words.

    Attributes:
        policy: Version of the policy that it was decided under.
        model: The name it asked for; one that the configuration knows.
        endpoint, stream, max_tokens, seqs, choices, prompts, reasoning, images, audios, tools, is_job,
            handed_over_as: As in `Request`.
        estimate: How long its prompt was taken to be.
        size_bytes: What it kept in memory.
        patience_s: How long its caller said that it waits for the first token, or None.
        headers: Those that the policy's conditions match on: the value where a condition names it, else
            `OTHER`.
    """

    policy: str
    model: str
    endpoint: Endpoint
    estimate: Estimate
    stream: bool = False
    max_tokens: int | None = None
    seqs: int = 1
    choices: int = 1
    prompts: int = 1
    reasoning: bool = False
    images: int = 0
    audios: int = 0
    tools: int = 0
    is_job: bool = False
    handed_over_as: str = ""
    size_bytes: int = 0
    patience_s: float | None = None
    headers: Mapping[str, HeaderValue] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        policy: str,
        model: ModelPolicy,
        request: Request,
        estimate: Estimate,
        *,
        size_bytes: int = 0,
        patience_s: float | None = None,
    ) -> "Asked":
        """Return what is kept of a request for a model of the policy with that version."""
        headers: dict[str, HeaderValue] = {}
        for name, values in _matched(model).items():
            value = request.headers.get(name)
            if value is not None:
                headers[name] = value if value in values else OTHER
        return cls(
            policy=policy,
            model=request.model,
            endpoint=request.endpoint,
            estimate=estimate,
            stream=request.stream,
            max_tokens=request.max_tokens,
            seqs=request.seqs,
            choices=request.choices,
            prompts=request.prompts,
            reasoning=request.reasoning,
            images=request.images,
            audios=request.audios,
            tools=request.tools,
            is_job=request.is_job,
            handed_over_as=request.handed_over_as,
            size_bytes=size_bytes,
            patience_s=patience_s,
            headers=headers,
        )

    def request(self, key: str | None = None) -> Request:
        """Return the request again, as far as a decision reads it. `key`: name of its caller's API key."""
        return Request(
            endpoint=self.endpoint,
            model=self.model,
            prompt=Prompt(),
            stream=self.stream,
            max_tokens=self.max_tokens,
            seqs=self.seqs,
            choices=self.choices,
            prompts=self.prompts,
            reasoning=self.reasoning,
            images=self.images,
            audios=self.audios,
            tools=self.tools,
            key=key,
            # No header can have the value "": it stands for one that nobody named.
            headers={name: "" if value is OTHER else str(value) for name, value in self.headers.items()},
            is_job=self.is_job,
            handed_over_as=self.handed_over_as,
        )


def matched_headers(policy: Policy, model: str) -> Mapping[str, frozenset[str]]:
    """Return the headers that the classes of a model match on, with every value that one of them names."""
    known = policy.model(model)
    return {} if known is None else _matched(known)


def _matched(model: ModelPolicy) -> Mapping[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for one in model.classes:
        for name, values in one.when.headers:
            found[name] = found.get(name, frozenset()).union(values)
    return found
