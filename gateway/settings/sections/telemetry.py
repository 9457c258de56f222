"""The section `telemetry` of the configuration file: what is sent to an OpenTelemetry receiver.

Defaults are choices: enough traces to see a trend, and what is slow or failed in any case.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from gateway.settings.addresses import Url
from gateway.settings.fields import Seconds, Section, Text, number


def _as_text(value: object) -> object:
    """Return a version that YAML reads as a number, because nobody quoted it, as text."""
    return str(value) if isinstance(value, float) else value


class OtlpSection(Section):
    """An OpenTelemetry receiver (a collector or a vendor's), reached by OTLP over HTTP."""

    endpoint: Url
    """Its base URL, such as http://127.0.0.1:4318; /v1/traces and /v1/metrics are appended."""

    headers_env: Text | None = None
    """Environment variable with the headers to send, as `name=value,name=value`."""

    service_name: Text = "gemma-gateway"
    """The gateway's service name there. `OTEL_RESOURCE_ATTRIBUTES` adds attributes."""


class TracesSection(Section):
    """Which requests are kept as traces. Failed ones always are. Traces never contain text."""

    share: Annotated[float, Field(ge=0, le=1), BeforeValidator(number)] = 0.01
    """Share of all requests kept in any case; every gateway keeps the same ones."""

    follow_callers: bool = True
    """Whether to keep a request because its caller's `traceparent` has the sampled flag."""

    slow_factor: Seconds = 1.0
    """Keep a stream whose first token takes longer than this many times its class's `ttft_target_s`."""

    slow_total_s: Seconds | None = None
    """Keep a request that takes longer than this in total. Unset: no such limit."""

    genai_conventions: Annotated[Literal["current", "1.41"], BeforeValidator(_as_text)] = "current"
    """Version of OpenTelemetry's GenAI names. Most dashboards use 1.41, the last before they changed."""


class PushSection(Section):
    """Metrics over OTLP: the same ones as on the Prometheus page."""

    interval_s: Seconds = 30.0
    """Seconds between two exports."""


class TelemetrySection(Section):
    """What is sent to an OpenTelemetry receiver. Without `otlp`: nothing, at no cost."""

    otlp: OtlpSection | None = None
    """Where it is sent."""

    traces: TracesSection | None = TracesSection()
    """Traces of requests; an explicit null for none."""

    metrics: PushSection | None = None
    """Metrics. Unset: they are only available on the admin port."""
