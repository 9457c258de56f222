"""The servers and what joins them: `tokenizer`, `backends`, `pools`, `timeouts`, `health`.

The sources of defaults are in `core.backends` and `core.health.HealthRules`.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from gateway.core.backends import Gates, Spill, Timeouts
from gateway.core.health import HealthRules
from gateway.settings.addresses import BaseUrl
from gateway.settings.fields import (
    Count,
    KneeCurve,
    Names,
    Positive,
    QuirkNames,
    Seconds,
    Section,
    Share,
    ShortForm,
    Text,
    Versions,
    number,
)

_TIMEOUTS = Timeouts()
_GATES, _SPILL = Gates(), Spill()
_HEALTH = HealthRules()


def _tokenizer(written: Any) -> Any:
    if written == "approximate":
        return {"vocab": None}
    if isinstance(written, dict) and (not written or ("vocab" in written and not written["vocab"])):
        raise ValueError("name the vocabulary file: {vocab: gemma4.tiktoken}")
    if isinstance(written, dict):
        return written
    raise ValueError("write approximate, or {vocab: gemma4.tiktoken}: there is no silent default")


class TokenizerSection(Section):
    """How prompts are counted. `approximate` instead of this section: estimated, with an error band."""

    model_config = ConfigDict(json_schema_extra={"required": ["vocab"]})

    vocab: Text | None = None
    """Your model's vocabulary, built by `gemma-gateway vocab build`; relative to this file. Exact."""


TokenizerChoice = Annotated[TokenizerSection, ShortForm(_tokenizer, {"const": "approximate"})]


class LimitsSection(Section):
    """A backend's own figures, overriding its profile's."""

    knee_seqs: KneeCurve | None = None
    """The knee: a number up to 999, or a curve [{prompt_tokens: "<= 2000", seqs: 64}, {seqs: 12}]."""

    context_tokens: Positive | None = None
    """Prompt plus output of one request: the engine's `--max-model-len`."""

    kv_blocks: Positive | None = None
    """KV pool size in blocks. An explicit null leaves KV admission to the engine alone."""

    kv_budget: Share | None = None
    """Share of the KV blocks that admission may plan with, above 0 and up to 1."""


class ModalitiesSection(Section):
    """What a backend accepts besides text, overriding its profile."""

    images_max: Count | None = None
    """Images per request; 0 for none, an explicit null for no limit."""

    audios_max: Count | None = None
    """Audio parts per request; 0 for none, an explicit null for no limit."""


NULL_LIFTS = frozenset({"kv_blocks", "images_max", "audios_max"})
"""Keys of these two sections whose explicit null lifts a limit; left out, they mean the profile's figure."""


class QuirksSection(Section):
    """Known bugs of a backend's engine, where they differ from its profile: docs/quirks.md."""

    add: QuirkNames = ()
    """Quirks it has in addition to its profile's."""

    remove: QuirkNames = ()
    """Quirks of its profile that it does not have, for example after an upgrade."""


class TlsSection(Section):
    """TLS to an https backend: how its certificate is verified, and the gateway's own."""

    ca_file: Text | None = None
    """Certificates to trust instead of the system's, in PEM format; relative to this file."""

    verify: bool = True
    """Whether the certificate is verified at all."""

    cert_file: Text | None = None
    """Client certificate, with its chain, if the backend asks for one; PEM format, relative to this file."""

    key_file: Text | None = None
    """Its private key, in PEM format, not encrypted. Unset: it is in `cert_file`."""


class BackendSection(Section):
    """One vLLM server."""

    url: BaseUrl
    """Scheme, host and port, and a path if a proxy has one for it, without /v1. Two backends must not share a
    URL: each is counted separately."""

    profile: Text
    """The profile its figures come from: a shipped one (docs/profiles.md) or one under `profiles`."""

    model: Text | None = None
    """The name under which it serves the model. Unset: learned from the backend's /v1/models."""

    api_key_env: Text | None = None
    """Environment variable that holds the backend's API key."""

    api_key_file: Text | None = None
    """File that holds the backend's API key; relative to this file."""

    limits: LimitsSection = LimitsSection()
    """Figures that override the profile's."""

    modalities: ModalitiesSection = ModalitiesSection()
    """Images and audio, where they differ from the profile."""

    quirks: QuirksSection = QuirksSection()
    """Known bugs of its engine, where they differ from the profile's."""

    drain: bool = False
    """Let running requests finish, send nothing new."""

    boot_budget_s: Seconds | None = None
    """Seconds it may take to become ready before that counts as a fault. Unset: the profile's."""

    tls: TlsSection = TlsSection()
    """How an https backend's certificate is verified."""

    versions: Versions | None = None
    """Allowed engine versions, as ">= 0.20, < 0.24"; with any other it gets no traffic. Unset: any."""

    @model_validator(mode="after")
    def _one_key(self) -> "BackendSection":
        if self.api_key_env is not None and self.api_key_file is not None:
            raise ValueError("give api_key_env or api_key_file, not both")
        return self


