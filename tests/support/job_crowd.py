"""Callers who hand jobs over with the unmodified SDK and hold on to them, whatever dies meanwhile.

Each asks a simulated model to count: what comes back shows whether it is that job's answer, and whole.
"""

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import anyio
import httpx
import openai

from support import clients

T = TypeVar("T")

NUMBERS = (8, 20)
"""How far a job counts: about 70 to 170 tokens."""

BEGINNING = 40
"""Characters of a thought that do not come again in it."""

PENDING = frozenset({"queued", "in_progress"})
PASSING = frozenset({"store_unavailable"})
"""Error codes that say "later", with 503."""


class Follow(StrEnum):
    """How a caller learns what becomes of its job."""

    POLL = "poll"
    AT_ONCE = "at once"  # the events follow the request, and are taken up again where they broke
    LATER = "later"  # it asks for the events once it has the id
    CANCEL = "cancel"


@dataclass
class HandedOver:
    """A job, and what its caller has seen of it.

    Attributes:
        number: Which of the caller's jobs; makes its numbers its own.
        key: The API key it belongs to.
        model: What is asked.
        follow: How.
        thinks, is_batch, is_doubled: Whether a thought is wanted, it can wait, and it is handed over twice.
        first, last: It counts from here to there.
        id: As the gateway calls it, once it is known to be accepted.
        ending: The response when it was first seen to be over.
        events: Those that its follower has seen.
        faults: What must not be.
    """

    number: int
    key: str
    model: str
    follow: Follow
    thinks: bool
    is_batch: bool
    is_doubled: bool
    first: int
    last: int
    id: str = ""
    ending: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def answer(self) -> str:
        """What a model in its right mind says."""
        return ", ".join(map(str, range(self.first, self.last + 1)))

    @property
    def fields(self) -> dict[str, Any]:
        """The request, but for whether it is streamed."""
        headers = {"Idempotency-Key": f"job-{self.number}"}
        if self.is_batch:
            headers["x-gateway-priority"] = "batch"
        return {
            "model": self.model,
            "input": f"Count from {self.first} to {self.last}.",
            "background": True,
            "extra_headers": headers,
            **({"reasoning": {"effort": "low"}} if self.thinks else {}),
        }

    def judged(self) -> list[str]:
        """Return what is wrong with how it ended."""
        status = self.ending.get("status")
        wanted = {"completed", "cancelled"} if self.follow is Follow.CANCEL else {"completed"}
        found = list(self.faults)
        if status not in wanted:
            found.append(f"it is {status}: {self.ending.get('error')}")
        if status == "completed" and (text := said(self.ending, "message")) != [self.answer]:
            found.append(f"it says {text}")
        thoughts = said(self.ending, "reasoning") if self.ending else []
        if status == "completed" and len(thoughts) != self.thinks:
            found.append(f"it has {len(thoughts)} thoughts")
        if any(thought.count(thought[:BEGINNING]) > 1 for thought in thoughts):
            found.append(f"it thinks twice: {thoughts}")
        numbers = [event["sequence_number"] for event in self.events]
        if numbers != list(range(len(numbers))):
            found.append(f"its events are {numbers}")
        return [f"job {self.number} ({self.id}, {self.follow}): {fault}" for fault in found]


def said(response: Mapping[str, Any], kind: str) -> list[str]:
    """Return the text of each item of a kind in a response."""
    return [
        "".join(part["text"] for part in item["content"])
        for item in response["output"]
        if item["type"] == kind
    ]


def drawn(number: int, dice: random.Random) -> HandedOver:
    """Return a job: three fifths for the models that are always there, the others for the two of the box."""
    model, thinks = dice.choices([("gemma-4", False), ("gemma-4", True), ("qwen", False)], [60, 20, 20])[0]
    first = 100_000 + 100 * number
    return HandedOver(
        number=number,
        key=dice.choice(("alpha", "beta")),
        model=model,
        follow=dice.choices(list(Follow), [45, 20, 23, 12])[0],
        thinks=thinks,
        is_batch=dice.random() < 0.15,
        is_doubled=dice.random() < 0.15,
        first=first,
        last=first + dice.randint(*NUMBERS),
    )


