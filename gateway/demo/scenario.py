"""What is sent when: the demo as a play in scenes, each of which shows one thing.

Times are GPU seconds, so that the play keeps its shape at any speed. Where a scene needs something to have
happened (a backend is busy, is back, has read its document), it waits for that and not for a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import anyio
import httpx
import openai
from anyio.abc import TaskGroup

from gateway.core.value import valueclass
from gateway.demo import prompts
from gateway.demo.caller import Caller
from gateway.demo.prompts import Ask, Kind
from gateway.demo.site import BOX, JOBS, QWEN
from gateway.demo.story import Exchange, Story

DOWN_S = 45.0
"""GPU seconds that the backend which crashes takes to come back. A choice: a real one takes minutes."""

JOB_TOKENS = 400
"""What a job for Qwen may answer at most. A choice: jobs end while somebody watches."""

TOP_UP_S = 0.02
"""Real seconds between two requests of a burst that goes on. A choice: ten of them per look of the
operator."""


@valueclass(frozen=True, slots=True)
class Size:
    """How much is sent.

    Attributes:
        burst: Chats of an ordinary burst.
        crash_burst: Chats under way when a backend crashes.
        rush: Chats of the rush at the end; above twice 64 they fill both LIGHT replicas.
        rush_tokens: Shortest answer of the rush: long enough that the first has not ended before the
            last is sent.
        source_tokens: Lengths of the documents made of program text.
        manual_tokens: Length of the longest document.
        trickle_s: GPU seconds between two single chats.
    """

    burst: int
    crash_burst: int
    rush: int
    rush_tokens: int
    source_tokens: Sequence[int]
    manual_tokens: int
    trickle_s: float = 9.0


SIZES = {
    "full": Size(36, 24, 150, 1_200, (24_000, 60_000), 190_000),
    "small": Size(12, 12, 140, 4_000, (20_000,), 40_000, trickle_s=12.0),
}
"""What `--size` chooses from. Choices: each scene has to show what its caption says."""


@valueclass(frozen=True, slots=True)
class Script:
    """The requests that take a while to write: those with long texts."""

    sources: Sequence[Ask]
    manual: Ask
    reasoning: Ask
    too_long: Ask


def prepare(size: Size) -> Script:
    """Return the long requests. Reads files and counts tokens for half a second: not for an event loop."""
    firsts = ("argparse.py", "_pydecimal.py")
    return Script(
        sources=[
            prompts.source(tokens, name) for tokens, name in zip(size.source_tokens, firsts, strict=False)
        ],
        manual=prompts.manual(size.manual_tokens),
        reasoning=prompts.reasoning_about(20_000, "typing.py"),
        too_long=prompts.too_long(300_000),
    )


class Stage:
    """What the play is performed on: callers, the fleet's faults, the captions."""

    def __init__(
        self,
        caller: Caller,
        story: Story,
        now: Callable[[], float],
        backends: Mapping[str, str],
        patience_s: float,
        bow_s: float,
    ) -> None:
        """Send through `caller`; `backends` are the simulated servers' URLs. Waits end after `patience_s`.

        The last scene stands for `bow_s` real seconds.
        """
        self.bow_s = bow_s
        self._caller = caller
        self._story = story
        self._now = now
        self._backends = backends
        self._patience_s = patience_s
        self._bursts = count(1)
        self._chats = count()
        self._streams_held = False

    def say(self, caption: str) -> None:
        """Tell what is going on."""
        self._story.caption = caption

    async def send(self, ask: Ask) -> Exchange:
        """Send a request and return when it is over."""
        return await self._caller.send(ask)

    def chat(self, *, stream: bool) -> Ask:
        """Return a short question that has not been asked before; not streamed while streams are held."""
        return prompts.chat(next(self._chats), stream=stream and not self._streams_held)

    async def hold_streams(self) -> None:
        """Return when no short answer is being streamed, and let none begin until `release_streams`."""
        self._streams_held = True
        await self.until(
            "no chat was being streamed",
            lambda: not any(map(_is_streamed_chat, self._story.exchanges)),
        )

    async def hand_over(self, number: int, tasks: TaskGroup) -> None:
        """Give Qwen so much to do, as jobs where the gateway can keep them; else somebody waits for each."""
        if self._story.left_out:
            burst = next(self._bursts)
            for _ in range(number):
                ask = prompts.chat(next(self._chats), max_tokens=JOB_TOKENS, stream=False, burst=burst)
                tasks.start_soon(self._caller.send, replace(ask, model=QWEN))
            return
        try:
            for _ in range(number):
                text = prompts.chat(next(self._chats)).title
                tasks.start_soon(self._caller.follow, await self._caller.hand_over(QWEN, text, JOB_TOKENS))
        except openai.APIError as error:
            self._story.problems.append(f"a job was not accepted: {error.message}")
            return
        self._story.note(
            self._now(), f"the demo submits {number} jobs for {QWEN}, and waits for none of them"
        )
        tasks.start_soon(self._tell_of_jobs)

    async def _tell_of_jobs(self) -> None:
        jobs = self._story.jobs
        await self._story.until(lambda: all(job.is_over for job in jobs))
        self._story.note(self._now(), f"all {len(jobs)} jobs for {QWEN} have ended", "good")

    async def until_in(self, backend: str, *, serves: bool) -> None:
        """Wait until a model of the box is coming in; `serves`: until it serves."""

        def is_in() -> bool:
            box = self._story.box
            return box.backend == backend and (box.state == "resident" or not serves)

        await self.until(f"{BOX} ran {backend}", is_in)

    def release_streams(self) -> None:
        """Let answers be streamed again."""
        self._streams_held = False
        self._story.changed()

    async def may_stream(self) -> None:
        """Wait while streams are held."""
        await self._story.until(lambda: not self._streams_held)

    async def send_burst(
        self,
        chats: int,
        over_s: float,
        *,
        max_tokens: int,
        min_tokens: int = 0,
        streamed_every: int = 4,
        until: Callable[[], bool] = lambda: True,
    ) -> None:
        """Send a burst of short chats, spread over so many GPU seconds; `streamed_every` 0 streams none.

        Where `until` does not hold then, more are sent, one by one, up to three times as many in all. Their
        answers are the longer the more there are: a machine that sends slowly has them under way together.
        """
        burst = next(self._bursts)
        async with anyio.create_task_group() as tasks:
            for number in range(3 * chats):
                if number >= chats:
                    if until():
                        break
                    await anyio.sleep(TOP_UP_S)
                longer = 1 + number // chats
                ask = prompts.chat(
                    next(self._chats),
                    max_tokens=max_tokens * longer,
                    min_tokens=min_tokens * longer,
                    stream=streamed_every > 0 and number % streamed_every == 0,
                    burst=burst,
                )
                tasks.start_soon(self._caller.send, ask)
                await self.pause(over_s / chats)

    async def pause(self, gpu_s: float) -> None:
        """Wait for GPU seconds."""
        await anyio.sleep(gpu_s / self._story.speed)

    async def until(self, what: str, condition: Callable[[], bool]) -> bool:
        """Wait until `condition` holds; note a problem and return False if it never does."""
        with anyio.move_on_after(self._patience_s):
            await self._story.until(condition)
            return True
        self._story.problems.append(f"timed out: it took more than {self._patience_s:g} s until {what}")
        return False

    async def until_state(self, backend: str, *states: str) -> bool:
        """Wait until the gateway believes that a backend is in one of `states`."""
        names = " or ".join(states)
        return await self.until(f"{backend} was {names}", lambda: self._story.fleet[backend].state in states)

    def in_flight(self, backend: str) -> int:
        """Return how many sequences the gateway has on a backend, as far as its operators know."""
        return self._story.fleet[backend].in_flight

    async def crash(self, backend: str, back_after_s: float) -> None:
        """Let a simulated server's engine die; it boots again and is back after so many GPU seconds."""
        order: dict[str, Any] = {"fault": "crash", "for_s": back_after_s}
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
            answer = await client.post(f"{self._backends[backend]}/simulator/fault", json=order)
            answer.raise_for_status()
        self._story.note(self._now(), f"the demo crashes {backend}: its engine dies and boots again", "bad")


