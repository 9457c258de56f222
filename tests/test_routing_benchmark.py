"""The routing benchmark in small: in a few virtual minutes policies differ as they do in hours."""

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    from benchmarks import routing

    return lambda mix, load, policy: routing.run(mix, load, 7, policy, 300.0, reasoning=False)


def test_in_overload_the_gateway_serves_more_than_a_cap_and_that_more_than_nothing(run: Any) -> None:
    gateway, capped, least = (run("A", 1.2, policy) for policy in ("gateway", "ctx-429", "ctx-least"))

    assert gateway.chat > capped.chat + 0.02
    assert capped.chat > least.chat + 0.2
    assert gateway.chat_ttft_p99_s < 2.5 < capped.chat_ttft_p99_s
    assert gateway.tokens_per_s > 0.95 * least.tokens_per_s


def test_nothing_is_sent_where_it_cannot_run_and_no_cap_is_passed(run: Any) -> None:
    gateway, blind = run("A", 1.0, "gateway"), run("A", 1.0, "least-in-flight")

    assert (gateway.misfits, gateway.above_cap) == (0, 0)
    assert gateway.kv_max < 0.97
    assert gateway.long >= blind.long
    assert blind.misfits > 0


def test_a_lower_cap_buys_tpot(run: Any) -> None:
    usual, tight = run("A", 1.0, "gateway"), run("A", 1.0, "gateway-40")

    assert tight.chat_tpot_s < usual.chat_tpot_s
    assert tight.chat_60ms > usual.chat_60ms
