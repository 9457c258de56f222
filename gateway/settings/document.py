"""The configuration file as it is written: one model per section, one documented field per key.

The docstring under a field is its documentation everywhere: in the JSON Schema that editors read, in
docs/configuration.md and in `missing` errors. Defaults are those of the core wherever the core has one.
"""

from typing import Annotated

from pydantic import Field

from gateway.settings.addresses import AddressText, OptionalAddress, OriginNames
from gateway.settings.fields import Section, Slug, Text
from gateway.settings.sections.boxes import BoxSection
from gateway.settings.sections.decisions import DecisionsSection
from gateway.settings.sections.fleet import (
    BackendSection,
    HealthSection,
    PoolChoice,
    TimeoutsSection,
    TokenizerChoice,
)
from gateway.settings.sections.models import ModelSection, RoutingSection
from gateway.settings.sections.service import (
    AnswersSection,
    IdempotencySection,
    JobsSection,
    Keys,
    ReloadSection,
    RequestsSection,
    ResponsesSection,
    ShutdownSection,
    StoreChoice,
    WebhookSection,
)
from gateway.settings.sections.site_profiles import SiteProfileSection
from gateway.settings.sections.telemetry import TelemetrySection


class Document(Section):
    """A Gemma Gateway configuration file."""

    listen: AddressText = "127.0.0.1:8080"
    """Where applications connect, as host:port."""

    admin: OptionalAddress = "127.0.0.1:9090"
    """Where operators connect (status, metrics, jobs), as host:port; off: no admin port. Never expose it."""

    admin_names: tuple[Text, ...] = ()
    """Host names that operators use for it, besides addresses, localhost and names without a dot."""

    tokenizer: TokenizerChoice
    """How prompts are counted: {vocab: FILE} exactly, `approximate` with a band. There is no default."""

    backends: Annotated[dict[Slug, BackendSection], Field(min_length=1)]
    """The vLLM servers, each under a name of your own."""

    pools: Annotated[dict[Slug, PoolChoice], Field(min_length=1)]
    """Groups of interchangeable backends."""

    boxes: dict[Slug, BoxSection] = Field(default_factory=dict)
    """Machines on which several backends take turns, one model at a time."""

    models: Annotated[dict[Text, ModelSection], Field(min_length=1)]
    """The names applications send, and the classes of work behind each."""

    profiles: dict[Slug, SiteProfileSection] = Field(default_factory=dict)
    """Your own profiles: a shipped one with some figures replaced."""

    timeouts: TimeoutsSection = TimeoutsSection()
    """Timeouts of every pool that does not set its own."""

    routing: RoutingSection = RoutingSection()
    """How a backend is chosen."""

    keys: Keys = None
    """API keys of callers, each under a name. Unset: the gateway is open to everyone who can reach it."""

    allowed_origins: OriginNames = ()
    """Origins whose web pages may call from a browser (docs/browsers.md), or "*" for all. Unset: none."""

    requests: RequestsSection = RequestsSection()
    """What is accepted from callers."""

    answers: AnswersSection = AnswersSection()
    """How answers look to callers."""

    responses: ResponsesSection = ResponsesSection()
    """How long, and how much, of /v1/responses is kept."""

    idempotency: IdempotencySection = IdempotencySection()
    """Answers kept for `Idempotency-Key`."""

    health: HealthSection = HealthSection()
    """When a backend counts as healthy."""

    store: StoreChoice | None = None
    """Redis or Valkey through which several gateways share limits. Unset: this process counts alone."""

    jobs: JobsSection | None = None
    """Requests that are submitted now and whose answers are fetched later. Unset: no jobs."""

    webhooks: dict[Slug, WebhookSection] = Field(default_factory=dict)
    """Endpoints that are notified when jobs end, each under a name. Needs `jobs`."""

    telemetry: TelemetrySection = TelemetrySection()
    """What is sent to an OpenTelemetry receiver."""

    decisions: DecisionsSection | None = None
    """A log of routing decisions, for replaying them under another policy. Unset: none is written."""

    reload: ReloadSection = ReloadSection()
    """Changing the configuration while the gateway runs."""

    shutdown: ShutdownSection = ShutdownSection()
    """What happens on SIGTERM."""