def _is_streamed_chat(exchange: Exchange) -> bool:
    kinds = (Kind.CHAT, Kind.CONVERSATION, Kind.IMAGE)
    return exchange.ask.stream and not exchange.stage.is_over and exchange.ask.kind in kinds


async def play(stage: Stage, size: Size, script: Script) -> None:
    """Perform the play; return when every request is over."""
    async with anyio.create_task_group() as tasks:
        trickle = anyio.CancelScope()
        tasks.start_soon(_conversation, stage)
        tasks.start_soon(_trickle, stage, size.trickle_s, trickle)
        await _jobs(stage, tasks)
        await _documents(stage, script, tasks)
        await _kinds(stage, script, tasks)
        is_read = await _long_document(stage, size, script, tasks)
        await _bursts(stage, size, script)
        await _crash(stage, size)
        stage.say("PUSH is still reading its long document; chats on LIGHT are as fast as ever.")
        await stage.until("the long document was answered", is_read)
        stage.say("Qwen is done, and Gemma returns to the Spark for the 20,000 tokens of code.")
        await stage.until_in("spark", serves=True)
        trickle.cancel()
        await _rush(stage, size)


async def _jobs(stage: Stage, tasks: TaskGroup) -> None:
    stage.say("Work for Qwen, which shares the Spark with Gemma: the box swaps models for it.")
    await stage.hand_over(JOBS, tasks)
    await stage.pause(5)


