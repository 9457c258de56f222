import pytest

from gateway.core.versions import bounds, misfit, order

ASCENDING = [
    "0.19.1.dev3",
    "0.19.1rc1.dev31+gabc123",
    "0.19.1rc1",
    "0.19.1rc2",
    "0.19.1",
    "0.19.1.post1",
    "0.19.2",
    "0.20",
    "0.20.2rc1",
    "0.20.2",
    "0.24.0a1",
    "0.24.0b1",
    "0.24.0rc1",
    "v0.24",
    "0.100.0",
    "1.0",
]


def test_versions_are_in_the_order_they_came_out() -> None:
    orders = [order(version) for version in ASCENDING]
    assert None not in orders
    assert sorted(orders, key=lambda one: one or ()) == orders
    assert len(set(orders)) == len(orders)


def test_what_means_the_same_is_the_same() -> None:
    assert order("0.24") == order("0.24.0") == order("v0.24.0+cu128")


@pytest.mark.parametrize("version", ["", "latest", "0.x", "1..2", "0.24-nightly"])
def test_what_is_no_version_has_no_order(version: str) -> None:
    assert order(version) is None


@pytest.mark.parametrize(
    ("allowed", "version", "expected"),
    [
        pytest.param(">= 0.20, < 0.24", "0.20.0", "", id="lower-end"),
        pytest.param(
            ">= 0.20, < 0.24", "0.20.0rc1", "engine version 0.20.0rc1, not >= 0.20", id="before-the-lower-end"
        ),
        pytest.param(">= 0.20, < 0.24", "0.23.9", "", id="inside"),
        pytest.param(">= 0.20, < 0.24", "0.24.0", "engine version 0.24.0, not < 0.24", id="upper-end"),
        pytest.param(
            "!= 0.23.1rc1", "0.23.1rc1", "engine version 0.23.1rc1, not != 0.23.1rc1", id="one-that-fails"
        ),
        pytest.param("== 0.25.1", "0.25.1", "", id="exactly"),
        pytest.param("> 0.24, <= 0.25.1", "0.25.1", "", id="closed-end"),
        pytest.param(">= 0.20", "", "the engine does not report its version", id="silent"),
        pytest.param(">= 0.20", "nightly", "engine version nightly cannot be compared", id="unreadable"),
    ],
)
def test_a_range_allows_or_says_why_not(allowed: str, version: str, expected: str) -> None:
    assert misfit(bounds(allowed), version) == expected


def test_without_a_range_everything_is_allowed() -> None:
    assert misfit((), "") == ""


@pytest.mark.parametrize("text", ["", "0.20", ">= ", "~= 0.20", ">= 0.20,", ">= x"])
def test_a_range_that_is_none_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="write it as"):
        bounds(text)
