"""Our own counters and histograms: what is read of them is what is read of prometheus_client's."""

import re
from collections.abc import Iterator

import prometheus_client
import pytest
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, Counter, Histogram

from gateway.clock import SystemClock
from gateway.core.usage import Ending
from gateway.telemetry.otlp_metrics import metrics_data
from gateway.telemetry.series import Collected, Counters, Histograms

CREATED = re.compile(r"(?<=[} ])[0-9.e+]+$", re.M)


def page(registry: CollectorRegistry) -> str:
    return written(Collected(registry))


def written(found: Collected) -> str:
    """Return the page, without the moments at which each series began."""
    lines = found.page().decode().splitlines()
    return "\n".join(CREATED.sub("then", line) if "_created" in line else line for line in lines)


def pushed(registry: CollectorRegistry) -> str:
    return metrics_data(registry, Resource({}), 1, 2).to_json()


@pytest.fixture
def _created_as_it_was() -> Iterator[None]:
    yield
    prometheus_client.enable_created_metrics()  # type: ignore[no-untyped-call]


def test_a_counter_reads_as_prometheus_clients_own() -> None:
    ours, theirs = CollectorRegistry(auto_describe=True), CollectorRegistry(auto_describe=True)
    names = ("backend", "ending")
    own = Counters("gateway_tries", "Tries.", names, registry=ours)
    reference = Counter("gateway_tries", "Tries.", names, registry=theirs)
    assert page(ours) == page(theirs)  # nothing yet

    for backend, ending, amount in (
        ("b", Ending.FAILED, 1),
        ("a", Ending.COMPLETED, 2.5),
        ('"\\\n', Ending.COMPLETED, 0),
        ("b", Ending.FAILED, 10**7),
    ):
        own.add((backend, ending), amount)
        reference.labels(backend, ending.value).inc(amount)

    assert page(ours) == page(theirs)
    assert pushed(ours) == pushed(theirs)
    assert 'gateway_tries_total{backend="b",ending="failed"} 1.0000001e+07' in page(ours)


@pytest.mark.parametrize("names", [(), ("backend",)])
@pytest.mark.parametrize("buckets", [(0.1, 0.25, 1, 1048576), (-0.5, -0.1, 0.1, 0.5)])
def test_a_histogram_reads_as_prometheus_clients_own(
    names: tuple[str, ...], buckets: tuple[float, ...]
) -> None:
    ours, theirs = CollectorRegistry(auto_describe=True), CollectorRegistry(auto_describe=True)
    own = Histograms("gateway_wait_seconds", "Waits.", names, buckets=buckets, registry=ours)
    reference = Histogram("gateway_wait_seconds", "Waits.", names, buckets=buckets, registry=theirs)
    assert page(ours) == page(theirs)  # nothing yet

    on_bounds = [near for bound in buckets for near in (bound - 1e-9, bound, bound + 1e-9)]
    for number, value in enumerate([*on_bounds, 0, -7, 1e9, float("inf")]):
        labels = ("one", "other")[number % 2 : number % 2 + 1] if names else ()
        own.observe(labels, value)
        (reference.labels(*labels) if names else reference).observe(value)

    assert page(ours) == page(theirs)
    assert pushed(ours) == pushed(theirs)


@pytest.mark.usefixtures("_created_as_it_was")
def test_when_a_series_began_is_left_out_where_prometheus_client_leaves_it_out() -> None:
    registry, before = CollectorRegistry(), SystemClock().wall()
    Counters("gateway_tries", "Tries.", ("backend",), registry=registry).add(("a",))
    Histograms("gateway_wait_seconds", "Waits.", buckets=(1,), registry=registry)
    for name, labels in (("gateway_tries_created", {"backend": "a"}), ("gateway_wait_seconds_created", {})):
        assert before <= (registry.get_sample_value(name, labels) or 0) <= SystemClock().wall()

    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

    assert "_created" not in page(registry)


def test_a_counter_does_not_go_down() -> None:
    registry = CollectorRegistry()
    subject = Counters("gateway_tries", "Tries.", ("backend",), registry=registry)

    with pytest.raises(ValueError, match="gateway_tries cannot go down, by -1"):
        subject.add(("a",), -1)

    assert registry.get_sample_value("gateway_tries_total", {"backend": "a"}) is None


def test_what_was_collected_does_not_change_until_it_is_written() -> None:
    registry = CollectorRegistry()
    tries = Counters("gateway_tries", "Tries.", ("backend",), registry=registry)
    durations = Histograms(
        "gateway_duration_seconds", "Times.", ("backend",), buckets=(1,), registry=registry
    )
    tries.add(("a",))
    durations.observe(("a",), 0.5)
    before, found = page(registry), Collected(registry)

    for backend in ("a", "b"):
        tries.add((backend,))
        durations.observe((backend,), 0.5)

    assert written(found) == before != page(registry)


def test_collecting_works_out_no_line() -> None:
    registry = CollectorRegistry()
    durations = Histograms(
        "gateway_duration_seconds", "Times.", ("backend",), buckets=(1,), registry=registry
    )
    durations.observe(("a",), 0.5)

    (family,) = Collected(registry).collect()

    assert "samples" not in vars(family)
    assert len(family.samples) == 5
