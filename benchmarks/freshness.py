"""How well do several gateways balance equal backends? `python benchmarks/freshness.py`, in simulated time.

Each sends its requests to the backend that is used least: by what it has there itself, which it knows
exactly, and by what the others had there as it last heard. Printed is by how much the fullest backend is
above the mean, as a part of the mean: where each request is a command whose reply says what the others have,
where that is told and read every 0.2 s, and where it is besides after as many requests as
`gateway/store/redis.py` says.
"""

import random
from heapq import heappop, heappush

from gateway.store.redis import PLACED_MAX, REFRESH_S, TICK_S

BACKENDS = 8
SECONDS = 200.0
WARM_S = 20.0
LOOK_S = 0.1
CASES = ((2, 1.0, 32), (2, 10.0, 32), (4, 1.0, 32), (10, 1.0, 32), (10, 10.0, 32), (10, 1.0, 4))
"""Gateways, mean time of a request in seconds, requests that a backend holds in the mean."""


class Gateways:
    """What each has on each backend, what it last told, and what it last heard of the others."""

    def __init__(self, count: int, placed_max: int | None) -> None:
        """Have nothing. `placed_max`: as PLACED_MAX; 0: all is told at once; None: nothing is."""
        self.own = [[0] * BACKENDS for _ in range(count)]
        self._told = [[0] * BACKENDS for _ in range(count)]
        self._others = [[0] * BACKENDS for _ in range(count)]
        self._placed = [[0] * BACKENDS for _ in range(count)]
        self._most = placed_max

    def settle(self, gateway: int, backend: int) -> None:
        """Tell what a gateway has there, and hear what the others told."""
        self._told[gateway][backend] = self.own[gateway][backend]
        others = (told[backend] for number, told in enumerate(self._told) if number != gateway)
        self._others[gateway][backend] = sum(others)
        self._placed[gateway][backend] = 0

    def place(self, gateway: int) -> int:
        """Send a request where there is least, and return where that is."""
        own, others = self.own[gateway], self._others[gateway]
        backend = min(range(BACKENDS), key=lambda name: own[name] + others[name])
        own[backend] += 1
        self._placed[gateway][backend] += 1
        most = self._most
        if most is not None and self._placed[gateway][backend] * (len(self.own) - 1) ** 2 >= most:
            self.settle(gateway, backend)
        return backend

    def end(self, gateway: int, backend: int) -> None:
        """End a request."""
        self.own[gateway][backend] -= 1
        if self._most == 0:
            self._told[gateway][backend] -= 1
            for number, others in enumerate(self._others):
                if number != gateway:
                    others[backend] = max(0, others[backend] - 1)


def excess(count: int, stay_s: float, held: int, age_s: float, placed_max: int | None) -> float:
    """Return by how much the fullest backend is above the mean, in the mean over a run."""
    dice = random.Random(1)
    gateways = Gateways(count, placed_max)
    looks = [age_s * number / count for number in range(count)]
    ends: list[tuple[float, int, int]] = []
    found: list[float] = []
    now, measured_at = 0.0, WARM_S
    while now < SECONDS:
        now += dice.expovariate(BACKENDS * held / stay_s)
        while ends and ends[0][0] <= now:
            _, gateway, backend = heappop(ends)
            gateways.end(gateway, backend)
        for gateway, at in enumerate(looks):
            if at <= now:
                looks[gateway] = now + age_s
                for backend in range(BACKENDS):
                    gateways.settle(gateway, backend)
        gateway = dice.randrange(count)
        heappush(ends, (now + dice.expovariate(1 / stay_s), gateway, gateways.place(gateway)))
        if now > measured_at + LOOK_S:
            measured_at = now
            total = [sum(own[name] for own in gateways.own) for name in range(BACKENDS)]
            found.append(max(total) / held - sum(total) / held / BACKENDS)
    return sum(found) / len(found)


def main() -> None:
    """Print the table."""
    print(f"{'gateways':>8} {'stay, s':>8} {'held':>5} {'each told':>10} {f'{TICK_S} s':>8} {'as it is':>9}")
    for count, stay_s, held in CASES:
        rules = ((REFRESH_S, 0), (TICK_S, None), (TICK_S, PLACED_MAX))
        each, ticks, now = (excess(count, stay_s, held, *rule) for rule in rules)
        print(f"{count:>8} {stay_s:>8.0f} {held:>5} {each:>10.0%} {ticks:>8.0%} {now:>9.0%}")


if __name__ == "__main__":
    main()
