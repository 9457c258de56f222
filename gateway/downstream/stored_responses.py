"""Stored responses: what they are, and what a request refers to of them."""

from collections import Counter
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from gateway.core.errors import BodyTooLarge, CallerError, InvalidRequest
from gateway.core.jobs import Job
from gateway.core.responses.items import Item, home_of
from gateway.core.responses.request import Needs
from gateway.core.value import valueclass
from gateway.downstream.callers_jobs import CallersJobs, gone
from gateway.downstream.reading import BodyReaders, Received
from gateway.ports import ResponseStore

REFERENCES_MAX = 64
"""Maximum number of responses that a request may refer to by item ids. A choice: each is looked up."""


@valueclass(frozen=True, slots=True)
class ResponseRetention:
    """The store of responses, and their expiry in seconds."""

    store: ResponseStore
    ttl_s: float


class StoredResponse(msgspec.Struct):
    """A stored response."""

    response: msgspec.Raw


class StoredConversation(StoredResponse):
    """A stored response with its conversation: everything before its own input, and that input."""

    context: list[Any]
    input: list[Any]

    def items(self) -> list[Item]:
        """Return the whole conversation, including the answer."""
        return [*self.context, *self.input, *self.output()]

    def output(self) -> list[Item]:
        """Return the items of the answer, without incomplete calls, which cannot have been answered."""
        response = msgspec.json.decode(self.response)
        return [item for item in response["output"] if not _is_half_a_call(item)]


def _is_half_a_call(item: Item) -> bool:
    return bool(item["type"] == "function_call" and item["status"] != "completed")


@dataclass(slots=True)
class Found:
    """The stored context of a request: its conversation, items by id, and what both were decoded from.

    `records` has an item as often as the request refers to it, since each reference becomes a copy;
    `size_bytes` is their total size.
    """

    context: Sequence[Item] = ()
    stored: dict[str, Item] = field(default_factory=dict)
    records: list[bytes] = field(default_factory=list)
    size_bytes: int = 0


class StoredResponses:
    """The responses that are kept for callers, and those of their jobs; one per process."""

    def __init__(
        self, store: ResponseStore, jobs: CallersJobs | None, readers: BodyReaders, bytes_max: int
    ) -> None:
        """Find responses in `store`, and among `jobs`, if there are any.

        `bytes_max` limits a request together with everything stored that it refers to.
        """
        self._store = store
        self._jobs = jobs
        self._readers = readers
        self._bytes_max = bytes_max

    async def job(self, key: str | None, id: str) -> Job | None:
        """Return the job that a response is the answer of; None: it is of no job."""
        return None if self._jobs is None else await self._jobs.get(key, id)

    async def record(self, key: str | None, id: str, param: str | None = None) -> bytes:
        """Return a response as it is stored. `param`: the request parameter that names it, for errors.

        Raises:
            InvalidRequest: it has not ended, or was a chat.
            ResponseNotFound: it is not kept for this key.
        """
        record = await self._store.get(key, id)
        job = None if record is not None else await self.job(key, id)
        if job is not None and self._jobs is not None and job.status.is_final:
            return await self._jobs.record(job, param)
        if job is not None:
            message = "That response has not ended yet."
            raise InvalidRequest(message, code="response_not_finished", param=param)
        if record is None:
            raise gone(id, param)
        return record

    async def look_up(self, received: Received, wanted: Needs) -> Found:
        """Return the conversation that a request continues, and the stored items it refers to.

        Raises:
            BodyTooLarge: a chat with all of it would be larger than a body may be.
            InvalidRequest: what it continues cannot be, or it refers to too many responses.
            ResponseNotFound: what it continues is not kept for this key.
        """
        key, found = received.key, Found()
        if wanted.previous is not None:
            record = await self.record(key, wanted.previous, "previous_response_id")
            self._add(found, [record], received)
            found.context = (await self._readers.run(partial(conversation_in, record), record)).items()
        uses = Counter(wanted.items)
        homes = {home for item in uses if (home := home_of(item)) is not None}
        if len(homes) > REFERENCES_MAX:
            message = f"`input` refers to items of more than {REFERENCES_MAX} responses."
            raise InvalidRequest(message, code="too_many_items", param="input")
        for home in homes:
            items: Sequence[tuple[Item, bytes]] = ()
            with suppress(CallerError):  # it is not kept, or has no items yet
                kept = await self.record(key, home)
                items = await self._readers.run(partial(_named, kept, uses), kept)
            for item, written in items:
                self._add(found, [written] * uses[item["id"]], received)
                found.stored[item["id"]] = item
        return found

    def _add(self, found: Found, records: Sequence[bytes], received: Received) -> None:
        found.records += records
        found.size_bytes += sum(map(len, records))
        if len(received.body) + found.size_bytes > self._bytes_max:
            message = f"With the responses it refers to, it is larger than {self._bytes_max} bytes."
            raise BodyTooLarge(message)


def response_in(record: bytes) -> bytes:
    """Return a stored response as JSON."""
    return bytes(msgspec.json.decode(record, type=StoredResponse).response)


def conversation_in(record: bytes) -> StoredConversation:
    """Decode a stored response and its conversation."""
    return msgspec.json.decode(record, type=StoredConversation)


def _named(record: bytes, ids: Container[str]) -> list[tuple[Item, bytes]]:
    """Return the items with these ids in a record, each with its JSON."""
    items = {item["id"]: item for item in conversation_in(record).items() if item["id"] in ids}
    return [(item, msgspec.json.encode(item)) for item in items.values()]
