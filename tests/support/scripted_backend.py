"""A backend in the place of `Pipeline.run`: it answers with words, or goes on with those that it is given.

As a program, a worker that is stuck in the middle of an answer, to be killed:
`python -m support.scripted_backend URL PREFIX LOST_S`.
"""

import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import anyio

from gateway.core.errors import GatewayError
from gateway.core.jobs import Job, Serving
from gateway.jobs.worker import Worker, WorkerRules
from gateway.ports import Arrival, Downstream, Incoming
from gateway.store.jobs import RedisJobs

WORDS = [f"word{number} " for number in range(8)]
ANSWER = "".join(WORDS)
WITHOUT_SLOT = -1
AFTER_END = len(WORDS) + 1
BODY = json.dumps({"stream": True, "messages": [{"role": "user", "content": "Say them."}]}).encode()


@dataclass(frozen=True)
class Asked:
    """A request, as far as the backend reads it."""

    job: Job
    body: dict[str, Any]

    @property
    def arrival(self) -> Arrival:
        """Jobs named "awaited..." have a caller who stays connected."""
        return Arrival("req-1", 0.0, 0.0, is_awaited=self.job.id.startswith("awaited"))

    @property
    def so_far(self) -> str:
        """The text that the answer is to go on from."""
        return str(self.body["messages"][-1]["content"]) if self.body.get("continue_final_message") else ""


def serves() -> Serving:
    return Serving("config", frozenset({"m"}))


async def tokens_of(text: str) -> int:
    """Each word is a token."""
    return len(text.split())


def read(job: Job, body: bytes) -> Incoming:
    return cast("Incoming", Asked(job, json.loads(body)))


def event(finish_reason: str | None = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


async def nothing(asked: Asked, number: int) -> None:
    """Let the next word come at once."""


class Backend:
    """Says WORDS. `before` is awaited before it has a slot, then before each word, 0 being the first; then
    before the end, and after it. If it `refuses`, each request has had another slot before, in vain."""

    def __init__(
        self,
        before: Callable[[Asked, int], Awaitable[None]] = nothing,
        finish_reason: str = "stop",
        *,
        refuses: bool = False,
    ) -> None:
        self.before = before
        self.finish_reason = finish_reason
        self.refuses = refuses
        self.asked: list[Asked] = []
        self.said: Counter[str] = Counter()  # words, by "job number"
        self.stopped: Counter[str] = Counter()  # how often a job's answer was cut, by job

    async def run(
        self, incoming: Incoming, downstream: Downstream, *, on_admitted: Callable[[bool], None]
    ) -> None:
        asked = cast("Asked", incoming)
        self.asked.append(asked)
        job = asked.job.id
        begin = WORDS.index(asked.so_far.split()[-1] + " ") + 1 if asked.so_far else 0
        has_begun = False
        try:
            if self.refuses:
                on_admitted(True)
                on_admitted(False)
            await self.before(asked, WITHOUT_SLOT)
            on_admitted(True)
            for number in range(begin, len(WORDS)):
                await self.before(asked, number)
                if number == begin:
                    await downstream.start(200, ())
                    has_begun = True
                await downstream.send(event(content=WORDS[number]))
                self.said[f"{job} {number}"] += 1
            await self.before(asked, len(WORDS))
            await downstream.send(event(self.finish_reason) + b"data: [DONE]\n\n")
            await self.before(asked, AFTER_END)
        except GatewayError as error:
            if not has_begun:
                raise
            await downstream.fail(error, error.code)  # as the pipeline says it in an answer
        except anyio.get_cancelled_exc_class():
            self.stopped[job] += 1
            raise


async def main(url: str, prefix: str, lost_s: float) -> None:
    async def stuck(asked: Asked, number: int) -> None:
        if number == 4:
            await anyio.sleep_forever()

    store = RedisJobs(url, prefix=prefix, lost_s=lost_s)
    rules = WorkerRules(beat_s=lost_s / 4, look_s=lost_s / 4)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.run)
        worker = Worker(store, "to be killed", read, Backend(stuck).run, rules, serves, tokens_of)
        tasks.start_soon(worker.run)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2], float(sys.argv[3]))
