"""A real OTLP receiver: a process that takes traces and metrics over HTTP and shows what it was sent.

It decodes the protocol's own messages, so what it shows is what a collector would have got.
"""

import gzip
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import anyio
import httpx
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Span:
    """A span as it arrived."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    started_ns: int
    ended_ns: int
    status: str
    attributes: dict[str, Any]
    links: list[tuple[str, str]]


@dataclass(frozen=True)
class Receiver:
    """A receiver that runs, at the base URL `url`."""

    url: str

    async def spans(self) -> list[Span]:
        """Return every span it was sent."""
        found = await self._shown("traces")
        return [
            _span(one)
            for request in found
            for resource in request["resourceSpans"]
            for scope in resource["scopeSpans"]
            for one in scope["spans"]
        ]

    async def metrics(self) -> dict[str, Any]:
        """Return the metrics it was sent last, by name."""
        found = (await self._shown("metrics"))[-1:]
        return {
            metric["name"]: metric
            for request in found
            for resource in request["resourceMetrics"]
            for scope in resource["scopeMetrics"]
            for metric in scope["metrics"]
        }

    async def headers(self) -> list[dict[str, str]]:
        """Return the headers of every request it was sent."""
        return await self._shown("headers")

    async def _shown(self, what: str) -> list[Any]:
        # Not `clients`: this module is a program, too, where there is no `support`.
        async with httpx.AsyncClient(verify=False, trust_env=False) as client:
            shown: list[Any] = (await client.get(f"{self.url}/{what}")).json()
            return shown


@asynccontextmanager
async def receiver() -> AsyncIterator[Receiver]:
    """Run a receiver in a process of its own."""
    process = await anyio.open_process([sys.executable, __file__], stderr=None)
    try:
        assert process.stdout is not None
        port = int((await process.stdout.receive()).decode())
        yield Receiver(f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        await process.aclose()


def _span(one: dict[str, Any]) -> Span:
    return Span(
        name=one["name"],
        kind=one["kind"],
        trace_id=one["traceId"],
        span_id=one["spanId"],
        parent_id=one.get("parentSpanId", ""),
        started_ns=int(one["startTimeUnixNano"]),
        ended_ns=int(one["endTimeUnixNano"]),
        status=one.get("status", {}).get("code", ""),
        attributes=_attributes(one),
        links=[(link["traceId"], link["spanId"]) for link in one.get("links", ())],
    )


def _attributes(of: dict[str, Any]) -> dict[str, Any]:
    return {one["key"]: _value(one["value"]) for one in of.get("attributes", ())}


def _value(value: dict[str, Any]) -> Any:
    match value:
        case {"stringValue": text}:
            return text
        case {"intValue": number}:
            return int(number)
        case {"doubleValue": number} | {"boolValue": number}:
            return number
        case {"arrayValue": {"values": values}}:
            return [_value(one) for one in values]
    return value


class _Handler(BaseHTTPRequestHandler):
    taken: dict[str, list[Any]] = {"traces": [], "metrics": [], "headers": []}  # noqa: RUF012 - one per process

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        what = self.path.removeprefix("/v1/")
        kinds: dict[str, Any] = {"traces": ExportTraceServiceRequest, "metrics": ExportMetricsServiceRequest}
        message = kinds[what]()
        message.ParseFromString(body)
        decoded = MessageToDict(message)
        if what == "traces":
            _with_hex_ids(decoded, message)
        self.taken[what].append(decoded)
        self.taken["headers"].append(dict(self.headers))
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(json.dumps(self.taken[self.path[1:]]).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _with_hex_ids(decoded: dict[str, Any], message: Any) -> None:
    """Write ids as people do: JSON of protobuf has them in base64."""
    for resource, its in zip(decoded["resourceSpans"], message.resource_spans, strict=True):
        for scope, of in zip(resource["scopeSpans"], its.scope_spans, strict=True):
            for one, span in zip(scope["spans"], of.spans, strict=True):
                one["traceId"], one["spanId"] = span.trace_id.hex(), span.span_id.hex()
                one["parentSpanId"] = span.parent_span_id.hex()
                for link, other in zip(one.get("links", ()), span.links, strict=True):
                    link["traceId"], link["spanId"] = other.trace_id.hex(), other.span_id.hex()


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()