async def _documents(stage: Stage, script: Script, tasks: TaskGroup) -> None:
    stage.say("Short chats: they match no other class, so the LIGHT replicas take them.")
    tasks.start_soon(stage.send, stage.chat(stream=True))
    await stage.pause(5)
    tasks.start_soon(stage.send, stage.chat(stream=False))
    await stage.pause(5)
    stage.say("Documents: prompts of 16,000 tokens or more go to PUSH, which holds 262,144.")
    for ask in script.sources:
        tasks.start_soon(stage.send, ask)
        await stage.pause(6)


async def _kinds(stage: Stage, script: Script, tasks: TaskGroup) -> None:
    stage.say("An image and a tool call are chats too; LIGHT takes images, PUSH does not.")
    tasks.start_soon(stage.send, prompts.image())
    await stage.pause(3)
    tasks.start_soon(stage.send, prompts.tool_call())
    await stage.pause(9)
    stage.say("Reasoning goes to the TPU, which is faster than the Spark ...")
    tasks.start_soon(stage.send, prompts.reasoning("Can three friends share 17 apples fairly?", stream=True))
    await stage.pause(4)
    tasks.start_soon(stage.send, prompts.reasoning("Why is the night sky dark?", stream=False))
    await stage.pause(8)
    await stage.until_in(QWEN, serves=False)
    stage.say("... but 20,000 tokens of code fit only on the Spark: Gemma must replace Qwen.")
    tasks.start_soon(stage.send, script.reasoning)
    await stage.pause(10)


async def _long_document(stage: Stage, size: Size, script: Script, tasks: TaskGroup) -> Callable[[], bool]:
    """Send the longest document; return the question whether it has been answered."""
    stage.say(f"A document of {size.manual_tokens:,} tokens: its prefill takes minutes, even on PUSH.")
    sent: list[Exchange] = []

    async def send() -> None:
        sent.append(await stage.send(script.manual))

    tasks.start_soon(send)
    await stage.pause(12)
    return lambda: bool(sent)


async def _bursts(stage: Stage, size: Size, script: Script) -> None:
    stage.say(f"{size.burst} chats at once: each goes to the LIGHT replica with more of its knee free.")
    await stage.send_burst(size.burst, 6, max_tokens=400)
    await stage.pause(6)
    stage.say("300,000 tokens fit nowhere: a clear 400 at once, and no backend is involved.")
    await stage.send(script.too_long)
    await stage.pause(8)


async def _crash(stage: Stage, size: Size) -> None:
    # A stream that has begun when its backend dies ends with an error, which no gateway can help. What has
    # not begun moves on, and that is what this scene shows.
    await stage.hold_streams()
    stage.say(f"{size.crash_burst} more chats, and light-0 is about to crash.")
    has_crashed = anyio.Event()
    burst = partial(stage.send_burst, max_tokens=600, min_tokens=450, streamed_every=0)
    async with anyio.create_task_group() as tasks:
        # A slow machine may crash it so late that the first have been answered.
        tasks.start_soon(partial(burst, size.crash_burst, 4, until=has_crashed.is_set))
        await stage.pause(4)
        await stage.crash("light-0", DOWN_S)
        has_crashed.set()
        stage.say("light-0 has crashed. What it had not begun to answer is retried on light-1.")
        await stage.until_state("light-0", "booting", "ejected", "down")
    stage.release_streams()
    await stage.pause(8)
    stage.say("While light-0 boots, light-1 takes every short chat.")
    await stage.send_burst(size.burst // 2, 6, max_tokens=300)
    if await stage.until_state("light-0", "probation", "up"):
        stage.say("light-0 is back, in probation: a few requests at first, then its full share.")
        await stage.until_state("light-0", "up")


async def _rush(stage: Stage, size: Size) -> None:
    stage.say("Rush hour: chats until both LIGHT replicas are full; the rest spill to PUSH.")
    await stage.send_burst(
        size.rush,
        0,
        max_tokens=size.rush_tokens + 100,
        min_tokens=size.rush_tokens,
        streamed_every=25,
        # A slow machine may not send as fast as this fleet answers.
        until=lambda: stage.in_flight("push") > 0,
    )
    stage.say("All requests are done.")
    await anyio.sleep(stage.bow_s)


async def _conversation(stage: Stage) -> None:
    """Hold a conversation whose every turn repeats what was said before."""
    said: list[prompts.Message] = []
    for _ in range(prompts.TURNS):
        await stage.may_stream()
        ask = prompts.turn(said)
        exchange = await stage.send(ask)
        said = [*ask.body["messages"][1:], {"role": "assistant", "content": exchange.text}]
        await stage.pause(22)


async def _trickle(stage: Stage, every_s: float, scope: anyio.CancelScope) -> None:
    """Send a single chat now and then, until the scope is cancelled; those that run are finished."""
    async with anyio.create_task_group() as tasks:
        with scope:
            for number in count():
                await stage.pause(every_s)
                tasks.start_soon(stage.send, stage.chat(stream=number % 2 == 0))
