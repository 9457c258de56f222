"""The simulated server as a process would be: its boot, its sleep, its faults, its end."""

import contextlib
import math
import signal
from collections.abc import AsyncIterator, Callable
from email.utils import formatdate

import anyio
from anyio.abc import TaskGroup
from uvicorn.server import ServerState

from gateway.clock import SystemClock
from gateway.simulator.app import Application
from gateway.simulator.door import ENDING_S, Door, cut_connections, next_look, wire
from gateway.simulator.faults import OF_THE_SERVER, Faults
from gateway.simulator.host import EngineHost
from gateway.simulator.options import Fault, FaultOrder, SimulatorOptions
from gateway.simulator.tally import Tally
from gateway.tasks import TasksBeside

_BOOT_S = 120.0
"""Boot time where nobody published one. A choice between the published 147 s and 60 s."""

_REFUSE_S = 5.0
"""How long the fault `refuse` lasts by default. A choice."""

_DYING_S = 0.5
"""From the engine's death to the server's: about as measured on vLLM (0.3 to 0.9 s)."""


class Memory:
    """A server's memory. Told of its sleep, which frees memory and takes it back: others may share it."""

    def asleep(self) -> None:
        """Note that the server has fallen asleep and its memory is free."""

    def waking(self) -> None:
        """Note that the server takes its memory back, from now on."""

    def awake(self) -> None:
        """Note that the server answers again."""


class Simulator:
    """One simulated server.

    Attributes:
        options: What it was told.
        faults: What requests meet.
        host: Its engine; another one after each restart.
        is_draining: It finishes what runs and refuses what comes.
        load: Requests inside the server.
        sleep_level: How deep it sleeps; None if it is awake.
        booted: Set once it accepts connections; replaced when it boots again.
    """

    def __init__(self, options: SimulatorOptions, tasks: TaskGroup, door: Door, memory: Memory) -> None:
        """Take over a port; connections are refused until `boot`."""
        self.options = options
        self.faults = Faults()
        self.is_draining = False
        self.load = 0
        self.sleep_level: int | None = None
        self.booted = anyio.Event()
        self._memory = memory
        self._turning = anyio.Lock()  # falling asleep and waking wait for each other
        self._striking = anyio.Lock()  # so do faults of the server
        self._cut = 0  # by engines that have been replaced
        self._tasks = tasks
        self._clock = SystemClock()
        self._state = ServerState()
        self._config = wire(Application(self))
        self._door = door
        self.host = self._new_host()
        self._lifted = anyio.Event()  # set when the order in force is replaced

    @property
    def url(self) -> str:
        """Its base URL, known before it has booted."""
        return self._door.url

    @property
    def generated_tokens(self) -> int:
        """Tokens generated since it last booted."""
        return self.host.tally.generation_tokens

    @property
    def cut(self) -> int:
        """Requests that its engine did not finish because it was stopped, put to sleep, or ended."""
        return self._cut + self.host.cut

    @property
    def boot_s(self) -> float:
        """Engine seconds that a boot takes."""
        if self.options.boot_s is not None:
            return self.options.boot_s
        return self.options.profile.boot_s if self.options.profile.boot_s is not None else _BOOT_S

    async def boot(self, boot_s: float | None = None) -> None:
        """Start the engine, refuse connections for the boot time, then accept them."""
        seconds = self.boot_s if boot_s is None else boot_s
        if seconds > 0:
            await anyio.sleep(seconds / self.options.speed)
        self._tasks.start_soon(self.host.run)
        self._door.open(self._config, self._state)
        self.booted.set()

    def boot_soon(self) -> None:
        """Boot, without waiting for it."""
        self._tasks.start_soon(self.boot)

    async def keep_date(self) -> None:
        """Refresh the date header every second, for ever."""
        while True:
            self._set_date()
            await anyio.sleep(1)

    def order(self, order: FaultOrder | None) -> None:
        """Carry out a fault in place of the one that is on; None only lifts that one."""
        self._lifted.set()
        self._lifted = anyio.Event()
        self.faults.set(order)
        if order is not None and order.fault in OF_THE_SERVER:
            self._tasks.start_soon(self._strike, order)

    async def sleep(self, level: int, mode: str = "abort") -> None:
        """Fall asleep as on `POST /sleep`: running answers end with "abort", new ones wait to be woken.

        Raises:
            ValueError: there is no such level, or no such mode.
        """
        if level not in (0, 1, 2):
            raise ValueError(f"there is no sleep level {level}")
        if mode not in ("abort", "wait"):
            raise ValueError(f"mode is abort or wait, not {mode!r}")
        async with self._turning:
            if self.sleep_level is not None:
                return
            host = self.host
            self.doze(level)
            if mode == "abort":
                self._cut_off(host)
            while not host.is_idle:
                await next_look()
            if level > 0:
                host.engine.forget_prefixes()
                await anyio.sleep(self.options.sleep_s / self.options.speed)
                if not host.is_stopped:
                    self._memory.asleep()

    def doze(self, level: int) -> None:
        """Keep new requests waiting from now on, as a sleeping engine does; what runs goes on."""
        self.sleep_level = level
        self.host.hold()

    async def wake_up(self) -> None:
        """Wake as on `POST /wake_up`. What level 2 threw away is not loaded again: it talks nonsense then."""
        async with self._turning:
            if self.sleep_level is None:
                return
            host, level = self.host, self.sleep_level
            if level > 0:
                self._memory.waking()
                await anyio.sleep(self.options.wake_s / self.options.speed)
            if host.is_stopped:
                return
            if level == 2:
                self.order(FaultOrder(Fault.WRONG_TEXT))
            self.sleep_level = None
            host.release()
            if level > 0:
                self._memory.awake()

    async def stop(self) -> None:
        """End as on SIGTERM: drain for `shutdown_timeout_s`, cut off what is left, refuse connections."""
        if self.options.shutdown_timeout_s > 0:
            self.is_draining = True
            with anyio.move_on_after(self.options.shutdown_timeout_s / self.options.speed):
                while self.load:
                    await next_look()
        self._door.close()
        self._close_idle()
        await self._cut_answers()
        await self.kill()

    async def kill(self) -> None:
        """End as on SIGKILL: every connection is cut. The port stays taken, and refuses."""
        self.halt()
        await cut_connections(self._state)

    def halt(self) -> None:
        """Refuse connections and stop the engine; `kill` cuts those that are open."""
        self._door.close()
        self.host.stop()

    # -------------------------------------------------------------- inside

    def _new_host(self) -> EngineHost:
        self._set_date()
        return EngineHost(self.options, Tally(self._clock.wall()))

    def _set_date(self) -> None:
        date = formatdate(self._clock.wall(), usegmt=True).encode()
        self._state.default_headers = [(b"date", date), *self._config.encoded_headers]

    async def _strike(self, order: FaultOrder) -> None:
        """Carry out a fault of the server, after its boot and after the one before it."""
        async with self._striking:
            await self.booted.wait()
            if self.faults.order is order:  # otherwise another one has replaced it
                await self._carry_out(order)

    async def _carry_out(self, order: FaultOrder) -> None:
        match order.fault:
            case Fault.HANG:
                host = self.host
                host.hang()
                await self._until_lifted(order, math.inf)
                host.resume()
            case Fault.REFUSE:
                self._door.close()
                self._close_idle()
                await self._until_lifted(order, _REFUSE_S)
                self._door.open(self._config, self._state)
            case Fault.CRASH:
                self.host.die()
                await anyio.sleep(_DYING_S / self.options.speed)
                await self._boot_again(order)
            case Fault.SILENT_STOP:
                self._door.close()
                self._close_idle()
                self.host.hang()
                while self.load:
                    await next_look()
                await self._boot_again(order)
            case _:
                self._door.close()
                await self._cut_answers()
                await self._boot_again(order)

    async def _boot_again(self, order: FaultOrder) -> None:
        self.booted = anyio.Event()
        self._door.close()
        self.host.stop()
        await cut_connections(self._state)
        self._cut += self.host.cut
        self.host = self._new_host()
        had_freed, self.sleep_level = bool(self.sleep_level), None
        if had_freed:
            self._memory.waking()
        self._lift(order)
        await self.boot(order.for_s)
        if had_freed:
            self._memory.awake()

    async def _until_lifted(self, order: FaultOrder, default_s: float) -> None:
        """Wait until an order is lifted or its time is over."""
        seconds = default_s if order.for_s is None else order.for_s
        with anyio.move_on_after(seconds / self.options.speed):
            await self._lifted.wait()
        self._lift(order)

    def _lift(self, order: FaultOrder) -> None:
        """Note that an order has run its course, unless another one has replaced it."""
        if self.faults.order is order:
            self.faults.set(None)

    async def _cut_answers(self) -> None:
        """Cut off all answers, and give them `ENDING_S` to write their last bytes."""
        self._cut_off(self.host)
        with anyio.move_on_after(ENDING_S):
            while self.load:
                await next_look()

    def _cut_off(self, host: EngineHost) -> None:
        for answer in host.answers:
            host.cut_off(answer)

    def _close_idle(self) -> None:
        for connection in list(self._state.connections):
            connection.shutdown()


