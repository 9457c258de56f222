"""The benchmark's fleet in virtual time: which servers, and how long callers wait."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Protocol

from benchmarks.traffic import Arrival, Kind
from gateway.core import virtual_fleet
from gateway.core.backends import Backend, Capacity
from gateway.core.profile import Profile
from gateway.core.virtual_fleet import Patience, holds
from gateway.profiles import library

__all__ = [
    "ACCEPT",
    "FLEET",
    "PATIENCE_S",
    "Fate",
    "Fleet",
    "Router",
    "backend_of",
    "fleet_of",
    "fleet_profiles",
    "holds",
]

ACCEPT = 2.5  # tokens per step with EAGLE3 on real text (measured on MT-Bench)
FLEET = {
    "light-0": "h100-tp1-light",
    "light-1": "h100-tp1-light",
    "push": "h100-tp2-push",
    "tpu": "tpu-v6e4-moe",
    "spark": "spark-nvfp4",
}
PATIENCE_S = {Kind.CHAT: 60.0, Kind.LONG: 900.0}
"""How long callers wait for the first token."""

REASONING_TIMEOUT_S = 600.0
"""How long a caller waits for a whole answer that nobody made a background job of: the SDKs' default."""

Fate = virtual_fleet.Fate[Arrival]
Fleet = virtual_fleet.Fleet[Arrival]


class Router(virtual_fleet.Router[Arrival], Protocol):
    """A policy of the benchmark."""

    is_patient: bool  # whether reasoning runs as a background job, whose caller does not wait
    above_cap: int  # times a server was found to hold more than the policy allows


def fleet_profiles() -> Mapping[str, Profile]:
    """Return the profile of every server of the fleet."""
    found = {}
    for name, profile_name in FLEET.items():
        profile = library.load(profile_name)
        if profile.flags.max_num_seqs and profile.perf.draft == 3 and name != "tpu":
            profile = replace(profile, perf=replace(profile.perf, accept=ACCEPT))
        found[name] = profile
    return found


def backend_of(name: str, profile: Profile, capacity: Capacity | None = None) -> Backend:
    """Return what an operator would configure for a server, with another capacity if one is given."""
    return Backend(
        id=name,
        url=f"http://{name}",
        capacity=capacity or profile.capacity,
        model="gemma",
        tokens_per_s=profile.perf.lone_tokens_per_s(),
        perf=profile.perf,
        batched_tokens=profile.flags.max_num_batched_tokens,
    )


def fleet_of(router: Router, arrivals: list[Arrival], counted_from_s: float, counted_until_s: float) -> Fleet:
    """Return the fleet behind a policy, before the first arrival."""

    def patience(arrival: Arrival) -> Patience:
        if arrival.kind is not Kind.REASONING:
            return Patience(PATIENCE_S.get(arrival.kind, inf))
        return Patience() if router.is_patient else Patience(REASONING_TIMEOUT_S, is_for_all=True)

    return virtual_fleet.Fleet(router, arrivals, fleet_profiles(), patience, counted_from_s, counted_until_s)
