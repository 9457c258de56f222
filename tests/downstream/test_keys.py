"""Who is calling, by API key."""

from hashlib import sha256

import pytest

from gateway.core.errors import Unauthorized
from gateway.downstream.keys import KeyRing


def digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


RING = {f"app-{number}": digest(f"gw-{number}") for number in range(1000)}


@pytest.mark.parametrize("scheme", ["Bearer ", "bearer ", "BEARER  "])
@pytest.mark.parametrize("number", [0, 1, 999])
def test_a_key_is_known_by_its_digest(scheme: str, number: int) -> None:
    assert KeyRing(RING).name_of({"authorization": f"{scheme}gw-{number}"}) == f"app-{number}"


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer  ", "Basic gw-1", "gw-1"])
def test_without_a_key_nobody_gets_in(given: str | None) -> None:
    with pytest.raises(Unauthorized, match="required"):
        KeyRing(RING).name_of({} if given is None else {"authorization": given})


@pytest.mark.parametrize("key", ["gw-1000", "gw-", "GW-1", "gw-1x", digest("gw-1").hex(), "gw-é"])
def test_who_has_no_known_key_does_not_get_in(key: str) -> None:
    with pytest.raises(Unauthorized, match="not known"):
        KeyRing(RING).name_of(bearer(key))


def test_a_ring_without_keys_lets_everybody_in() -> None:
    assert KeyRing({}).name_of({}) is None
    assert KeyRing({}).name_of(bearer("anything")) is None


def test_keys_can_be_replaced() -> None:
    ring = KeyRing(RING)
    ring.replace({"new": digest("gw-new")})
    assert ring.name_of(bearer("gw-new")) == "new"
    with pytest.raises(Unauthorized):
        ring.name_of(bearer("gw-1"))


def test_no_ring_looks_a_key_up_under_what_another_would() -> None:
    known = [set(KeyRing({"one": digest("gw-1")})._names) for _ in range(2)]
    assert not known[0] & known[1]