@contextlib.asynccontextmanager
async def simulator(options: SimulatorOptions) -> AsyncIterator[Simulator]:
    """Run a simulated server in this event loop for the length of the block; yield it.

    With `boot_s` 0 it accepts connections when the block begins; else its URL is known, it refuses, and
    `booted` is set when it is up. Leaving the block kills it.

    Raises:
        OSError: the port is taken.
    """
    door = Door(options.host, options.port)
    try:
        async with behind(door, options) as server:
            if options.boot_s == 0:
                await server.boot()
            else:
                server.boot_soon()
            yield server
    finally:
        door.release()


@contextlib.asynccontextmanager
async def behind(
    door: Door, options: SimulatorOptions, memory: Memory | None = None
) -> AsyncIterator[Simulator]:
    """Run a server behind a port that is there already; it is yielded before it boots. Leaving kills it."""
    async with TasksBeside(Exception) as tasks:
        server = Simulator(options, tasks, door, memory or Memory())
        try:
            tasks.start_soon(server.keep_date)
            if options.fault is not None:
                server.order(options.fault)
            yield server
        finally:
            with anyio.CancelScope(shield=True):
                await server.kill()


@contextlib.asynccontextmanager
async def running(options: SimulatorOptions) -> AsyncIterator[str]:
    """Run a simulated server as `simulator` does; yield its base URL."""
    async with simulator(options) as server:
        yield server.url


async def serve(options: SimulatorOptions, *, ready: Callable[[str], None]) -> None:
    """Run a simulated server until SIGTERM or SIGINT, or until cancelled.

    `ready` is called with the base URL once connections are accepted. The first signal stops it as
    vLLM stops (`shutdown_timeout_s`), a second one at once.
    """
    async with simulator(options) as server, anyio.create_task_group() as tasks:

        async def announce() -> None:
            await server.booted.wait()
            ready(server.url)

        async def stop() -> None:
            await server.stop()
            tasks.cancel_scope.cancel()

        tasks.start_soon(announce)
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            seen = 0
            async for _ in signals:
                seen += 1
                if seen > 1:
                    break
                tasks.start_soon(stop)
        tasks.cancel_scope.cancel()
