"""Orders to go wrong."""

from typing import Any

import pytest

from gateway.simulator.faults import Faults, order_from
from gateway.simulator.options import Fault, FaultOrder


def test_a_counted_fault_wears_off() -> None:
    faults = Faults()
    order = FaultOrder(Fault.ERROR, count=2)
    faults.set(order)

    assert [faults.take() for _ in range(3)] == [order, order, None]
    assert faults.order is None


def test_an_uncounted_fault_stays_until_it_is_lifted() -> None:
    faults = Faults()
    faults.set(FaultOrder(Fault.ERROR))

    assert all(faults.take() for _ in range(10))
    faults.set(None)
    assert faults.take() is None


@pytest.mark.parametrize("fault", [Fault.REFUSE, Fault.HANG, Fault.CRASH, Fault.RESTART, Fault.SILENT_STOP])
def test_faults_of_the_server_do_not_strike_requests(fault: Fault) -> None:
    faults = Faults()
    faults.set(FaultOrder(fault))

    assert faults.take() is None


@pytest.mark.parametrize(
    ("data", "order"),
    [
        ({"fault": None}, None),
        ({"fault": "hang", "for_s": 5}, FaultOrder(Fault.HANG, for_s=5)),
        ({"fault": "abort", "count": 2, "after_chunks": 9}, FaultOrder(Fault.ABORT, count=2, after_chunks=9)),
    ],
    ids=["lifted", "for-a-time", "for-some-requests"],
)
def test_orders_are_read(data: dict[str, Any], order: FaultOrder | None) -> None:
    assert order_from(data) == order


@pytest.mark.parametrize(
    "data",
    [
        {"fault": "explode"},
        {"fault": "hang", "count": "two"},
        {"fault": "error", "count": 0},
        {"fault": "abort", "after_chunks": None},
        {"fault": "hang", "seconds": 5},
        {"kind": "hang"},
        {},
    ],
    ids=["unknown", "count", "no-request", "after-chunks", "another-member", "no-fault", "empty"],
)
def test_orders_that_make_no_sense_are_refused(data: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"unknown fault|whole number|at least 1|an order is"):
        order_from(data)
