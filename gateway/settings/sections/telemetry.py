"""The section `telemetry` of the configuration file: what is sent to an OpenTelemetry receiver."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from gateway.settings.fields import Seconds, Section, Text, Url, number


class OtlpSection(Section):
    """An OpenTelemetry receiver (a collector, or a vendor's), reached by OTLP over HTTP."""

    endpoint: Url
    """Its base URL, such as http://127.0.0.1:4318; /v1/traces and /v1/metrics are added."""

    headers_env: Text | None = None
    """Environment variable with headers that it wants, as `name=value,name=value`."""

    service_name: Text = "gemma-gateway"
    """What the gateway is called there. `OTEL_RESOURCE_ATTRIBUTES` says more of it."""


class TracesSection(Section):
    """Which requests are kept as traces. Failed ones always are. Never any text."""

    share: Annotated[float, Field(ge=0, le=1), BeforeValidator(number)] = 0.01
    """Share of all requests that is kept anyway; the same ones on every gateway."""

    follow_callers: bool = True
    """Whether a request is kept because its caller's `traceparent` says that it keeps its own part."""

    slow_factor: Seconds = 1.0
    """A stream whose first token comes later than this many times its class's `ttft_target_s` is kept."""

    slow_total_s: Seconds | None = None
    """A request that takes longer in all is kept; left out, none is for that."""

    genai_conventions: Literal["current", "1.41"] = "current"
    """Version of OpenTelemetry's GenAI names. Most dashboards know 1.41, the last before they moved."""


class PushSection(Section):
    """Metrics by OTLP, beside the page for Prometheus; the same ones."""

    interval_s: Seconds = 30.0
    """Seconds between two of them."""


class TelemetrySection(Section):
    """What is sent to an OpenTelemetry receiver. Without `otlp`: nothing, and nothing is paid for it."""

    otlp: OtlpSection | None = None
    """Where it is sent."""

    traces: TracesSection | None = TracesSection()
    """Traces of requests; an explicit null for none."""

    metrics: PushSection | None = None
    """Metrics; left out, they are only shown on the admin port."""
