"""The operator in the demo: polls the gateway's admin port, and writes what it says into the story."""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import anyio
import httpx
import msgspec

from gateway.demo.reasons import why
from gateway.demo.site import BOX, BOXED
from gateway.demo.story import BoxGauge, Exchange, Gauge, Story

POLL_S = 0.2
"""Real seconds between two looks. A choice: the display seems continuous, and the gateway hardly notices."""

_RATE_WINDOW_S = 2.0
"""Real seconds over which tokens per second are averaged. A choice: figures that can still be read."""

_GOOD = frozenset({"up"})
_QUIET = frozenset({"starting", "unknown"})


class Operator:
    """Watches a gateway through its admin port."""

    def __init__(self, admin_url: str, story: Story, now: Callable[[], float]) -> None:
        """Watch the gateway that tells operators about itself at `admin_url`."""
        self._story = story
        self._now = now
        self._client = httpx.AsyncClient(base_url=admin_url, trust_env=False, timeout=5.0)
        self._counters: dict[str, deque[tuple[float, float]]] = {}
        self._explained = 0  # exchanges before this one are done with

    async def aclose(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def run(self) -> None:
        """Look again and again, until cancelled. A look that fails is no news: somebody else tells that."""
        while True:
            with suppress(httpx.HTTPError):
                await self.look()
            await anyio.sleep(POLL_S)

    async def look(self) -> None:
        """Read the gauges of the fleet, and the reasons of what has ended since the last time.

        Raises:
            httpx.HTTPError: the gateway cannot be asked.
        """
        self._read_fleet((await self._client.get("/admin/backends")).raise_for_status().json())
        self._read_box((await self._client.get("/admin/boxes")).raise_for_status().json()[BOX])
        owed = self._unexplained()
        if owed:
            page = (await self._client.get("/admin/requests")).raise_for_status().content
            records = msgspec.json.decode(page)  # many, at every look
            known = {record["id"]: record for record in records}
            for exchange in owed:
                if record := known.get(exchange.request_id):
                    exchange.why = why(record)
        self._story.changed()

    def _unexplained(self) -> list[Exchange]:
        """Return the exchanges that are over and still lack their reason."""
        exchanges = self._story.exchanges
        while self._explained < len(exchanges) and exchanges[self._explained].why is not None:
            self._explained += 1
        return [
            exchange
            for exchange in exchanges[self._explained :]
            if exchange.stage.is_over and exchange.why is None and exchange.request_id
        ]

    def _read_fleet(self, view: Mapping[str, Mapping[str, Any]]) -> None:
        for name, seen in view.items():
            old = self._story.fleet.get(name)
            engine = seen["engine"] or {}
            gauge = Gauge(
                name=name,
                state=seen["state"],
                reason=seen["reason"],
                in_flight=seen["in_flight"],
                knee_used=seen["knee_used"],
                running=engine.get("running"),
                waiting=engine.get("waiting"),
                kv_usage=engine.get("kv_usage"),
                tokens_per_s=self._rate(name, engine),
            )
            self._story.fleet[name] = gauge
            # A model that comes and goes is the box's doing, which is told by itself.
            if old is not None and old.state != gauge.state and old.state not in _QUIET and name not in BOXED:
                mood = "good" if gauge.state in _GOOD else "bad" if gauge.state != "probation" else "plain"
                self._story.note(self._now(), f"{name}: {old.state} → {gauge.state}: {gauge.reason}", mood)

    def _read_box(self, seen: Mapping[str, Any]) -> None:
        old = self._story.box
        box = self._story.box = BoxGauge(
            state=seen["state"],
            backend=seen["backend"],
            target=seen["next"]["backend"],
            held=seen["next"]["held_by_batch"],
            for_s=seen["for_s"],
            reason=seen["reason"],
            waiting={name: one["requests"] + one["stored_jobs"] for name, one in seen["waiting"].items()},
            boots=seen["boots"],
        )
        if box.state != old.state and old.state not in _QUIET:
            who = f"{box.backend} → {box.target}" if box.state in ("draining", "stopping") else box.backend
            mood = {"resident": "good", "failed": "bad"}.get(box.state, "plain")
            self._story.note(self._now(), f"{BOX}: {box.state} {who}: {box.reason}", mood)

    def _rate(self, name: str, engine: Mapping[str, Any]) -> float | None:
        """Return tokens generated per second of the clock, over the last samples of the engine's counter."""
        total = engine.get("generation_tokens")
        if total is None:
            return None
        samples = self._counters.setdefault(name, deque())
        at = self._now() - float(engine["age_s"])
        if samples and total < samples[-1][1]:
            samples.clear()  # it was restarted
        if not samples or at - samples[-1][0] > 0.2:  # not the same sample once more
            samples.append((at, float(total)))
        while len(samples) > 2 and samples[0][0] < at - _RATE_WINDOW_S:
            samples.popleft()
        if len(samples) < 2:
            return None
        (start, before), (end, after) = samples[0], samples[-1]
        return (after - before) / (end - start)