class TimeoutsSection(Section):
    """How long each phase of an attempt may take."""

    connect_s: Seconds = _TIMEOUTS.connect_s
    """Seconds to open the connection."""

    first_byte_s: Seconds = _TIMEOUTS.first_byte_s
    """Seconds from sending a streamed request to its first generated byte; a long prefill happens here."""

    idle_s: Seconds = _TIMEOUTS.idle_s
    """Seconds between two reads after the first byte."""

    total_s: Seconds = _TIMEOUTS.total_s
    """Seconds for the whole attempt; keep-alive comments cannot extend it."""


class PoolTimeoutsSection(Section):
    """A pool's own timeouts. Anything unset comes from the top-level `timeouts`."""

    connect_s: Seconds | None = None
    """Seconds to open the connection."""

    first_byte_s: Seconds | None = None
    """Seconds from sending a streamed request to its first generated byte."""

    idle_s: Seconds | None = None
    """Seconds between two reads after the first byte."""

    total_s: Seconds | None = None
    """Seconds for the whole attempt."""


class GatesSection(Section):
    """A pool's admission limits besides the knee, per backend: docs/routing.md says what each is worth."""

    long_prompt_tokens: Positive = _GATES.long_prompt_tokens
    """Prompts of at least this length are long."""

    long_prefills: Count | None = None
    """Long prompts prefilled at once; 0: only on an idle backend. Unset: 0 for chat pools, else 1."""

    long_seqs: Positive | None = None
    """Long documents a backend may hold: 4 to 6 for interactive readers, 12 to 16 for throughput."""

    prefill_s: Seconds | None = None
    """Seconds of outstanding prefill at which a backend takes no more prompts. Unset: 0.6 for chat pools."""


class SpillSection(Section):
    """When a pool takes work that prefers an earlier pool of its class."""

    reserve: Annotated[float, Field(ge=0, lt=1), BeforeValidator(number)] = _SPILL.reserve
    """Share of the knee that stays free for the pool's own work."""

    prefill_s: Seconds = _SPILL.prefill_s
    """Seconds of outstanding prefill from which on it takes no spilled work."""


class JobRoomSection(Section):
    """What jobs leave free on each backend, for requests whose callers are waiting."""

    reserve: Annotated[float, Field(ge=0, lt=1), BeforeValidator(number)] | None = None
    """Share of the knee and of the KV blocks. Unset: 1/8; 0 where every class of the pool has a `queue`."""

    prefill_s: Seconds | None = None
    """Seconds of outstanding prefill at which a backend takes no more jobs. Unset: 0.5, or no limit there."""


_POOL_SHORT: dict[str, Any] = {"type": "array", "items": {"type": "string"}, "minItems": 1}


def _pool(written: Any) -> Any:
    if isinstance(written, str):
        raise ValueError(f"a list of backends is needed: [{written}]")
    return {"backends": written} if isinstance(written, list) else written


class PoolSection(Section):
    """Interchangeable backends. A plain list is the short form."""

    backends: Names
    """Backend ids; at equal scores the earlier one wins."""

    timeouts: PoolTimeoutsSection = PoolTimeoutsSection()
    """Timeouts of this pool, where they differ from the top-level `timeouts`."""

    gates: GatesSection = GatesSection()
    """Admission limits besides the knee."""

    spill: SpillSection = SpillSection()
    """When it takes work of classes whose first choice is another pool."""

    jobs: JobRoomSection = JobRoomSection()
    """What jobs leave free, for requests whose callers are waiting."""

    tpot_target_ms: Annotated[float, Field(gt=0, le=60_000), BeforeValidator(number)] | None = None
    """Target milliseconds per output token; a backend that exceeds it gets less than its knee."""


PoolChoice = Annotated[PoolSection, ShortForm(_pool, _POOL_SHORT)]


class HealthSection(Section):
    """When a backend counts as healthy."""

    interval_s: Seconds = _HEALTH.interval_s
    """Seconds between two probes of a backend."""

    timeout_s: Seconds = _HEALTH.probe_timeout_s
    """Seconds one probe of `/health` may take; those of other paths, 5."""

    failures: Positive = _HEALTH.failures_max
    """Failures that eject a backend: consecutive failed probes, or failed requests minus successes."""

    ejection_s: Seconds = _HEALTH.penalty_s
    """Seconds of the first ejection; each further one doubles it."""

    ejection_max_s: Seconds = _HEALTH.penalty_max_s
    """Longest ejection in seconds."""

    hang_s: Seconds = _HEALTH.hang_s
    """Seconds without a token, while requests run or wait, that count as a hang; more if a step is longer."""

    probation_successes: Positive = _HEALTH.probation_successes
    """Requests that must succeed before a recovered backend is trusted again."""
