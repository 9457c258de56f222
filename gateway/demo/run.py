"""Runs the demo: processes, play, operator and display, side by side, and one end for all of them."""

import io
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
from rich.console import Console
from rich.live import Live

from gateway.clock import SystemClock
from gateway.core.value import valueclass
from gateway.demo import processes, summary
from gateway.demo.plain import PlainLines
from gateway.demo.processes import Site, StartError
from gateway.demo.story import Exchange, Story
from gateway.demo.view import View

if TYPE_CHECKING:
    from gateway.demo.scenario import Script

FRAMES_PER_S = 10
"""Frames of the display per real second. A choice."""

LAST_LOOK_S = 5.0
"""Real seconds that reasons still owed may take after the play. A choice."""

BOW_S = 1.5
"""Real seconds for which the last scene stands. A choice."""

PATIENCE_S, PATIENCE_GPU_S = 120.0, 1500.0
"""A request has failed after so many seconds of the clock and so many GPU seconds. A choice: several times
what the longest one takes."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@valueclass(frozen=True, slots=True)
class DemoOptions:
    """How to run the demo.

    Attributes:
        speed: GPU seconds per second of the clock.
        size: "full" or "small".
        port: Where the gateway listens; 0 for a free port.
        serve: Whether to go on serving after the summary.
        plain: Lines instead of the live view.
    """

    speed: float = 10.0
    size: str = "full"
    port: int = 0
    serve: bool = False
    plain: bool = False


class Output(Console):
    """Standard output; when nobody reads it any more, as in `demo | head`, it falls silent and says so."""

    def __init__(self) -> None:
        super().__init__(highlight=False)
        self.on_closed: Callable[[], None] = lambda: None

    def on_broken_pipe(self) -> None:
        """See rich, which would end the process here, in the middle of everything."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        self.on_closed()


class Demo:
    """One run of the demo."""

    def __init__(self, options: DemoOptions, console: Output) -> None:
        """Prepare to run on `console`."""
        self._options = options
        self._console = console
        self._clock = SystemClock()
        self._began = self._clock.now()
        self._story = Story(speed=options.speed)
        self._scope = anyio.CancelScope()
        self._script: Script
        self._loaded = anyio.Event()
        self._interrupted = False
        self._concluded = False
        self._is_lost = False
        console.on_closed = self._interrupt

    async def run(self) -> int:
        """Run it; return the exit status."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._stop_on_signal)
                with self._scope:
                    await self._run()
                tasks.cancel_scope.cancel()
        except* StartError as group:
            if not self._is_lost:  # or it has been told
                self._story.problems.append(str(_first(group)))
            self._concluded = False
        if self._interrupted and not self._concluded:
            self._complain("interrupted")
            return 1
        if not self._concluded or self._is_lost:
            for problem in self._story.problems:
                self._complain(problem)
            return 1
        return 0 if self._story.is_good else 1

    def _now(self) -> float:
        return self._clock.now() - self._began

    async def _stop_on_signal(self) -> None:
        with anyio.open_signal_receiver(*_SIGNALS) as signals:
            async for _ in signals:
                self._interrupt()

    def _interrupt(self) -> None:
        self._interrupted = True
        self._scope.cancel()

    def _lost(self, obituary: str) -> None:
        self._is_lost = True
        self._story.problems.append(obituary)
        self._scope.cancel()

    async def _run(self) -> None:
        story, options = self._story, self._options
        story.caption = "Starting six simulated servers, two of them on one machine, and the gateway."
        async with anyio.create_task_group() as tasks:
            showing = anyio.CancelScope()
            shown = anyio.Event()
            tasks.start_soon(self._lines if self._is_plain else self._live, showing, shown)
            tasks.start_soon(self._load)
            try:
                async with processes.running(options.speed, options.port, self._lost) as site:
                    await self._loaded.wait()
                    await self._perform(site)
                    showing.cancel()
                    await shown.wait()
                    self._conclude()
                    if options.serve:
                        self._invite(site)
                        await anyio.sleep_forever()
            finally:
                showing.cancel()
                with anyio.CancelScope(shield=True):
                    await shown.wait()

    @property
    def _is_plain(self) -> bool:
        console = self._console
        can_draw = console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
        return self._options.plain or not can_draw

    async def _load(self) -> None:
        """Load the client and write the long requests, in a thread, while the processes start."""
        self._script = await anyio.to_thread.run_sync(_prepare, self._options.size)
        self._loaded.set()

    async def _perform(self, site: Site) -> None:
        from gateway.demo.caller import Caller
        from gateway.demo.operator import Operator
        from gateway.demo.scenario import SIZES, Stage, play

        story = self._story
        story.url, story.left_out = site.url, site.no_jobs
        patience_s = PATIENCE_S + PATIENCE_GPU_S / story.speed
        caller = Caller(site.url, story, self._now, timeout_s=patience_s)
        operator = Operator(site.admin_url, story, self._now)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(operator.run)
                stage = Stage(
                    caller, story, self._now, site.backends, patience_s, 0 if self._is_plain else BOW_S
                )
                await play(stage, SIZES[self._options.size], self._script)
                with anyio.move_on_after(LAST_LOOK_S):
                    await story.until(lambda: not any(map(_is_owed, story.exchanges)))
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await caller.aclose()
                await operator.aclose()

    # -------------------------------------------------------------- showing

    async def _live(self, showing: anyio.CancelScope, shown: anyio.Event) -> None:
        console, story = self._console, self._story
        try:
            with showing, Live(View(story, 0.0), console=console, screen=True, auto_refresh=False) as live:
                while True:
                    live.update(View(story, self._now()), refresh=True)
                    await anyio.sleep(1 / FRAMES_PER_S)
        finally:
            shown.set()

    async def _lines(self, showing: anyio.CancelScope, shown: anyio.Event) -> None:
        teller = PlainLines(self._story)
        try:
            with showing:
                while True:
                    self._tell(teller)
                    await anyio.sleep(1 / FRAMES_PER_S)
        finally:
            self._tell(teller, final=True)
            shown.set()

    def _tell(self, teller: PlainLines, *, final: bool = False) -> None:
        for line in teller.news(self._now(), final=final):
            self._console.out(line, highlight=False)

    def _conclude(self) -> None:
        console, story = self._console, self._story
        console.print()
        console.print(summary.render(story), highlight=False)
        for problem in summary.problems(story):
            console.print(f"[bold red]failed:[/] {problem}", highlight=False)
        console.print()
        if story.is_good and not self._options.serve:
            console.print(summary.NEXT, highlight=False)
        self._concluded = True

    def _invite(self, site: Site) -> None:
        console = self._console
        console.print("The gateway keeps serving until Ctrl-C. Point your SDK at it:", highlight=False)
        for heading, text in summary.snippets(site.url, site.admin_url, str(site.config)).items():
            console.print(f"\n[bold]# {heading}[/]", highlight=False)
            console.out(text, highlight=False)
        sys.stdout.flush()

    def _complain(self, text: object) -> None:
        Console(stderr=True).print(
            f"gemma-gateway demo: {text}", highlight=False, markup=False, soft_wrap=True
        )


def _prepare(size: str) -> "Script":
    # The client's library takes a second to load, half of what the start may take.
    from gateway.demo import scenario

    return scenario.prepare(scenario.SIZES[size])


def _is_owed(exchange: Exchange) -> bool:
    return bool(exchange.request_id) and exchange.why is None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def run(options: DemoOptions) -> int:
    """Run the demo on standard output; return its exit status."""

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an arrow is not worth a crash

    async def main() -> int:
        return await Demo(options, Output()).run()

    return anyio.run(main)
