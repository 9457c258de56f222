"""The benchmark of conversations in small: what the gateway knows of prefix caches is worth what docs say."""

import pytest

from benchmarks import conversations
from benchmarks.conversations import Callers, Score, Turn
from gateway.core.virtual_fleet import Fate


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some minutes of conversations that soon are long."""
    monkeypatch.setattr(conversations, "WARM_UP_S", 100.0)
    monkeypatch.setattr(conversations, "DURATION_S", 400.0)
    monkeypatch.setattr(conversations, "FIRST_TOKENS", 20_000)


def run(policy: str, *, callers: int = 50, is_known: bool = True) -> Score:
    return conversations.run(
        policy, is_known=is_known, callers=callers, servers=2, profile="h100-tp2-push", seed=7
    )


def test_conversations_that_return_are_read_once_and_answered_sooner() -> None:
    gateway, blind, least = (run(policy, callers=45) for policy in conversations.POLICIES)

    assert gateway.cached > 0.85 > 0.8 > max(blind.cached, least.cached)
    assert gateway.answered > 1.2 * max(blind.answered, least.answered)
    assert gateway.ttft_p90_s < 0.6 * min(blind.ttft_p90_s, least.ttft_p90_s)


def test_more_callers_than_the_servers_have_slots_for_do_not_displace_each_other() -> None:
    below, above = run("gateway", callers=60), run("gateway", callers=90)

    assert above.cached > 0.8
    assert above.answered > 0.95 * below.answered


def test_where_engines_keep_nothing_it_costs_little() -> None:
    gateway, blind = run("gateway", is_known=False), run("affinity 0", is_known=False)

    assert gateway.cached == 0
    assert gateway.answered > 0.95 * blind.answered


def test_a_turn_has_the_blocks_of_the_one_before_and_the_boundaries_that_a_gateway_sees() -> None:
    callers = Callers(1, 7, is_known=True)
    (first,) = callers.first()
    fate = Fate(first, done_at=1.0, output_tokens=first.output_tokens)
    second = callers.next(fate, 1.0)
    assert isinstance(second, Turn)

    assert second.prefix_keys[: len(first.prefix_keys)] == first.prefix_keys
    assert len(second.prefix_keys) == second.prompt_tokens // 128
    assert [key for key, _ in first.prefixes] == [key for key, _ in second.prefixes[:-1]]
    assert second.prefixes[1][1] == first.prompt_tokens / second.prompt_tokens