class Crowd:
    """The callers of all jobs, at several gateways.

    Attributes:
        jobs: Everything that was handed over.
        troubles: What callers met and got over, counted.
        accepted: Jobs whose callers know that they are accepted.
    """

    def __init__(self, urls: Mapping[str, str], closing: AsyncExitStack) -> None:
        """Use the gateways at `urls`; clients are closed with `closing`."""
        self.jobs: list[HandedOver] = []
        self.troubles: Counter[str] = Counter()
        self.accepted = 0
        self.names = list(urls)
        self._grown = anyio.Event()
        self._clients: dict[tuple[str, str], openai.AsyncOpenAI] = {}
        for name, url in urls.items():
            for key in ("alpha", "beta"):
                # No retries of its own, so that a caller turns to the other gateway at once.
                client = clients.sdk(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30)
                closing.push_async_callback(client.close)
                self._clients[name, key] = client

    async def reached(self, accepted: int) -> None:
        """Return once so many jobs have been accepted."""
        while self.accepted < accepted:
            await self._grown.wait()

    async def live(self, job: HandedOver, dice: random.Random) -> None:
        """Hand a job over, and hold on to it until it is over, or a fault."""
        self.jobs.append(job)
        with suppress(GaveUp):
            await self._live(job, dice.choice(self.names), dice)

    async def read(self, job: HandedOver, name: str) -> dict[str, Any]:
        """Return a job as a gateway shows it."""
        return (await self._patient(name, job).responses.retrieve(job.id)).to_dict(mode="json")

    async def events(self, job: HandedOver, name: str) -> list[dict[str, Any]]:
        """Return all events of a job as a gateway tells them."""
        stream = await self._patient(name, job).responses.retrieve(job.id, stream=True)
        return [event.to_dict(mode="json") async for event in stream]

    async def forget(self, job: HandedOver, name: str) -> None:
        """Delete a job."""
        await self._patient(name, job).responses.delete(job.id)

    def _patient(self, name: str, job: HandedOver) -> openai.AsyncOpenAI:
        """Return a client for when nothing is dead any more, but the machine may be slow."""
        return self._clients[name, job.key].with_options(max_retries=5)

    # ------------------------------------------------------------ one caller

    async def _live(self, job: HandedOver, name: str, dice: random.Random) -> None:
        if job.follow is Follow.AT_ONCE:
            await self._follow(job, name, dice)
        else:
            job.id = await self._hand_over(job, name, dice)
            self._count()
        if job.is_doubled and (again := await self._hand_over(job, self._beside(name), dice)) != job.id:
            job.faults.append(f"handed over again it is {again}")
        match job.follow:
            case Follow.POLL:
                await self._poll(job, name, dice)
            case Follow.LATER:
                await self._follow(job, name, dice)
            case Follow.CANCEL:
                await anyio.sleep(dice.uniform(0, 3))
                await self._insist(job, name, dice, lambda client: self._cancel(client, job))

    def _count(self) -> None:
        self.accepted += 1
        self._grown.set()
        self._grown = anyio.Event()

    async def _hand_over(self, job: HandedOver, name: str, dice: random.Random) -> str:
        async def create(client: openai.AsyncOpenAI) -> str:
            if job.follow is not Follow.AT_ONCE:
                return str((await client.responses.create(**job.fields)).id)
            async with await client.responses.create(**job.fields, stream=True) as stream:
                async for event in stream:
                    return str(event.response.id)
            raise Cut

        return await self._insist(job, name, dice, create)

    async def _poll(self, job: HandedOver, name: str, dice: random.Random) -> None:
        async def look(client: openai.AsyncOpenAI) -> None:
            response = await client.responses.retrieve(job.id)
            if response.status not in PENDING:
                job.ending = response.to_dict(mode="json")

        while not job.ending:
            await anyio.sleep(dice.uniform(0.5, 2))
            await self._insist(job, name, dice, look)

    async def _cancel(self, client: openai.AsyncOpenAI, job: HandedOver) -> None:
        job.ending = (await client.responses.cancel(job.id)).to_dict(mode="json")

    async def _follow(self, job: HandedOver, name: str, dice: random.Random) -> None:
        """Take in every event, on from the last one seen where the stream breaks."""

        async def hear(client: openai.AsyncOpenAI) -> None:
            if not job.id:
                stream = await client.responses.create(**job.fields, stream=True)
            elif job.events:
                seen = job.events[-1]["sequence_number"]
                stream = await client.responses.retrieve(job.id, stream=True, starting_after=seen)
            else:
                stream = await client.responses.retrieve(job.id, stream=True)
            async with stream:
                async for event in stream:
                    self._take(job, event.to_dict(mode="json"))
            if not job.ending:
                raise Cut

        while not job.ending:
            await self._insist(job, name, dice, hear)

    def _take(self, job: HandedOver, event: dict[str, Any]) -> None:
        if not job.id:
            job.id = event["response"]["id"]
            self._count()
        if "sequence_number" not in event or job.ending:
            job.faults.append(f"{event} after {len(job.events)} events")
            return
        job.events.append(event)
        response = event.get("response") or {}
        if response.get("status") not in (None, *PENDING):
            job.ending = response

    async def _insist(
        self,
        job: HandedOver,
        name: str,
        dice: random.Random,
        ask: Callable[[openai.AsyncOpenAI], Awaitable[T]],
    ) -> T:
        """Ask one gateway, and the other where that fails, until there is an answer."""
        while True:
            try:
                return await ask(self._clients[name, job.key])
            except (openai.APIError, httpx.TransportError, Cut) as error:
                self._judge(job, error)
            name = self._beside(name)
            await anyio.sleep(dice.uniform(0.1, 0.5))

    def _judge(self, job: HandedOver, error: Exception) -> None:
        """Note what a caller met; it is a fault unless something dead, or the store, explains it."""
        is_passing = isinstance(error, openai.APIConnectionError | httpx.TransportError | Cut) or (
            isinstance(error, openai.APIStatusError) and error.status_code == 503 and error.code in PASSING
        )
        self.troubles[f"{type(error).__name__} {getattr(error, 'code', None) or ''}".strip()] += 1
        if not is_passing:
            job.faults.append(f"{type(error).__name__}: {error}")
            raise GaveUp from error

    def _beside(self, name: str) -> str:
        return self.names[(self.names.index(name) + 1) % len(self.names)]


class Cut(Exception):
    """A stream of events that ended before its last event."""


class GaveUp(Exception):
    """A caller that met what must not be."""
