"""The format of the decision log: lines for requests and for policies. docs/replay.md documents it.

Each line is a JSON object with the version of the format (`v`) and its kind. Members may be added within a
version; if the meaning of one changes, so does the version.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import msgspec

from gateway.core.policy import Policy
from gateway.core.profile import EngineFlags
from gateway.core.request import CountMode, Endpoint
from gateway.core.request_features import HeaderValue, RequestFeatures
from gateway.core.usage import Ending, RequestRecord

VERSION = 1
"""Version of the form of lines. `replay` cannot read those of a newer one."""


class NewerFormat(Exception):
    """The line has a version that this program does not know."""


class PromptLength(msgspec.Struct, frozen=True):
    """See `core.request.Estimate`."""

    tokens: int
    tokens_max: int
    mode: CountMode


class PolicyLine(msgspec.Struct, frozen=True, tag="policy", tag_field="kind", omit_defaults=True):
    """A policy. Every file contains it before the first request that was decided under it.

    Attributes:
        v: Version of the format.
        version: Short hash of its configuration.
        policy: The policy itself; backends without their URLs.
        engines: Launch flags of the engines, by backend.
        boxes: Backends that take turns on one machine, by the machine's name.
    """

    v: int
    version: str
    policy: Policy
    engines: dict[str, EngineFlags]
    boxes: dict[str, tuple[str, ...]] = {}


class RequestLine(msgspec.Struct, frozen=True, tag="request", tag_field="kind", omit_defaults=True):
    """A finished request. Times in seconds; values that are unknown or do not apply are left out.

    Attributes:
        v: Version of the format.
        at: Epoch seconds of its arrival.
        ending, code, status: How it ended, with `error.code` and the HTTP status.
        total_s: From arrival to the end.
        key: Name of its caller's API key.
        policy, model, endpoint, stream, max_tokens, seqs, choices, prompts, reasoning, images, audios, tools,
            is_job, handed_over_as, size_bytes, patience_s, headers: See
            `core.request_features.RequestFeatures`. All are missing if `prompt` is.
        prompt: Its estimated prompt length.
        traffic_class: Its class.
        out: Why backends were passed over in its first decision, by backend; of all, if none was left.
        pool, backend, is_spill: Where it was served, and whether in a later pool of its class.
        tries: Attempts on backends.
        wait_s: From the decision to a slot; if it got none, to the end.
        ttft_s: From arrival to the first token; for a non-streamed answer, to the whole of it.
        tokens_in, tokens_cached, tokens_out: As reported by the backend.
        chunks: Reads relayed after the first byte.
    """

    v: int
    at: float
    ending: Ending
    total_s: float
    status: int
    code: str = ""
    key: str | None = None
    policy: str = ""
    model: str = ""
    endpoint: Endpoint = Endpoint.CHAT
    prompt: PromptLength | None = None
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
    size_bytes: int = 0
    patience_s: float | None = None
    headers: Mapping[str, HeaderValue] = {}
    traffic_class: str = ""
    out: Mapping[str, str] = {}
    pool: str = ""
    backend: str = ""
    is_spill: bool = False
    tries: int = 0
    wait_s: float | None = None
    ttft_s: float | None = None
    tokens_in: int | None = None
    tokens_cached: int = 0
    tokens_out: int | None = None
    chunks: int = 0


Line = PolicyLine | RequestLine

ASKED = tuple(one.name for one in fields(RequestFeatures) if one.name != "estimate")
"""The members of `core.request_features.RequestFeatures` that a line contains unchanged."""


class _Head(msgspec.Struct):
    v: int


_encoder = msgspec.json.Encoder()
_lines: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
_heads = msgspec.json.Decoder(_Head)


def policy_line(
    policy: Policy, engines: Mapping[str, EngineFlags], boxes: Mapping[str, tuple[str, ...]]
) -> bytes:
    """Encode a policy as a line, including the line break."""
    backends = {name: replace(backend, url="") for name, backend in policy.backends.items()}
    plain = replace(policy, backends=backends)
    return _encoder.encode(PolicyLine(VERSION, policy.version, plain, dict(engines), dict(boxes))) + b"\n"


def request_line(record: RequestRecord, *, has_key: bool) -> bytes:
    """Encode a request as a line, including the line break. `has_key`: with the name of the API key."""
    facts: dict[str, Any] = {}
    asked, decision, usage = record.asked, record.decision, record.usage
    if asked is not None:
        facts |= {name: getattr(asked, name) for name in ASKED}
        estimate = asked.estimate
        facts["prompt"] = PromptLength(estimate.tokens, estimate.tokens_max, estimate.mode)
    if decision is not None:
        facts["traffic_class"] = decision.traffic_class
        # Not all excluded ones: to find them, the whole fleet would have to be ranked.
        facts["out"] = {name: reason.value for name, reason in decision.candidates.passed_over}
    if asked is not None and record.estimated_at is not None:
        facts["wait_s"] = round((record.admitted_at or record.ended_at) - record.estimated_at, 6)
    if record.first_byte_at is not None:
        facts["ttft_s"] = round(record.first_byte_at - record.received_at, 6)
    if usage is not None:
        facts |= {"tokens_in": usage.prompt_tokens, "tokens_out": usage.completion_tokens}
        facts["tokens_cached"] = usage.cached_tokens
    line = RequestLine(
        v=VERSION,
        at=round(record.wall_at, 6),
        ending=record.ending,
        total_s=round(record.ended_at - record.received_at, 6),
        status=record.status,
        code=record.error_code,
        key=record.key if has_key else None,
        pool=record.pool,
        backend=record.backend,
        is_spill=record.is_spill,
        tries=len(record.attempts),
        chunks=record.chunks,
        **facts,
    )
    return _encoder.encode(line) + b"\n"


def read(line: bytes) -> Line:
    """Decode a line.

    Raises:
        ValueError: it is not a complete line of a decision log.
        NewerFormat: it has a newer version.
    """
    try:
        if _heads.decode(line).v > VERSION:
            raise NewerFormat
        return _lines.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
